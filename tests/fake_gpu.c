/* fake_gpu.c - a GPU whose kernels work: fake_libcuda.c plus host functions for the tuner's own kernels and for the kernel families
 * `stream` and `batch` (of the latter the default schedules, by whose shared memory their number of token groups is known).
 *
 * Built as build/tests/libfakegpu.so and used like libfakecuda.so (MOEFORGE_LIBCUDA). Launches outside graphs compute what the kernel would; launches
 * in graphs write zeros and take their scripted time. So the whole of `moeforge tune` runs on it, with times that repeat to the bit.
 *
 * FAKEGPU_WRONG=<schedule value of flight>: kernels launched with that many stages in flight return one wrong element; FAKEGPU_HANG=<value>: they
 * hang; FAKEGPU_CRASH=<value>: the process is killed by SIGSEGV. FAKEGPU_SLEEP_US=<us>: each graph launch lasts that long, so that a test has
 * time to kill the tuner. FAKEGPU_EARLY=1: launches in graphs that may begin early write ones. FAKEGPU_HANG_BEHIND=<pdl><cooperative><router's pdl>,...: launches
 * in graphs behind a router hang that are made so, once FAKEGPU_HANG_SPARES of them have not; FAKEGPU_CRASH_BEHIND: they end the process.
 * FAKEGPU_TRACE=1: kernels leave the record of a traced build, of a clock of 2 GHz on which launches begin every 10 us. */
#include "fake_libcuda.h"

#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "batch/params.h"
#include "datagen.h"
#include "family_batch.h"
#include "moeforge_recipe.h"
#include "reference.h"
#include "stream/params.h"
#include "stream/trace.h"
#include "tools/router_params.h"

extern fakecuda_on_launch_fn fakecuda_on_launch;
extern fakecuda_hang_fn fakecuda_hang;

#define MAX_TENSORS 256

/* Which weights were made where: the functions below make them again instead of reading gigabytes. */
static struct {
  const void *address;
  uint64_t seed;
} tensors[MAX_TENSORS];
static int ntensors;

static void remember(const void *address, uint64_t seed)
{
  for(int i = 0; i < ntensors; i++) {
    if(tensors[i].address == address) {
      tensors[i].seed = seed;
      return;
    }
  }
  if(ntensors < MAX_TENSORS) {
    tensors[ntensors].address = address;
    tensors[ntensors++].seed = seed;
  }
}

/* Weights of one layer: generated ones are known by their seed; others were uploaded and are read where they lie. */
struct layer {
  bool generated;
  uint64_t seed;
  const uint8_t *w13, *w2;
  const float *s13, *s2;
};

static struct layer layer_of(const struct mf_stream_params *a, const struct fakecuda_map *up_map, const struct fakecuda_map *down_map)
{
  struct layer layer = {.w13 = (const uint8_t *)(uintptr_t)up_map->address, .w2 = (const uint8_t *)(uintptr_t)down_map->address, .s13 = a->s13, .s2 = a->s2};
  for(int i = 0; i < ntensors; i++) {
    if(tensors[i].address == layer.w13) {
      layer.generated = true;
      layer.seed = tensors[i].seed;
    }
  }
  return layer;
}

static uint64_t u64(const struct fakecuda_launch *l, int i)
{
  uint64_t v = 0;
  memcpy(&v, l->params[i], l->sizes[i] < 8 ? l->sizes[i] : 8);
  return v;
}

static void *pointer(const struct fakecuda_launch *l, int i)
{
  return (void *)(uintptr_t)u64(l, i);
}

/* The problem that a stream kernel was emitted for: the tests use one shape (specs/models/tiny.yaml). */
static struct mf_problem tiny_problem(void)
{
  struct mf_problem p;
  memset(&p, 0, sizeof(p));
  p.struct_size = sizeof(p);
  p.experts = p.expert_count = 64;
  p.top_k = 2;
  p.hidden = 1024;
  p.intermediate = 256;
  p.groups = p.groups_kept = 1;
  p.renormalize = 1;
  return p;
}

/* q[i] * s of a quantised vector of 'count' values. */
static void quantise(const float *values, int count, float *out)
{
  for(int first = 0; first < count; first += 128) {
    uint8_t q[128];
    const float s = reference_quantise(values + first, 128, MF_ACT_SCALE_F32, q);
    for(int i = 0; i < 128; i++)
      out[first + i] = e4m3_to_float(q[i]) * s;
  }
}

