/* device_cuda_behind.c - times the kernels of a profile behind another kernel, with and without programmatic dependent launch (docs/timing.md).
 *
 *   BEHIND_PLAIN   router | layer | router | layer | ...      each begins when the one ahead of it has ended
 *   BEHIND_EDGE    router > layer | router > layer | ...      > : the layer's launch may begin as soon as all of the router's CTAs have
 *   BEHIND_CHAIN   router > layer > router > layer > ...
 *
 * The router (templates/tools/router.cu) reads a matrix of its layer's own and the launch's x, and writes x and logits where the layer finds them.
 *
 * Guard: each graph is tried before it is timed. Ahead of some replays what the router writes is poisoned, and so are the outputs, which
 * must then be to the bit those of the same kernel behind plain edges. A layer that reads x or logits ahead of the router's end, or a workspace that an earlier
 * launch still uses, shows there; CTAs that read different logits wait for each other for ever. */
#include "device_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "datagen.h"
#include "tools/router_params.h"

#define PROOFS 4          /* replays that are looked at */
#define MATRIX_BYTE 0x3C  /* bf16 0x3C3C: about 0.01 */
#define FULL_CARVEOUT 100 /* percent */

void cuda_close_behind(struct device *dev)
{
  struct cuda_behind *b = &dev->profile.behind;
  for(int i = 0; b->graphs != NULL && i < (dev->profile.count + 1) * BEHIND_KINDS; i++)
    if(b->graphs[i] != NULL)
      dev->api.p_cuGraphExecDestroy(b->graphs[i]);
  if(b->matrices != 0)
    dev->api.p_cuMemFree(b->matrices);
  if(b->written != 0)
    dev->api.p_cuMemFree(b->written);
  if(b->module != NULL)
    dev->api.p_cuModuleUnload(b->module);
  for(int i = 0; b->want != NULL && i < dev->profile.count; i++)
    free(b->want[i]);
  free(b->want);
  free(b->graphs);
  memset(b, 0, sizeof(*b));
}

/* ---- what the router needs ---- */
/* Rows of its matrix. */
static int router_rows(const struct device *dev)
{
  return dev->problem.experts + dev->problem.zero_experts;
}

static size_t matrix_bytes(const struct device *dev)
{
  return (size_t)router_rows(dev) * (size_t)dev->problem.hidden * sizeof(uint16_t);
}

/* x and logits of one launch. */
static size_t written_bytes(const struct device *dev)
{
  return dev->profile.x_bytes + dev->profile.logits_bytes;
}

static CUdeviceptr written_at(const struct device *dev, int launch)
{
  return dev->profile.behind.written + (CUdeviceptr)launch * written_bytes(dev);
}

/* The router leaves shared memory to its neighbour, as a kernel does that has much of its own: a multiprocessor changes how it divides its memory between
 * cache and shared memory only when it is empty. */
static enum mf_status load_router(struct device *dev, const void *cubin, struct error *err)
{
  struct cuda_behind *b = &dev->profile.behind;
  CUresult result = dev->api.p_cuModuleLoadData(&b->module, cubin);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuModuleGetFunction(&b->router, b->module, "mf_router");
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuFuncSetAttribute(b->router, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, FULL_CARVEOUT);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuMemAlloc(&b->matrices, (size_t)dev->nlayers * matrix_bytes(dev));
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuMemAlloc(&b->written, (size_t)dev->profile.launches * written_bytes(dev));
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuMemsetD8(b->matrices, MATRIX_BYTE, (size_t)dev->nlayers * matrix_bytes(dev));
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "loading the router that launches are timed behind");
}

