/* device_cuda_time.c - times candidates against each other and against the HBM floor; docs/timing.md tells why it is done this way.
 *
 * A *profile* is one (token count, routing kind, seed). open_profile() makes different inputs for each of n launches and, for every kernel, one graph of
 * n launches: launch i has its own x, logits and out, and the weights of layer i % L. The floor kernel gets a graph of the same shape that reads
 * exactly the experts that launch i activates, computed on the CPU by the reference's routing.
 *
 *   round:  floor | kernel a | kernel b | ... | floor | tensor floor         order of the kernels rotated from round to round
 *   kernel: replay (untimed) , event , TIMED_REPLAYS replays , event      all enqueued at once
 *
 * The untimed replay brings the kernel's code and the workspace into the caches (the weights of the first layers are long out of L2 when the timed
 * replay comes to them) and keeps the GPU busy while the host enqueues the rest, so that no host latency lies between the events.
 *
 * Guards: the real routing must keep every weight byte cold (device_reuse_experts); after the first replay no output may still be poison; a round whose
 * two floor measurements differ by more than DRIFT_RATIO is measured again, at most DRIFT_RETRIES times. Programmatic dependent launch is taken
 * out of the recipes here: behind itself it would overlap with its own predecessor, which no real program lets it do. device_cuda_behind.c times it. */
#include "device_cuda.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "datagen.h"
#include "reference.h"
#include "spec.h"

#define TIMED_REPLAYS 2
#define WARM_UP_MS 20 /* the clocks of an idle GPU need some milliseconds to rise */
#define DRIFT_RATIO 1.05
#define DRIFT_RETRIES 2
#define MAX_LAUNCHES 4096

/* Host copies that live only while a profile is opened. */
struct inputs {
  unsigned char *bytes;  /* all launches: x, logits, out (poison) */
  int32_t *experts;      /* [launches][problem_stored_experts()] */
  int *counts;           /* [launches] */
  size_t launch_bytes;
};

static size_t padded(size_t bytes)
{
  return (bytes + 255) / 256 * 256;
}

void cuda_close_profile(struct device *dev)
{
  struct cuda_profile *pf = &dev->profile;
  cuda_close_behind(dev);
  for(int i = 0; i < pf->count && pf->graphs != NULL; i++)
    if(pf->graphs[i] != NULL)
      dev->api.p_cuGraphExecDestroy(pf->graphs[i]);
  if(pf->floor != NULL)
    dev->api.p_cuGraphExecDestroy(pf->floor);
  if(pf->floor_tensor != NULL)
    dev->api.p_cuGraphExecDestroy(pf->floor_tensor);
  if(pf->begin != NULL)
    dev->api.p_cuEventDestroy(pf->begin);
  if(pf->end != NULL)
    dev->api.p_cuEventDestroy(pf->end);
  if(pf->inputs != 0)
    dev->api.p_cuMemFree(pf->inputs);
  free(pf->graphs);
  free(pf->kernels);
  memset(pf, 0, sizeof(*pf));
}

/* ---- inputs ---- */
static void inputs_free(struct inputs *in)
{
  free(in->bytes);
  free(in->experts);
  free(in->counts);
}

static void make_launch(struct device *dev, struct inputs *in, int launch, const struct test_case *tc, const float *bias, struct routing_result *routing)
{
  const struct cuda_profile *pf = &dev->profile;
  unsigned char *x = in->bytes + (size_t)launch * in->launch_bytes, *logits = x + pf->x_bytes;
  data_x(&dev->problem, tc, (uint16_t *)(void *)x);
  data_logits(&dev->problem, tc, logits);
  memset(logits + pf->logits_bytes, POISON, pf->out_bytes);
  reference_route(&dev->problem, tc->tokens, logits, bias, dev->routed_scaling, routing);
  in->counts[launch] = device_active_experts(&dev->problem, routing, in->experts + (size_t)launch * (size_t)problem_stored_experts(&dev->problem));
}