/* The bytes of a generated tensor, made when first needed and kept. */
static const uint8_t *tensor_bytes(uint64_t seed, enum data_stream stream, size_t count)
{
  static struct {
    uint64_t seed;
    enum data_stream stream;
    uint8_t *bytes;
  } kept[64];
  int i = 0;
  while(i < 64 && kept[i].bytes != NULL && (kept[i].seed != seed || kept[i].stream != stream))
    i++;
  if(i == 64)
    abort();
  if(kept[i].bytes == NULL) {
    kept[i].seed = seed;
    kept[i].stream = stream;
    kept[i].bytes = malloc(count);
    data_weights(seed, stream, 0, count, kept[i].bytes);
  }
  return kept[i].bytes;
}

static float e4m3[256]; /* their values; filled by install() */

/* Adds 128 products to 'sum'. Eight parts, which do not wait for one another. */
static double add_block(double sum, const uint8_t *bytes, const float *x, double scale)
{
  float part[8] = {0};
  for(int i = 0; i < 128; i += 8)
#pragma GCC unroll 8
    for(int j = 0; j < 8; j++)
      part[j] += e4m3[bytes[i + j]] * x[i + j];
  for(int j = 0; j < 8; j++)
    sum += (double)part[j] * scale;
  return sum;
}

/* Row 'row' of a generated matrix with 'columns' columns times x. */
static double dot_row(const struct mf_problem *p, const struct layer *layer, enum data_stream weights, enum data_stream scales, uint64_t row,
                      uint64_t scale_row, int columns, const float *x)
{
  float made[64];
  const size_t count = (size_t)p->experts * (size_t)p->intermediate * (size_t)p->hidden * (weights == DATA_W13 ? 2 : 1);
  const uint8_t *bytes = (layer->generated ? tensor_bytes(layer->seed, weights, count) : weights == DATA_W13 ? layer->w13 : layer->w2) + row * (uint64_t)columns;
  const float *s = (weights == DATA_W13 ? layer->s13 : layer->s2) + scale_row * (uint64_t)(columns / 128);
  double sum = 0;
  if(layer->generated) {
    data_scales(layer->seed, scales, p, scale_row * (uint64_t)(columns / 128), (size_t)columns / 128, made);
    s = made;
  }
  for(int b = 0; b < columns / 128; b++)
    sum = add_block(sum, bytes + b * 128, x + b * 128, (double)s[b]);
  return sum;
}

/* h of one expert for one token, rounded to bf16. */
static void up(const struct mf_problem *p, const struct layer *layer, int expert, const float *x, uint16_t *h)
{
  const uint64_t n = (uint64_t)p->intermediate, first = (uint64_t)expert * 2 * n;
  for(uint64_t f = 0; f < n; f++) {
    const double gate = dot_row(p, layer, DATA_W13, DATA_S13, first + f, (first + f) / 128, p->hidden, x);
    const double value = dot_row(p, layer, DATA_W13, DATA_S13, first + n + f, (first + n + f) / 128, p->hidden, x);
    h[f] = bf16_from_float((float)(gate / (1 + exp(-gate)) * value));
  }
}

/* The experts of one token in the kernel's rank order: with one token as picked, else by index. */
static void rank_order(const struct routing_result *r, int token, int order[MAX_TOP_K])
{
  for(int j = 0; j < r->top_k; j++)
    order[j] = j;
  for(int a = 0; r->tokens > 1 && a < r->top_k; a++) {
    for(int b = a + 1; b < r->top_k; b++) {
      const int32_t x = r->ids[token * r->top_k + order[a]], y = r->ids[token * r->top_k + order[b]];
      if(y >= 0 && (x < 0 || y < x)) {
        const int swap = order[a];
        order[a] = order[b];
        order[b] = swap;
      }
    }
  }
}

/* Where in the workspace a kernel leaves what. */
struct places {
  size_t h_bytes, ids, weights; /* of one h buffer; offsets */
};

static struct places places_of(const struct mf_problem *p, const struct fakecuda_launch *l)
{
  const struct device_info dev = {.sms = (int)l->grid[0], .shared_bytes_per_cta = 232448};
  struct places at = {(size_t)MF_STREAM_WS_H_BYTES(p->top_k, p->intermediate), MF_STREAM_WS_IDS(p->top_k), MF_STREAM_WS_WEIGHTS(p->top_k)};
  for(int groups = MF_BATCH_MIN_GROUPS; groups <= MF_BATCH_MAX_GROUPS && l->block[0] == 640; groups++) {
    struct schedule sched = {.family = &family_batch};
    family_batch.default_schedule(p, 8 * groups, &dev, &sched);
    if(family_batch.shared_bytes(p, &sched, &dev) == (long)l->shared_bytes)
      return (struct places){(size_t)MF_BATCH_WS_H_BYTES(groups, p->top_k, p->intermediate), (size_t)MF_BATCH_WS_IDS(groups, p->top_k, p->intermediate),
                             (size_t)MF_BATCH_WS_WEIGHTS(groups, p->top_k, p->intermediate)};
  }
  return at;
}

