/* fake_libcuda_work.h - part of fake_libcuda.c (included there and nowhere else): launches, memsets, graphs, tensor maps. */
#ifndef MOEFORGE_TESTS_FAKE_LIBCUDA_WORK_H
#define MOEFORGE_TESTS_FAKE_LIBCUDA_WORK_H

/* ---- work: launches and memsets, at once or recorded ---- */
static void node_free(struct node *n)
{
  free(n->bytes);
  free(n);
}

/* The time of a launch that no script gives; words that are device addresses do not count, so that it repeats from run to run. */
static double launch_us(const struct node *n)
{
  uint64_t h = hash_bytes(n->function->module->hash, n->launch.kernel, strlen(n->launch.kernel));
  h = hash_bytes(h, n->launch.grid, sizeof(n->launch.grid));
  h = hash_bytes(h, n->launch.block, sizeof(n->launch.block));
  for(int i = 0; i < n->launch.nparams; i++)
    for(size_t at = 0; at < n->launch.sizes[i]; at += 8) {
      const size_t left = n->launch.sizes[i] - at;
      uint64_t word = 0;
      memcpy(&word, (const unsigned char *)n->launch.params[i] + at, left < 8 ? left : 8);
      if(allocation_of((const void *)(uintptr_t)word, 1) == NULL)
        h = hash_bytes(h, &word, sizeof(word));
    }
  return 5.0 + (double)(h >> 11) / (double)(1ull << 53) * 20.0;
}

static void log_launch(const struct node *n)
{
  const struct fakecuda_launch *l = &n->launch;
  size_t bytes = 0, at = 0;
  char *hex;
  if(log_path() == NULL)
    return;
  for(int i = 0; i < l->nparams; i++)
    bytes += l->sizes[i];
  hex = malloc(2 * bytes + (size_t)l->nparams + 1);
  for(int i = 0; i < l->nparams; i++) {
    for(size_t k = 0; k < l->sizes[i]; k++)
      at += (size_t)sprintf(hex + at, "%02x", ((const unsigned char *)l->params[i])[k]);
    hex[at++] = i + 1 < l->nparams ? ':' : '\0';
  }
  hex[at] = '\0';
  log_line("launch kernel=%s grid=%u,%u,%u block=%u,%u,%u shared=%u cooperative=%d pdl=%d params=%s\n", l->kernel, l->grid[0], l->grid[1], l->grid[2],
           l->block[0], l->block[1], l->block[2], l->shared_bytes, l->cooperative, l->pdl, hex);
  free(hex);
}

/* Does one node's work on a stream's clock. */
static void node_run(const struct node *n, struct stream *s)
{
  if(n->function == NULL) {
    memset(n->set_address, n->set_value, n->set_bytes);
    log_line("memset value=%u bytes=%zu\n", n->set_value, n->set_bytes);
    s->now_us += 1;
    return;
  }
  log_launch(n);
  s->now_us += fake.script.time_us >= 0 ? fake.script.time_us : n->us;
  fake.hung |= fake.script.hang != 0;
  fake.faulted |= fake.script.fault != 0;
  if(fake.hook != NULL && !fake.hung && !fake.faulted)
    fake.hook(fake.hook_context, &n->launch);
}

/* Records the node if its stream captures, else runs it; takes it over either way. */
static void submit(struct node *n, struct stream *s)
{
  if(s->capture == NULL) {
    node_run(n, s);
    node_free(n);
    return;
  }
  n->launch.captured = 1;
  *s->capture->last = n;
  s->capture->last = &n->next;
  s->capture->count++;
}

static CUresult memset_on(CUdeviceptr address, unsigned char value, size_t bytes, struct stream *s)
{
  struct node *n;
  CUresult rc = s == NULL ? CUDA_ERROR_INVALID_HANDLE : usable();
  if(rc == CUDA_SUCCESS && bytes > 0 && allocation_of((void *)(uintptr_t)address, bytes) == NULL)
    rc = CUDA_ERROR_INVALID_VALUE;
  if(rc != CUDA_SUCCESS)
    return rc;
  n = calloc(1, sizeof(*n));
  n->set_address = (void *)(uintptr_t)address;
  n->set_value = value;
  n->set_bytes = bytes;
  submit(n, s);
  return CUDA_SUCCESS;
}

