/* reference.c - both projections of the operator on the CPU; see reference.h.
 *
 * Speed comes from three things. Weights are generated 128 at a time, straight from the generator's hash to f64 (weight_value[]), and used at once
 * for all tokens of the expert and for both forms of the operator. Vectors are f64, so that the inner loop is a plain dot product; it exists
 * twice (any CPU, AVX2), chosen at run time. Rows are independent and shared among OpenMP threads.
 *
 * The result is the same to the bit for every CPU and number of threads: products of e4m3 (and of e4m3 with bf16 or f32) are exact in f64; sums of
 * 128 products of two e4m3 numbers are exact as well (43 bits), all other sums have a fixed order; a row belongs to one thread. */
#include "reference.h"
#include "datagen.h"
#include "spec.h"
#include "tools/datagen_core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 128
#define LANES 8
#define PARALLEL_MIN (1 << 19) /* weights; a smaller matrix is not worth waking threads for (they spin, which hurts on a busy machine) */

#ifdef _OPENMP
#include <omp.h>
#define OMP_ROWS _Pragma("omp parallel for schedule(static) if(weights >= PARALLEL_MIN)")
#else
#define OMP_ROWS (void)weights;
#endif

typedef double half_lanes __attribute__((vector_size(LANES * 4), aligned(8), may_alias)); /* 32 bytes: what every back end handles well */

/* One row of a weight matrix times the vectors of an expert's tokens. Both sums are scaled and over all blocks. */
struct row_job {
  const double *weight_value; /* [256]: random byte -> value */
  uint64_t key, first;        /* stream key, byte index of the row's first weight */
  int columns, origin;        /* the first block has 128 - origin columns */
  const float *weight_scale;  /* [blocks] */
  int count;                  /* vectors */
  const double *const *quantised;    /* [count][columns + LANES]: e4m3 values */
  const double *const *unquantised;  /* likewise; NULL: not wanted */
  const float *const *scale;         /* [count][blocks] of the quantised vectors */
};

/* --- Inner loops --- */

/* weights[i] for the 'count' bytes from 'first', then zeros up to a multiple of LANES. Returns where in 'room' it starts. */
static inline __attribute__((always_inline)) const double *generate(const struct row_job *job, uint64_t first, int count, double *room)
{
  const int skip = (int)(first % 8), end = skip + count;
  for(int i = 0; i < end; i += 8) {
    const uint64_t hash = mf_data_hash(job->key, first / 8 + (uint64_t)i / 8);
    for(int j = 0; j < 8; j++)
      room[i + j] = job->weight_value[hash >> 8 * j & 255];
  }
  for(int i = end; i < end + LANES; i++)
    room[i] = 0.0;
  return room + skip;
}

static inline __attribute__((always_inline)) double dot(const double *a, const double *b, int count)
{
  half_lanes low = {0.0}, high = {0.0};
  for(int i = 0; i < count; i += LANES) {
    low += *(const half_lanes *)(a + i) * *(const half_lanes *)(b + i);
    high += *(const half_lanes *)(a + i + LANES / 2) * *(const half_lanes *)(b + i + LANES / 2);
  }
  return ((low[0] + low[1]) + (low[2] + low[3])) + ((high[0] + high[1]) + (high[2] + high[3]));
}

static inline __attribute__((always_inline)) void row_body(const struct row_job *job, double *sum_q, double *sum_u)
{
  double room[BLOCK + 8 + 2 * LANES];
  int block = 0;
  for(int t = 0; t < job->count; t++)
    sum_q[t] = sum_u[t] = 0.0;
  for(int c = 0, size = BLOCK - job->origin; c < job->columns; c += size, size = BLOCK, block++) {
    const int count = job->columns - c < size ? job->columns - c : size;
    const double *w = generate(job, job->first + (uint64_t)c, count, room);
    const double scale = job->weight_scale[block];
    for(int t = 0; t < job->count; t++) {
      sum_q[t] += scale * job->scale[t][block] * dot(w, job->quantised[t] + c, count);
      if(job->unquantised != NULL)
        sum_u[t] += scale * dot(w, job->unquantised[t] + c, count);
    }
  }
}

