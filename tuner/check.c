/* check.c - the gates; see check.h, and docs/accuracy.md for the arithmetic behind the limits.
 *
 * h and y are results that are rounded to bf16 once. Comparing two rounded numbers is coarse: values next to a rounding boundary differ by a whole
 * step although both are right, and in a heavy-tailed row one such element outweighs everything else. So both gates compare the kernel's
 * rounded number with the *unrounded* reference and count only what half a step does not explain (excess_of). A correct kernel's excess is the error
 * of its sums alone; one that rounds wrongly has an excess of its own making.
 *
 * The kernel's h rows may be in any order within a token: its ids say which is which, and judge.row maps canonical positions to them. */
#include "check.h"
#include "spec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Relative to the reference's weight. The kernel's weights follow the same operations (exact_math.h) up to the order of sums and the reciprocal:
 * a few units of 2^-24. Weights below WEIGHT_FLOOR of the token's largest are measured against that. */
#define LIMIT_WEIGHT 1e-5
#define WEIGHT_FLOOR 1e-6
/* FP8 tensor cores align 32 products to the largest and keep 13 bits behind its leading one; that gives an excess of 6e-5 to 3e-4 per row (modelled).
 * Truncating h instead of rounding it to nearest gives 1.1e-3, one wrong scale of 16 4e-3 and more. */
#define LIMIT_H 7e-4
/* The same accumulators over 8 rows only: up to 7e-4 (modelled); truncating y gives 3.9e-3 in the worst group. */
#define LIMIT_Y_GIVEN_H 2e-3
#define ROW_GROUP 8
/* Output rows may cancel, the error of their sums does not: a group is measured against at least this share of the token's root mean square. */
#define ROW_GROUP_FLOOR 0.5
/* Error against the unquantised operator, relative to the faithful reference's own. Legal differences of h re-draw some roundings to e4m3, and now
 * and then (the largest of 128 values moves by a step) a whole group's. That shifts a token's error either way, the more the fewer values are
 * rounded: END_SLACK of the token's norm at top_k * N <= END_SLACK_VALUES, falling with the root beyond. Shared experts outweigh the others several
 * times (1 against 1 / top_k each), so beside them theirs are the values that count. */
#define LIMIT_END 1.05
#define END_SLACK 2e-2
#define END_SLACK_VALUES 512.0

const char *gate_name(enum gate gate)
{
  static const char *const names[GATES] = {
#define GATE_TEXT(name, text) text,
    GATE_TABLE(GATE_TEXT)
#undef GATE_TEXT
  };
  return (unsigned)gate < GATES ? names[gate] : "?";
}

double gate_limit(enum gate gate)
{
  static const double limits[GATES] = {
    [GATE_WEIGHT] = LIMIT_WEIGHT, [GATE_H] = LIMIT_H, [GATE_Y_GIVEN_H] = LIMIT_Y_GIVEN_H, [GATE_END] = LIMIT_END};
  return (unsigned)gate < GATES ? limits[gate] : 0.0;
}

/* --- Which cases --- */

/* What is run for every token count. At one token all experts are disjoint, so concentrated and dispersed add nothing. */
static const struct {
  enum routing_kind routing;
  enum case_data data;
  uint32_t seed;
  int min_tokens;
} case_list[] = {
  {ROUTING_UNIFORM, CASE_NORMAL, 1, 1},      {ROUTING_UNIFORM, CASE_NORMAL, 2, 1},    {ROUTING_ZIPF, CASE_NORMAL, 3, 1},
  {ROUTING_CONCENTRATED, CASE_NORMAL, 4, 2}, {ROUTING_DISPERSED, CASE_NORMAL, 5, 2},  {ROUTING_TIES, CASE_NORMAL, 6, 1},
  {ROUTING_UNIFORM, CASE_ZERO_TOKEN, 7, 1},  {ROUTING_ZIPF, CASE_HUGE_SCALE, 8, 1},   {ROUTING_UNIFORM, CASE_TINY_SCALE, 9, 1},
  {ROUTING_UNIFORM, CASE_NEG_INF, 10, 1},    {ROUTING_ZIPF, CASE_NEG_INF, 11, 2},
};

#define EVERY_COUNT 16 /* beyond it every fourth token count, and the last */