/* The routing needs the layer's bias, which is made here as datagen makes it on the GPU. */
static enum mf_status make_inputs(struct device *dev, struct inputs *in, enum routing_kind kind, uint32_t seed, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  struct routing_result *routing = malloc(sizeof(*routing));
  float *bias = malloc((size_t)(dev->problem.experts + dev->problem.zero_experts) * sizeof(*bias));
  const size_t launches = (size_t)pf->launches;
  enum mf_status rc = MF_OK;
  double active = 0;
  in->launch_bytes = pf->x_bytes + pf->logits_bytes + pf->out_bytes;
  in->bytes = calloc(launches, in->launch_bytes);
  in->experts = calloc(launches * (size_t)problem_stored_experts(&dev->problem), sizeof(*in->experts));
  in->counts = calloc(launches, sizeof(*in->counts));
  if(routing == NULL || bias == NULL || in->bytes == NULL || in->experts == NULL || in->counts == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "no memory for the inputs of %d launches", pf->launches);
    goto out;
  }
  for(int i = 0; i < pf->launches; i++) {
    const struct test_case tc = device_profile_case(pf->tokens, kind, seed, i);
    if(dev->problem.select_bias)
      data_bias(data_layer_seed((uint32_t)(i % dev->nlayers)), dev->problem.experts + dev->problem.zero_experts, bias);
    make_launch(dev, in, i, &tc, dev->problem.select_bias ? bias : NULL, routing);
    active += in->counts[i];
  }
  pf->active = active / pf->launches;
out:
  free(routing);
  free(bias);
  return rc;
}

static enum mf_status upload(struct device *dev, const struct inputs *in, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  const size_t bytes = (size_t)pf->launches * in->launch_bytes;
  CUresult result = dev->api.p_cuMemAlloc(&pf->inputs, bytes);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuMemcpyHtoD(pf->inputs, in->bytes, bytes);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "uploading the inputs of a profile");
}

static enum mf_status check_cold(const struct device *dev, const struct inputs *in, struct error *err)
{
  const double expert_mb = 3.0 * dev->problem.intermediate * dev->problem.hidden / 1e6, l2_mb = (double)dev->info.l2_bytes / 1e6;
  const int stored = problem_stored_experts(&dev->problem);
  const int64_t reuse = device_reuse_experts(in->experts, in->counts, stored, dev->profile.launches, dev->nlayers, stored);
  if(reuse < 0)
    return error_set(err, MF_ERR_NOMEM, "no memory to check that weights are cold");
  if(reuse == INT64_MAX || (double)reuse * expert_mb >= COLD_L2_RATIO * l2_mb)
    return MF_OK;
  return error_set(err, MF_REJECTED,
                   "the weights would not be cold: an expert is used again after %.0f MB, expected at least %d x %.0f MB of L2; load more layers than %d (%d are enough "
                   "for any routing)",
                   (double)reuse * expert_mb, COLD_L2_RATIO, l2_mb, dev->nlayers, device_layers_needed(&dev->problem, &dev->info, dev->profile.tokens));
}

/* ---- graphs ---- */
CUdeviceptr cuda_launch_inputs(const struct cuda_profile *pf, int launch)
{
  return pf->inputs + (CUdeviceptr)launch * (pf->x_bytes + pf->logits_bytes + pf->out_bytes);
}

enum mf_status cuda_enqueue_launch(struct device *dev, const struct device_kernel *kernel, bool pdl, int launch, CUdeviceptr from, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  struct mf_recipe recipe = kernel->recipe;
  struct mf_call call;
  CUresult result = CUDA_SUCCESS;
  enum mf_status rc;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = pf->tokens;
  call.workspace = (void *)(uintptr_t)cuda_workspace(kernel);
  call.x = (const void *)(uintptr_t)from;
  data_logits_call(&dev->problem, from + pf->x_bytes, &call);
  call.out = (void *)(uintptr_t)(cuda_launch_inputs(pf, launch) + pf->x_bytes + pf->logits_bytes);
  if(!pdl)
    recipe.flags &= ~MF_RECIPE_PDL;
  rc = recipe_launch(&dev->api, &recipe, kernel->function, &kernel->blocks[launch % dev->nlayers], &dev->problem, &call, dev->stream, &result);
  return rc == MF_OK ? MF_OK : recipe_failed(dev, rc, result, "launching the kernel in a graph", err);
}

