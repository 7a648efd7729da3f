/* test_datagen_logits.c - router logits: each routing kind is what its name says under every policy, and the experts expected to become active do. */
#include "datagen.h"
#include "problem_fixture.h"
#include "reference.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>

static struct mf_problem grouped_problem(void)
{
  struct mf_problem p = plain_problem();
  p.score = MF_SCORE_SIGMOID;
  p.select_bias = 1;
  p.groups = 8;
  p.groups_kept = 4;
  return p;
}

/* --- Routing kinds --- */

static void route(const struct mf_problem *p, const struct test_case *tc, struct routing_result *out)
{
  static float bias[DATA_MAX_LOGITS];
  float *logits = malloc((size_t)tc->tokens * (size_t)(p->experts + p->zero_experts) * sizeof(float));
  data_logits(p, tc, logits);
  data_bias(data_layer_seed(0), p->experts, bias);
  reference_route(p, tc->tokens, logits, bias, 1.0f, out);
  free(logits);
}

/* Problems of every policy family. */
static int policy_problems(struct mf_problem *out)
{
  int count = 0;
  for(int score = MF_SCORE_SOFTMAX; score <= MF_SCORE_TOPK_SOFTMAX; score++) {
    for(int variant = 0; variant < 4; variant++) {
      struct mf_problem p = variant & 2 ? grouped_problem() : plain_problem();
      p.score = score;
      p.select_bias = variant & 1;
      out[count++] = p;
    }
  }
  out[count] = plain_problem();
  out[count++].zero_experts = 128;
  out[count] = plain_problem();
  out[count++].logits_dtype = MF_DTYPE_F32;
  return count;
}

START_TEST(concentrated_chooses_the_same_experts_under_every_policy)
{
  struct mf_problem problems[32];
  static struct routing_result routing;
  const int count = policy_problems(problems);
  for(int i = 0; i < count; i++)
    for(uint32_t seed = 1; seed < 6; seed++) {
      const struct test_case tc = {.tokens = 8, .routing = ROUTING_CONCENTRATED, .seed = seed};
      route(&problems[i], &tc, &routing);
      ck_assert_int_eq(routing.active, problems[i].top_k);
      for(int j = 0; j < 64; j++)
        ck_assert_int_ge(routing.ids[j], 0);
    }
}
END_TEST

START_TEST(dispersed_is_disjoint_under_every_policy)
{
  struct mf_problem problems[32];
  static struct routing_result routing;
  const int count = policy_problems(problems);
  for(int i = 0; i < count; i++)
    for(int tokens = 1; tokens <= 40; tokens += 13) {
      const struct test_case tc = {.tokens = tokens, .routing = ROUTING_DISPERSED, .seed = 3};
      const int want = tokens * 8 < 256 ? tokens * 8 : 256;
      route(&problems[i], &tc, &routing);
      ck_assert_int_eq(routing.active, want);
      ck_assert(data_expected_active(&problems[i], tokens, ROUTING_DISPERSED) == want);
    }
}
END_TEST

/* One group may be chosen from: tokens stay disjoint within their groups. */
START_TEST(dispersed_goes_as_far_as_groups_allow)
{
  static struct routing_result routing;
  struct mf_problem p = grouped_problem();
  p.groups = 32;
  p.groups_kept = 1;
  for(int tokens = 1; tokens <= 64; tokens *= 4) {
    const struct test_case tc = {.tokens = tokens, .routing = ROUTING_DISPERSED, .seed = 8};
    route(&p, &tc, &routing);
    ck_assert(data_expected_active(&p, tokens, ROUTING_DISPERSED) == routing.active);
    for(int t = 0; t < tokens; t++)
      for(int j = 0; j < 8; j++)
        ck_assert_int_eq(routing.ids[t * 8 + j] / 8, routing.ids[t * 8] / 8);
  }
}
END_TEST

START_TEST(ties_have_few_values_and_both_zeros)
{
  struct mf_problem p = plain_problem();
  const struct test_case tc = {.tokens = 8, .routing = ROUTING_TIES, .seed = 2};
  static uint16_t logits[8 * 256];
  long seen[65536] = {0};
  int values = 0;
  data_logits(&p, &tc, logits);
  for(int i = 0; i < 8 * 256; i++)
    values += seen[logits[i]]++ == 0;
  ck_assert_int_eq(values, 5);
  ck_assert_int_gt(seen[0x0000], 0);
  ck_assert_int_gt(seen[0x8000], 0);
}
END_TEST

