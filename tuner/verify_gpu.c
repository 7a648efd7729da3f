/* verify_gpu.c - see verify_gpu.h.
 *
 *   output and workspace buffers   | guard | bytes | guard |   guards and output are poisoned before each launch */
#include "verify_gpu.h"
#include "datagen.h"
#include "progress.h"
#include "spec.h"
#include "verify_judge.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GUARD_BYTES 4096u
#define GUARD_POISON 0xffu
#define DEFAULT_TIMEOUT_MS 10000
#define SOAK_BATCH 64 /* launches between two waits for the GPU */

static enum mf_status cuda_error(const struct verify_gpu *gpu, CUresult cr, const char *doing, struct error *err)
{
  const char *name = NULL, *text = NULL;
  gpu->api.p_cuGetErrorName(cr, &name);
  gpu->api.p_cuGetErrorString(cr, &text);
  return error_set(err, cr == CUDA_ERROR_NO_DEVICE ? MF_ERR_NO_DEVICE : MF_ERR_DEVICE, "verify: %s: %s (%s)", doing, name != NULL ? name : "unknown error",
                   text != NULL ? text : "no description");
}

enum mf_status verify_gpu_open(int ordinal, int timeout_ms, struct verify_gpu *gpu, struct error *err)
{
  char why[512];
  CUresult cr;
  memset(gpu, 0, sizeof(*gpu));
  gpu->ordinal = ordinal;
  gpu->timeout_ms = timeout_ms > 0 ? timeout_ms : DEFAULT_TIMEOUT_MS;
  if(cuda_api_open(&gpu->api, why, sizeof(why)) != 0)
    return error_set(err, MF_ERR_NO_DEVICE, "%s", why);
  cr = gpu->api.p_cuInit(0);
  if(cr == CUDA_SUCCESS)
    cr = gpu->api.p_cuDeviceGet(&gpu->device, ordinal);
  if(cr != CUDA_SUCCESS) {
    cuda_error(gpu, cr, "looking for the GPU", err);
    cuda_api_close(&gpu->api);
    err->status = MF_ERR_NO_DEVICE;
    return MF_ERR_NO_DEVICE;
  }
  cr = gpu->api.p_cuDeviceGetName(gpu->name, (int)sizeof(gpu->name) - 1, gpu->device);
  if(cr == CUDA_SUCCESS)
    cr = gpu->api.p_cuDevicePrimaryCtxRetain(&gpu->context, gpu->device);
  if(cr == CUDA_SUCCESS)
    cr = gpu->api.p_cuCtxPushCurrent(gpu->context);
  if(cr == CUDA_SUCCESS)
    cr = gpu->api.p_cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING);
  return cr == CUDA_SUCCESS ? MF_OK : cuda_error(gpu, cr, "opening the GPU", err);
}

void verify_gpu_close(struct verify_gpu *gpu)
{
  if(gpu->api.library == NULL)
    return;
  if(gpu->stream != NULL)
    gpu->api.p_cuStreamDestroy(gpu->stream);
  if(gpu->context != NULL) {
    gpu->api.p_cuCtxPopCurrent(NULL);
    gpu->api.p_cuDevicePrimaryCtxRelease(gpu->device);
  }
  cuda_api_close(&gpu->api);
}

bool verify_gpu_is_busy(enum mf_status rc)
{
  return rc == MF_ERR_TIMEOUT || rc == MF_ERR_INTERRUPTED;
}

static enum mf_status allocate(struct verify_gpu *gpu, size_t bytes, const char *what, CUdeviceptr *out, struct error *err)
{
  const CUresult cr = gpu->api.p_cuMemAlloc(out, bytes);
  if(cr == CUDA_SUCCESS)
    return MF_OK;
  *out = 0;
  if(cr != CUDA_ERROR_OUT_OF_MEMORY)
    return cuda_error(gpu, cr, what, err);
  return error_set(err, MF_ERR_NOMEM, "verify: the GPU has no %.2f GiB left for %s: end other programs on it", (double)bytes / (1 << 30), what);
}

