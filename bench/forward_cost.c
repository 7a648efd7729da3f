/* forward_cost.c - what mf_moe_forward costs the host, over a bare cuLaunchKernelEx of the same kernel with the same arguments.
 *
 *   forward_cost PACKAGE [--device N] on a GPU: an entry of the package must be for it
 *   MOEFORGE_LIBCUDA=build/tests/libfakecuda.so FAKECUDA=light build/bench/forward_cost build/bench/fixture.moeforge
 *
 * The library's launch is caught once, by standing in for the driver's function in the op's table, and repeated bare. Both are then called in turns, in
 * batches shorter than the queue of a stream, and the medians over all batches are compared. On the scripted driver a launch is a function that returns
 * at once: the difference is then the library's own part, and says nothing about a real driver.
 *
 * Two more columns say what the launch itself consists of: the first FIRST launches of each bare batch alone, which cannot have waited for room in the queue (if
 * all of a batch cost clearly more, the rest did); and bare launches without the cooperative attribute. The kernel is the same and needs all of its CTAs at a
 * time as before: they are, since nothing else runs on the GPU. So run it on one that is idle. */
#include "moeforge.h"
#include "op.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BATCH 200
#define BATCHES 101
#define FIRST 20

/* The caught launch, with copies of what its pointers point to. */
static struct caught {
  CUlaunchConfig config;
  CUlaunchAttribute attributes[4];
  CUfunction function;
  struct recipe_block block;
  void *params[MF_RECIPE_MAX_PARAMS];
} caught;
static const struct mf_recipe *caught_recipe;

static CUresult CUDAAPI catch_launch(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
  (void)extra;
  caught.config = *config;
  memcpy(caught.attributes, config->attrs, config->numAttrs * sizeof(caught.attributes[0]));
  caught.config.attrs = caught.attributes;
  caught.function = function;
  for(uint32_t i = 0; i < MF_RECIPE_MAX_PARAMS; i++) {
    const struct mf_recipe_param *p = &caught_recipe->params[i < caught_recipe->nparams ? i : 0];
    caught.params[i] = caught.block.bytes + p->offset;
    memcpy(caught.params[i], params[i], p->size);
  }
  return CUDA_SUCCESS;
}

static double now_ns(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double values[BATCHES])
{
  qsort(values, BATCHES, sizeof(values[0]), compare);
  return values[BATCHES / 2];
}

static void must(int good, const char *what)
{
  if(good)
    return;
  fprintf(stderr, "forward_cost: %s\n", what);
  exit(1);
}

/* Device memory for weights, inputs and outputs of 'p', zeroed. */
static CUdeviceptr zeroed(const struct cuda_api *api, size_t bytes)
{
  CUdeviceptr memory = 0;
  must(api->p_cuMemAlloc(&memory, bytes) == CUDA_SUCCESS && api->p_cuMemsetD8(memory, 0, bytes) == CUDA_SUCCESS, "device memory cannot be allocated");
  return memory;
}

static size_t shared_experts(const struct mf_problem *p)
{
  return (size_t)(p->shared_experts & ~MF_SHARED_GATED);
}

static struct mf_weights make_weights(const struct cuda_api *api, const struct mf_problem *p)
{
  const size_t experts = (size_t)(p->expert_count > 0 ? p->expert_count : p->experts) + shared_experts(p);
  const size_t matrix = experts * (size_t)p->intermediate * (size_t)p->hidden;
  const size_t blocks = experts * (((size_t)p->intermediate_offset + (size_t)p->intermediate + 127) / 128) * (((size_t)p->hidden + 127) / 128);
  struct mf_weights w;
  memset(&w, 0, sizeof(w));
  w.struct_size = sizeof(w);
  w.w13 = (const void *)zeroed(api, 2 * matrix);
  w.w2 = (const void *)zeroed(api, matrix);
  w.s13 = (const float *)zeroed(api, 2 * blocks * sizeof(float));
  w.s2 = (const float *)zeroed(api, blocks * sizeof(float));
  w.bias = (const float *)zeroed(api, (size_t)(p->experts + p->zero_experts) * sizeof(float));
  return w;
}

/* Whatever the problem routes by: logits, or ids and weights (all of expert 0: what a launch costs the host does not depend on them). */
static struct mf_call make_call(const struct cuda_api *api, const struct mf_problem *p, const struct mf_op *op)
{
  const size_t most = (size_t)mf_op_max_tokens(op);
  struct mf_call call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.x = (const void *)zeroed(api, most * (size_t)p->hidden * 2);
  if(p->score == MF_SCORE_GIVEN) {
    call.ids = (const int32_t *)zeroed(api, most * (size_t)p->top_k * sizeof(int32_t));
    call.weights = (const float *)zeroed(api, most * (size_t)p->top_k * sizeof(float));
  } else {
    call.logits = (const void *)zeroed(api, most * (size_t)(p->experts + p->zero_experts) * 4);
  }
  if(p->shared_experts & MF_SHARED_GATED)
    call.shared_gate = (const void *)zeroed(api, most * shared_experts(p) * 4);
  call.out = (void *)zeroed(api, most * (size_t)p->hidden * 2);
  call.workspace = (void *)zeroed(api, mf_op_workspace_size(op));
  return call;
}

/* Nanoseconds per call. */
struct costs {
  double bare, first, alone, forward; /* first: of the first FIRST bare ones; alone: without the cooperative attribute */
};

