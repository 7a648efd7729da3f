/* model_kernel.h - a second implementation of the operator for the tests: plain loops over stored weights, with the accumulators of FP8 tensor
 * cores if wanted, and with one defect at a time, as a kernel might have it. It shares routing and number formats with the reference.
 *
 * Accumulator model: 32 products and the running sum are aligned to the largest of them, cut off 'accumulator_bits' behind its leading bit, and
 * added; after 128 columns the sum goes into f32. */
#ifndef MOEFORGE_TESTS_MODEL_KERNEL_H
#define MOEFORGE_TESTS_MODEL_KERNEL_H

#include "datagen.h"
#include "device.h"
#include "reference.h"
#include "spec.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum defect {
  DEFECT_NONE,
  DEFECT_S13_NEXT_BLOCK,   /* 8 features of one expert take one gate scale from the next k-block */
  DEFECT_S2_NEXT_BLOCK,    /* 8 output rows of one expert take one scale from the next row block */
  DEFECT_K_BLOCK_MISSING,  /* 8 features of one expert leave out the last k-block */
  DEFECT_GATE_UP_SWAPPED,
  DEFECT_H_TRUNCATED,      /* cut off to bf16 instead of rounded */
  DEFECT_Y_TRUNCATED,
  DEFECT_Y_ROUNDED_TWICE,  /* each expert's share goes through bf16 */
  DEFECT_WEIGHTS_SWAPPED,  /* one token's y takes the weights of its first two experts the wrong way round */
  DEFECT_EXPERT_SKIPPED,   /* one token's y leaves out its last expert */
  DEFECT_H_STALE,          /* one expert of one token is multiplied with another token's h */
  DEFECT_X_UNQUANTISED,
  DEFECT_H_UNQUANTISED,
  DEFECT_X_DIVIDED,        /* x / s instead of x * (1 / s) */
  DEFECT_NO_FLOOR,         /* max(amax, 1e-10) left out */
  DEFECT_ORIGIN_IGNORED,   /* h quantised in groups that start at the rank's first feature */
  DEFECT_CLAMP_MISSING
};

struct model {
  const struct mf_problem *problem;
  uint64_t layer_seed;
  int accumulator_bits;    /* 0: exact */
  enum defect defect;
  struct routing_result routing;
  int tokens, top_k, n, k, x_blocks, h_blocks;
  float *x, *x_scale;      /* values as multiplied: e4m3, or plain with scale 1 */
  float *h, *h_scale;
  float *h_unrounded;      /* [tokens][top_k][N] */
  uint16_t *h_bits;
  double *y;               /* [tokens][K] before rounding */
};

static double model_dot(const uint8_t *w, const float *v, int count, int bits)
{
  static float value[256]; /* e4m3_to_float(): made once */
  double sum = 0;
  if(value[0x38] == 0)
    for(int code = 0; code < 256; code++)
      value[code] = e4m3_to_float((uint8_t)code);
  for(int c = 0; c < count; c += 32) {
    const int steps = count - c < 32 ? count - c : 32;
    double product[32], largest = fabs(sum), step = 0, per_unit;
    for(int i = 0; i < steps; i++) {
      product[i] = (double)value[w[c + i]] * (double)v[c + i];
      largest = largest > fabs(product[i]) ? largest : fabs(product[i]);
      step += product[i];
    }
    if(bits == 0 || largest == 0) {
      sum += step;
      continue;
    }
    per_unit = ldexp(1, bits - ilogb(largest));
    step = (double)(int64_t)(sum * per_unit);
    for(int i = 0; i < steps; i++)
      step += (double)(int64_t)(product[i] * per_unit);
    sum = step / per_unit;
  }
  return sum;
}

