/* reference_route.c - which experts a token gets, and with what weights; see reference.h and templates/stream/exact_math.h.
 *
 * A policy is three steps over one row of logits, all in single precision with one rounding per operation, so that a kernel that follows the
 * same order gets the same bits:
 *   score   softmax: exp(l - l_max); sigmoid; sqrt(softplus). NaN stays NaN.
 *   key     what selects. Softmax and top-k softmax: the logit itself; softmax with a bias or groups: the probability (+ bias);
 *           else the score (+ bias). Groups: those with the best sums of their two best keys stay, ties to the lower group.
 *           The top_k best keys win, ties to the lower expert. NaN is never selected, -inf is (last, with weight 0).
 *   weight  score / (sum of the chosen scores) if renormalised, else the probability (softmax) or the score; times the scaling factor.
 * Score given has none of these: the ids and weights of the call are taken in their order. An expert that is named again adds its weight to where it
 * was named first; what is no id selects nothing.
 * A zero expert (its column has a bias like the others) takes its place among the top_k, counts in the sum, and then is dropped: the operator
 * adds nothing for it. */
#include "datagen.h"
#include "reference.h"
#include "spec.h"
#include "stream/exact_math.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define SUM_LANES 32 /* as exact_math.h sums over all experts */

struct route_row {
  const struct mf_problem *problem;
  int columns;
  float logit[DATA_MAX_LOGITS];
  float score[DATA_MAX_LOGITS];
  float key[DATA_MAX_LOGITS];
  uint32_t order[DATA_MAX_LOGITS]; /* mf_exact_order(key), 0 = cannot be selected (any more) */
  float score_sum;                 /* softmax: over all columns */
};

static bool is_softmax(const struct mf_problem *problem)
{
  return problem->score == MF_SCORE_SOFTMAX || problem->score == MF_SCORE_TOPK_SOFTMAX;
}

/* Adds 'count' values (a power of two) in place, neighbours first. */
static float sum_pairs(float *value, int count)
{
  for(size_t left = (size_t)count; left > 1; left /= 2)
    for(size_t i = 0; i < left / 2; i++)
      value[i] = mf_exact_add(value[2 * i], value[2 * i + 1]);
  return value[0];
}

static float sum_all(const float *score, int columns)
{
  const int per_lane = (columns + SUM_LANES - 1) / SUM_LANES;
  float lane[SUM_LANES] = {0.0f};
  for(int c = 0; c < columns; c++)
    lane[c / per_lane] = mf_exact_add(lane[c / per_lane], score[c] == score[c] ? score[c] : 0.0f);
  return sum_pairs(lane, SUM_LANES);
}

static void softmax_scores(struct route_row *row)
{
  float top = -INFINITY;
  for(int c = 0; c < row->columns; c++)
    top = row->logit[c] > top ? row->logit[c] : top;
  for(int c = 0; c < row->columns; c++) {
    const float l = row->logit[c];
    /* With nothing but -inf and NaN there is no distribution: all scores are 0. */
    row->score[c] = l != l ? l : top == -INFINITY ? 0.0f : mf_exact_exp(l - top);
  }
  row->score_sum = sum_all(row->score, row->columns);
}

static float score_over_sum(float score, float sum, float scaling)
{
  return score == 0.0f ? 0.0f : mf_exact_weight(score, sum, scaling);
}

static void make_scores(struct route_row *row)
{
  if(is_softmax(row->problem)) {
    softmax_scores(row);
    return;
  }
  for(int c = 0; c < row->columns; c++) {
    const float l = row->logit[c];
    row->score[c] = l != l ? l : row->problem->score == MF_SCORE_SIGMOID ? mf_exact_sigmoid(l) : mf_exact_sqrt_softplus(l);
  }
}

static void make_keys(struct route_row *row, const float *bias)
{
  const struct mf_problem *p = row->problem;
  const bool probability = p->score == MF_SCORE_SOFTMAX && (bias != NULL || p->groups > 1);
  const float *base = is_softmax(p) ? row->logit : row->score;
  for(int c = 0; c < row->columns; c++) {
    float key = base[c];
    if(probability && key == key)
      key = score_over_sum(row->score[c], row->score_sum, 1.0f);
    if(bias != NULL)
      key = mf_exact_add(key, bias[c]);
    row->key[c] = key;
    row->order[c] = mf_exact_order(key);
  }
}

/* Sum of the two best keys of a group; what cannot be selected counts as -inf. */
static float group_score(const float *key, size_t size)
{
  float first = -INFINITY, second = -INFINITY;
  for(size_t i = 0; i < size; i++) {
    const float v = key[i] == key[i] ? key[i] : -INFINITY;
    second = v > first ? first : v > second ? v : second;
    first = v > first ? v : first;
  }
  return mf_exact_add(first, second);
}

static void drop_groups(struct route_row *row)
{
  const struct mf_problem *p = row->problem;
  const size_t size = (size_t)(p->experts / p->groups);
  uint32_t order[DATA_MAX_LOGITS];
  for(int g = 0; g < p->groups; g++)
    order[g] = mf_exact_order(group_score(row->key + (size_t)g * size, size));
  for(int g = 0; g < p->groups; g++) {
    int better = 0;
    for(int other = 0; other < p->groups; other++)
      better += other < g ? order[other] >= order[g] : order[other] > order[g];
    if(better >= p->groups_kept)
      memset(row->order + (size_t)g * size, 0, size * sizeof(row->order[0]));
  }
}