/* 'count' bare launches; nanoseconds of all of them. */
static double launch_bare(const struct cuda_api *api, const CUlaunchConfig *config, int count)
{
  const double start = now_ns();
  for(int k = 0; k < count; k++)
    must(api->p_cuLaunchKernelEx(config, caught.function, caught.params, NULL) == CUDA_SUCCESS, "a bare launch failed");
  return now_ns() - start;
}

static double launch_forward(const struct mf_layer *layer, const struct mf_call *call, CUstream stream, int count)
{
  const double start = now_ns();
  for(int k = 0; k < count; k++)
    must(mf_moe_forward(layer, call, stream) == MF_OK, "a forward call failed");
  return now_ns() - start;
}

/* Medians over the batches. */
static struct costs measure(const struct mf_layer *layer, const struct cuda_api *api, const struct mf_call *call, CUstream stream)
{
  static double bare_ns[BATCHES], first_ns[BATCHES], alone_ns[BATCHES], forward_ns[BATCHES];
  CUlaunchAttribute attributes[4];
  CUlaunchConfig alone = caught.config;
  alone.attrs = attributes;
  alone.numAttrs = 0;
  for(unsigned int i = 0; i < caught.config.numAttrs; i++)
    if(caught.attributes[i].id != CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
      attributes[alone.numAttrs++] = caught.attributes[i];
  for(int i = 0; i < BATCHES; i++) {
    first_ns[i] = launch_bare(api, &caught.config, FIRST);
    bare_ns[i] = (first_ns[i] + launch_bare(api, &caught.config, BATCH - FIRST)) / BATCH;
    first_ns[i] /= FIRST;
    must(api->p_cuStreamSynchronize(stream) == CUDA_SUCCESS, "the GPU reports a failure");
    alone_ns[i] = launch_bare(api, &alone, BATCH) / BATCH;
    must(api->p_cuStreamSynchronize(stream) == CUDA_SUCCESS, "the GPU reports a failure");
    forward_ns[i] = launch_forward(layer, call, stream, BATCH) / BATCH;
    must(api->p_cuStreamSynchronize(stream) == CUDA_SUCCESS, "the GPU reports a failure");
  }
  return (struct costs){median(bare_ns), median(first_ns), median(alone_ns), median(forward_ns)};
}

/* The first problem that this GPU takes, for as many tokens as its entries cover from 1 on. */
static struct mf_op *make_op(struct mf_package *pkg, int device, struct mf_package_entry *found)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  struct mf_op *op = NULL;
  enum mf_status rc = MF_ERR_NOT_FOUND;
  for(size_t i = 0; mf_package_entry_at(pkg, i, &entry) == MF_OK; i++) {
    struct mf_op *more = NULL;
    if(op != NULL && (memcmp(&entry.problem, &found->problem, sizeof(entry.problem)) != 0 || entry.tokens_max <= mf_op_max_tokens(op)))
      continue;
    rc = mf_op_create(pkg, &entry.problem, device, entry.tokens_max, &more);
    if(rc != MF_OK)
      continue;
    mf_op_destroy(op);
    op = more;
    *found = entry;
  }
  must(op != NULL, mf_status_string(rc));
  return op;
}

int main(int argc, char **argv)
{
  const int device = argc > 3 && strcmp(argv[2], "--device") == 0 ? atoi(argv[3]) : 0;
  struct mf_package_entry entry;
  struct mf_package *pkg = NULL;
  struct mf_layer *layer = NULL;
  struct cuda_api real;
  struct mf_weights weights;
  struct mf_call call;
  struct mf_op *op;
  CUstream stream;
  must(argc >= 2, "usage: forward_cost PACKAGE [--device N]");
  must(mf_package_open(argv[1], &pkg) == MF_OK, "the package cannot be opened");
  op = make_op(pkg, device, &entry);
  real = op->api;
  must(real.p_cuCtxSetCurrent(op->context) == CUDA_SUCCESS && real.p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "no stream");
  weights = make_weights(&real, &entry.problem);
  call = make_call(&real, &entry.problem, op);
  must(mf_layer_bind(op, &weights, &layer) == MF_OK, "the layer cannot be bound");
  must(mf_workspace_init(op, call.workspace, stream) == MF_OK, "the workspace cannot be cleared");
  printf("%s on %s: host nanoseconds per call, median of %d batches of %d\n", entry.shape_name, entry.device_name, BATCHES, BATCH);
  printf("tokens   cuLaunchKernelEx   mf_moe_forward   over it   first %d   not cooperative\n", FIRST);
  for(int tokens = 1; tokens <= mf_op_max_tokens(op); tokens *= 2) {
    call.tokens = tokens;
    caught_recipe = op->kernels[op->kernel_of[tokens]].recipe;
    op->api.p_cuLaunchKernelEx = catch_launch;
    must(mf_moe_forward(layer, &call, stream) == MF_OK, "a forward call failed");
    op->api.p_cuLaunchKernelEx = real.p_cuLaunchKernelEx;
    const struct costs ns = measure(layer, &real, &call, stream);
    printf("%6d %18.0f %16.0f %9.0f %10.0f %17.0f\n", tokens, ns.bare, ns.forward, ns.forward - ns.bare, ns.first, ns.alone);
  }
  mf_layer_destroy(layer);
  mf_op_destroy(op);
  mf_package_close(pkg);
  return 0;
}