typedef void row_fn(const struct row_job *job, double *sum_q, double *sum_u);

static void row_any(const struct row_job *job, double *sum_q, double *sum_u)
{
  row_body(job, sum_q, sum_u);
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void row_avx2(const struct row_job *job, double *sum_q, double *sum_u)
{
  row_body(job, sum_q, sum_u);
}

static row_fn *choose_row_fn(void)
{
  return __builtin_cpu_supports("avx2") ? row_avx2 : row_any;
}
#else
static row_fn *choose_row_fn(void)
{
  return row_any;
}
#endif

/* --- The work of one call --- */

/* A (token, rank) pair that an expert of this rank works for. */
struct pair {
  int token, rank;
};

struct slot {
  int expert;       /* local index */
  int first, count; /* in work.pair */
};

/* Owns everything that it points to but 'problem' and 'routing'. Vectors of doubles have LANES spare zeros behind each row. */
struct work {
  const struct mf_problem *problem;
  const struct routing_result *routing;
  uint64_t layer_seed;
  row_fn *row;
  double weight_value[256];
  int x_blocks, h_blocks;         /* 128-blocks of K and, in unsharded columns, of N */
  size_t x_pitch, h_pitch;
  int nslots;
  struct slot *slot;
  struct pair *pair;
  double *x_quantised, *x_plain;  /* [tokens] */
  float *x_scale;
  double *h_quantised, *h_plain;  /* [tokens * top_k] */
  float *h_scale;
  float *weight_scale;            /* block scales of one expert */
  double *y, *y_plain;            /* [tokens][K] */
};

static void work_close(struct work *w)
{
  free(w->slot);
  free(w->pair);
  free(w->x_quantised);
  free(w->x_plain);
  free(w->x_scale);
  free(w->h_quantised);
  free(w->h_plain);
  free(w->h_scale);
  free(w->weight_scale);
  free(w->y);
  free(w->y_plain);
}

static void fill_weight_values(double value[256])
{
  for(int i = 0; i < 256; i++)
    value[i] = (double)e4m3_to_float((uint8_t)(mf_data_magnitude[i & 127] | (i & 128)));
}

/* Which pairs each active expert of this rank has; experts ascending, tokens ascending. */
static void list_slots(struct work *w)
{
  const struct mf_problem *p = w->problem;
  const struct routing_result *r = w->routing;
  int npairs = 0;
  for(int e = 0; e < problem_stored_experts(p); e++) {
    const int first = npairs;
    for(int i = 0; i < r->tokens * r->top_k; i++)
      if(problem_local_expert(p, r->ids[i]) == e)
        w->pair[npairs++] = (struct pair){i / r->top_k, i % r->top_k};
    if(npairs > first)
      w->slot[w->nslots++] = (struct slot){e, first, npairs - first};
  }
}

/* 'plain': the unquantised form is wanted as well. On failure work_close() frees what is there. */
static enum mf_status work_open(struct work *w, const struct mf_problem *problem, const struct routing_result *routing, uint64_t layer_seed,
                                bool plain, struct error *err)
{
  const size_t tokens = (size_t)routing->tokens, pairs = tokens * (size_t)routing->top_k, hidden = (size_t)problem->hidden;
  const size_t plain_tokens = plain ? tokens : 0, plain_pairs = plain ? pairs : 0;
  memset(w, 0, sizeof(*w));
  w->problem = problem;
  w->routing = routing;
  w->layer_seed = layer_seed;
  w->row = choose_row_fn();
  fill_weight_values(w->weight_value);
  w->x_blocks = (problem->hidden + BLOCK - 1) / BLOCK;
  w->h_blocks = (problem->intermediate_offset + problem->intermediate + BLOCK - 1) / BLOCK;
  w->x_pitch = hidden + LANES;
  w->h_pitch = (size_t)problem->intermediate + LANES;
  w->slot = calloc(pairs, sizeof(*w->slot));
  w->pair = calloc(pairs, sizeof(*w->pair));
  w->x_quantised = calloc(plain_tokens * w->x_pitch + 1, sizeof(double));
  w->x_plain = calloc(plain_tokens * w->x_pitch + 1, sizeof(double));
  w->x_scale = calloc(plain_tokens * (size_t)w->x_blocks + 1, sizeof(float));
  w->h_quantised = calloc(pairs * w->h_pitch, sizeof(double));
  w->h_plain = calloc(plain_pairs * w->h_pitch + 1, sizeof(double));
  w->h_scale = calloc(pairs * (size_t)w->h_blocks, sizeof(float));
  w->weight_scale = calloc(2 * (size_t)w->x_blocks * (size_t)w->h_blocks, sizeof(float));
  w->y = calloc(tokens * hidden, sizeof(double));
  w->y_plain = calloc(plain_tokens * hidden + 1, sizeof(double));
  if(w->slot == NULL || w->pair == NULL || w->x_quantised == NULL || w->x_plain == NULL || w->x_scale == NULL || w->h_quantised == NULL ||
     w->h_plain == NULL || w->h_scale == NULL || w->weight_scale == NULL || w->y == NULL || w->y_plain == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the reference of %d tokens; free some and run again", routing->tokens);
  list_slots(w);
  return MF_OK;
}

/* Quantises a vector in blocks of which the first has 128 - origin columns. */
static void quantise_vector(const float *values, int columns, int origin, enum mf_act_scale kind, double *quantised, float *scale)
{
  uint8_t bytes[BLOCK];
  for(int c = 0, size = BLOCK - origin; c < columns; c += size, size = BLOCK) {
    const int count = columns - c < size ? columns - c : size;
    *scale++ = reference_quantise(values + c, count, kind, bytes);
    for(int i = 0; i < count; i++)
      quantised[c + i] = (double)e4m3_to_float(bytes[i]);
  }
}

static void take_x(struct work *w, const uint16_t *x, float *room)
{
  const int hidden = w->problem->hidden;
  for(int t = 0; t < w->routing->tokens; t++) {
    double *plain = w->x_plain + (size_t)t * w->x_pitch;
    for(int k = 0; k < hidden; k++) {
      room[k] = bf16_to_float(x[(size_t)t * (size_t)hidden + (size_t)k]);
      plain[k] = (double)room[k];
    }
    quantise_vector(room, hidden, 0, (enum mf_act_scale)w->problem->act_scale, w->x_quantised + (size_t)t * w->x_pitch,
                    w->x_scale + (size_t)t * (size_t)w->x_blocks);
  }
}

/* Whether the weight of the slot's expert goes to its input; those of shared experts never do. */
static bool weight_on_input(const struct mf_problem *p, const struct slot *slot)
{
  return p->weight_on_input != 0 && slot->expert < p->expert_count;
}

/* --- Up --- */

static double activate(const struct mf_problem *problem, double gate, double up)
{
  const double limit = (double)problem->swiglu_limit, alpha = problem->swiglu_alpha != 0.0f ? (double)problem->swiglu_alpha : 1.0;
  if(limit > 0.0) {
    gate = fmin(gate, limit);
    up = fmax(fmin(up, limit), -limit);
  }
  return gate / (1.0 + exp(-alpha * gate)) * up;
}

/* Feature f of an expert for all its tokens: into out->h_unrounded and w->h_plain. */
static void up_feature(const struct work *w, const struct slot *slot, const struct row_job *shared, int f, const struct reference_result *out)
{
  const struct mf_problem *p = w->problem;
  const size_t n = (size_t)p->intermediate, half_scales = (size_t)w->h_blocks * (size_t)w->x_blocks;
  double gate_q[MAX_TOKENS], gate_u[MAX_TOKENS], up_q[MAX_TOKENS], up_u[MAX_TOKENS];
  struct row_job job = *shared;
  job.first = (((uint64_t)slot->expert * 2) * n + (uint64_t)f) * (uint64_t)p->hidden;
  job.weight_scale = w->weight_scale + (size_t)((p->intermediate_offset + f) / BLOCK) * (size_t)w->x_blocks;
  w->row(&job, gate_q, gate_u);
  job.first += n * (uint64_t)p->hidden;
  job.weight_scale += half_scales;
  w->row(&job, up_q, up_u);
  for(int i = 0; i < slot->count; i++) {
    const struct pair at = w->pair[slot->first + i];
    const size_t row = (size_t)at.token * (size_t)w->routing->top_k + (size_t)at.rank;
    const double on_input = weight_on_input(p, slot) ? (double)w->routing->weights[row] : 1.0;
    out->h_unrounded[row * n + (size_t)f] = (float)activate(p, gate_q[i] * on_input, up_q[i] * on_input);
    w->h_plain[row * w->h_pitch + (size_t)f] = (double)(float)activate(p, gate_u[i] * on_input, up_u[i] * on_input);
  }
}

static void up_expert(struct work *w, const struct slot *slot, const struct reference_result *out)
{
  const struct mf_problem *p = w->problem;
  const double *quantised[MAX_TOKENS], *plain[MAX_TOKENS];
  const float *scale[MAX_TOKENS];
  const struct row_job job = {.weight_value = w->weight_value, .key = mf_data_key(w->layer_seed, DATA_W13), .columns = p->hidden,
                              .count = slot->count, .quantised = quantised, .unquantised = plain, .scale = scale};
  const long weights = (long)p->intermediate * p->hidden;
  const size_t scales = 2 * (size_t)w->h_blocks * (size_t)w->x_blocks;
  data_scales(w->layer_seed, DATA_S13, p, (uint64_t)slot->expert * scales, scales, w->weight_scale);
  for(int i = 0; i < slot->count; i++) {
    const size_t token = (size_t)w->pair[slot->first + i].token;
    quantised[i] = w->x_quantised + token * w->x_pitch;
    plain[i] = w->x_plain + token * w->x_pitch;
    scale[i] = w->x_scale + token * (size_t)w->x_blocks;
  }
  OMP_ROWS
  for(int f = 0; f < p->intermediate; f++)
    up_feature(w, slot, &job, f, out);
}

/* --- Down --- */

static void take_h(struct work *w, const uint16_t *h, float *room)
{
  const int n = w->problem->intermediate;
  for(int i = 0; i < w->routing->tokens * w->routing->top_k; i++) {
    for(int f = 0; f < n; f++)
      room[f] = bf16_to_float(h[(size_t)i * (size_t)n + (size_t)f]);
    quantise_vector(room, n, w->problem->intermediate_offset, (enum mf_act_scale)w->problem->act_scale, w->h_quantised + (size_t)i * w->h_pitch,
                    w->h_scale + (size_t)i * (size_t)w->h_blocks);
  }
}

/* Output row r of an expert, added to y of its tokens. */
static void down_row(const struct work *w, const struct slot *slot, const struct row_job *shared, int r)
{
  const struct mf_problem *p = w->problem;
  double sum_q[MAX_TOKENS], sum_u[MAX_TOKENS];
  struct row_job job = *shared;
  job.first = ((uint64_t)slot->expert * (uint64_t)p->hidden + (uint64_t)r) * (uint64_t)p->intermediate;
  job.weight_scale = w->weight_scale + (size_t)(r / BLOCK) * (size_t)w->h_blocks;
  w->row(&job, sum_q, sum_u);
  for(int i = 0; i < slot->count; i++) {
    const struct pair at = w->pair[slot->first + i];
    const size_t y = (size_t)at.token * (size_t)p->hidden + (size_t)r;
    const double weight = weight_on_input(p, slot) ? 1.0 : (double)w->routing->weights[at.token * w->routing->top_k + at.rank];
    w->y[y] += weight * sum_q[i];
    if(job.unquantised != NULL)
      w->y_plain[y] += weight * sum_u[i];
  }
}

static void down_expert(struct work *w, const struct slot *slot, bool with_plain)
{
  const struct mf_problem *p = w->problem;
  const double *quantised[MAX_TOKENS], *plain[MAX_TOKENS];
  const float *scale[MAX_TOKENS];
  const struct row_job job = {.weight_value = w->weight_value, .key = mf_data_key(w->layer_seed, DATA_W2), .columns = p->intermediate,
                              .origin = p->intermediate_offset, .count = slot->count, .quantised = quantised,
                              .unquantised = with_plain ? plain : NULL, .scale = scale};
  const long weights = (long)p->intermediate * p->hidden;
  const size_t scales = (size_t)w->h_blocks * (size_t)w->x_blocks;
  data_scales(w->layer_seed, DATA_S2, p, (uint64_t)slot->expert * scales, scales, w->weight_scale);
  for(int i = 0; i < slot->count; i++) {
    const struct pair at = w->pair[slot->first + i];
    const size_t row = (size_t)at.token * (size_t)w->routing->top_k + (size_t)at.rank;
    quantised[i] = w->h_quantised + row * w->h_pitch;
    plain[i] = with_plain ? w->h_plain + row * w->h_pitch : NULL;
    scale[i] = w->h_scale + row * (size_t)w->h_blocks;
  }
  OMP_ROWS
  for(int r = 0; r < p->hidden; r++)
    down_row(w, slot, &job, r);
}

static void to_floats(const double *from, size_t count, float *to)
{
  for(size_t i = 0; i < count; i++)
    to[i] = (float)from[i];
}

/* --- The calls --- */

static enum mf_status check_sizes(const struct mf_problem *p, int tokens, struct error *err)
{
  if(tokens < 1 || tokens > MAX_TOKENS)
    return error_set(err, MF_ERR_USAGE, "tokens: expected 1 to %d, got %d", MAX_TOKENS, tokens);
  if(p->top_k < 1 || problem_ranks(p) > MAX_TOP_K)
    return error_set(err, MF_ERR_USAGE, "top_k: expected 1 to %d with the shared experts, got %d", MAX_TOP_K, problem_ranks(p));
  if(p->experts < 1 || p->zero_experts < 0 || p->experts + p->zero_experts > DATA_MAX_LOGITS)
    return error_set(err, MF_ERR_USAGE, "experts: expected 1 to %d with the zero experts, got %d + %d", DATA_MAX_LOGITS, p->experts, p->zero_experts);
  if(p->hidden < 1 || p->intermediate < 1 || p->intermediate_offset < 0 || p->intermediate_offset >= BLOCK)
    return error_set(err, MF_ERR_USAGE, "sizes: expected hidden and intermediate above 0 and an offset of 0 to %d, got %d, %d and %d", BLOCK - 1,
                     p->hidden, p->intermediate, p->intermediate_offset);
  return MF_OK;
}

void reference_set_threads(int threads)
{
#ifdef _OPENMP
  omp_set_num_threads(threads > 0 ? threads : 1);
#else
  (void)threads;
#endif
}

void reference_free(struct reference_result *result)
{
  free(result->h);
  free(result->h_unrounded);
  free(result->y);
  free(result->y_unquantised);
  memset(result, 0, sizeof(*result));
}

static enum mf_status allocate_result(const struct mf_problem *problem, int tokens, struct reference_result *out, struct error *err)
{
  const size_t h = (size_t)tokens * (size_t)problem_ranks(problem) * (size_t)problem->intermediate, y = (size_t)tokens * (size_t)problem->hidden;
  out->h = calloc(h, sizeof(*out->h));
  out->h_unrounded = calloc(h, sizeof(*out->h_unrounded));
  out->y = calloc(y, sizeof(*out->y));
  out->y_unquantised = calloc(y, sizeof(*out->y_unquantised));
  if(out->h == NULL || out->h_unrounded == NULL || out->y == NULL || out->y_unquantised == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for the reference of %d tokens; free some and run again", tokens);
  return MF_OK;
}

/* Makes x, logits and bias of the case; routes into out->routing. *x is the caller's to free. */
static enum mf_status make_inputs(const struct mf_problem *problem, float routed_scaling, uint64_t layer_seed, const struct test_case *tc,
                                  struct routing_result *routing, uint16_t **x, struct error *err)
{
  void *logits = malloc(data_logits_bytes(problem, tc->tokens));
  float bias[DATA_MAX_LOGITS];
  *x = malloc((size_t)tc->tokens * (size_t)problem->hidden * sizeof(**x));
  if(logits == NULL || *x == NULL) {
    free(logits);
    return error_set(err, MF_ERR_NOMEM, "no memory for the inputs of %d tokens; free some and run again", tc->tokens);
  }
  data_x(problem, tc, *x);
  data_logits(problem, tc, logits);
  data_bias(layer_seed, problem->experts + problem->zero_experts, bias);
  reference_route(problem, tc->tokens, logits, bias, routed_scaling, routing);
  free(logits);
  return MF_OK;
}

enum mf_status reference_run(const struct mf_problem *problem, float routed_scaling, uint64_t layer_seed, const struct test_case *tc,
                             struct reference_result *out, struct error *err)
{
  struct work w = {0};
  uint16_t *x = NULL;
  float *room = NULL;
  size_t h_values, y_values;
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  rc = check_sizes(problem, tc->tokens, err);
  if(rc != MF_OK)
    return rc;
  rc = make_inputs(problem, routed_scaling, layer_seed, tc, &out->routing, &x, err);
  if(rc == MF_OK)
    rc = work_open(&w, problem, &out->routing, layer_seed, true, err);
  if(rc == MF_OK)
    rc = allocate_result(problem, tc->tokens, out, err);
  if(rc != MF_OK)
    goto out;
  room = malloc((size_t)(problem->hidden > problem->intermediate ? problem->hidden : problem->intermediate) * sizeof(*room));
  if(room == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "no memory for the reference; free some and run again");
    goto out;
  }
  h_values = (size_t)tc->tokens * (size_t)problem_ranks(problem) * (size_t)problem->intermediate;
  y_values = (size_t)tc->tokens * (size_t)problem->hidden;
  take_x(&w, x, room);
  for(int s = 0; s < w.nslots; s++)
    up_expert(&w, &w.slot[s], out);
  for(size_t i = 0; i < h_values; i++)
    out->h[i] = bf16_from_float(out->h_unrounded[i]);
  take_h(&w, out->h, room);
  for(int s = 0; s < w.nslots; s++)
    down_expert(&w, &w.slot[s], true);
  to_floats(w.y, y_values, out->y);
  to_floats(w.y_plain, y_values, out->y_unquantised);
out:
  free(room);
  free(x);
  work_close(&w);
  if(rc != MF_OK)
    reference_free(out);
  return rc;
}

enum mf_status reference_down(const struct mf_problem *problem, uint64_t layer_seed, const struct routing_result *routing, const uint16_t *h,
                              float *y, struct error *err)
{
  struct work w = {0};
  float *room = NULL;
  enum mf_status rc = check_sizes(problem, routing->tokens, err);
  if(rc != MF_OK)
    return rc;
  rc = work_open(&w, problem, routing, layer_seed, false, err);
  if(rc != MF_OK)
    goto out;
  room = malloc((size_t)problem->intermediate * sizeof(*room));
  if(room == NULL) {
    rc = error_set(err, MF_ERR_NOMEM, "no memory for the reference; free some and run again");
    goto out;
  }
  take_h(&w, h, room);
  for(int s = 0; s < w.nslots; s++)
    down_expert(&w, &w.slot[s], false);
  to_floats(w.y, (size_t)routing->tokens * (size_t)problem->hidden, y);
out:
  free(room);
  work_close(&w);
  return rc;
}