int check_cases(const struct mf_problem *problem, int tokens_lo, int tokens_hi, struct test_case *out, int max)
{
  int count = 0;
  (void)problem;
  for(int tokens = tokens_lo; tokens <= tokens_hi; tokens++) {
    if(tokens > EVERY_COUNT && tokens % 4 != 0 && tokens != tokens_lo && tokens != tokens_hi)
      continue;
    for(size_t i = 0; i < sizeof(case_list) / sizeof(case_list[0]) && count < max; i++) {
      if(tokens < case_list[i].min_tokens)
        continue;
      out[count++] = (struct test_case){tokens, case_list[i].routing, case_list[i].data, case_list[i].seed};
    }
  }
  return count;
}

/* --- Judging one case --- */

struct judge {
  const struct mf_problem *problem;
  uint64_t layer_seed;
  const struct test_case *tc;
  const struct reference_result *ref;
  const struct device_output *out;
  int top_k, n, hidden;            /* top_k: with shared experts */
  int row[MAX_TOKENS * MAX_TOP_K]; /* canonical (token, rank) -> row of the kernel's h, -1 where there is none or no expert of this rank */
  uint16_t *h;                     /* the kernel's h in canonical order */
  float *y_given_h;
  double worst_error;
  struct error *err;
  enum mf_status rc;
  char where[96];                  /* of the value that a measure returns */
};

/* What the bf16 'bits' is off 'exact' beyond half a step at its own magnitude. */
static double excess_of(uint16_t bits, double exact)
{
  const double value = (double)bf16_to_float(bits);
  int exponent;
  double half = 0.0;
  if(value != 0.0) {
    frexp(value, &exponent); /* 2^(exponent - 1) <= |value| */
    half = ldexp(1.0, (exponent > -125 ? exponent : -125) - 9);
  }
  return fmax(fabs(value - exact) - half, 0.0);
}

/* 'error' relative to 'scale', where 0 / 0 is right and anything else / 0 is infinitely wrong. */
static double relative(double error, double scale)
{
  return error == 0.0 ? 0.0 : scale > 0.0 ? error / scale : INFINITY;
}

/* Keeps the larger of two measures; true if 'value' is the new worst (NaN counts as infinite). */
static bool raise_worst(double *worst, double value)
{
  const double v = isnan(value) ? INFINITY : value;
  if(v <= *worst)
    return false;
  *worst = v;
  return true;
}

static double measure_guard(struct judge *j)
{
  snprintf(j->where, sizeof(j->where), "bytes outside the outputs changed");
  return j->out->guard_damaged ? 1.0 : 0.0;
}

static double measure_status(struct judge *j)
{
  snprintf(j->where, sizeof(j->where), "status word 0x%x", (unsigned)j->out->status);
  return j->out->status != 0 ? 1.0 : 0.0;
}

static double measure_written(struct judge *j)
{
  snprintf(j->where, sizeof(j->where), "an output element was never written");
  return j->out->poison_left ? 1.0 : 0.0;
}

static bool is_finite_bf16(uint16_t bits)
{
  return (bits & 0x7F80) != 0x7F80;
}

static bool is_local(const struct judge *j, int id)
{
  return problem_local_expert(j->problem, id) >= 0;
}

/* y, and h of the kernel's own experts. */
static double measure_finite(struct judge *j)
{
  double bad = 0.0;
  for(int t = 0; t < j->tc->tokens; t++)
    for(int r = 0; r < j->hidden; r++)
      if(!is_finite_bf16(j->out->y[(size_t)t * (size_t)j->hidden + (size_t)r]) && bad++ == 0.0)
        snprintf(j->where, sizeof(j->where), "token %d output row %d", t, r);
  for(int i = 0; i < j->tc->tokens * j->top_k; i++) {
    if(!is_local(j, j->out->ids[i]))
      continue;
    for(int f = 0; f < j->n; f++)
      if(!is_finite_bf16(j->out->h[(size_t)i * (size_t)j->n + (size_t)f]) && bad++ == 0.0)
        snprintf(j->where, sizeof(j->where), "token %d expert %d feature %d of h", i / j->top_k, j->out->ids[i], f);
  }
  return bad;
}

static double measure_replay(struct judge *j)
{
  snprintf(j->where, sizeof(j->where), "a repeated launch gave other bits");
  return j->out->replays_equal ? 0.0 : 1.0;
}