static void model_quantise(const struct model *m, bool is_x, const float *from, int count, int origin, float *to, float *scale)
{
  const enum mf_act_scale kind = (enum mf_act_scale)m->problem->act_scale;
  for(int c = 0, size = 128 - origin; c < count; c += size, size = 128, scale++) {
    const int part = count - c < size ? count - c : size;
    uint8_t bytes[128];
    float amax = 0;
    *scale = reference_quantise(from + c, part, kind, bytes);
    for(int i = 0; i < part; i++)
      amax = fmaxf(amax, fabsf(from[c + i]));
    if(m->defect == DEFECT_NO_FLOOR && amax > 0)
      *scale = amax / 448.0f;
    if(m->defect == (is_x ? DEFECT_X_UNQUANTISED : DEFECT_H_UNQUANTISED))
      *scale = 1;
    for(int i = 0; i < part; i++) {
      to[c + i] = e4m3_to_float(bytes[i]);
      if(m->defect == (is_x ? DEFECT_X_UNQUANTISED : DEFECT_H_UNQUANTISED))
        to[c + i] = from[c + i];
      if(is_x && m->defect == DEFECT_X_DIVIDED)
        to[c + i] = e4m3_to_float(e4m3_from_float(from[c + i] / *scale));
      if(m->defect == DEFECT_NO_FLOOR && amax > 0)
        to[c + i] = e4m3_to_float(e4m3_from_float(from[c + i] * (1.0f / *scale)));
    }
  }
}

static void model_open(struct model *m, const struct mf_problem *p, float scaling, uint64_t layer_seed, const struct test_case *tc, int bits,
                       enum defect defect)
{
  const size_t rows = (size_t)tc->tokens * (size_t)problem_ranks(p), n = (size_t)p->intermediate, k = (size_t)p->hidden;
  float *logits = malloc(data_logits_bytes(p, tc->tokens)), bias[DATA_MAX_LOGITS], *plain;
  uint16_t *x = malloc((size_t)tc->tokens * k * sizeof(*x));
  *m = (struct model){.problem = p, .layer_seed = layer_seed, .accumulator_bits = bits, .defect = defect, .tokens = tc->tokens, .top_k = problem_ranks(p),
                      .n = p->intermediate, .k = p->hidden, .x_blocks = (p->hidden + 127) / 128,
                      .h_blocks = (p->intermediate_offset + p->intermediate + 127) / 128};
  data_logits(p, tc, logits);
  data_bias(layer_seed, p->experts + p->zero_experts, bias);
  reference_route(p, tc->tokens, logits, bias, scaling, &m->routing);
  m->x = calloc((size_t)tc->tokens * k, sizeof(float));
  m->x_scale = calloc((size_t)(tc->tokens * m->x_blocks), sizeof(float));
  m->h = calloc(rows * n, sizeof(float));
  m->h_scale = calloc(rows * (size_t)m->h_blocks, sizeof(float));
  m->h_unrounded = calloc(rows * n, sizeof(float));
  m->h_bits = calloc(rows * n, sizeof(uint16_t));
  m->y = calloc((size_t)tc->tokens * k, sizeof(double));
  plain = calloc(k, sizeof(float));
  data_x(p, tc, x);
  for(int t = 0; t < tc->tokens; t++) {
    for(size_t i = 0; i < k; i++)
      plain[i] = bf16_to_float(x[(size_t)t * k + i]);
    model_quantise(m, true, plain, p->hidden, 0, m->x + (size_t)t * k, m->x_scale + t * m->x_blocks);
  }
  free(plain);
  free(logits);
  free(x);
}

static void model_close(struct model *m)
{
  free(m->x);
  free(m->x_scale);
  free(m->h);
  free(m->h_scale);
  free(m->h_unrounded);
  free(m->h_bits);
  free(m->y);
}

/* The first expert that is active, in the rank's own numbers: where local defects are. */
static int model_victim(const struct model *m)
{
  for(int i = 0; i < m->tokens * m->top_k; i++)
    if(problem_local_expert(m->problem, m->routing.ids[i]) >= 0)
      return problem_local_expert(m->problem, m->routing.ids[i]);
  return -1;
}

/* One row (gate: half 0, up: half 1) of expert 'local' times one token's x. */
static double model_up_row(const struct model *m, int local, int half, int f, int token, const uint8_t *w, const float *scales)
{
  const bool broken = local == model_victim(m) && f < 8 && half == 0;
  const float *scale = scales + (half * m->h_blocks + (m->problem->intermediate_offset + f) / 128) * m->x_blocks;
  double sum = 0;
  for(int b = 0; b < m->x_blocks; b++) {
    const int count = m->k - b * 128 < 128 ? m->k - b * 128 : 128;
    const int from = broken && m->defect == DEFECT_S13_NEXT_BLOCK && b == 0 ? 1 : b;
    if(broken && m->defect == DEFECT_K_BLOCK_MISSING && b == m->x_blocks - 1)
      continue;
    sum += (double)scale[from] * (double)m->x_scale[token * m->x_blocks + b] *
           model_dot(w + b * 128, m->x + (size_t)token * (size_t)m->k + b * 128, count, m->accumulator_bits);
  }
  return sum;
}