/* What one graph is made of: a kernel, or if there is none a floor ('tensor' as in enqueue_floor()). */
struct content {
  const struct device_kernel *kernel, *tensor;
  const struct inputs *in;
};

/* 'tensor': the kernel whose way of reading is taken; NULL: long copies. */
static enum mf_status enqueue_floor(struct device *dev, const struct device_kernel *tensor, const struct inputs *in, struct error *err)
{
  enum mf_status rc = MF_OK;
  for(int i = 0; i < dev->profile.launches && rc == MF_OK; i++) {
    const int32_t *experts = in->experts + (size_t)i * (size_t)problem_stored_experts(&dev->problem);
    rc = tensor == NULL ? cuda_enqueue_floor(dev, i % dev->nlayers, experts, in->counts[i], err)
                        : cuda_enqueue_tensor_floor(dev, tensor, i % dev->nlayers, experts, in->counts[i], err);
  }
  return rc;
}

static enum mf_status enqueue_content(struct device *dev, const void *context, struct error *err)
{
  const struct content *what = context;
  enum mf_status rc = MF_OK;
  if(what->kernel == NULL)
    return enqueue_floor(dev, what->tensor, what->in, err);
  for(int i = 0; i < dev->profile.launches && rc == MF_OK; i++)
    rc = cuda_enqueue_launch(dev, what->kernel, false, i, cuda_launch_inputs(&dev->profile, i), err);
  return rc;
}

enum mf_status cuda_capture(struct device *dev, cuda_enqueue_fn *enqueue, const void *context, CUgraphExec *out, struct error *err)
{
  CUgraph graph = NULL;
  CUresult result = dev->api.p_cuStreamBeginCapture(dev->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  enum mf_status rc;
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "beginning a capture");
  rc = enqueue(dev, context, err);
  result = dev->api.p_cuStreamEndCapture(dev->stream, &graph);
  if(rc == MF_OK && result == CUDA_SUCCESS)
    result = dev->api.p_cuGraphInstantiateWithFlags(out, graph, 0);
  if(rc == MF_OK && result != CUDA_SUCCESS)
    rc = cuda_failed(&dev->api, result, err, "making a graph");
  if(graph != NULL)
    dev->api.p_cuGraphDestroy(graph);
  return rc;
}

enum mf_status cuda_launch_graph(struct device *dev, CUgraphExec graph, struct error *err)
{
  const CUresult result = dev->api.p_cuGraphLaunch(graph, dev->stream);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "launching a graph");
}

/* Replays the kernel's graph once and looks whether it wrote every output. 'bytes' is the profile's picture with poisoned outputs. */
static enum mf_status prove(struct device *dev, struct device_kernel *kernel, CUgraphExec graph, const struct inputs *in, unsigned char *back, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  const size_t bytes = (size_t)pf->launches * in->launch_bytes, before = pf->x_bytes + pf->logits_bytes;
  const size_t out_bytes = (size_t)pf->tokens * (size_t)dev->problem.hidden * sizeof(uint16_t);
  CUresult result = dev->api.p_cuMemcpyHtoD(pf->inputs, in->bytes, bytes);
  enum mf_status rc = result == CUDA_SUCCESS ? cuda_fresh_workspace(dev, kernel, err) : cuda_failed(&dev->api, result, err, "poisoning the outputs");
  if(rc == MF_OK)
    rc = cuda_launch_graph(dev, graph, err);
  if(rc == MF_OK)
    rc = cuda_wait(dev, ROUND_TIMEOUT_MS, "first replay of a timing graph", err);
  if(rc != MF_OK)
    return rc;
  result = dev->api.p_cuMemcpyDtoH(back, pf->inputs, bytes);
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "reading the outputs");
  for(int i = 0; i < pf->launches; i++) {
    const unsigned char *out = back + (size_t)i * in->launch_bytes + before;
    for(size_t k = 0; k < out_bytes; k += sizeof(uint16_t))
      if(out[k] == POISON && out[k + 1] == POISON)
        return error_set(err, MF_ERR_CHECK, "timing graph: launch %d of %s left output element %zu unwritten", i, kernel->recipe.kernel, k / sizeof(uint16_t));
  }
  return MF_OK;
}