static int count_finite(const uint16_t *logits, int columns)
{
  int finite = 0;
  for(int c = 0; c < columns; c++) {
    ck_assert_msg((logits[c] & 0x7F80) != 0x7F80 || logits[c] == 0xFF80, "neither finite nor -inf: 0x%04x", logits[c]);
    finite += logits[c] != 0xFF80;
  }
  return finite;
}

START_TEST(neg_inf_leaves_enough_but_for_two_tokens)
{
  struct mf_problem p = plain_problem();
  static uint16_t logits[8 * 256];
  for(int tokens = 1; tokens <= 8; tokens++)
    for(uint32_t seed = 0; seed < 4; seed++) {
      const struct test_case tc = {.tokens = tokens, .routing = ROUTING_ZIPF, .data = CASE_NEG_INF, .seed = seed};
      const int victim = (int)(seed % (uint32_t)tokens);
      data_logits(&p, &tc, logits);
      for(int t = 0; t < tokens; t++) {
        const int finite = count_finite(logits + t * 256, 256);
        if(t == victim)
          ck_assert_int_eq(finite, p.top_k - 1);
        else if(tokens >= 3 && t == (victim + 1) % tokens)
          ck_assert_int_eq(finite, 0);
        else
          ck_assert_int_eq(finite, 192);
      }
    }
}
END_TEST

START_TEST(f32_logits_are_the_unrounded_bf16_logits)
{
  struct mf_problem p = plain_problem(), q = p;
  const struct test_case tc = {.tokens = 3, .routing = ROUTING_ZIPF, .seed = 1};
  static uint16_t rounded[3 * 256];
  static float plain[3 * 256];
  q.logits_dtype = MF_DTYPE_F32;
  data_logits(&p, &tc, rounded);
  data_logits(&q, &tc, plain);
  for(int i = 0; i < 3 * 256; i++)
    ck_assert_uint_eq(rounded[i], bf16_from_float(plain[i]));
}
END_TEST

/* The most popular expert is chosen by nearly everybody, the least popular by nearly nobody. */
START_TEST(zipf_has_popular_experts)
{
  struct mf_problem p = plain_problem();
  static struct routing_result routing;
  int times[256] = {0}, most = 0, never = 0;
  const struct test_case tc = {.tokens = 64, .routing = ROUTING_ZIPF, .seed = 11};
  route(&p, &tc, &routing);
  for(int i = 0; i < 64 * 8; i++)
    times[routing.ids[i]]++;
  for(int e = 0; e < 256; e++) {
    most = times[e] > most ? times[e] : most;
    never += times[e] == 0;
  }
  ck_assert_int_ge(most, 40); /* p = 1 / H(256) = 0.16 per draw, eight draws without replacement */
  ck_assert_int_ge(never, 60);
}
END_TEST

/* --- Expected active experts --- */

static double mean_active(const struct mf_problem *p, int tokens, enum routing_kind kind, int draws)
{
  static struct routing_result routing;
  double sum = 0;
  for(int i = 0; i < draws; i++) {
    const struct test_case tc = {.tokens = tokens, .routing = kind, .seed = 1000u + (uint32_t)i};
    route(p, &tc, &routing);
    sum += routing.active;
  }
  return sum / draws;
}

START_TEST(expected_active_agrees_with_many_draws)
{
  struct mf_problem problems[3] = {plain_problem(), grouped_problem(), plain_problem()};
  problems[2].expert_begin = 64;
  problems[2].expert_count = 64;
  for(int i = 0; i < 3; i++)
    for(int tokens = 1; tokens <= 16; tokens *= 4) {
      const double uniform = mean_active(&problems[i], tokens, ROUTING_UNIFORM, 150), zipf = mean_active(&problems[i], tokens, ROUTING_ZIPF, 150);
      ck_assert(fabs(data_expected_active(&problems[i], tokens, ROUTING_UNIFORM) / uniform - 1) < 0.05);
      ck_assert(fabs(data_expected_active(&problems[i], tokens, ROUTING_ZIPF) / zipf - 1) < (i == 2 ? 0.25 : 0.08)); /* few experts: noisy */
    }
  ck_assert(fabs(data_expected_active(&problems[0], 8, ROUTING_UNIFORM) - 57.42) < 0.01);
  ck_assert(data_expected_active(&problems[0], 8, ROUTING_CONCENTRATED) == 8);
  ck_assert(data_expected_active(&problems[2], 8, ROUTING_CONCENTRATED) == 2);
  ck_assert(data_expected_active(&problems[0], 64, ROUTING_DISPERSED) == 256);
  ck_assert(data_expected_active(&problems[0], 8, ROUTING_ZIPF) == data_expected_active(&problems[0], 8, ROUTING_ZIPF));
  ck_assert(data_expected_active(&problems[0], 8, ROUTING_ZIPF) < data_expected_active(&problems[0], 8, ROUTING_UNIFORM));
}
END_TEST

