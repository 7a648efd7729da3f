/* device_cuda_trace.c - launches of a kernel that leaves a trace in its workspace (docs/trace.md).
 *
 *   fresh workspace | warm launches | the trace's part is cleared | traced launches          all in stream order, one wait at the end
 *
 * As in timing, launch i has inputs of its own and the weights of layer i % L, so weights are cold where L is large enough, and no launch waits for the
 * host. Outputs are poisoned: a kernel that left some unwritten has no trace worth looking at. */
#include "device_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "datagen.h"

#define ALIGN_BYTES 256
#define MOST_LAUNCHES 4096

/* x, logits and out of all launches, one behind the other. */
struct calls {
  size_t x_bytes, logits_bytes, out_bytes, launch_bytes; /* the first three without padding */
  size_t logits_at, out_at;                              /* in a launch's part */
  unsigned char *host;
  size_t bytes;
  CUdeviceptr device;
};

static size_t padded(size_t bytes)
{
  return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

static enum mf_status make_calls(struct device *dev, const struct device_trace *what, struct calls *in, struct error *err)
{
  const int launches = what->warm + what->launches;
  CUresult result;
  in->x_bytes = in->out_bytes = (size_t)what->tokens * (size_t)dev->problem.hidden * sizeof(uint16_t);
  in->logits_bytes = data_logits_bytes(&dev->problem, what->tokens);
  in->logits_at = padded(in->x_bytes);
  in->out_at = in->logits_at + padded(in->logits_bytes);
  in->launch_bytes = in->out_at + padded(in->out_bytes);
  in->bytes = (size_t)launches * in->launch_bytes;
  in->host = malloc(in->bytes);
  if(in->host == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the inputs of %d launches", launches);
  memset(in->host, POISON, in->bytes);
  for(int i = 0; i < launches; i++) {
    const struct test_case tc = device_profile_case(what->tokens, what->routing, what->seed, i);
    unsigned char *at = in->host + (size_t)i * in->launch_bytes;
    data_x(&dev->problem, &tc, (uint16_t *)(void *)at);
    data_logits(&dev->problem, &tc, at + in->logits_at);
  }
  result = dev->api.p_cuMemAlloc(&in->device, in->bytes);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuMemcpyHtoD(in->device, in->host, in->bytes);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "uploading the inputs of a trace");
}

static enum mf_status launch_one(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, const struct calls *in, int launch,
                                 struct error *err)
{
  const CUdeviceptr at = in->device + (CUdeviceptr)launch * in->launch_bytes;
  struct mf_recipe recipe = kernel->recipe;
  struct mf_call call;
  CUresult result = CUDA_SUCCESS;
  enum mf_status rc;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = what->tokens;
  call.x = (const void *)(uintptr_t)at;
  data_logits_call(&dev->problem, at + in->logits_at, &call);
  call.out = (void *)(uintptr_t)(at + in->out_at);
  call.workspace = (void *)(uintptr_t)cuda_workspace(kernel);
  recipe.flags &= ~MF_RECIPE_PDL; /* as in timing */
  rc = recipe_launch(&dev->api, &recipe, kernel->function, &kernel->blocks[launch % dev->nlayers], &dev->problem, &call, dev->stream, &result);
  kernel->launches++;
  return rc == MF_OK ? MF_OK : recipe_failed(dev, rc, result, "launching the traced kernel", err);
}

static enum mf_status launch_all(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, const struct calls *in, struct error *err)
{
  enum mf_status rc = cuda_fresh_workspace(dev, kernel, err);
  for(int i = 0; i < what->warm + what->launches && rc == MF_OK; i++) {
    if(i == what->warm) {
      const CUresult result = dev->api.p_cuMemsetD8Async(cuda_workspace(kernel) + what->offset, 0, what->bytes, dev->stream);
      if(result != CUDA_SUCCESS)
        return cuda_failed(&dev->api, result, err, "clearing the trace");
    }
    rc = launch_one(dev, kernel, what, in, i, err);
  }
  return rc == MF_OK ? cuda_wait(dev, what->timeout_ms, "running the traced kernel", err) : rc;
}

/* Whether every element of every output was written. */
static enum mf_status check_outputs(struct device *dev, const struct device_trace *what, struct calls *in, struct error *err)
{
  const CUresult result = dev->api.p_cuMemcpyDtoH(in->host, in->device, in->bytes);
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "reading the outputs of a trace");
  for(int i = 0; i < what->warm + what->launches; i++) {
    const unsigned char *out = in->host + (size_t)i * in->launch_bytes + in->out_at;
    for(size_t k = 0; k < in->out_bytes; k += sizeof(uint16_t))
      if(out[k] == POISON && out[k + 1] == POISON)
        return error_set(err, MF_ERR_CHECK, "trace: launch %d left output element %zu unwritten", i, k / sizeof(uint16_t));
  }
  return MF_OK;
}

enum mf_status cuda_trace(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, void *area, struct error *err)
{
  struct calls in;
  enum mf_status rc;
  CUresult result;
  memset(&in, 0, sizeof(in));
  if(what->tokens < 1 || what->tokens > dev->tokens_max || what->warm < 0 || what->launches < 1 || what->launches > MOST_LAUNCHES ||
     what->warm > MOST_LAUNCHES - what->launches || what->offset > kernel->recipe.workspace_bytes ||
     what->bytes > kernel->recipe.workspace_bytes - what->offset)
    return error_set(err, MF_ERR_USAGE, "trace: expected 1..%d tokens, 1..%d launches and a part of the workspace (%llu bytes); got %d, %d + %d, %llu + %zu",
                     dev->tokens_max, MOST_LAUNCHES, (unsigned long long)kernel->recipe.workspace_bytes, what->tokens, what->warm, what->launches,
                     (unsigned long long)what->offset, what->bytes);
  cuda_close_profile(dev);
  rc = make_calls(dev, what, &in, err);
  if(rc == MF_OK)
    rc = launch_all(dev, kernel, what, &in, err);
  if(rc == MF_OK)
    rc = check_outputs(dev, what, &in, err);
  if(rc == MF_OK) {
    result = dev->api.p_cuMemcpyDtoH(area, cuda_workspace(kernel) + what->offset, what->bytes);
    rc = result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "reading the trace");
  }
  if(in.device != 0 && rc != MF_ERR_TIMEOUT && rc != MF_ERR_DEVICE) /* the GPU may be busy with it for ever */
    dev->api.p_cuMemFree(in.device);
  free(in.host);
  return rc;
}