static enum mf_status make_graphs(struct device *dev, const struct inputs *in, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  unsigned char *back = malloc((size_t)pf->launches * in->launch_bytes);
  enum mf_status rc;
  if(back == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the outputs of a profile");
  rc = cuda_capture(dev, enqueue_content, &(struct content){.in = in}, &pf->floor, err);
  for(int i = 0; i < pf->count && rc == MF_OK && pf->floor_tensor == NULL; i++)
    if(cuda_has_tensor_floor(dev, pf->kernels[i]))
      rc = cuda_capture(dev, enqueue_content, &(struct content){.tensor = pf->kernels[i], .in = in}, &pf->floor_tensor, err);
  for(int i = 0; i < pf->count && rc == MF_OK; i++) {
    rc = cuda_capture(dev, enqueue_content, &(struct content){.kernel = pf->kernels[i], .in = in}, &pf->graphs[i], err);
    if(rc == MF_OK)
      rc = prove(dev, pf->kernels[i], pf->graphs[i], in, back, err);
  }
  free(back);
  return rc;
}

static double now_ms(void)
{
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec / 1e6;
}

static enum mf_status warm_up(struct device *dev, struct error *err)
{
  const double until = now_ms() + WARM_UP_MS;
  enum mf_status rc;
  do {
    rc = cuda_launch_graph(dev, dev->profile.floor, err);
    if(rc == MF_OK)
      rc = cuda_wait(dev, ROUND_TIMEOUT_MS, "warming up", err);
  } while(rc == MF_OK && now_ms() < until);
  return rc;
}

/* ---- a profile ---- */
static enum mf_status fill_profile(struct device *dev, struct device_kernel *const *kernels, int count, int tokens, int launches, struct error *err)
{
  struct cuda_profile *pf = &dev->profile;
  CUresult result;
  pf->tokens = tokens;
  pf->launches = device_graph_launches(launches, dev->nlayers);
  pf->x_bytes = pf->out_bytes = padded((size_t)tokens * (size_t)dev->problem.hidden * sizeof(uint16_t));
  pf->logits_bytes = padded(data_logits_bytes(&dev->problem, tokens));
  pf->graphs = calloc((size_t)count, sizeof(CUgraphExec));
  pf->kernels = calloc((size_t)count, sizeof(struct device_kernel *));
  if(pf->graphs == NULL || pf->kernels == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for a profile of %d kernels", count);
  memcpy(pf->kernels, kernels, (size_t)count * sizeof(struct device_kernel *));
  pf->count = count;
  result = dev->api.p_cuEventCreate(&pf->begin, CU_EVENT_DEFAULT);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuEventCreate(&pf->end, CU_EVENT_DEFAULT);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "making events");
}

enum mf_status cuda_open_profile(struct device *dev, struct device_kernel *const *kernels, int count, int tokens, enum routing_kind routing, uint32_t seed,
                                 int launches, struct error *err)
{
  struct inputs in;
  enum mf_status rc;
  memset(&in, 0, sizeof(in));
  cuda_close_profile(dev);
  if(!dev->problem_loaded || count < 1 || tokens < 1 || tokens > dev->tokens_max || launches < 1 || launches > MAX_LAUNCHES)
    return error_set(err, MF_ERR_USAGE, "open_profile: expected a loaded problem, kernels, 1..%d tokens, 1..%d launches; got %d kernels, %d tokens, %d launches",
                     dev->tokens_max, MAX_LAUNCHES, count, tokens, launches);
  rc = fill_profile(dev, kernels, count, tokens, launches, err);
  if(rc == MF_OK)
    rc = make_inputs(dev, &in, routing, seed, err);
  if(rc == MF_OK)
    rc = check_cold(dev, &in, err);
  if(rc == MF_OK)
    rc = upload(dev, &in, err);
  if(rc == MF_OK)
    rc = make_graphs(dev, &in, err);
  if(rc == MF_OK)
    rc = warm_up(dev, err);
  inputs_free(&in);
  if(rc != MF_OK && rc != MF_ERR_TIMEOUT)
    cuda_close_profile(dev);
  return rc;
}

/* ---- a round ---- */
enum mf_status cuda_time_graph(struct device *dev, CUgraphExec graph, int timeout_ms, double *us, struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  float ms = 0;
  CUresult result;
  enum mf_status rc = cuda_launch_graph(dev, graph, err);
  result = rc == MF_OK ? dev->api.p_cuEventRecord(pf->begin, dev->stream) : CUDA_SUCCESS;
  for(int i = 0; i < TIMED_REPLAYS && rc == MF_OK; i++)
    rc = cuda_launch_graph(dev, graph, err);
  if(rc == MF_OK && result == CUDA_SUCCESS)
    result = dev->api.p_cuEventRecord(pf->end, dev->stream);
  if(rc == MF_OK && result == CUDA_SUCCESS)
    rc = cuda_wait(dev, timeout_ms, "timing a graph", err);
  if(rc == MF_OK && result == CUDA_SUCCESS)
    result = dev->api.p_cuEventElapsedTime(&ms, pf->begin, pf->end);
  if(rc == MF_OK && result != CUDA_SUCCESS)
    rc = cuda_failed(&dev->api, result, err, "timing a graph");
  *us = (double)ms * 1e3 / (TIMED_REPLAYS * pf->launches);
  return rc;
}

/* One pass over floor, kernels, floor. floor_us[2]: first and last. */
static enum mf_status time_pass(struct device *dev, const bool *run, int round, double *us, double floor_us[2], struct error *err)
{
  const struct cuda_profile *pf = &dev->profile;
  enum mf_status rc = cuda_time_graph(dev, pf->floor, ROUND_TIMEOUT_MS, &floor_us[0], err);
  for(int k = 0; k < pf->count && rc == MF_OK; k++) {
    const int i = (int)(((unsigned)round + (unsigned)k) % (unsigned)pf->count);
    us[i] = NAN;
    if(run == NULL || run[i])
      rc = cuda_time_graph(dev, pf->graphs[i], ROUND_TIMEOUT_MS, &us[i], err);
  }
  return rc == MF_OK ? cuda_time_graph(dev, pf->floor, ROUND_TIMEOUT_MS, &floor_us[1], err) : rc;
}

enum mf_status cuda_time_round(struct device *dev, const bool *run, int round, double *us, struct floor_times *floors, double *active, struct error *err)
{
  double ends[2] = {0, 0};
  enum mf_status rc = MF_OK;
  if(dev->profile.floor == NULL)
    return error_set(err, MF_ERR_USAGE, "time_round: no profile is open");
  for(int attempt = 0; attempt <= DRIFT_RETRIES && rc == MF_OK; attempt++) {
    rc = time_pass(dev, run, round, us, ends, err);
    if(fmax(ends[0], ends[1]) <= DRIFT_RATIO * fmin(ends[0], ends[1]))
      break;
  }
  *floors = (struct floor_times){(ends[0] + ends[1]) / 2, NAN};
  *active = dev->profile.active;
  if(rc == MF_OK && dev->profile.floor_tensor != NULL)
    rc = cuda_time_graph(dev, dev->profile.floor_tensor, ROUND_TIMEOUT_MS, &floors->tensor_us, err);
  return rc;
}