/* Finds each of the reference's experts once among the kernel's; what is left over must be -1. Fills in j->row. */
static double measure_routing(struct judge *j)
{
  double wrong = 0.0;
  for(int t = 0; t < j->tc->tokens; t++) {
    const size_t first = (size_t)t * (size_t)j->top_k;
    const int32_t *want = j->ref->routing.ids + first, *have = j->out->ids + first;
    bool used[MAX_TOP_K] = {false};
    for(int k = 0; k < j->top_k; k++) {
      int at = 0;
      while(at < j->top_k && (used[at] || have[at] != want[k]))
        at++;
      if(at < j->top_k)
        used[at] = true;
      else if(wrong++ == 0.0)
        snprintf(j->where, sizeof(j->where), "token %d: expert %d is missing", t, (int)want[k]);
      j->row[t * j->top_k + k] = at < j->top_k && want[k] >= 0 ? t * j->top_k + at : -1;
    }
  }
  return wrong;
}

static double measure_weight(struct judge *j)
{
  double worst = 0.0;
  for(int t = 0; t < j->tc->tokens; t++) {
    double largest = 0.0;
    for(int k = 0; k < j->top_k; k++)
      largest = fmax(largest, fabs((double)j->ref->routing.weights[t * j->top_k + k]));
    for(int k = 0; k < j->top_k; k++) {
      const int i = t * j->top_k + k;
      const double want = (double)j->ref->routing.weights[i], have = j->row[i] >= 0 ? (double)j->out->weights[j->row[i]] : 0.0;
      if(raise_worst(&worst, relative(fabs(have - want), fmax(fabs(want), WEIGHT_FLOOR * largest))))
        snprintf(j->where, sizeof(j->where), "token %d expert %d", t, (int)j->ref->routing.ids[i]);
    }
  }
  return worst;
}

static double measure_h(struct judge *j)
{
  double worst = 0.0;
  for(int i = 0; i < j->tc->tokens * j->top_k; i++) {
    const int id = j->ref->routing.ids[i];
    const float *want = j->ref->h_unrounded + (size_t)i * (size_t)j->n;
    double error = 0.0, norm = 0.0;
    if(!is_local(j, id))
      continue;
    for(int f = 0; f < j->n; f++) {
      const double excess = excess_of(j->out->h[(size_t)j->row[i] * (size_t)j->n + (size_t)f], (double)want[f]);
      error += excess * excess;
      norm += (double)want[f] * (double)want[f];
    }
    if(raise_worst(&worst, relative(sqrt(error), sqrt(norm))))
      snprintf(j->where, sizeof(j->where), "token %d expert %d", i / j->top_k, id);
  }
  return worst;
}

/* The kernel's h in canonical order, and what the reference makes of it. */
static enum mf_status project_own_h(struct judge *j)
{
  const size_t rows = (size_t)j->tc->tokens * (size_t)j->top_k, n = (size_t)j->n;
  j->h = calloc(rows * n, sizeof(*j->h));
  j->y_given_h = calloc((size_t)j->tc->tokens * (size_t)j->hidden, sizeof(*j->y_given_h));
  if(j->h == NULL || j->y_given_h == NULL)
    return error_set(j->err, MF_ERR_NOMEM, "no memory to check %d tokens; free some and run again", j->tc->tokens);
  for(size_t i = 0; i < rows; i++)
    if(is_local(j, j->ref->routing.ids[i]))
      memcpy(j->h + i * n, j->out->h + (size_t)j->row[i] * n, n * sizeof(*j->h));
  return reference_down(j->problem, j->layer_seed, &j->ref->routing, j->h, j->y_given_h, j->err);
}

static double measure_y_given_h(struct judge *j)
{
  double worst = 0.0;
  j->rc = project_own_h(j);
  if(j->rc != MF_OK)
    return 0.0;
  for(int t = 0; t < j->tc->tokens; t++) {
    const float *want = j->y_given_h + (size_t)t * (size_t)j->hidden;
    const uint16_t *have = j->out->y + (size_t)t * (size_t)j->hidden;
    double square = 0.0;
    for(int r = 0; r < j->hidden; r++)
      square += (double)want[r] * (double)want[r];
    for(int g = 0; g < j->hidden; g += ROW_GROUP) {
      const int end = g + ROW_GROUP < j->hidden ? g + ROW_GROUP : j->hidden;
      double error = 0.0, norm = 0.0;
      for(int r = g; r < end; r++) {
        const double excess = excess_of(have[r], (double)want[r]);
        error += excess * excess;
        norm += (double)want[r] * (double)want[r];
      }
      norm = fmax(norm, ROW_GROUP_FLOOR * ROW_GROUP_FLOOR * square * (end - g) / j->hidden);
      if(raise_worst(&worst, relative(sqrt(error), sqrt(norm))))
        snprintf(j->where, sizeof(j->where), "token %d output rows %d..%d", t, g, end - 1);
    }
  }
  return worst;
}