CUresult fake_cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes)
{
  fake_enter();
  return fake_leave(memset_on(address, value, bytes, &fake.default_stream));
}

CUresult fake_cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
  fake_enter();
  return fake_leave(memset_on(address, value, bytes, stream_of(stream)));
}

static struct node *node_from(const CUlaunchConfig *config, struct function *f, void *const *params)
{
  struct node *n = calloc(1, sizeof(*n));
  struct fakecuda_launch *l = &n->launch;
  size_t bytes = 0, at = 0;
  n->function = f;
  l->kernel = f->name;
  memcpy(l->grid, (unsigned[]){config->gridDimX, config->gridDimY, config->gridDimZ}, sizeof(l->grid));
  memcpy(l->block, (unsigned[]){config->blockDimX, config->blockDimY, config->blockDimZ}, sizeof(l->block));
  l->shared_bytes = config->sharedMemBytes;
  l->stream = (void *)config->hStream;
  for(unsigned i = 0; i < config->numAttrs; i++) {
    if(config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
      l->cooperative = config->attrs[i].value.cooperative;
    if(config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      l->pdl = config->attrs[i].value.programmaticStreamSerializationAllowed;
  }
  l->nparams = f->nparams;
  for(int i = 0; i < f->nparams; i++)
    bytes += (f->sizes[i] + 7) / 8 * 8;
  n->bytes = calloc(1, bytes + 1);
  for(int i = 0; i < f->nparams; i++, at += (f->sizes[i - 1] + 7) / 8 * 8) {
    memcpy(n->bytes + at, params[i], f->sizes[i]);
    l->sizes[i] = f->sizes[i];
    l->params[i] = n->bytes + at;
  }
  n->us = launch_us(n); /* once: a graph's nodes run thousands of times */
  return n;
}

/* May the function be launched on the stream? Call with the lock held. */
static CUresult launchable(const struct function *f, const struct stream *s)
{
  CUcontext context;
  if(f == NULL || f->kind != KIND_FUNCTION || s == NULL)
    return CUDA_ERROR_INVALID_HANDLE;
  context = s->context != NULL ? s->context : current_context();
  if(context == NULL)
    return CUDA_ERROR_INVALID_CONTEXT;
  if(f->module->context != context)
    return CUDA_ERROR_INVALID_HANDLE;
  return !context_good(context) ? CUDA_ERROR_INVALID_CONTEXT : fake.faulted ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

CUresult fake_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
  struct function *f = (void *)function;
  struct stream *s = stream_of(config->hStream);
  struct node *n = NULL;
  CUresult rc;
  (void)extra;
  if(fake.script.light)
    return f != NULL && f->kind == KIND_FUNCTION ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  rc = launchable(f, s);
  if(rc == CUDA_SUCCESS && fake.script.launch_fail)
    rc = CUDA_ERROR_LAUNCH_FAILED;
  if(rc == CUDA_SUCCESS && (config->blockDimX * config->blockDimY * config->blockDimZ > 1024 || config->sharedMemBytes > (unsigned)f->shared_limit))
    rc = CUDA_ERROR_INVALID_VALUE;
  if(rc == CUDA_SUCCESS) {
    n = node_from(config, f, params);
    if(n->launch.cooperative && (long)config->gridDimX * config->gridDimY * config->gridDimZ > fake.script.occupancy * fake.script.sms)
      rc = CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  }
  if(rc == CUDA_SUCCESS && fake.script.early_fail && n->launch.cooperative && n->launch.pdl)
    rc = CUDA_ERROR_NOT_SUPPORTED;
  if(rc == CUDA_SUCCESS)
    submit(n, s);
  else if(n != NULL)
    node_free(n);
  return fake_leave(rc);
}

/* ---- graphs ---- */
static void graph_release(struct graph *g)
{
  if(--g->users > 0)
    return;
  while(g->first != NULL) {
    struct node *next = g->first->next;
    node_free(g->first);
    g->first = next;
  }
  g->kind = 0;
  free(g);
}

CUresult fake_cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode)
{
  struct stream *s = stream_of(stream);
  (void)mode;
  if(s == NULL || s == &fake.default_stream || s->capture != NULL)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  fake_enter();
  s->capture = calloc(1, sizeof(*s->capture));
  s->capture->kind = KIND_GRAPH;
  s->capture->users = 1;
  s->capture->last = &s->capture->first;
  fake.capturing++;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuStreamEndCapture(CUstream stream, CUgraph *out)
{
  struct stream *s = stream_of(stream);
  if(s == NULL || s->capture == NULL)
    return CUDA_ERROR_INVALID_VALUE;
  fake_enter();
  *out = (CUgraph)(void *)s->capture;
  s->capture = NULL;
  fake.capturing--;
  fake.alive++;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
  struct graph *g = (void *)graph;
  struct exec *x;
  (void)flags;
  if(g == NULL || g->kind != KIND_GRAPH)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  x = calloc(1, sizeof(*x));
  x->kind = KIND_EXEC;
  x->graph = g;
  g->users++;
  fake.alive++;
  *out = (CUgraphExec)(void *)x;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
  struct exec *x = (void *)exec;
  struct stream *s = stream_of(stream);
  CUresult rc;
  fake_enter();
  rc = x == NULL || x->kind != KIND_EXEC || s == NULL ? CUDA_ERROR_INVALID_HANDLE : usable();
  if(rc == CUDA_SUCCESS) {
    log_line("graph_launch nodes=%d\n", x->graph->count);
    for(const struct node *n = x->graph->first; n != NULL; n = n->next)
      node_run(n, s);
  }
  return fake_leave(rc);
}

CUresult fake_cuGraphExecDestroy(CUgraphExec exec)
{
  struct exec *x = (void *)exec;
  if(x == NULL || x->kind != KIND_EXEC)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  graph_release(x->graph);
  x->kind = 0;
  free(x);
  fake.alive--;
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuGraphDestroy(CUgraph graph)
{
  struct graph *g = (void *)graph;
  if(g == NULL || g->kind != KIND_GRAPH)
    return CUDA_ERROR_INVALID_HANDLE;
  fake_enter();
  graph_release(g);
  fake.alive--;
  return fake_leave(CUDA_SUCCESS);
}

/* ---- tensor maps ---- */
CUresult fake_cuTensorMapEncodeTiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
                                     const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *element_stride, CUtensorMapInterleave interleave,
                                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
  struct fakecuda_map map = {.magic = FAKECUDA_MAP_MAGIC, .type = (unsigned char)type, .rank = (unsigned char)rank};
  bool good = !fake.script.map_fail && rank >= 1 && rank <= 5 && (uintptr_t)address % 16 == 0 && (uintptr_t)out % 64 == 0;
  if(current_context() == NULL)
    return CUDA_ERROR_INVALID_CONTEXT;
  for(cuuint32_t i = 0; good && i < rank; i++) {
    good = dim[i] >= 1 && dim[i] <= (1ull << 32) && box[i] >= 1 && box[i] <= 256 && element_stride[i] >= 1 && element_stride[i] <= 8 &&
           (i + 1 == rank || (stride[i] % 16 == 0 && stride[i] < (1ull << 40)));
    map.dim[i] = dim[i];
    map.box[i] = (unsigned short)box[i];
    map.element_stride[i] = (unsigned char)element_stride[i];
    if(i + 1 < rank)
      map.stride[i] = stride[i];
  }
  if(!good)
    return CUDA_ERROR_INVALID_VALUE;
  map.interleave = (unsigned char)interleave;
  map.swizzle = (unsigned char)swizzle;
  map.promotion = (unsigned char)promotion;
  map.fill = (unsigned char)fill;
  map.address = (unsigned long long)(uintptr_t)address;
  memset(out, 0, sizeof(*out));
  memcpy(out, &map, sizeof(map));
  return CUDA_SUCCESS;
}

/* ---- for tests ---- */
fakecuda_on_launch_fn fakecuda_on_launch;
void fakecuda_on_launch(fakecuda_launch_fn *fn, void *context)
{
  fake_enter();
  fake.hook = fn;
  fake.hook_context = context;
  fake_leave(CUDA_SUCCESS);
}

fakecuda_hang_fn fakecuda_hang;
void fakecuda_hang(void)
{
  fake.hung = true; /* the caller runs under the lock */
}

fakecuda_alive_fn fakecuda_alive;
int fakecuda_alive(void)
{
  return fake.alive;
}

#endif
