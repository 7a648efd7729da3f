/* test_reference_route.c - the reference's routing: every policy against hand-made and libm answers; ties, NaN, -inf. */
#include "problem_fixture.h"
#include "reference.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Routes one token of f32 logits. */
static void route_one(const struct mf_problem *problem, const float *logits, const float *bias, float scaling, struct routing_result *out)
{
  struct mf_problem p = *problem;
  p.logits_dtype = MF_DTYPE_F32;
  reference_route(&p, 1, logits, bias, scaling, out);
}

static void expect_ids(const struct routing_result *r, int count, const int *ids)
{
  for(int j = 0; j < count; j++)
    ck_assert_msg(r->ids[j] == ids[j], "rank %d: expected expert %d, got %d", j, ids[j], (int)r->ids[j]);
}
#define EXPECT_IDS(r, ...) expect_ids(r, (int)(sizeof((int[]){__VA_ARGS__}) / sizeof(int)), (int[]){__VA_ARGS__})

static void expect_weight(const struct routing_result *r, int rank, double want)
{
  ck_assert_msg(fabs((double)r->weights[rank] - want) <= 3e-7 * fabs(want) + 1e-30, "rank %d: expected weight %.9g, got %.9g", rank, want,
                (double)r->weights[rank]);
}

static const float some_logits[16] = {0.5f, -1, 3, 2, 0, 1.5f, -2, 2.5f, -3, 1, 0.25f, -0.5f, 0.75f, -4, 1.25f, 1.75f}; /* best: 2, 7, 3, 15 */

START_TEST(softmax_renormalised)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  const double sum = exp(0) + exp(-0.5) + exp(-1) + exp(-1.25);
  route_one(&p, some_logits, NULL, 1, &r);
  EXPECT_IDS(&r, 2, 7, 3, 15);
  expect_weight(&r, 0, 1 / sum);
  expect_weight(&r, 1, exp(-0.5) / sum);
  expect_weight(&r, 2, exp(-1) / sum);
  expect_weight(&r, 3, exp(-1.25) / sum);
  ck_assert_int_eq(r.active, 4);
}
END_TEST

START_TEST(softmax_over_all_experts)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  double sum = 0;
  p.renormalize = 0;
  for(int e = 0; e < 16; e++)
    sum += exp((double)some_logits[e]);
  route_one(&p, some_logits, NULL, 2.5f, &r);
  expect_weight(&r, 0, 2.5 * exp(3) / sum);
  expect_weight(&r, 3, 2.5 * exp(1.75) / sum);
  route_one(&p, some_logits, NULL, 0, &r); /* 0 means 1 */
  expect_weight(&r, 0, exp(3) / sum);
}
END_TEST

START_TEST(topk_softmax_normalises_over_the_chosen)
{
  struct mf_problem p = small_problem(), q = p;
  static struct routing_result r, s;
  q.score = MF_SCORE_TOPK_SOFTMAX;
  q.renormalize = 0;
  route_one(&p, some_logits, NULL, 1, &r);
  route_one(&q, some_logits, NULL, 1, &s);
  ck_assert_mem_eq(r.weights, s.weights, 4 * sizeof(float));
}
END_TEST

START_TEST(ties_go_to_the_lowest_expert)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float logits[16] = {0};
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 0, 1, 2, 3);
  expect_weight(&r, 3, 0.25);
  for(int e = 0; e < 16; e++)
    logits[e] = e % 2 == 0 ? -0.0f : 0.0f; /* equal */
  logits[9] = 1;
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 9, 0, 1, 2);
  p.score = MF_SCORE_SIGMOID;
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 9, 0, 1, 2);
}
END_TEST

/* Ids of 4 and their weights, of one token. */
static void route_given(struct mf_problem *p, const int32_t ids[4], const float weights[4], float scaling, struct routing_result *r)
{
  uint32_t block[8];
  memcpy(block, ids, 16);
  memcpy(block + 4, weights, 16);
  p->score = MF_SCORE_GIVEN;
  p->renormalize = 0;
  reference_route(p, 1, block, NULL, scaling, r);
}