static double model_activate(const struct model *m, double gate, double up)
{
  const double limit = m->defect == DEFECT_CLAMP_MISSING ? 0 : (double)m->problem->swiglu_limit;
  const double alpha = m->problem->swiglu_alpha == 0 ? 1 : (double)m->problem->swiglu_alpha;
  const double g = limit > 0 && gate > limit ? limit : gate;
  const double u = limit > 0 ? (up > limit ? limit : up < -limit ? -limit : up) : up;
  return g / (1 + exp(-alpha * g)) * u;
}

static uint16_t model_round(double value, bool truncate)
{
  const float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, sizeof(bits));
  return truncate ? (uint16_t)(bits >> 16) : bf16_from_float(single);
}

static void model_up(struct model *m)
{
  const struct mf_problem *p = m->problem;
  const size_t n = (size_t)m->n, k = (size_t)m->k, nscales = 2 * (size_t)m->h_blocks * (size_t)m->x_blocks;
  uint8_t *w = malloc(2 * n * k);
  float *scales = malloc(nscales * sizeof(float));
  for(int e = 0; e < problem_stored_experts(p); e++) {
    bool made = false;
    for(int i = 0; i < m->tokens * m->top_k; i++) {
      if(problem_local_expert(p, m->routing.ids[i]) != e)
        continue;
      if(!made) {
        data_weights(m->layer_seed, DATA_W13, (uint64_t)e * 2 * n * k, 2 * n * k, w);
        data_scales(m->layer_seed, DATA_S13, p, (uint64_t)e * nscales, nscales, scales);
        made = true;
      }
      for(int f = 0; f < m->n; f++) {
        const double on_input = p->weight_on_input && e < p->expert_count ? (double)m->routing.weights[i] : 1;
        const double gate = on_input * model_up_row(m, e, 0, f, i / m->top_k, w + (size_t)f * k, scales);
        const double up = on_input * model_up_row(m, e, 1, f, i / m->top_k, w + (n + (size_t)f) * k, scales);
        const double h = m->defect == DEFECT_GATE_UP_SWAPPED ? model_activate(m, up, gate) : model_activate(m, gate, up);
        m->h_unrounded[(size_t)i * n + (size_t)f] = (float)h;
        m->h_bits[(size_t)i * n + (size_t)f] = model_round(h, m->defect == DEFECT_H_TRUNCATED);
      }
    }
  }
  free(w);
  free(scales);
}

/* Row r of expert 'local' times the h of pair 'i'. */
static double model_down_row(const struct model *m, int local, int r, int i, const uint8_t *w, const float *scales)
{
  const bool broken = local == model_victim(m) && r < 8 && m->defect == DEFECT_S2_NEXT_BLOCK;
  double sum = 0;
  int block = 0;
  for(int c = 0, size = 128 - m->problem->intermediate_offset; c < m->n; c += size, size = 128, block++) {
    const int count = m->n - c < size ? m->n - c : size;
    const float scale = scales[(r / 128 + (broken && block == 0)) * m->h_blocks + block];
    /* With the origin ignored the scale of a column is that of its local block. */
    if(m->defect == DEFECT_ORIGIN_IGNORED) {
      for(int j = c; j < c + count; j++)
        sum += (double)scale * (double)m->h_scale[i * m->h_blocks + j / 128] * model_dot(w + j, m->h + (size_t)i * (size_t)m->n + j, 1, 0);
      continue;
    }
    sum += (double)scale * (double)m->h_scale[i * m->h_blocks + block] *
           model_dot(w + c, m->h + (size_t)i * (size_t)m->n + c, count, m->accumulator_bits);
  }
  return sum;
}