/* ---- graphs ---- */
static enum mf_status enqueue_router(struct device *dev, bool pdl, int launch, struct error *err)
{
  struct mf_router_params params = {.matrix = (const void *)(uintptr_t)(dev->profile.behind.matrices + (CUdeviceptr)(launch % dev->nlayers) * matrix_bytes(dev)),
                                    .from = (const void *)(uintptr_t)cuda_launch_inputs(&dev->profile, launch),
                                    .to = (void *)(uintptr_t)written_at(dev, launch),
                                    .tokens = dev->profile.tokens,
                                    .hidden = dev->problem.hidden,
                                    .rows = router_rows(dev),
                                    .words = (int32_t)(written_bytes(dev) / 16),
                                    .ctas = dev->info.sms};
  void *args[] = {&params};
  CUlaunchAttribute attribute;
  CUlaunchConfig config;
  CUresult result;
  memset(&attribute, 0, sizeof(attribute));
  memset(&config, 0, sizeof(config));
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  config.gridDimX = (unsigned)dev->info.sms;
  config.blockDimX = MF_ROUTER_THREADS;
  config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = MF_ROUTER_SHARED_BYTES;
  config.hStream = dev->stream;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  result = dev->api.p_cuLaunchKernelEx(&config, dev->profile.behind.router, args, NULL);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "launching the router in a graph");
}

/* What one graph is made of. */
struct pairs {
  const struct device_kernel *kernel; /* NULL: routers only */
  enum behind_kind kind;
};

static enum mf_status enqueue_pairs(struct device *dev, const void *context, struct error *err)
{
  const struct pairs *what = context;
  enum mf_status rc = MF_OK;
  for(int i = 0; i < dev->profile.launches && rc == MF_OK; i++) {
    rc = enqueue_router(dev, what->kind == BEHIND_CHAIN, i, err);
    if(rc == MF_OK && what->kernel != NULL)
      rc = cuda_enqueue_launch(dev, what->kernel, what->kind != BEHIND_PLAIN, i, written_at(dev, i), err);
  }
  return rc;
}

static bool has_graph(const struct device_kernel *kernel, enum behind_kind kind)
{
  if(kernel == NULL)
    return kind != BEHIND_EDGE;
  return kind == BEHIND_PLAIN || (kernel->recipe.flags & MF_RECIPE_PDL) != 0;
}

/* ---- proof ---- */
static enum mf_status poison(struct device *dev, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  CUresult result = dev->api.p_cuMemsetD8Async(pf->behind.written, POISON, (size_t)pf->launches * written_bytes(dev), dev->stream);
  for(int i = 0; i < pf->launches && result == CUDA_SUCCESS; i++)
    result = dev->api.p_cuMemsetD8Async(cuda_launch_inputs(pf, i) + written_bytes(dev), POISON, pf->out_bytes, dev->stream);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "poisoning what a router writes");
}

static enum mf_status read_outputs(struct device *dev, unsigned char *out, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  CUresult result = CUDA_SUCCESS;
  for(int i = 0; i < pf->launches && result == CUDA_SUCCESS; i++)
    result = dev->api.p_cuMemcpyDtoH(out + (size_t)i * pf->out_bytes, cuda_launch_inputs(pf, i) + written_bytes(dev), pf->out_bytes);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "reading the outputs behind a router");
}

/* No poison may be left. */
static enum mf_status check_written(const struct device *dev, const unsigned char *outputs, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  const size_t bytes = (size_t)pf->tokens * (size_t)dev->problem.hidden * sizeof(uint16_t);
  for(int i = 0; i < pf->launches; i++) {
    const unsigned char *out = outputs + (size_t)i * pf->out_bytes;
    for(size_t k = 0; k < bytes; k += sizeof(uint16_t))
      if(out[k] == POISON && out[k + 1] == POISON)
        return error_set(err, MF_ERR_CHECK, "behind a router: launch %d left output element %zu unwritten", i, k / sizeof(uint16_t));
  }
  return MF_OK;
}

static enum mf_status check_equal(const struct device *dev, const unsigned char *got, const unsigned char *want, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  const size_t bytes = (size_t)pf->tokens * (size_t)dev->problem.hidden * sizeof(uint16_t);
  for(int i = 0; i < pf->launches; i++)
    if(memcmp(got + (size_t)i * pf->out_bytes, want + (size_t)i * pf->out_bytes, bytes) != 0)
      return error_set(err, MF_ERR_CHECK, "behind a router: launch %d has other outputs than behind a plain edge", i);
  return MF_OK;
}