START_TEST(given_experts)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  route_given(&p, (const int32_t[4]){5, 0, 15, 7}, (const float[4]){0.5f, -0.25f, 3, 0}, 2, &r);
  EXPECT_IDS(&r, 5, 0, 15, 7);
  expect_weight(&r, 0, 1);
  expect_weight(&r, 1, -0.5);
  expect_weight(&r, 2, 6);
  ck_assert_int_eq(r.active, 4);
  /* named again; none, which weighs nothing */
  route_given(&p, (const int32_t[4]){-1, 9, 3, 9}, (const float[4]){8, 0.5f, 1, 0.125f}, 1, &r);
  EXPECT_IDS(&r, 9, 3, -1, -1);
  expect_weight(&r, 0, 0.625);
  expect_weight(&r, 1, 1);
  expect_weight(&r, 2, 0);
  ck_assert_int_eq(r.active, 2);
  /* not there; a zero expert */
  p.zero_experts = 2;
  route_given(&p, (const int32_t[4]){18, 17, -2, 2}, (const float[4]){1, 1, 1, 1}, 1, &r);
  EXPECT_IDS(&r, -1, 2, -1, -1);
  expect_weight(&r, 0, 0);
  expect_weight(&r, 1, 1);
}
END_TEST

/* Behind the picks, with numbers behind the zero experts'; the scaling is not theirs. */
START_TEST(shared_experts)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float block[2 * 20 + 2] = {0}; /* logits of two tokens with two zero experts each, to a multiple of 16 bytes: gates */
  p.zero_experts = 2;
  p.expert_begin = p.expert_count = 8;
  p.logits_dtype = MF_DTYPE_F32;
  memcpy(block, some_logits, sizeof(some_logits));
  memcpy(block + 18, some_logits, sizeof(some_logits));
  block[16] = block[17] = block[34] = block[35] = -9;
  p.shared_experts = 1;
  reference_route(&p, 2, block, NULL, 2, &r);
  ck_assert_int_eq(r.top_k, 5);
  EXPECT_IDS(&r, 2, 7, 3, 15, 18, 2, 7, 3, 15, 18);
  expect_weight(&r, 4, 1);
  ck_assert_int_eq(r.active, 2); /* 15 and the shared one */
  p.shared_experts = 1 + MF_SHARED_GATED;
  block[36] = 1.5f;
  block[37] = NAN;
  reference_route(&p, 2, block, NULL, 2, &r);
  EXPECT_IDS(&r, 2, 7, 3, 15, 18, 2, 7, 3, 15, 18);
  expect_weight(&r, 4, 1 / (1 + exp(-1.5)));
  expect_weight(&r, 9, 0); /* a NaN selects nothing */
}
END_TEST

START_TEST(nan_is_never_selected)
{
  static struct routing_result r;
  for(int score = MF_SCORE_SOFTMAX; score <= MF_SCORE_TOPK_SOFTMAX; score++) {
    struct mf_problem p = small_problem();
    float logits[16];
    p.score = score;
    memcpy(logits, some_logits, sizeof(logits));
    logits[2] = NAN;
    logits[3] = -NAN;
    route_one(&p, logits, NULL, 1, &r);
    EXPECT_IDS(&r, 7, 15, 5, 14);
    for(int e = 0; e < 16; e++)
      if(e != 6 && e != 13)
        logits[e] = NAN;
    route_one(&p, logits, NULL, 1, &r);
    EXPECT_IDS(&r, 6, 13, -1, -1);
    ck_assert(r.weights[2] == 0 && r.weights[3] == 0);
    ck_assert(fabsf(r.weights[0] + r.weights[1] - 1) < 1e-6f);
    ck_assert_int_eq(r.active, 2);
    logits[6] = logits[13] = NAN;
    route_one(&p, logits, NULL, 1, &r);
    EXPECT_IDS(&r, -1, -1, -1, -1);
    ck_assert_int_eq(r.active, 0);
  }
}
END_TEST

START_TEST(nan_bias_deselects)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float bias[16] = {0};
  p.score = MF_SCORE_SIGMOID;
  p.select_bias = 1;
  bias[2] = NAN;
  route_one(&p, some_logits, bias, 1, &r);
  EXPECT_IDS(&r, 7, 3, 15, 5);
}
END_TEST

START_TEST(neg_inf_is_selected_last_with_weight_zero)
{
  static struct routing_result r;
  for(int score = MF_SCORE_SOFTMAX; score <= MF_SCORE_TOPK_SOFTMAX; score++)
    for(int renormalize = 0; renormalize <= 1; renormalize++) {
      struct mf_problem p = small_problem();
      float logits[16];
      p.score = score;
      p.renormalize = renormalize;
      for(int e = 0; e < 16; e++)
        logits[e] = -INFINITY;
      logits[11] = 0;
      route_one(&p, logits, NULL, 1, &r);
      EXPECT_IDS(&r, 11, 0, 1, 2);
      ck_assert(r.weights[0] > 0);
      for(int j = 1; j < 4; j++)
        ck_assert(r.weights[j] == 0);
      logits[11] = -INFINITY; /* nothing at all: no NaN */
      route_one(&p, logits, NULL, 1, &r);
      EXPECT_IDS(&r, 0, 1, 2, 3);
      for(int j = 0; j < 4; j++)
        ck_assert(r.weights[j] == 0);
    }
}
END_TEST