static void moe_token(const struct mf_problem *p, const struct mf_stream_params *a, const struct routing_result *r, int token, const struct layer *layer,
                      const struct places *at, char *h_buffer)
{
  static _Thread_local float x[8192], xq[8192], h[8192], hq[MAX_TOP_K][8192];
  const uint16_t *row = (const uint16_t *)a->x + (size_t)token * (size_t)a->x_pitch;
  char *ws = a->workspace;
  int order[MAX_TOP_K];
  for(int i = 0; i < p->hidden; i++)
    x[i] = bf16_to_float(row[i]);
  quantise(x, p->hidden, xq);
  rank_order(r, token, order);
  for(int rank = 0; rank < p->top_k; rank++) {
    const int32_t expert = r->ids[token * r->top_k + order[rank]];
    uint16_t *out = (uint16_t *)(void *)h_buffer + (size_t)(token * p->top_k + rank) * (size_t)p->intermediate;
    ((int32_t *)(void *)(ws + at->ids))[token * p->top_k + rank] = expert;
    ((float *)(void *)(ws + at->weights))[token * p->top_k + rank] = expert >= 0 ? r->weights[token * r->top_k + order[rank]] : 0;
    if(expert < 0)
      continue;
    up(p, layer, expert, xq, out);
    for(int f = 0; f < p->intermediate; f++) {
      h[f] = bf16_to_float(out[f]);
      out[f] = (uint16_t)~out[f];
    }
    quantise(h, p->intermediate, hq[rank]);
  }
  for(int c = 0; c < p->hidden; c++) {
    double y = 0;
    for(int rank = 0; rank < p->top_k; rank++) {
      const int32_t expert = r->ids[token * r->top_k + order[rank]];
      const uint64_t w2_row = (uint64_t)expert * (uint64_t)p->hidden + (uint64_t)c;
      if(expert >= 0)
        y += (double)r->weights[token * r->top_k + order[rank]] * dot_row(p, layer, DATA_W2, DATA_S2, w2_row, w2_row / 128, p->intermediate, hq[rank]);
    }
    ((uint16_t *)a->out)[(size_t)token * (size_t)a->out_pitch + (size_t)c] = bf16_from_float((float)y);
  }
}

static long env_number(const char *name)
{
  const char *text = getenv(name);
  return text != NULL ? atol(text) : -1;
}

/* What test scripts ask of kernels with a certain in-flight cap. */
static void misbehave(const struct mf_stream_params *a)
{
  if(env_number("FAKEGPU_HANG") == a->flight)
    fakecuda_hang();
  if(env_number("FAKEGPU_CRASH") == a->flight)
    raise(SIGSEGV);
  if(env_number("FAKEGPU_WRONG") == a->flight)
    ((uint16_t *)a->out)[17] = bf16_from_float(bf16_to_float(((uint16_t *)a->out)[17]) * 1.5f + 0.25f);
}

/* Event e of every role comes e / 2 us behind the launch's begin; the producer waited 1 us for tickets. */
static void leave_trace(const struct mf_stream_params *a, const struct mf_problem *p, unsigned grid, uint32_t launch)
{
  struct mf_trace_cta *all = (struct mf_trace_cta *)(void *)((char *)a->workspace + MF_TRACE_OFFSET(p->top_k, p->intermediate));
  const uint32_t clock = 1000001 + 20000 * launch, timer = 5000000 + 10000 * launch;
  for(unsigned c = 0; c < grid; c++) {
    struct mf_trace_cta *r = &all[launch % MF_TRACE_LAUNCHES * grid + c];
    *r = (struct mf_trace_cta){.launch = launch + 1, .sm = c, .finalisers = 1, .loaders = 1, .down_ctas = grid, .units = 1,
                               .pair = {{clock + 2000, 0, timer + 1000, 0}, {clock + 16000, 0, timer + 8000, 0}}};
    for(uint32_t e = 0; e < MF_TRACE_EVENTS; e++)
      for(int track = 0; track < MF_TRACE_HELPER + 2; track++)
        r->track[track].time[e] = clock + 1000 * e;
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_ACTIVE] = 2;
    r->track[MF_TRACE_PRODUCER].value[MF_PRODUCER_TICKET_WAIT] = 2000;
  }
}