/* ---- what an engine passes that has routed ---- */
/* Ids that are none, and ids that a token has named before, of all tokens of a case. */
static void count_given(enum routing_kind routing, enum case_data data, int *none, int *again)
{
  const struct mf_problem p = {.struct_size = sizeof(p), .experts = 64, .top_k = 6, .hidden = 256, .intermediate = 64, .expert_count = 64, .groups = 1,
                               .groups_kept = 1, .score = MF_SCORE_GIVEN};
  const struct test_case tc = {.tokens = 4, .routing = routing, .data = data, .seed = 3};
  int32_t ids[4 * 6 * 2];
  *none = *again = 0;
  ck_assert_uint_eq(data_logits_bytes(&p, 4), sizeof(ids));
  data_logits(&p, &tc, ids);
  for(int i = 0; i < 24; i++) {
    bool before = false;
    ck_assert(ids[i] >= -1 && ids[i] < 64);
    for(int j = i / 6 * 6; j < i; j++)
      before = before || ids[j] == ids[i];
    *none += ids[i] < 0;
    *again += ids[i] >= 0 && before;
  }
}

START_TEST(given_ids_of_every_kind)
{
  int none, again;
  count_given(ROUTING_UNIFORM, CASE_NORMAL, &none, &again);
  ck_assert(none == 0 && again == 0);
  count_given(ROUTING_CONCENTRATED, CASE_NORMAL, &none, &again);
  ck_assert(none == 0 && again == 0);
  count_given(ROUTING_TIES, CASE_NORMAL, &none, &again);
  ck_assert(none == 0 && again == 8);
  count_given(ROUTING_UNIFORM, CASE_NEG_INF, &none, &again);
  ck_assert(none == 7 && again == 0); /* one of a token, all of the next */
}
END_TEST

/* Gates lie behind the logits and do not change them; shared experts are always active. */
START_TEST(gates_of_shared_experts)
{
  struct mf_problem p = {.struct_size = sizeof(p), .experts = 20, .top_k = 2, .hidden = 256, .intermediate = 64, .expert_count = 20, .groups = 1,
                         .groups_kept = 1};
  const struct test_case tc = {.tokens = 3, .routing = ROUTING_UNIFORM, .data = CASE_NEG_INF, .seed = 4};
  uint16_t plain[3 * 20], gated[3 * 20 + 4 + 3 * 2];
  const double active = data_expected_active(&p, 3, ROUTING_ZIPF);
  struct mf_call call = {.tokens = 3};
  data_logits(&p, &tc, plain);
  p.shared_experts = 2 + MF_SHARED_GATED;
  ck_assert_uint_eq(data_logits_bytes(&p, 3), sizeof(gated));
  data_logits(&p, &tc, gated);
  ck_assert_mem_eq(plain, gated, sizeof(plain));
  for(int i = 0; i < 6; i++)
    ck_assert((i / 2 == 1) == (data_gate_at(&p, gated, 3, i) == -INFINITY));
  data_logits_call(&p, (uint64_t)(uintptr_t)gated, &call);
  ck_assert_ptr_eq(call.logits, gated);
  ck_assert_ptr_eq(call.shared_gate, gated + 64);
  ck_assert(data_expected_active(&p, 3, ROUTING_ZIPF) == active + 2);
}
END_TEST

static void add_all(TCase *tc)
{
  tcase_add_test(tc, concentrated_chooses_the_same_experts_under_every_policy);
  tcase_add_test(tc, dispersed_is_disjoint_under_every_policy);
  tcase_add_test(tc, dispersed_goes_as_far_as_groups_allow);
  tcase_add_test(tc, ties_have_few_values_and_both_zeros);
  tcase_add_test(tc, neg_inf_leaves_enough_but_for_two_tokens);
  tcase_add_test(tc, f32_logits_are_the_unrounded_bf16_logits);
  tcase_add_test(tc, zipf_has_popular_experts);
  tcase_add_test(tc, expected_active_agrees_with_many_draws);
  tcase_add_test(tc, given_ids_of_every_kind);
  tcase_add_test(tc, gates_of_shared_experts);
}

int main(void)
{
  Suite *suite = suite_create("datagen_logits");
  TCase *tc = tcase_create("logits");
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