START_TEST(sigmoid_scores_and_bias)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float bias[16] = {0};
  double sum;
  p.score = MF_SCORE_SIGMOID;
  p.select_bias = 1;
  bias[8] = 2; /* the worst but one becomes the best */
  bias[2] = -2;
  route_one(&p, some_logits, bias, 2.5f, &r);
  EXPECT_IDS(&r, 8, 7, 3, 15);
  sum = 1 / (1 + exp(3)) + 1 / (1 + exp(-2.5)) + 1 / (1 + exp(-2)) + 1 / (1 + exp(-1.75));
  expect_weight(&r, 0, 2.5 / (1 + exp(3)) / sum); /* weighed without the bias */
  expect_weight(&r, 1, 2.5 / (1 + exp(-2.5)) / sum);
  p.renormalize = 0;
  route_one(&p, some_logits, bias, 2.5f, &r);
  expect_weight(&r, 0, 2.5 / (1 + exp(3)));
  route_one(&p, some_logits, NULL, 1, &r); /* no bias given */
  EXPECT_IDS(&r, 2, 7, 3, 15);
  p.select_bias = 0;
  route_one(&p, some_logits, bias, 1, &r); /* a bias that the policy does not have is ignored */
  EXPECT_IDS(&r, 2, 7, 3, 15);
}
END_TEST

START_TEST(groups_by_their_two_best)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  /* group 0: best single expert, weak second; groups 1 and 2: two good ones; group 3: equal to group 2 */
  const float logits[16] = {6, -9, -9, -9, 2, 2, -9, 1, 1, 1.5f, -9, -9, 1.5f, 1, -9, -9};
  p.score = MF_SCORE_SIGMOID;
  p.groups = 4;
  p.groups_kept = 2;
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 4, 5, 9, 7); /* groups 1 and 2: not expert 0, not group 3, whose sum is equal to that of group 2 */
  p.groups_kept = 1;
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 4, 5, 7, 6);
  p.top_k = 6; /* more than the group holds: the rest is none, never another group's */
  route_one(&p, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 4, 5, 7, 6, -1, -1);
}
END_TEST

START_TEST(sqrt_softplus_agrees_with_libm)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  double last = -1;
  p.score = MF_SCORE_SQRT_SOFTPLUS;
  p.renormalize = 0;
  for(double l = -80; l <= 80; l += 0.37) {
    float logits[16];
    double want = sqrt(l > 30 ? l : log1p(exp(l)));
    for(int e = 0; e < 16; e++)
      logits[e] = (float)l;
    want = sqrt(l > 30 ? (double)(float)l : log1p(exp((double)(float)l)));
    route_one(&p, logits, NULL, 1, &r);
    ck_assert_msg(fabs((double)r.weights[0] - want) < 4e-7 * want, "at %g: %.9g, expected %.9g", l, (double)r.weights[0], want);
    ck_assert((double)r.weights[0] >= last);
    last = (double)r.weights[0];
  }
}
END_TEST

START_TEST(softmax_with_bias_selects_by_probability)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float bias[16] = {0};
  double sum = 0;
  for(int e = 0; e < 16; e++)
    sum += exp((double)some_logits[e]);
  p.select_bias = 1;
  p.renormalize = 0;
  bias[13] = 0.2f; /* expert 2 has 0.30, expert 7 has 0.18 */
  route_one(&p, some_logits, bias, 1, &r);
  EXPECT_IDS(&r, 2, 13, 7, 3);
  expect_weight(&r, 1, exp(-4) / sum);
}
END_TEST

START_TEST(zero_experts_take_a_place_and_drop_out)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float logits[20];
  double sum = 0;
  memcpy(logits, some_logits, sizeof(some_logits));
  logits[16] = 2.25f; /* between experts 7 and 3 */
  logits[17] = 9;
  logits[18] = logits[19] = -5;
  p.zero_experts = 4;
  p.renormalize = 0;
  for(int c = 0; c < 20; c++)
    sum += exp((double)logits[c]);
  route_one(&p, logits, NULL, 6, &r);
  EXPECT_IDS(&r, 2, 7, -1, -1);
  expect_weight(&r, 0, 6 * exp(3) / sum);
  expect_weight(&r, 1, 6 * exp(2.5) / sum);
  ck_assert(r.weights[2] == 0);
  ck_assert_int_eq(r.active, 2);
  p.renormalize = 1; /* the sum counts them */
  route_one(&p, logits, NULL, 1, &r);
  expect_weight(&r, 0, exp(3 - 9) / (1 + exp(3 - 9) + exp(2.5 - 9) + exp(2.25 - 9)));
}
END_TEST

