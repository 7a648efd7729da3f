/* device_cuda_case.c - runs one test case on the GPU and brings everything back that a judge needs.
 *
 * All buffers of the call lie in one *arena*, made on the host, uploaded as a whole, downloaded as a whole:
 *
 *   | guard | x | guard | logits | guard | out of launch 0 | guard | out of launch 1 | guard | ...
 *
 * Guards and outputs are filled with POISON. Afterwards everything but the outputs must be as it was: a write outside an output, or into an input,
 * shows whoever did it. An output element that is still poison was never written (kernels do not produce that NaN). Each launch has an output of
 * its own, so that all launches of a case go to the stream at once and are compared bitwise afterwards: two copies and a wait per case.
 *
 * The workspace is poisoned and initialised when the kernel is new and again every FRESH_EVERY cases; in between it goes on from case to case, as it
 * does in serving. Its guards are checked, too. */
#include "device_cuda.h"

#include <stdlib.h>
#include <string.h>

#include "datagen.h"
#include "spec.h"

#define FRESH_EVERY 8
#define MAX_REPLAYS 8
#define ALIGN_BYTES 256

/* Offsets in the arena; host is its picture before the launches, back its picture after. */
struct arena {
  size_t x, x_bytes, logits, logits_bytes, out[MAX_REPLAYS], out_bytes, bytes;
  int replays;
  unsigned char *host, *back;
  CUdeviceptr device;
};

static size_t place(size_t *at, size_t bytes)
{
  const size_t here = *at + GUARD_BYTES;
  *at = (here + bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
  return here;
}

static void lay_out(struct arena *a, const struct mf_problem *p, int tokens, int replays)
{
  size_t at = 0;
  a->replays = replays;
  a->x_bytes = a->out_bytes = (size_t)tokens * (size_t)p->hidden * sizeof(uint16_t);
  a->logits_bytes = data_logits_bytes(p, tokens);
  a->x = place(&at, a->x_bytes);
  a->logits = place(&at, a->logits_bytes);
  for(int i = 0; i < replays; i++)
    a->out[i] = place(&at, a->out_bytes);
  a->bytes = at + GUARD_BYTES;
}

static void arena_free(struct arena *a)
{
  free(a->host);
  free(a->back);
}

/* Device memory for an arena: allocating and freeing synchronise, so the largest one so far is kept. */
static enum mf_status reserve_scratch(struct device *dev, size_t bytes, struct error *err)
{
  CUresult result;
  if(bytes <= dev->scratch_bytes)
    return MF_OK;
  if(dev->scratch != 0)
    dev->api.p_cuMemFree(dev->scratch);
  dev->scratch = 0;
  dev->scratch_bytes = 0;
  result = dev->api.p_cuMemAlloc(&dev->scratch, bytes);
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "allocating the inputs of a case");
  dev->scratch_bytes = bytes;
  return MF_OK;
}

static enum mf_status arena_make(struct device *dev, const struct test_case *tc, int replays, struct arena *a, struct error *err)
{
  CUresult result;
  enum mf_status rc;
  lay_out(a, &dev->problem, tc->tokens, replays);
  rc = reserve_scratch(dev, a->bytes, err);
  if(rc != MF_OK)
    return rc;
  a->device = dev->scratch;
  a->host = malloc(a->bytes);
  a->back = malloc(a->bytes);
  if(a->host == NULL || a->back == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the inputs of a case (%zu bytes)", a->bytes);
  memset(a->host, POISON, a->bytes);
  data_x(&dev->problem, tc, (uint16_t *)(void *)(a->host + a->x));
  data_logits(&dev->problem, tc, a->host + a->logits);
  result = dev->api.p_cuMemcpyHtoD(a->device, a->host, a->bytes);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "uploading the inputs of a case");
}

static enum mf_status launch_all(struct device *dev, struct device_kernel *kernel, const struct test_case *tc, int layer, const struct arena *a,
                                 struct error *err)
{
  struct mf_call call;
  memset(&call, 0, sizeof(call));
  call.struct_size = sizeof(call);
  call.tokens = tc->tokens;
  call.x = (const void *)(uintptr_t)(a->device + a->x);
  data_logits_call(&dev->problem, a->device + a->logits, &call);
  call.workspace = (void *)(uintptr_t)cuda_workspace(kernel);
  for(int i = 0; i < a->replays; i++) {
    CUresult result = CUDA_SUCCESS;
    enum mf_status rc;
    call.out = (void *)(uintptr_t)(a->device + a->out[i]);
    rc = recipe_launch(&dev->api, &kernel->recipe, kernel->function, &kernel->blocks[layer], &dev->problem, &call, dev->stream, &result);
    if(rc != MF_OK)
      return recipe_failed(dev, rc, result, "launching the kernel", err);
    kernel->launches++;
  }
  return MF_OK;
}

static bool all_poison(const unsigned char *bytes, size_t count)
{
  for(size_t i = 0; i < count; i++)
    if(bytes[i] != POISON)
      return false;
  return true;
}

/* Is everything outside the outputs as it was uploaded? */
static bool arena_intact(const struct arena *a)
{
  size_t from = 0;
  for(int i = 0; i <= a->replays; i++) {
    const size_t to = i < a->replays ? a->out[i] : a->bytes;
    if(memcmp(a->host + from, a->back + from, to - from) != 0)
      return false;
    from = to + a->out_bytes;
  }
  return true;
}

