/* datagen_logits.c - router logits of each routing kind, and how many experts become active; see datagen.h.
 *
 *   uniform        i.i.d. normal, standard deviation 1.5
 *   zipf           -log(rank) over a random permutation of the columns, plus Gumbel noise: a draw without replacement with p ~ 1 / rank
 *   concentrated   the same top_k experts lie around 4 in all tokens (spread 0.25), all others around -4 (spread 0.25)
 *   dispersed      likewise, but each token has its own experts while there are enough
 *   ties           five values only: 1 (one column in 32), 0.5, +0, -0, -1
 *
 * The margins of concentrated and dispersed exceed every bias of data_bias() under every score (with softmax and a bias: up to top_k = 8; beyond,
 * all but surely), so the names hold to the letter. Zero experts are never among their chosen.
 *
 * Grouped policies: the groups are shuffled and dealt into windows of groups_kept groups (left-over groups are not used). concentrated takes top_k
 * experts of the first window; dispersed gives token t the window t % windows, in which tokens take disjoint experts until it is used up. Hence
 * tokens are disjoint as long as each window holds top_k x its tokens.
 *
 * CASE_NEG_INF, on top of any kind: about a quarter of a token's logits is -inf, top_k stay finite; but token seed % tokens has only top_k - 1
 * finite ones, and of three or more tokens the one behind it has none.
 *
 * Gates of shared experts are normal, standard deviation 2; CASE_NEG_INF has -inf for the token that has too few finite logits.
 *
 * Score given: ids and weights are those of a softmax router on these logits, renormalised, in a row that begins anywhere in their order. ties names
 * experts twice, CASE_NEG_INF has -1 (beside a weight that must not count) instead of what would weigh 0. */
#include "datagen.h"
#include "reference.h"
#include "spec.h"
#include "tools/datagen_core.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define SIMULATED_DRAWS 64   /* cases that an expectation is the mean of, up to SIMULATED_TOKENS tokens together */
#define SIMULATED_TOKENS 512
#define NORMAL_UNIT (1.0 / (75674.0 * 1.41421356237309505)) /* two sums of four: standard deviation 1 */

struct logit_source {
  const struct mf_problem *problem;
  uint64_t key;
  int columns;
  int window, windows;             /* experts per window, number of windows */
  uint16_t order[DATA_MAX_LOGITS]; /* zipf: column of each rank, inverted; else the experts, window after window */
  bool chosen[DATA_MAX_LOGITS];    /* of the token in hand (concentrated, dispersed) */
};

/* Natural logarithm of a positive normal number by IEEE operations alone. */
static double plain_log(double x)
{
  int exponent;
  double m = frexp(x, &exponent), s, sum = 0.0;
  if(m < 0.70710678118654752) {
    m *= 2.0;
    exponent--;
  }
  s = (m - 1.0) / (m + 1.0);
  for(int k = 11; k >= 0; k--)
    sum = sum * (s * s) + 1.0 / (2 * k + 1);
  return exponent * 0.69314718055994531 + 2.0 * s * sum;
}

static double normal_at(const struct logit_source *src, uint64_t index)
{
  return (mf_data_normal4(mf_data_hash(src->key, 2 * index)) + mf_data_normal4(mf_data_hash(src->key, 2 * index + 1))) * NORMAL_UNIT;
}

static void shuffle(uint64_t key, uint16_t *list, int count)
{
  for(int i = count - 1; i > 0; i--) {
    const int j = (int)(mf_data_hash(key, (uint64_t)i) % (uint64_t)(i + 1));
    const uint16_t swap = list[i];
    list[i] = list[j];
    list[j] = swap;
  }
}

static void set_windows(struct logit_source *src)
{
  const struct mf_problem *p = src->problem;
  const int groups = p->groups > 1 ? p->groups : 1;
  const int kept = groups > 1 ? p->groups_kept : 1;
  src->windows = groups / kept;
  src->window = kept * (p->experts / groups);
}

/* --- One value --- */

static double value_uniform(const struct logit_source *src, int column, uint64_t index)
{
  (void)column;
  return 1.5 * normal_at(src, index);
}

static double value_zipf(const struct logit_source *src, int column, uint64_t index)
{
  const double u = ((double)(mf_data_hash(src->key, index) >> 11) + 0.5) * 0x1p-53;
  return -plain_log(src->order[column] + 1.0) - plain_log(-plain_log(u));
}