static void run_moe(const struct fakecuda_launch *l)
{
  const struct mf_problem p = tiny_problem();
  const struct places at = places_of(&p, l);
  struct mf_stream_params a;
  struct fakecuda_map up_map, down_map;
  struct layer layer;
  struct routing_result r;
  uint32_t *launches;
  char *h_buffer, *other;
  memcpy(&a, l->params[0], sizeof(a));
  memcpy(&up_map, l->params[1], sizeof(up_map));
  memcpy(&down_map, l->params[2], sizeof(down_map));
  layer = layer_of(&a, &up_map, &down_map);
  launches = (uint32_t *)(void *)((char *)a.workspace + MF_STREAM_WS_LAUNCHES);
  h_buffer = (char *)a.workspace + MF_STREAM_WS_H + (launches[0] & 1) * at.h_bytes;
  other = (char *)a.workspace + MF_STREAM_WS_H + (~launches[0] & 1) * at.h_bytes;
  memset(other, 0, at.h_bytes);
  reference_route(&p, a.tokens, a.logits, NULL, a.scaling, &r);
  for(int t = 0; t < a.tokens; t++)
    moe_token(&p, &a, &r, t, &layer, &at, h_buffer);
  if(env_number("FAKEGPU_TRACE") > 0)
    leave_trace(&a, &p, l->grid[0], launches[0]);
  for(unsigned c = 0; c < l->grid[0]; c++)
    launches[c]++;
  misbehave(&a);
}

/* Whether the variable names launches like this one behind the last router; -1: that there was none. */
static bool is_listed(const char *variable, const struct fakecuda_launch *l, int router_pdl)
{
  const char *list = getenv(variable);
  char like[8];
  snprintf(like, sizeof(like), "%d%d%d", l->pdl, l->cooperative, router_pdl);
  return list != NULL && router_pdl >= 0 && strstr(list, like) != NULL;
}

static void misbehave_behind(const struct fakecuda_launch *l, int router_pdl)
{
  static long spared;
  if(is_listed("FAKEGPU_CRASH_BEHIND", l, router_pdl))
    raise(SIGSEGV);
  if(is_listed("FAKEGPU_HANG_BEHIND", l, router_pdl) && spared++ >= env_number("FAKEGPU_HANG_SPARES"))
    fakecuda_hang();
}

static void run_kernel(void *context, const struct fakecuda_launch *l)
{
  static int router_pdl = -1; /* of the router that ran last, if no kernel has since */
  (void)context;
  if(strcmp(l->kernel, "mf_moe") == 0 && l->captured)
    misbehave_behind(l, router_pdl);
  router_pdl = strcmp(l->kernel, "mf_router") == 0 ? l->pdl : -1;
  if(strcmp(l->kernel, "mf_gen_weights") == 0) {
    data_weights(u64(l, 3), (enum data_stream)u64(l, 4), u64(l, 1), (size_t)(u64(l, 2) < 4096 ? u64(l, 2) : 4096), pointer(l, 0));
    remember(pointer(l, 0), u64(l, 3));
  } else if(strcmp(l->kernel, "mf_moe") == 0 && !l->captured) {
    run_moe(l);
  } else if(strcmp(l->kernel, "mf_moe") == 0) {
    struct mf_stream_params a;
    memcpy(&a, l->params[0], sizeof(a));
    for(int t = 0; t < a.tokens; t++)
      memset((uint16_t *)a.out + (size_t)t * (size_t)a.out_pitch, l->pdl && env_number("FAKEGPU_EARLY") > 0, (size_t)tiny_problem().hidden * 2);
  } else if(strcmp(l->kernel, "mf_router") == 0) {
    struct mf_router_params a;
    memcpy(&a, l->params[0], sizeof(a));
    memcpy(a.to, a.from, 16 * (size_t)a.words);
  } else if(strcmp(l->kernel, "mf_floor") == 0 && env_number("FAKEGPU_SLEEP_US") > 0) {
    usleep((useconds_t)env_number("FAKEGPU_SLEEP_US"));
  }
}

__attribute__((constructor)) static void install(void)
{
  for(int i = 0; i < 256; i++)
    e4m3[i] = e4m3_to_float((uint8_t)i);
  fakecuda_on_launch(run_kernel, NULL);
}