/* The best column that is left, -1 if none can be selected. Takes it. */
static int pick(struct route_row *row)
{
  int best = -1;
  uint32_t order = 0;
  for(int c = 0; c < row->columns; c++) {
    if(row->order[c] > order) {
      order = row->order[c];
      best = c;
    }
  }
  if(best >= 0)
    row->order[best] = 0;
  return best;
}

static float chosen_sum(const struct route_row *row, const int *picks)
{
  float score[MAX_TOP_K] = {0.0f};
  int leaves = 8;
  while(leaves < row->problem->top_k)
    leaves *= 2;
  for(int j = 0; j < row->problem->top_k; j++)
    score[j] = picks[j] >= 0 ? row->score[picks[j]] : 0.0f;
  return sum_pairs(score, leaves);
}

static float weight_of(const struct route_row *row, float score, float sum, float scaling)
{
  const struct mf_problem *p = row->problem;
  if(p->renormalize || p->score == MF_SCORE_TOPK_SOFTMAX)
    return score_over_sum(score, is_softmax(p) ? sum : mf_exact_add(sum, 1e-20f), scaling);
  return is_softmax(p) ? score_over_sum(score, row->score_sum, scaling) : mf_exact_mul(score, scaling);
}

static void route_token(struct route_row *row, const float *bias, float scaling, int32_t *ids, float *weights)
{
  const struct mf_problem *p = row->problem;
  int picks[MAX_TOP_K] = {0}, kept = 0;
  float sum;
  make_scores(row);
  make_keys(row, bias);
  if(p->groups > 1)
    drop_groups(row);
  for(int j = 0; j < p->top_k; j++)
    picks[j] = pick(row);
  sum = chosen_sum(row, picks);
  for(int j = 0; j < p->top_k; j++) {
    if(picks[j] < 0 || picks[j] >= p->experts)
      continue;
    ids[kept] = picks[j];
    weights[kept++] = weight_of(row, row->score[picks[j]], sum, scaling);
  }
  for(; kept < p->top_k; kept++) {
    ids[kept] = -1;
    weights[kept] = 0.0f;
  }
}

static int count_active(const struct mf_problem *problem, const struct routing_result *routing)
{
  bool seen[DATA_MAX_LOGITS] = {false};
  int count = 0;
  for(int i = 0; i < routing->tokens * routing->top_k; i++) {
    const int local = problem_local_expert(problem, routing->ids[i]);
    if(local < 0 || seen[local])
      continue;
    seen[local] = true;
    count++;
  }
  return count;
}

/* One token whose ids and weights the engine has chosen. */
static void take_given(const struct mf_problem *p, const int32_t *given, const float *given_weights, float scaling, int32_t *ids, float *weights)
{
  int kept = 0;
  for(int j = 0; j < p->top_k; j++) {
    int at = 0;
    if(given[j] < 0 || given[j] >= p->experts + p->zero_experts)
      continue;
    while(at < kept && ids[at] != given[j])
      at++;
    ids[at] = given[j];
    weights[at] = mf_exact_add(at < kept ? weights[at] : 0.0f, given_weights[j]);
    kept += at == kept;
  }
  for(int j = 0; j < p->top_k; j++) {
    const bool routed = j < kept && ids[j] < p->experts;
    ids[j] = routed ? ids[j] : -1;
    weights[j] = routed ? mf_exact_mul(weights[j], scaling) : 0.0f;
  }
}

/* Token 't' of the shared experts, behind its picks. */
static void add_shared(const struct mf_problem *p, const void *logits, int tokens, int t, int32_t *ids, float *weights)
{
  const int shared = problem_shared(p);
  for(int s = 0; s < shared; s++) {
    const float gate = problem_shared_gated(p) ? data_gate_at(p, logits, tokens, t * shared + s) : 0.0f;
    ids[s] = p->experts + p->zero_experts + s;
    weights[s] = !problem_shared_gated(p) ? 1.0f : gate == gate ? mf_exact_sigmoid(gate) : 0.0f;
  }
}

void reference_route(const struct mf_problem *problem, int tokens, const void *logits, const float *bias, float routed_scaling,
                     struct routing_result *out)
{
  struct route_row row = {.problem = problem, .columns = problem->experts + problem->zero_experts};
  const float scaling = routed_scaling != 0.0f ? routed_scaling : 1.0f;
  assert(row.columns <= DATA_MAX_LOGITS && tokens <= MAX_TOKENS && problem_ranks(problem) <= MAX_TOP_K);
  out->tokens = tokens;
  out->top_k = problem_ranks(problem);
  for(int t = 0; t < tokens; t++) {
    const size_t first = (size_t)t * (size_t)row.columns, k = (size_t)problem->top_k, pick = (size_t)t * (size_t)out->top_k, given = (size_t)t * k;
    add_shared(problem, logits, tokens, t, out->ids + pick + k, out->weights + pick + k);
    if(problem->score == MF_SCORE_GIVEN) {
      take_given(problem, (const int32_t *)logits + given, (const float *)logits + (size_t)tokens * k + given, scaling, out->ids + pick, out->weights + pick);
      continue;
    }
    for(int c = 0; c < row.columns; c++)
      row.logit[c] = problem->logits_dtype == MF_DTYPE_F32 ? ((const float *)logits)[first + (size_t)c]
                                                           : bf16_to_float(((const uint16_t *)logits)[first + (size_t)c]);
    route_token(&row, problem->select_bias ? bias : NULL, scaling, out->ids + pick, out->weights + pick);
  }
  out->active = count_active(problem, out);
}