static double model_weight(const struct model *m, int i)
{
  if(m->problem->weight_on_input && m->routing.ids[i] < m->problem->experts)
    return 1;
  if(m->defect == DEFECT_EXPERT_SKIPPED && i == m->top_k - 1)
    return 0;
  if(m->defect == DEFECT_WEIGHTS_SWAPPED && i < 2)
    return (double)m->routing.weights[1 - i];
  return (double)m->routing.weights[i];
}

static void model_down(struct model *m)
{
  const struct mf_problem *p = m->problem;
  const size_t n = (size_t)m->n, k = (size_t)m->k, nscales = (size_t)m->h_blocks * (size_t)m->x_blocks;
  uint8_t *w = malloc(n * k);
  float *scales = malloc((nscales + (size_t)m->h_blocks) * sizeof(float)), *plain = malloc(n * sizeof(float));
  for(int i = 0; i < m->tokens * m->top_k; i++) {
    const size_t from = m->defect == DEFECT_H_STALE && i == 0 ? (size_t)m->top_k : (size_t)i;
    for(size_t f = 0; f < n; f++)
      plain[f] = bf16_to_float(m->h_bits[from * n + f]);
    model_quantise(m, false, plain, m->n, m->defect == DEFECT_ORIGIN_IGNORED ? 0 : p->intermediate_offset, m->h + (size_t)i * n,
                   m->h_scale + i * m->h_blocks);
  }
  for(int e = 0; e < problem_stored_experts(p); e++) {
    bool made = false;
    for(int i = 0; i < m->tokens * m->top_k; i++) {
      if(problem_local_expert(p, m->routing.ids[i]) != e)
        continue;
      if(!made) {
        data_weights(m->layer_seed, DATA_W2, (uint64_t)e * n * k, n * k, w);
        data_scales(m->layer_seed, DATA_S2, p, (uint64_t)e * nscales, nscales, scales);
        made = true;
      }
      for(int r = 0; r < m->k; r++) {
        double *y = &m->y[(size_t)(i / m->top_k) * k + (size_t)r];
        *y += model_weight(m, i) * model_down_row(m, e, r, i, w + (size_t)r * n, scales);
        if(m->defect == DEFECT_Y_ROUNDED_TWICE)
          *y = (double)bf16_to_float(bf16_from_float((float)*y));
      }
    }
  }
  free(w);
  free(scales);
  free(plain);
}

/* --- As a device would hand it back: experts in ascending order, missing ones last --- */

static inline void model_output(const struct model *m, struct device_output *out)
{
  const size_t rows = (size_t)m->tokens * (size_t)m->top_k, n = (size_t)m->n, outputs = (size_t)m->tokens * (size_t)m->k;
  memset(out, 0, sizeof(*out));
  out->replays_equal = true;
  out->y = calloc(outputs, sizeof(*out->y));
  out->h = calloc(rows * n, sizeof(*out->h));
  out->ids = calloc(rows, sizeof(*out->ids));
  out->weights = calloc(rows, sizeof(*out->weights));
  for(size_t i = 0; i < outputs; i++)
    out->y[i] = model_round(m->y[i], m->defect == DEFECT_Y_TRUNCATED);
  for(int i = 0; i < m->tokens * m->top_k; i++) {
    const int t = i / m->top_k, id = m->routing.ids[i];
    int rank = 0;
    for(int j = t * m->top_k; j < (t + 1) * m->top_k; j++)
      rank += j != i && (id >= 0 ? m->routing.ids[j] >= 0 && m->routing.ids[j] < id : m->routing.ids[j] >= 0 || j < i);
    rank += t * m->top_k;
    out->ids[rank] = id;
    out->weights[rank] = m->routing.weights[i];
    memcpy(out->h + (size_t)rank * n, m->h_bits + (size_t)i * n, n * sizeof(*out->h));
  }
}

static inline void model_output_free(struct device_output *out)
{
  free(out->y);
  free(out->h);
  free(out->ids);
  free(out->weights);
}

static void model_run(struct model *m, const struct mf_problem *p, float scaling, uint64_t layer_seed, const struct test_case *tc, int bits,
                      enum defect defect)
{
  model_open(m, p, scaling, layer_seed, tc, bits, defect);
  model_up(m);
  model_down(m);
}

#endif