static bool output_has_poison(const unsigned char *out, size_t bytes)
{
  for(size_t i = 0; i < bytes; i += sizeof(uint16_t))
    if(out[i] == POISON && out[i + 1] == POISON)
      return true;
  return false;
}

static enum mf_status read_outputs(struct device *dev, const struct arena *a, struct device_output *out, struct error *err)
{
  const CUresult result = dev->api.p_cuMemcpyDtoH(a->back, a->device, a->bytes);
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "reading the outputs");
  out->y = malloc(a->out_bytes);
  if(out->y == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for an output");
  memcpy(out->y, a->back + a->out[a->replays - 1], a->out_bytes);
  out->guard_damaged = !arena_intact(a);
  out->replays_equal = true;
  for(int i = 0; i < a->replays; i++) {
    out->poison_left |= output_has_poison(a->back + a->out[i], a->out_bytes);
    out->replays_equal &= memcmp(a->back + a->out[i], a->back + a->out[0], a->out_bytes) == 0;
  }
  return MF_OK;
}

static uint32_t word_at(const unsigned char *bytes, uint64_t offset)
{
  uint32_t word;
  memcpy(&word, bytes + offset, sizeof(word));
  return word;
}

/* h, routing and status of the last launch, from the downloaded workspace (guards included). */
static enum mf_status pick_intermediates(const struct device *dev, const struct device_kernel *kernel, int tokens, const unsigned char *bytes,
                                         struct device_output *out, struct error *err)
{
  const struct mf_recipe *r = &kernel->recipe;
  const unsigned char *ws = bytes + GUARD_BYTES;
  const size_t rows = (size_t)tokens * (size_t)problem_ranks(&dev->problem), h_count = rows * (size_t)dev->problem.intermediate;
  const uint32_t launches = word_at(ws, r->launch_count_offset);
  const unsigned char *h = ws + r->h_offset + ((kernel->launches - 1) & 1) * r->h_buffer_bytes;
  out->h = malloc(h_count * sizeof(*out->h));
  out->ids = malloc(rows * sizeof(*out->ids));
  out->weights = malloc(rows * sizeof(*out->weights));
  if(out->h == NULL || out->ids == NULL || out->weights == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for an output");
  memcpy(out->h, h, h_count * sizeof(*out->h));
  for(size_t i = 0; i < h_count; i++)
    out->h[i] = (uint16_t)~out->h[i];
  memcpy(out->ids, ws + r->routing_ids_offset, rows * sizeof(*out->ids));
  memcpy(out->weights, ws + r->routing_weights_offset, rows * sizeof(*out->weights));
  out->status = word_at(ws, r->status_offset);
  if(launches != kernel->launches || !all_poison(bytes, GUARD_BYTES) || !all_poison(ws + r->workspace_bytes, GUARD_BYTES))
    out->guard_damaged = true;
  return MF_OK;
}

static enum mf_status read_workspace(struct device *dev, const struct device_kernel *kernel, int tokens, struct device_output *out, struct error *err)
{
  const size_t bytes = (size_t)kernel->recipe.workspace_bytes + 2 * (size_t)GUARD_BYTES;
  unsigned char *copy = malloc(bytes);
  CUresult result;
  enum mf_status rc;
  if(copy == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for a workspace (%zu bytes)", bytes);
  result = dev->api.p_cuMemcpyDtoH(copy, kernel->workspace, bytes);
  rc = result == CUDA_SUCCESS ? pick_intermediates(dev, kernel, tokens, copy, out, err) : cuda_failed(&dev->api, result, err, "reading the workspace");
  free(copy);
  return rc;
}

enum mf_status cuda_run_case(struct device *dev, struct device_kernel *kernel, const struct test_case *tc, int layer, int replays, int timeout_ms,
                             struct device_output *out, struct error *err)
{
  struct arena arena;
  enum mf_status rc = MF_OK;
  memset(out, 0, sizeof(*out));
  memset(&arena, 0, sizeof(arena));
  if(layer < 0 || layer >= dev->nlayers || replays < 2 || replays > MAX_REPLAYS || tc->tokens < 1 || tc->tokens > dev->tokens_max)
    return error_set(err, MF_ERR_USAGE, "run_case: expected a layer below %d, 2..%d replays, 1..%d tokens; got %d, %d, %d", dev->nlayers, MAX_REPLAYS,
                     dev->tokens_max, layer, replays, tc->tokens);
  if(kernel->cases++ % FRESH_EVERY == 0)
    rc = cuda_fresh_workspace(dev, kernel, err);
  if(rc == MF_OK)
    rc = arena_make(dev, tc, replays, &arena, err);
  if(rc == MF_OK)
    rc = launch_all(dev, kernel, tc, layer, &arena, err);
  if(rc == MF_OK)
    rc = cuda_wait(dev, timeout_ms * replays, "running the kernel", err);
  if(rc == MF_OK)
    rc = read_outputs(dev, &arena, out, err);
  if(rc == MF_OK)
    rc = read_workspace(dev, kernel, tc->tokens, out, err);
  arena_free(&arena);
  if(rc != MF_OK)
    device_output_free(out);
  return rc;
}