static double value_chosen(const struct logit_source *src, int column, uint64_t index)
{
  return src->chosen[column] ? 4.0 + 0.25 * normal_at(src, index) : -4.0 + 0.25 * normal_at(src, index);
}

static double value_ties(const struct logit_source *src, int column, uint64_t index)
{
  static const double values[4] = {0.5, 0.0, -0.0, -1.0};
  const uint64_t h = mf_data_hash(src->key, index);
  (void)column;
  return (h & 31) == 0 ? 1.0 : values[h >> 62];
}

/* --- What a kind needs before all tokens, and before each --- */

static void order_columns(struct logit_source *src)
{
  for(int i = 0; i < src->columns; i++)
    src->order[i] = (uint16_t)i;
  shuffle(~src->key, src->order, src->columns);
}

static void order_windows(struct logit_source *src)
{
  const struct mf_problem *p = src->problem;
  const int groups = p->groups > 1 ? p->groups : 1, size = p->experts / groups;
  uint16_t group[DATA_MAX_LOGITS];
  for(int g = 0; g < groups; g++)
    group[g] = (uint16_t)g;
  shuffle(~src->key, group, groups);
  for(int i = 0; i < groups * size; i++)
    src->order[i] = (uint16_t)(group[i / size] * size + i % size);
  for(int w = 0; w < src->windows; w++)
    shuffle(~src->key + (uint64_t)w + 1, src->order + (size_t)w * (size_t)src->window, src->window);
}

static void choose(struct logit_source *src, int window, int turn)
{
  const int count = src->problem->top_k < src->window ? src->problem->top_k : src->window;
  memset(src->chosen, 0, sizeof(src->chosen));
  for(int j = 0; j < count; j++)
    src->chosen[src->order[window * src->window + (turn * src->problem->top_k + j) % src->window]] = true;
}

static void choose_same(struct logit_source *src, int token)
{
  (void)token;
  choose(src, 0, 0);
}

static void choose_disjoint(struct logit_source *src, int token)
{
  choose(src, token % src->windows, token / src->windows);
}

static const struct {
  double (*value)(const struct logit_source *src, int column, uint64_t index);
  void (*prepare)(struct logit_source *src);
  void (*begin_token)(struct logit_source *src, int token);
} kinds[ROUTING_KINDS] = {
  [ROUTING_UNIFORM] = {value_uniform, NULL, NULL},
  [ROUTING_ZIPF] = {value_zipf, order_columns, NULL},
  [ROUTING_CONCENTRATED] = {value_chosen, order_windows, choose_same},
  [ROUTING_DISPERSED] = {value_chosen, order_windows, choose_disjoint},
  [ROUTING_TIES] = {value_ties, NULL, NULL},
};

/* --- -inf --- */

/* Makes -inf of 'row' what CASE_NEG_INF wants for 'token'. */
static void mask_row(const struct logit_source *src, const struct test_case *tc, int token, float *row)
{
  const int victim = (int)(tc->seed % (uint32_t)tc->tokens);
  const uint64_t key = mf_data_hash(~src->key, ~(uint64_t)token);
  uint16_t order[DATA_MAX_LOGITS];
  int keep = src->columns - src->columns / 4;
  for(int i = 0; i < src->columns; i++)
    order[i] = (uint16_t)i;
  shuffle(key, order, src->columns);
  if(keep < src->problem->top_k)
    keep = src->problem->top_k;
  if(token == victim)
    keep = src->problem->top_k - 1;
  else if(tc->tokens >= 3 && token == (victim + 1) % tc->tokens)
    keep = 0;
  for(int i = keep; i < src->columns; i++)
    row[order[i]] = -INFINITY;
}

static void open_source(struct logit_source *src, const struct mf_problem *problem, const struct test_case *tc)
{
  src->problem = problem;
  src->columns = problem->experts + problem->zero_experts;
  assert(src->columns <= DATA_MAX_LOGITS);
  src->key = mf_data_key(data_case_seed(tc), DATA_LOGITS);
  set_windows(src);
  if(kinds[tc->routing].prepare != NULL)
    kinds[tc->routing].prepare(src);
}

/* The logits of one token, not yet rounded. */
static void make_row(struct logit_source *src, const struct test_case *tc, int token, float *row)
{
  const uint64_t first = (uint64_t)token * (uint64_t)src->columns;
  if(kinds[tc->routing].begin_token != NULL)
    kinds[tc->routing].begin_token(src, token);
  for(int c = 0; c < src->columns; c++)
    row[c] = (float)kinds[tc->routing].value(src, c, first + (uint64_t)c);
  if(tc->data == CASE_NEG_INF)
    mask_row(src, tc, token, row);
}