/* Replays the graph with everything poisoned. The first outputs behind plain edges are those that all others must have. */
static enum mf_status prove(struct device *dev, int k, enum behind_kind kind, int timeout_ms, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  unsigned char **want = &pf->behind.want[k], *got = malloc((size_t)pf->launches * pf->out_bytes);
  enum mf_status rc;
  if(got == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the outputs of %d launches", pf->launches);
  rc = cuda_fresh_workspace(dev, pf->kernels[k], err);
  if(rc == MF_OK)
    rc = poison(dev, err);
  if(rc == MF_OK)
    rc = cuda_launch_graph(dev, pf->behind.graphs[k * BEHIND_KINDS + (int)kind], err);
  if(rc == MF_OK)
    rc = cuda_wait(dev, timeout_ms, "a first replay behind a router", err);
  if(rc == MF_OK)
    rc = read_outputs(dev, got, err);
  if(rc == MF_OK)
    rc = *want == NULL ? check_written(dev, got, err) : check_equal(dev, got, *want, err);
  if(rc == MF_OK && *want == NULL) {
    *want = got;
    got = NULL;
  }
  free(got);
  return rc;
}

/* ---- open ---- */
enum mf_status cuda_open_behind(struct device *dev, const void *router, size_t bytes, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  enum mf_status rc;
  if(pf->floor == NULL || bytes == 0)
    return error_set(err, MF_ERR_USAGE, "open_behind: expected an open profile and a router");
  cuda_close_behind(dev);
  rc = load_router(dev, router, err);
  pf->behind.graphs = calloc((size_t)(pf->count + 1) * BEHIND_KINDS, sizeof(CUgraphExec));
  pf->behind.want = calloc((size_t)pf->count, sizeof(unsigned char *));
  if(rc == MF_OK && (pf->behind.graphs == NULL || pf->behind.want == NULL))
    rc = error_set(err, MF_ERR_NOMEM, "no memory for %d graphs", (pf->count + 1) * BEHIND_KINDS);
  if(rc != MF_OK)
    cuda_close_behind(dev);
  return rc;
}

/* ---- one kind of launch ---- */
/* Its graph's place; NULL if there is no such kind. */
static CUgraphExec *graph_of(const struct device *dev, int k, enum behind_kind kind)
{
  const struct cuda_profile *pf = &dev->profile;
  if(pf->behind.graphs == NULL || k < 0 || k > pf->count || !has_graph(k < pf->count ? pf->kernels[k] : NULL, kind))
    return NULL;
  return &pf->behind.graphs[k * BEHIND_KINDS + (int)kind];
}

enum mf_status cuda_try_behind(struct device *dev, int k, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  const bool alone = k == pf->count;
  const struct pairs what = {alone ? NULL : pf->kernels[k], kind};
  CUgraphExec *graph = graph_of(dev, k, kind);
  enum mf_status rc;
  *refused = (struct error){MF_OK, ""};
  if(graph == NULL || *graph != NULL || (!alone && (kind == BEHIND_PLAIN) != (pf->behind.want[k] == NULL)))
    return error_set(err, MF_ERR_USAGE, "try_behind: expected a new kind of launch, plain edges first");
  rc = cuda_capture(dev, enqueue_pairs, &what, graph, err);
  if(rc == MF_ERR_DEVICE && kind != BEHIND_PLAIN) { /* no failure: the driver does not take it */
    *refused = *err;
    *graph = NULL;
    return MF_OK;
  }
  for(int i = 0; i < PROOFS && rc == MF_OK && !alone; i++)
    rc = prove(dev, k, kind, timeout_ms, err);
  if(rc == MF_OK && alone)
    rc = cuda_launch_graph(dev, *graph, err);
  if(rc == MF_OK && alone)
    rc = cuda_wait(dev, timeout_ms, "a first replay of routers", err);
  return rc;
}

enum mf_status cuda_time_behind(struct device *dev, int k, enum behind_kind kind, int timeout_ms, double *us, struct error *err)
{
  const CUgraphExec *graph = graph_of(dev, k, kind);
  if(graph == NULL || *graph == NULL)
    return error_set(err, MF_ERR_USAGE, "time_behind: expected a kind of launch that was tried");
  return cuda_time_graph(dev, *graph, timeout_ms, us, err);
}