static double measure_end(struct judge *j)
{
  const int shared = problem_shared(j->problem), dominant = shared > 0 ? shared : j->top_k;
  const double values = (double)dominant * j->n;
  const double slack = END_SLACK * (values > END_SLACK_VALUES ? sqrt(END_SLACK_VALUES / values) : 1.0);
  double worst = 0.0;
  for(int t = 0; t < j->tc->tokens; t++) {
    double kernel = 0.0, faithful = 0.0, square = 0.0, beyond;
    for(int r = 0; r < j->hidden; r++) {
      const size_t i = (size_t)t * (size_t)j->hidden + (size_t)r;
      const double exact = (double)j->ref->y_unquantised[i];
      const double a = (double)bf16_to_float(j->out->y[i]) - exact, b = (double)bf16_to_float(bf16_from_float(j->ref->y[i])) - exact;
      kernel += a * a;
      faithful += b * b;
      square += exact * exact;
    }
    raise_worst(&j->worst_error, relative(sqrt(kernel), sqrt(square)));
    beyond = fmax(sqrt(kernel) - slack * sqrt(square), 0.0);
    if(raise_worst(&worst, relative(beyond, sqrt(faithful))))
      snprintf(j->where, sizeof(j->where), "token %d", t);
  }
  return worst;
}

/* In the order in which they explain each other. 'decisive': if it fails, the later ones mean nothing. */
static const struct {
  enum gate gate;
  bool decisive;
  double (*measure)(struct judge *j);
} gate_order[GATES] = {
  {GATE_GUARD, true, measure_guard},     {GATE_STATUS, true, measure_status},   {GATE_WRITTEN, true, measure_written},
  {GATE_FINITE, true, measure_finite},   {GATE_REPLAY, true, measure_replay},   {GATE_ROUTING, true, measure_routing},
  {GATE_WEIGHT, false, measure_weight},  {GATE_H, false, measure_h},            {GATE_Y_GIVEN_H, false, measure_y_given_h},
  {GATE_END, false, measure_end},
};

static void record_failure(const struct judge *j, enum gate gate, double value, struct check_result *result)
{
  char number[64] = "";
  if(!result->passed)
    return;
  result->passed = false;
  result->failed_gate = gate;
  if(gate_limit(gate) > 0.0)
    snprintf(number, sizeof(number), ": %.1e > %.1e", value, gate_limit(gate));
  snprintf(result->detail, sizeof(result->detail), "%s: %s%s (B=%d %s %s seed %u)", gate_name(gate), j->where, number, j->tc->tokens,
           routing_name(j->tc->routing), case_data_name(j->tc->data), (unsigned)j->tc->seed);
}

void check_begin(struct check_result *result)
{
  memset(result, 0, sizeof(*result));
  result->passed = true;
}

enum mf_status check_judge(const struct mf_problem *problem, uint64_t layer_seed, const struct test_case *tc, const struct reference_result *ref,
                           const struct device_output *out, struct check_result *result, struct error *err)
{
  struct judge j = {.problem = problem, .layer_seed = layer_seed, .tc = tc, .ref = ref, .out = out, .top_k = problem_ranks(problem),
                    .n = problem->intermediate, .hidden = problem->hidden, .err = err, .rc = MF_OK};
  for(int i = 0; i < GATES; i++) {
    const enum gate gate = gate_order[i].gate;
    const double value = gate_order[i].measure(&j);
    if(j.rc != MF_OK)
      break;
    raise_worst(&result->worst[gate], value);
    if(!(value > gate_limit(gate)))
      continue;
    record_failure(&j, gate, value, result);
    if(gate_order[i].decisive)
      break;
  }
  if(tc->data != CASE_TINY_SCALE) /* there the operator as it must be quantised gives zeros: an error of 1, of every kernel */
    raise_worst(&result->worst_error, j.worst_error);
  free(j.h);
  free(j.y_given_h);
  return j.rc;
}

void check_summary(const struct check_result *result, struct strbuf *out)
{
  for(int gate = 0; gate < GATES; gate++) {
    const double worst = result->worst[gate], limit = gate_limit((enum gate)gate);
    if(limit > 0.0)
      strbuf_printf(out, "%-14s worst %.2e  limit %.2e\n", gate_name((enum gate)gate), worst, limit);
    else
      strbuf_printf(out, "%-14s %s\n", gate_name((enum gate)gate), worst > 0.0 ? "FAILED" : "clean");
  }
  strbuf_printf(out, "%-14s worst %.2e  against the unquantised operator\n", "error", result->worst_error);
}