/* Waits for the stream, but no longer than the time limit. */
static enum mf_status wait_for_stream(struct verify_gpu *gpu, struct error *err)
{
  const struct timespec pause = {.tv_nsec = 200000};
  struct timespec start, now;
  CUresult cr;
  clock_gettime(CLOCK_MONOTONIC, &start);
  while((cr = gpu->api.p_cuStreamQuery(gpu->stream)) == CUDA_ERROR_NOT_READY) {
    clock_gettime(CLOCK_MONOTONIC, &now);
    if(interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted");
    if((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 > gpu->timeout_ms)
      return error_set(err, MF_ERR_TIMEOUT, "verify: a launch did not end within %d ms", gpu->timeout_ms);
    nanosleep(&pause, NULL);
  }
  return cr == CUDA_SUCCESS ? MF_OK : cuda_error(gpu, cr, "running the kernel", err);
}

static enum mf_status upload(struct verify_gpu *gpu, CUdeviceptr to, const void *from, size_t bytes, struct error *err)
{
  const CUresult cr = gpu->api.p_cuMemcpyHtoD(to, from, bytes);
  return cr == CUDA_SUCCESS ? MF_OK : cuda_error(gpu, cr, "copying to the GPU", err);
}

/* ---- weights ---- */
static size_t blocks(const struct mf_problem *p)
{
  return ((size_t)p->intermediate_offset + (size_t)p->intermediate + 127) / 128;
}

static enum mf_status make_scales(struct verify_gpu *gpu, struct verify_weights *w, enum data_stream stream, size_t count, CUdeviceptr *out, struct error *err)
{
  float *scales = malloc(count * sizeof(*scales));
  enum mf_status rc = scales == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : allocate(gpu, count * sizeof(*scales), "scales", out, err);
  if(rc == MF_OK) {
    if(stream == DATA_BIAS)
      data_bias(w->layer_seed, (int)count, scales);
    else
      data_scales(w->layer_seed, stream, w->problem, 0, count, scales);
    rc = upload(gpu, *out, scales, count * sizeof(*scales), err);
  }
  free(scales);
  return rc;
}

enum mf_status verify_weights_make(struct verify_gpu *gpu, const struct mf_problem *p, float routed_scaling, struct verify_weights *w, struct error *err)
{
  const size_t experts = (size_t)problem_stored_experts(p), matrix = experts * (size_t)p->intermediate * (size_t)p->hidden;
  const size_t hidden_blocks = ((size_t)p->hidden + 127) / 128;
  enum mf_status rc;
  memset(w, 0, sizeof(*w));
  w->problem = p;
  w->layer_seed = data_layer_seed(0);
  w->routed_scaling = routed_scaling;
  w->uploaded = calloc(experts, sizeof(*w->uploaded));
  if(w->uploaded == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = allocate(gpu, 2 * matrix, "the gate and up weights", &w->w13, err);
  if(rc == MF_OK)
    rc = allocate(gpu, matrix, "the down weights", &w->w2, err);
  if(rc == MF_OK && (gpu->api.p_cuMemsetD8(w->w13, 0, 2 * matrix) != CUDA_SUCCESS || gpu->api.p_cuMemsetD8(w->w2, 0, matrix) != CUDA_SUCCESS))
    rc = error_set(err, MF_ERR_DEVICE, "verify: cannot clear the weights");
  if(rc == MF_OK)
    rc = make_scales(gpu, w, DATA_S13, experts * 2 * blocks(p) * hidden_blocks, &w->s13, err);
  if(rc == MF_OK)
    rc = make_scales(gpu, w, DATA_S2, experts * hidden_blocks * blocks(p), &w->s2, err);
  if(rc == MF_OK && p->select_bias)
    rc = make_scales(gpu, w, DATA_BIAS, (size_t)p->experts + (size_t)p->zero_experts, &w->bias, err);
  return rc;
}

void verify_weights_free(struct verify_gpu *gpu, struct verify_weights *w)
{
  const CUdeviceptr memory[] = {w->w13, w->w2, w->s13, w->s2, w->bias};
  for(size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
    if(memory[i] != 0)
      gpu->api.p_cuMemFree(memory[i]);
  free(w->uploaded);
  memset(w, 0, sizeof(*w));
}

/* Generates one expert of one tensor and uploads it; 'bytes' is the expert's size. */
static enum mf_status upload_matrix(struct verify_gpu *gpu, const struct verify_weights *w, enum data_stream stream, CUdeviceptr tensor, int expert,
                                    size_t bytes, unsigned char *buffer, struct error *err)
{
  const uint64_t first = (uint64_t)expert * bytes;
  data_weights(w->layer_seed, stream, first, bytes, buffer);
  return upload(gpu, tensor + first, buffer, bytes, err);
}

/* The experts of a routing that are not there yet. */
static enum mf_status upload_experts(struct verify_gpu *gpu, const struct verify_weights *w, const struct routing_result *routing, struct error *err)
{
  const struct mf_problem *p = w->problem;
  const size_t matrix = (size_t)p->intermediate * (size_t)p->hidden;
  unsigned char *buffer = malloc(2 * matrix);
  enum mf_status rc = buffer == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : MF_OK;
  for(int i = 0; rc == MF_OK && i < routing->tokens * routing->top_k; i++) {
    const int expert = problem_local_expert(p, routing->ids[i]);
    if(expert < 0 || w->uploaded[expert])
      continue;
    rc = upload_matrix(gpu, w, DATA_W13, w->w13, expert, 2 * matrix, buffer, err);
    if(rc == MF_OK)
      rc = upload_matrix(gpu, w, DATA_W2, w->w2, expert, matrix, buffer, err);
    w->uploaded[expert] = rc == MF_OK;
  }
  free(buffer);
  return rc;
}

/* ---- kernels ---- */
static enum mf_status allocate_buffers(struct verify_gpu *gpu, struct verify_kernel *k, int max_tokens, struct error *err)
{
  const struct mf_problem *p = k->weights->problem;
  const size_t tokens = (size_t)max_tokens;
  enum mf_status rc;
  k->x_bytes = tokens * (size_t)p->hidden * 2;
  k->out_bytes = k->x_bytes;
  k->logits_bytes = data_logits_bytes(p, max_tokens);
  k->workspace_bytes = mf_op_workspace_size(k->op);
  rc = allocate(gpu, k->x_bytes, "x", &k->x, err);
  if(rc == MF_OK)
    rc = allocate(gpu, k->logits_bytes, "router logits", &k->logits, err);
  if(rc == MF_OK)
    rc = allocate(gpu, k->out_bytes + 2 * (size_t)GUARD_BYTES, "the output", &k->out, err);
  if(rc == MF_OK)
    rc = allocate(gpu, k->workspace_bytes + 2 * (size_t)GUARD_BYTES, "the workspace", &k->workspace, err);
  return rc;
}

static enum mf_status prepare_workspace(struct verify_gpu *gpu, const struct verify_kernel *k, struct error *err)
{
  enum mf_status rc;
  const CUresult cr = gpu->api.p_cuMemsetD8Async(k->workspace, GUARD_POISON, k->workspace_bytes + 2 * (size_t)GUARD_BYTES, gpu->stream);
  if(cr != CUDA_SUCCESS)
    return cuda_error(gpu, cr, "poisoning the workspace", err);
  rc = mf_workspace_init(k->op, (void *)(uintptr_t)(k->workspace + GUARD_BYTES), gpu->stream);
  return rc == MF_OK ? wait_for_stream(gpu, err) : error_set(err, rc, "mf_workspace_init: %s", mf_status_string(rc));
}

enum mf_status verify_kernel_make(struct verify_gpu *gpu, struct mf_package *pkg, const struct verify_weights *weights, int max_tokens,
                                  struct verify_kernel *k, struct error *err)
{
  struct mf_weights w;
  enum mf_status rc;
  memset(k, 0, sizeof(*k));
  memset(&w, 0, sizeof(w));
  k->weights = weights;
  rc = mf_op_create(pkg, weights->problem, gpu->ordinal, max_tokens, &k->op);
  if(rc != MF_OK)
    return error_set(err, rc, "mf_op_create: %s", mf_status_string(rc));
  w.struct_size = sizeof(w);
  w.w13 = (const void *)(uintptr_t)weights->w13;
  w.w2 = (const void *)(uintptr_t)weights->w2;
  w.s13 = (const float *)(uintptr_t)weights->s13;
  w.s2 = (const float *)(uintptr_t)weights->s2;
  w.bias = (const float *)(uintptr_t)weights->bias;
  w.routed_scaling = weights->routed_scaling;
  rc = mf_layer_bind(k->op, &w, &k->layer);
  if(rc != MF_OK)
    return error_set(err, rc, "mf_layer_bind: %s", mf_status_string(rc));
  rc = allocate_buffers(gpu, k, max_tokens, err);
  return rc == MF_OK ? prepare_workspace(gpu, k, err) : rc;
}

void verify_kernel_free(struct verify_gpu *gpu, struct verify_kernel *k)
{
  const CUdeviceptr memory[] = {k->workspace, k->x, k->logits, k->out};
  for(size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
    if(memory[i] != 0)
      gpu->api.p_cuMemFree(memory[i]);
  mf_layer_destroy(k->layer);
  mf_op_destroy(k->op);
  memset(k, 0, sizeof(*k));
}

/* ---- a case ---- */
static enum mf_status upload_inputs(struct verify_gpu *gpu, const struct verify_kernel *k, const struct test_case *tc, struct error *err)
{
  const struct mf_problem *p = k->weights->problem;
  uint16_t *x = malloc(k->x_bytes);
  void *logits = malloc(k->logits_bytes);
  enum mf_status rc = x == NULL || logits == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : MF_OK;
  if(rc == MF_OK) {
    data_x(p, tc, x);
    data_logits(p, tc, logits);
    rc = upload(gpu, k->x, x, (size_t)tc->tokens * (size_t)p->hidden * 2, err);
  }
  if(rc == MF_OK)
    rc = upload(gpu, k->logits, logits, data_logits_bytes(p, tc->tokens), err);
  free(x);
  free(logits);
  return rc;
}

static enum mf_status forward(struct verify_gpu *gpu, const struct verify_kernel *k, int tokens, CUdeviceptr out, struct error *err)
{
  struct mf_call call = {.struct_size = sizeof(call),
                         .tokens = tokens,
                         .x = (const void *)(uintptr_t)k->x,
                         .out = (void *)(uintptr_t)out,
                         .workspace = (void *)(uintptr_t)(k->workspace + GUARD_BYTES)};
  enum mf_status rc;
  data_logits_call(k->weights->problem, k->logits, &call);
  rc = mf_moe_forward(k->layer, &call, gpu->stream);
  return rc == MF_OK ? MF_OK : error_set(err, rc, "mf_moe_forward with %d tokens: %s", tokens, mf_status_string(rc));
}

static enum mf_status poison(struct verify_gpu *gpu, CUdeviceptr at, size_t bytes, struct error *err)
{
  const CUresult cr = gpu->api.p_cuMemsetD8Async(at, GUARD_POISON, bytes, gpu->stream);
  return cr == CUDA_SUCCESS ? MF_OK : cuda_error(gpu, cr, "poisoning the output", err);
}

static enum mf_status launch(struct verify_gpu *gpu, const struct verify_kernel *k, int tokens, struct error *err)
{
  enum mf_status rc = poison(gpu, k->out, k->out_bytes + 2 * (size_t)GUARD_BYTES, err);
  if(rc == MF_OK)
    rc = forward(gpu, k, tokens, k->out + GUARD_BYTES, err);
  return rc == MF_OK ? wait_for_stream(gpu, err) : rc;
}

static bool all_poison(const unsigned char *bytes, size_t count)
{
  for(size_t i = 0; i < count; i++)
    if(bytes[i] != GUARD_POISON)
      return false;
  return true;
}

/* Fetches the guards at 'at' and tells whether they are as they were. */
static enum mf_status check_guard(struct verify_gpu *gpu, CUdeviceptr at, bool *intact, struct error *err)
{
  unsigned char guard[GUARD_BYTES];
  const CUresult cr = gpu->api.p_cuMemcpyDtoH(guard, at, sizeof(guard));
  if(cr != CUDA_SUCCESS)
    return cuda_error(gpu, cr, "copying from the GPU", err);
  *intact &= all_poison(guard, sizeof(guard));
  return MF_OK;
}

/* y, and everything behind the rows that the case has, up to the end of the second guard. */
static enum mf_status fetch_output(struct verify_gpu *gpu, const struct verify_kernel *k, size_t y_bytes, uint16_t *y, bool *intact, struct error *err)
{
  const size_t rest = k->out_bytes - y_bytes + GUARD_BYTES;
  unsigned char *behind = malloc(rest);
  CUresult cr;
  if(behind == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  cr = gpu->api.p_cuMemcpyDtoH(y, k->out + GUARD_BYTES, y_bytes);
  if(cr == CUDA_SUCCESS)
    cr = gpu->api.p_cuMemcpyDtoH(behind, k->out + GUARD_BYTES + y_bytes, rest);
  if(cr == CUDA_SUCCESS)
    *intact &= all_poison(behind, rest);
  free(behind);
  return cr == CUDA_SUCCESS ? MF_OK : cuda_error(gpu, cr, "copying from the GPU", err);
}

enum mf_status verify_run(struct verify_gpu *gpu, struct verify_kernel *k, const struct test_case *tc, const struct routing_result *routing, uint16_t *y,
                          bool *guards_intact, struct error *err)
{
  const CUdeviceptr guards[] = {k->out, k->workspace, k->workspace + GUARD_BYTES + k->workspace_bytes};
  enum mf_status rc = upload_experts(gpu, k->weights, routing, err);
  if(rc == MF_OK)
    rc = upload_inputs(gpu, k, tc, err);
  if(rc == MF_OK)
    rc = launch(gpu, k, tc->tokens, err);
  if(rc == MF_OK)
    rc = fetch_output(gpu, k, (size_t)tc->tokens * (size_t)k->weights->problem->hidden * 2, y, guards_intact, err);
  for(size_t i = 0; rc == MF_OK && i < sizeof(guards) / sizeof(guards[0]); i++)
    rc = check_guard(gpu, guards[i], guards_intact, err);
  return rc;
}

/* ---- many launches ---- */
/* 'count' launches, the first of which is number 'number'; 'out' and 'back' have room for their outputs. */
static enum mf_status soak_batch(struct verify_gpu *gpu, const struct verify_kernel *k, int tokens, int count, int number, CUdeviceptr out, unsigned char *back,
                                 const uint16_t *y, int *different, int *first, struct error *err)
{
  const size_t bytes = (size_t)tokens * (size_t)k->weights->problem->hidden * 2;
  struct error ignored;
  CUresult cr;
  enum mf_status rc = poison(gpu, out, (size_t)count * bytes, err);
  for(int i = 0; rc == MF_OK && i < count; i++)
    rc = forward(gpu, k, tokens, out + (size_t)i * bytes, err);
  if(rc != MF_OK) { /* those ahead of it are still under way, and 'out' is theirs */
    const enum mf_status waited = wait_for_stream(gpu, &ignored);
    return verify_gpu_is_busy(waited) ? error_set(err, waited, "%s", ignored.text) : rc;
  }
  rc = wait_for_stream(gpu, err);
  if(rc != MF_OK)
    return rc;
  cr = gpu->api.p_cuMemcpyDtoH(back, out, (size_t)count * bytes);
  if(cr != CUDA_SUCCESS)
    return cuda_error(gpu, cr, "copying from the GPU", err);
  for(int i = 0; i < count; i++) {
    if(memcmp(back + (size_t)i * bytes, y, bytes) == 0)
      continue;
    *first = *different == 0 ? number + i : *first;
    ++*different;
  }
  return MF_OK;
}

enum mf_status verify_soak(struct verify_gpu *gpu, struct verify_kernel *k, int tokens, int launches, const uint16_t *y, int *different, int *first,
                           struct error *err)
{
  const size_t room = SOAK_BATCH * (size_t)tokens * (size_t)k->weights->problem->hidden * 2;
  unsigned char *back = malloc(room);
  CUdeviceptr out = 0;
  enum mf_status rc;
  *different = *first = 0;
  if(back == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = allocate(gpu, room + GUARD_BYTES, "the outputs of many launches", &out, err);
  for(int done = 0; rc == MF_OK && done < launches; done += SOAK_BATCH) {
    const int count = launches - done < SOAK_BATCH ? launches - done : SOAK_BATCH;
    rc = soak_batch(gpu, k, tokens, count, done + 1, out, back, y, different, first, err);
  }
  if(out != 0 && !verify_gpu_is_busy(rc))
    gpu->api.p_cuMemFree(out);
  free(back);
  return rc;
}
