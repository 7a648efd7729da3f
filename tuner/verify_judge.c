/* verify_judge.c - see verify_judge.h. */
#include "verify_judge.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ROWS 8
#define SEED 7001u /* other inputs than tuning and its checks use */

static void fail(struct verify_verdict *v, const struct test_case *tc, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void fail(struct verify_verdict *v, const struct test_case *tc, const char *fmt, ...)
{
  char what[160];
  va_list args;
  if(!v->passed)
    return;
  va_start(args, fmt);
  vsnprintf(what, sizeof(what), fmt, args);
  va_end(args);
  v->passed = false;
  snprintf(v->detail, sizeof(v->detail), "%d tokens, %s, %s, seed %u: %s", tc->tokens, routing_name(tc->routing), case_data_name(tc->data), tc->seed, what);
}

/* Keeps the worst value of a measure and fails above its limit; a NaN is above every limit. */
static void measure(struct verify_verdict *v, const struct test_case *tc, double *worst, double value, double limit, const char *name, int token)
{
  if(!(value <= *worst))
    *worst = value;
  if(!(value <= limit))
    fail(v, tc, "%s: token %d: %.3e, at most %.3e is allowed", name, token, value, limit);
}

static double square_error(const uint16_t *y, const float *ref, int count)
{
  double sum = 0;
  for(int i = 0; i < count; i++) {
    const double d = (double)bf16_to_float(y[i]) - (double)ref[i];
    sum += d * d;
  }
  return sum;
}

static double square(const float *ref, int count)
{
  double sum = 0;
  for(int i = 0; i < count; i++)
    sum += (double)ref[i] * (double)ref[i];
  return sum;
}

static void judge_token(const struct mf_problem *p, const struct test_case *tc, const uint16_t *y, const float *ref, int token, struct verify_verdict *v)
{
  const double power = square(ref, p->hidden);
  if(power == 0) { /* an all-zero token: exactly zero comes out */
    if(square_error(y, ref, p->hidden) != 0)
      fail(v, tc, "token %d: not zero, although its input is", token);
    return;
  }
  measure(v, tc, &v->token, sqrt(square_error(y, ref, p->hidden) / power), VERIFY_TOKEN_LIMIT, "against the reference", token);
  for(int row = 0; row < p->hidden; row += ROWS) {
    const int count = p->hidden - row < ROWS ? p->hidden - row : ROWS;
    const double expected = power * count / p->hidden;
    measure(v, tc, &v->rows, sqrt(square_error(y + row, ref + row, count) / expected), VERIFY_ROWS_LIMIT, "8 rows against the reference", token);
  }
}

/* The reference's own error against the unquantised operator, rounded to bf16 as the kernel's output is. */
static double reference_square_error(const struct reference_result *ref, size_t count)
{
  double sum = 0;
  for(size_t i = 0; i < count; i++) {
    const double d = (double)bf16_to_float(bf16_from_float(ref->y[i])) - (double)ref->y_unquantised[i];
    sum += d * d;
  }
  return sum;
}

static void judge_end(const struct mf_problem *p, const struct test_case *tc, const struct reference_result *ref, const uint16_t *y, struct verify_verdict *v)
{
  const int count = tc->tokens * p->hidden;
  const double own = sqrt(reference_square_error(ref, (size_t)count)), have = sqrt(square_error(y, ref->y_unquantised, count));
  const double beyond = fmax(have - VERIFY_END_SLACK * sqrt(square(ref->y_unquantised, count)), 0), limit = gate_limit(GATE_END);
  if(own == 0)
    return; /* nothing but zeros */
  if(!(beyond / own <= v->end))
    v->end = beyond / own;
  if(!(beyond / own <= limit))
    fail(v, tc, "against the unquantised operator: %.3f times the reference's own error, at most %.3f is allowed", beyond / own, limit);
}

/* Is every output element there and finite? Reports the first that is not. */
static bool judge_written(const struct mf_problem *p, const struct test_case *tc, const uint16_t *y, struct verify_verdict *v)
{
  for(int i = 0; i < tc->tokens * p->hidden; i++) {
    if(y[i] != VERIFY_POISON && isfinite(bf16_to_float(y[i])))
      continue;
    fail(v, tc, "token %d, column %d: %s", i / p->hidden, i % p->hidden, y[i] == VERIFY_POISON ? "never written" : "not finite");
    return false;
  }
  return true;
}

void verify_judge(const struct mf_problem *problem, const struct test_case *tc, const struct reference_result *ref, const struct verify_output *out,
                  struct verify_verdict *v)
{
  const size_t count = (size_t)tc->tokens * (size_t)problem->hidden;
  v->cases++;
  if(!judge_written(problem, tc, out->y, v))
    return; /* there are no numbers to measure */
  if(memcmp(out->y, out->y_again, count * sizeof(*out->y)) != 0)
    fail(v, tc, "two launches gave different results");
  if(!out->guards_intact)
    fail(v, tc, "bytes beside the output or the workspace were changed");
  for(int token = 0; token < tc->tokens; token++)
    judge_token(problem, tc, out->y + (size_t)token * (size_t)problem->hidden, ref->y + (size_t)token * (size_t)problem->hidden, token, v);
  judge_end(problem, tc, ref, out->y, v);
}

int verify_cases(int tokens_min, int tokens_max, struct test_case *out, int max)
{
  const int tokens[3] = {tokens_min, (tokens_min + tokens_max) / 2, tokens_max};
  static const enum case_data special[] = {CASE_ZERO_TOKEN, CASE_NEG_INF};
  int count = 0;
  for(int i = 0; i < 3; i++) {
    if(i > 0 && tokens[i] == tokens[i - 1])
      continue;
    for(int kind = 0; kind < ROUTING_KINDS && count < max; kind++)
      out[count++] = (struct test_case){.tokens = tokens[i], .routing = (enum routing_kind)kind, .data = CASE_NORMAL, .seed = SEED + (uint32_t)i};
  }
  for(size_t i = 0; i < sizeof(special) / sizeof(special[0]) && count < max; i++)
    out[count++] = (struct test_case){.tokens = tokens_max, .routing = ROUTING_UNIFORM, .data = special[i], .seed = SEED + 3};
  return count;
}