/* What an engine's own router makes of the logits. */
static void choose_row(const struct logit_source *src, const struct test_case *tc, const float *row, int t, int32_t *ids, float *weights)
{
  struct mf_problem softmax = *src->problem;
  struct routing_result routing;
  const int k = softmax.top_k, first = (int)(mf_data_hash(src->key, ~(uint64_t)t) % (uint64_t)k);
  softmax.score = MF_SCORE_SOFTMAX;
  softmax.renormalize = 1;
  softmax.logits_dtype = MF_DTYPE_F32;
  softmax.shared_experts = 0;
  reference_route(&softmax, 1, row, NULL, 1.0f, &routing);
  for(int j = 0; j < k; j++) {
    const int from = (first + j) % k;
    const bool none = routing.ids[from] < 0 || (tc->data == CASE_NEG_INF && routing.weights[from] == 0.0f);
    ids[j] = none ? -1 : routing.ids[from];
    weights[j] = none ? 0.75f : routing.weights[from];
    if(tc->routing == ROUTING_TIES && j % 3 == 2)
      ids[j] = ids[j - 2];
  }
}

/* Token 't' of what data_logits() makes of 'tokens'. */
static void store_row(const struct logit_source *src, const struct test_case *tc, const float *row, int tokens, int t, void *out)
{
  const struct mf_problem *p = src->problem;
  const size_t columns = (size_t)src->columns, k = (size_t)p->top_k, at = (size_t)t;
  if(p->score == MF_SCORE_GIVEN)
    choose_row(src, tc, row, t, (int32_t *)out + at * k, (float *)out + ((size_t)tokens + at) * k);
  else if(p->logits_dtype == MF_DTYPE_F32)
    memcpy((float *)out + at * columns, row, columns * sizeof(row[0]));
  else
    for(size_t c = 0; c < columns; c++)
      ((uint16_t *)out)[at * columns + c] = bf16_from_float(row[c]);
}

/* Bytes of all but the gates. */
static size_t choice_bytes(const struct mf_problem *problem, int tokens)
{
  const size_t columns = (size_t)problem->experts + (size_t)problem->zero_experts, k = (size_t)problem->top_k;
  if(problem->score == MF_SCORE_GIVEN)
    return (size_t)tokens * k * (sizeof(int32_t) + sizeof(float));
  return (size_t)tokens * columns * (problem->logits_dtype == MF_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t));
}

static size_t gate_bytes(const struct mf_problem *problem)
{
  return problem->logits_dtype == MF_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
}

static size_t gate_offset(const struct mf_problem *problem, int tokens)
{
  return (choice_bytes(problem, tokens) + 15) / 16 * 16;
}

size_t data_logits_bytes(const struct mf_problem *problem, int tokens)
{
  if(!problem_shared_gated(problem))
    return choice_bytes(problem, tokens);
  return gate_offset(problem, tokens) + (size_t)tokens * (size_t)problem_shared(problem) * gate_bytes(problem);
}

float data_gate_at(const struct mf_problem *problem, const void *logits, int tokens, int index)
{
  const unsigned char *at = (const unsigned char *)logits + gate_offset(problem, tokens) + (size_t)index * gate_bytes(problem);
  return problem->logits_dtype == MF_DTYPE_F32 ? *(const float *)(const void *)at : bf16_to_float(*(const uint16_t *)(const void *)at);
}

/* The gates of one token, at the end of what data_logits() makes. */
static void store_gates(const struct logit_source *src, const struct test_case *tc, int tokens, int t, void *out)
{
  const struct mf_problem *p = src->problem;
  const int shared = problem_shared(p);
  const uint64_t key = mf_data_key(data_case_seed(tc), DATA_GATE);
  unsigned char *at = (unsigned char *)out + gate_offset(p, tokens) + (size_t)t * (size_t)shared * gate_bytes(p);
  for(int s = 0; s < shared; s++, at += gate_bytes(p)) {
    const double normal = mf_data_normal4(mf_data_hash(key, (uint64_t)t * (uint64_t)shared + (uint64_t)s)) * (2.0 / 75674.0);
    const float value = tc->data == CASE_NEG_INF && t == (int)(tc->seed % (uint32_t)tc->tokens) ? -INFINITY : (float)normal;
    const uint16_t bits = bf16_from_float(value);
    if(p->logits_dtype == MF_DTYPE_F32)
      memcpy(at, &value, sizeof(value));
    else
      memcpy(at, &bits, sizeof(bits));
  }
}

