/* device_plan.c - the arithmetic of cold weights and device memory; see device.h. Pure, so that `plan` and the tests use it without a device.
 *
 * When is a weight byte cold? Between two uses of the same byte the GPU must have read at least COLD_L2_RATIO times the size of its L2. A graph of n
 * launches over L layers (launch i: layer i % L) uses a layer again after L - 1 other launches, each of which reads its active experts. The
 * fewest experts are active when all tokens choose the same ones: top_k. The graph is replayed, so n must be a multiple of L, else the first
 * layer would come again too soon. open_profile() then checks the real routing with device_reuse_experts(). */
#include "device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference.h"
#include "spec.h"

#define CONTEXT_BYTES 7e8          /* what a CUDA context with a few modules takes */
#define WORKSPACE_GUESS_BYTES 8e6  /* of one kernel; recipes say it exactly */
#define PLANNED_LAUNCHES 32

static double expert_bytes(const struct mf_problem *p)
{
  return 3.0 * p->intermediate * p->hidden;
}

static int blocks_of(int extent)
{
  return (extent + 127) / 128;
}

/* Fewest experts of this rank that a launch of any token count reads: all tokens choose the same top_k, of which this rank holds its share. */
static double fewest_active(const struct mf_problem *p)
{
  const double share = p->experts > 0 ? (double)p->expert_count / p->experts : 1;
  return fmax(1, floor(p->top_k * share) + problem_shared(p));
}

int device_layers_needed(const struct mf_problem *problem, const struct device_info *dev, int tokens)
{
  const double per_launch = fewest_active(problem) * expert_bytes(problem);
  double layers = COLD_MIN_LAYERS;
  (void)tokens; /* concentrated routing reads the same few experts at every token count */
  if(per_launch > 0 && dev->l2_bytes > 0)
    layers = fmax(layers, ceil(COLD_L2_RATIO * (double)dev->l2_bytes / per_launch) + 1);
  return layers > COLD_MAX_LAYERS ? COLD_MAX_LAYERS : (int)layers;
}

double device_weights_bytes(const struct mf_problem *p, int layers)
{
  const double blocks_k = blocks_of(p->hidden), blocks_n = blocks_of(p->intermediate_offset + p->intermediate);
  const double scales = problem_stored_experts(p) * 3.0 * blocks_n * blocks_k * sizeof(float);
  const double bias = p->select_bias ? (p->experts + p->zero_experts) * (double)sizeof(float) : 0;
  return layers * (problem_stored_experts(p) * expert_bytes(p) + scales + bias);
}

double device_memory_needed(const struct mf_problem *p, int layers, int tokens_max, int kernels)
{
  const int launches = device_graph_launches(PLANNED_LAUNCHES, layers);
  const double row = 2.0 * 2 * p->hidden + 4.0 * (p->experts + p->zero_experts);
  return device_weights_bytes(p, layers) + launches * (tokens_max * row + 4.0 * problem_stored_experts(p)) + kernels * WORKSPACE_GUESS_BYTES + CONTEXT_BYTES;
}

int device_graph_launches(int launches, int layers)
{
  const int turns = layers > 0 ? (launches + layers - 1) / layers : 0;
  return (turns > 0 ? turns : 1) * layers;
}

struct test_case device_profile_case(int tokens, enum routing_kind routing, uint32_t seed, int launch)
{
  const struct test_case tc = {.tokens = tokens, .routing = routing, .data = CASE_NORMAL, .seed = seed * 4096u + (uint32_t)launch};
  return tc;
}

int device_active_experts(const struct mf_problem *problem, const struct routing_result *routing, int32_t *ids)
{
  int active = 0;
  for(int local = 0; local < problem_stored_experts(problem); local++) {
    bool used = false;
    for(int i = 0; i < routing->tokens * routing->top_k && !used; i++)
      used = problem_local_expert(problem, routing->ids[i]) == local;
    if(used)
      ids[active++] = local;
  }
  return active;
}

int64_t device_reuse_experts(const int32_t *ids, const int *counts, int stride, int launches, int layers, int experts)
{
  const size_t slots = (size_t)layers * (size_t)experts;
  int64_t *read_until = malloc(slots * sizeof(*read_until)); /* experts read up to the end of the slot's last launch, -1 unused */
  int64_t smallest = INT64_MAX, before = 0;
  if(read_until == NULL)
    return -1;
  for(size_t i = 0; i < slots; i++)
    read_until[i] = -1;
  for(int turn = 0; turn < 2 * launches; turn++) {
    const int launch = turn % launches;
    for(int i = 0; i < counts[launch]; i++) {
      int64_t *slot = &read_until[(size_t)(launch % layers) * (size_t)experts + (size_t)ids[launch * stride + i]];
      if(*slot >= 0 && before - *slot < smallest)
        smallest = before - *slot;
      *slot = before + counts[launch];
    }
    before += counts[launch];
  }
  free(read_until);
  return smallest;
}

void device_output_free(struct device_output *out)
{
  free(out->y);
  free(out->h);
  free(out->ids);
  free(out->weights);
  memset(out, 0, sizeof(*out));
}