/* The bias has a value for every column: it may bring in a zero expert, or keep it out. */
START_TEST(zero_experts_have_a_bias)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float logits[20], bias[20] = {0};
  memcpy(logits, some_logits, sizeof(some_logits));
  logits[16] = logits[17] = logits[18] = logits[19] = -9;
  p.zero_experts = 4;
  p.select_bias = 1;
  p.renormalize = 0;
  bias[18] = 1;
  route_one(&p, logits, bias, 1, &r);
  EXPECT_IDS(&r, 2, 7, 3, -1);
  logits[17] = 4; /* the most probable column of all */
  bias[17] = -2;
  route_one(&p, logits, bias, 1, &r);
  EXPECT_IDS(&r, 2, 7, 3, -1);
}
END_TEST

START_TEST(many_experts_per_token)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  float logits[512];
  for(int top_k = 1; top_k <= MAX_TOP_K; top_k++) {
    double sum = 0, weights = 0;
    p.experts = p.expert_count = 512;
    p.top_k = top_k;
    for(int e = 0; e < 512; e++)
      logits[e] = (float)((e * 193) % 512) / 100.0f;
    for(int j = 0; j < top_k; j++)
      sum += exp(-j / 100.0);
    route_one(&p, logits, NULL, 1, &r);
    for(int j = 0; j < top_k; j++) {
      ck_assert_int_eq(r.ids[j] * 193 % 512, 511 - j);
      ck_assert(fabs((double)r.weights[j] - exp(-j / 100.0) / sum) < 2e-6);
      weights += (double)r.weights[j];
    }
    ck_assert(fabs(weights - 1) < 1e-5);
  }
}
END_TEST

/* ids stay global, 'active' counts this rank's. */
START_TEST(expert_parallel_routing)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  p.expert_begin = 4;
  p.expert_count = 4;
  route_one(&p, some_logits, NULL, 1, &r);
  EXPECT_IDS(&r, 2, 7, 3, 15);
  ck_assert_int_eq(r.active, 1);
}
END_TEST

START_TEST(bf16_logits_are_read_as_such)
{
  struct mf_problem p = small_problem();
  static struct routing_result r;
  uint16_t logits[32];
  for(int i = 0; i < 16; i++) {
    logits[i] = bf16_from_float(some_logits[i]);
    logits[16 + i] = bf16_from_float(some_logits[15 - i]);
  }
  reference_route(&p, 2, logits, NULL, 1, &r);
  EXPECT_IDS(&r, 2, 7, 3, 15, 13, 8, 12, 0);
  ck_assert_int_eq(r.active, 8);
}
END_TEST

static void add_all(TCase *tc)
{
  tcase_add_test(tc, softmax_renormalised);
  tcase_add_test(tc, softmax_over_all_experts);
  tcase_add_test(tc, topk_softmax_normalises_over_the_chosen);
  tcase_add_test(tc, given_experts);
  tcase_add_test(tc, shared_experts);
  tcase_add_test(tc, ties_go_to_the_lowest_expert);
  tcase_add_test(tc, nan_is_never_selected);
  tcase_add_test(tc, nan_bias_deselects);
  tcase_add_test(tc, neg_inf_is_selected_last_with_weight_zero);
  tcase_add_test(tc, sigmoid_scores_and_bias);
  tcase_add_test(tc, groups_by_their_two_best);
  tcase_add_test(tc, sqrt_softplus_agrees_with_libm);
  tcase_add_test(tc, softmax_with_bias_selects_by_probability);
  tcase_add_test(tc, zero_experts_take_a_place_and_drop_out);
  tcase_add_test(tc, zero_experts_have_a_bias);
  tcase_add_test(tc, many_experts_per_token);
  tcase_add_test(tc, expert_parallel_routing);
  tcase_add_test(tc, bf16_logits_are_read_as_such);
}

int main(void)
{
  Suite *suite = suite_create("reference_route");
  TCase *tc = tcase_create("routing");
  SRunner *runner;
  int failed;
  tcase_set_timeout(tc, 120);
  add_all(tc);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