void data_logits_call(const struct mf_problem *problem, uint64_t address, struct mf_call *call)
{
  if(problem->score == MF_SCORE_GIVEN) {
    call->ids = (const int32_t *)(uintptr_t)address;
    call->weights = (const float *)(uintptr_t)address + (size_t)call->tokens * (size_t)problem->top_k;
  } else {
    call->logits = (const void *)(uintptr_t)address;
  }
  if(problem_shared_gated(problem))
    call->shared_gate = (const void *)(uintptr_t)(address + gate_offset(problem, call->tokens));
}

void data_logits(const struct mf_problem *problem, const struct test_case *tc, void *out)
{
  struct logit_source src;
  float row[DATA_MAX_LOGITS];
  open_source(&src, problem, tc);
  for(int t = 0; t < tc->tokens; t++) {
    make_row(&src, tc, t, row);
    store_row(&src, tc, row, tc->tokens, t, out);
    if(problem_shared_gated(problem))
      store_gates(&src, tc, tc->tokens, t, out);
  }
}

/* --- Expected active experts --- */

/* Distinct local experts of one drawn case under the problem's own policy. */
static int drawn_active(const struct mf_problem *problem, const struct test_case *tc, const float *bias)
{
  struct logit_source src;
  struct routing_result routing;
  float row[DATA_MAX_LOGITS];
  uint32_t stored[DATA_MAX_LOGITS];
  bool active[DATA_MAX_LOGITS] = {false};
  int count = 0;
  open_source(&src, problem, tc);
  for(int t = 0; t < tc->tokens; t++) {
    make_row(&src, tc, t, row);
    store_row(&src, tc, row, 1, 0, stored);
    reference_route(problem, 1, stored, bias, 1.0f, &routing);
    for(int j = 0; j < routing.top_k; j++) {
      const int local = routing.ids[j] - problem->expert_begin;
      if(routing.ids[j] < 0 || local < 0 || local >= problem->expert_count || active[local])
        continue;
      active[local] = true;
      count++;
    }
  }
  return count;
}

static double simulated_active(const struct mf_problem *problem, int tokens, enum routing_kind routing)
{
  const int draws = tokens * SIMULATED_DRAWS <= SIMULATED_TOKENS ? SIMULATED_DRAWS : (SIMULATED_TOKENS + tokens - 1) / tokens;
  struct test_case tc = {.tokens = tokens, .routing = routing, .data = CASE_NORMAL};
  float bias[DATA_MAX_LOGITS];
  double sum = 0.0;
  data_bias(data_layer_seed(0), problem->experts + problem->zero_experts, bias);
  for(int i = 0; i < draws; i++) {
    tc.seed = 0xAC710000u + (uint32_t)i;
    sum += drawn_active(problem, &tc, bias);
  }
  return sum / draws;
}

/* All tokens disjoint within their windows. */
static double dispersed_active(const struct mf_problem *problem, int tokens)
{
  struct logit_source src = {.problem = problem};
  double sum = 0.0;
  set_windows(&src);
  for(int w = 0; w < src.windows; w++) {
    const int wanted = problem->top_k * ((tokens - w + src.windows - 1) / src.windows);
    sum += wanted <= 0 ? 0 : wanted < src.window ? wanted : src.window;
  }
  return sum;
}

/* Without shared experts. */
static double routed_active(const struct mf_problem *problem, int tokens, enum routing_kind routing)
{
  const double share = (double)problem->expert_count / problem->experts;
  const double hit = (double)problem->top_k / (problem->experts + problem->zero_experts);
  switch(routing) {
    case ROUTING_UNIFORM: return problem->expert_count * (1.0 - pow(1.0 - hit, tokens));
    case ROUTING_CONCENTRATED: return problem->top_k * share;
    case ROUTING_DISPERSED: return dispersed_active(problem, tokens) * share;
    default: return tokens > 0 ? simulated_active(problem, tokens, routing) : 0.0;
  }
}

double data_expected_active(const struct mf_problem *problem, int tokens, enum routing_kind routing)
{
  struct mf_problem routed = *problem;
  routed.shared_experts = 0;
  return routed_active(&routed, tokens, routing) + problem_shared(problem);
}
