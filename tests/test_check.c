/* test_check.c - do the gates let every right kernel pass and stop every wrong one?
 *
 * "Right" is a second implementation whose sums are those of FP8 tensor cores (model_kernel.h, 13 bits), so that its h differs from the reference's
 * in every tenth element and its end result by 1e-2. "Wrong" is the same with one defect inside, or with one thing changed in what it hands back; a
 * table says for each which gate must be the first to notice, and on which case. */
#include "check.h"
#include "model_kernel.h"

#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYER 1
#define SCALING 1.5f
#define ACCUMULATOR_BITS 13

/* A rank with a straddled 128-block: o = 64, features 0..63 | 64..191. */
static struct mf_problem small_problem(void)
{
  const struct mf_problem p = {.struct_size = sizeof(p), .experts = 16, .top_k = 4, .hidden = 384, .intermediate = 192, .intermediate_offset = 64,
                               .expert_count = 16, .groups = 1, .groups_kept = 1, .renormalize = 1};
  return p;
}

static struct mf_problem sigmoid_problem(void)
{
  struct mf_problem p = small_problem();
  p.score = MF_SCORE_SIGMOID;
  p.select_bias = 1;
  p.groups = 4;
  p.groups_kept = 2;
  p.act_scale = MF_ACT_SCALE_UE8M0;
  p.swiglu_limit = 0.5f;
  return p;
}

struct trial {
  struct mf_problem problem;
  struct test_case tc;
  struct reference_result ref;
  struct model model;
  struct device_output out;
  struct check_result result;
};

static void trial_open(struct trial *t, const struct mf_problem *problem, const struct test_case *tc, enum defect defect)
{
  struct error err = {0};
  memset(t, 0, sizeof(*t));
  t->problem = *problem;
  t->tc = *tc;
  ck_assert_msg(reference_run(&t->problem, SCALING, data_layer_seed(LAYER), tc, &t->ref, &err) == MF_OK, "%s", err.text);
  model_run(&t->model, &t->problem, SCALING, data_layer_seed(LAYER), tc, ACCUMULATOR_BITS, defect);
  model_output(&t->model, &t->out);
  check_begin(&t->result);
}

static void trial_judge(struct trial *t)
{
  struct error err = {0};
  ck_assert_msg(check_judge(&t->problem, data_layer_seed(LAYER), &t->tc, &t->ref, &t->out, &t->result, &err) == MF_OK, "%s", err.text);
}

static void trial_close(struct trial *t)
{
  model_output_free(&t->out);
  model_close(&t->model);
  reference_free(&t->ref);
}

static void expect_failure(const struct trial *t, const char *name, enum gate gate)
{
  ck_assert_msg(!t->result.passed, "%s passed", name);
  ck_assert_msg(t->result.failed_gate == gate, "%s: expected gate %s, got %s (%s)", name, gate_name(gate), gate_name(t->result.failed_gate),
                t->result.detail);
  ck_assert_msg(strncmp(t->result.detail, gate_name(gate), strlen(gate_name(gate))) == 0, "%s", t->result.detail);
  ck_assert(t->result.worst[gate] > gate_limit(gate));
}

/* --- What must pass --- */

static void expect_all_cases_pass(const struct mf_problem *problem, int lo, int hi)
{
  static struct test_case cases[CHECK_MAX_CASES];
  const int count = check_cases(problem, lo, hi, cases, CHECK_MAX_CASES);
  for(int i = 0; i < count; i++) {
    struct trial t;
    trial_open(&t, problem, &cases[i], DEFECT_NONE);
    trial_judge(&t);
    ck_assert_msg(t.result.passed, "%s", t.result.detail);
    trial_close(&t);
  }
}

START_TEST(a_right_kernel_passes_every_case)
{
  const struct mf_problem p = small_problem();
  expect_all_cases_pass(&p, 1, 2);
  expect_all_cases_pass(&p, 5, 5);
}
END_TEST

START_TEST(a_right_kernel_passes_every_case_of_another_policy)
{
  const struct mf_problem p = sigmoid_problem();
  expect_all_cases_pass(&p, 4, 4);
}
END_TEST

START_TEST(a_right_kernel_of_a_rank_passes)
{
  struct mf_problem p = small_problem();
  p.expert_begin = 4;
  p.expert_count = 8;
  expect_all_cases_pass(&p, 4, 4);
}
END_TEST

/* The h of experts elsewhere, and of none, is nobody's business. */
START_TEST(a_right_kernel_with_shared_experts_passes)
{
  struct mf_problem p = small_problem();
  p.shared_experts = 1;
  expect_all_cases_pass(&p, 3, 3);
  p.shared_experts = 2 + MF_SHARED_GATED;
  expect_all_cases_pass(&p, 5, 5);
}
END_TEST

START_TEST(rows_of_other_ranks_are_not_judged)
{
  struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct trial t;
  int others = 0;
  p.expert_begin = 4;
  p.expert_count = 8;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  for(int i = 0; i < 5 * 4; i++) {
    if(t.out.ids[i] >= 4 && t.out.ids[i] < 12)
      continue;
    memset(t.out.h + (size_t)i * 192, 0xFF, 192 * sizeof(*t.out.h));
    others++;
  }
  ck_assert_int_gt(others, 0);
  trial_judge(&t);
  ck_assert_msg(t.result.passed, "%s", t.result.detail);
  trial_close(&t);
}
END_TEST

/* The model is not too good to be true: it differs from the reference as the hardware does (8e-4 in h, 1e-2 in y). */
START_TEST(the_right_kernel_is_not_the_reference)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct trial t;
  double error = 0, square = 0;
  int flips = 0;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  trial_judge(&t);
  ck_assert(t.result.passed);
  for(int i = 0; i < 5 * 4 * 192; i++) {
    const double a = (double)bf16_to_float(t.model.h_bits[i]), b = (double)bf16_to_float(t.ref.h[i]);
    flips += t.model.h_bits[i] != t.ref.h[i];
    error += (a - b) * (a - b);
    square += b * b;
  }
  ck_assert_int_gt(flips, 5 * 4 * 192 / 50);
  ck_assert(sqrt(error / square) > 2e-4 && sqrt(error / square) < 4e-3);
  ck_assert(t.result.worst[GATE_H] > 0 && t.result.worst[GATE_H] < 0.6 * gate_limit(GATE_H));
  ck_assert(t.result.worst[GATE_Y_GIVEN_H] > 0 && t.result.worst[GATE_Y_GIVEN_H] < 0.6 * gate_limit(GATE_Y_GIVEN_H));
  ck_assert(t.result.worst_error > 0.02 && t.result.worst_error < 0.1);
  trial_close(&t);
}
END_TEST

/* Below the floor of the quantisation the right kernel gives zeros: an error of 1 against the unquantised operator, which says nothing of a kernel. */
START_TEST(tiny_inputs_say_nothing_of_the_error)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_TINY_SCALE, 1};
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  trial_judge(&t);
  ck_assert(t.result.passed);
  ck_assert_double_eq(t.result.worst_error, 0);
  trial_close(&t);
}
END_TEST

/* An h with noise of the measured size, requantised by whoever made y. */
START_TEST(noise_in_h_of_the_measured_size_passes)
{
  const struct mf_problem p = small_problem();
  for(uint32_t seed = 1; seed <= 10; seed++) {
    const struct test_case tc = {5, ROUTING_UNIFORM, CASE_NORMAL, seed};
    struct trial t;
    trial_open(&t, &p, &tc, DEFECT_NONE);
    for(int row = 0; row < 5 * 4; row++) {
      double square = 0;
      for(int f = 0; f < 192; f++)
        square += pow((double)t.ref.h_unrounded[row * 192 + f], 2);
      for(int f = 0; f < 192; f++) {
        const double noise = (double)(data_hash(seed, 99, (uint64_t)(row * 192 + f)) >> 11) * 0x1p-52 - 1; /* -1 .. 1 */
        t.model.h_bits[row * 192 + f] = bf16_from_float(t.ref.h_unrounded[row * 192 + f] + (float)(noise * 3e-4 * sqrt(square / 192)));
      }
    }
    memset(t.model.y, 0, 5 * 384 * sizeof(double));
    model_down(&t.model);
    model_output_free(&t.out);
    model_output(&t.model, &t.out);
    trial_judge(&t);
    ck_assert_msg(t.result.passed, "%s", t.result.detail);
    trial_close(&t);
  }
}
END_TEST

/* --- Defects of the computation --- */

static const struct {
  const char *name;
  enum defect defect;
  enum routing_kind routing;
  enum case_data data;
  enum gate gate;
} defects[] = {
  {"a scale of w13 from the next block", DEFECT_S13_NEXT_BLOCK, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"a scale of w2 from the next block", DEFECT_S2_NEXT_BLOCK, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"last k-block of 8 features missing", DEFECT_K_BLOCK_MISSING, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"gate and up swapped", DEFECT_GATE_UP_SWAPPED, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"h truncated to bf16", DEFECT_H_TRUNCATED, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"y truncated to bf16", DEFECT_Y_TRUNCATED, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"y rounded per expert", DEFECT_Y_ROUNDED_TWICE, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"weights of two experts swapped", DEFECT_WEIGHTS_SWAPPED, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"an expert left out", DEFECT_EXPERT_SKIPPED, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"an expert left out, concentrated", DEFECT_EXPERT_SKIPPED, ROUTING_CONCENTRATED, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"another token's h used", DEFECT_H_STALE, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"x not quantised", DEFECT_X_UNQUANTISED, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"h not quantised", DEFECT_H_UNQUANTISED, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
  {"x divided by the scale", DEFECT_X_DIVIDED, ROUTING_UNIFORM, CASE_NORMAL, GATE_H},
  {"no floor under amax", DEFECT_NO_FLOOR, ROUTING_UNIFORM, CASE_TINY_SCALE, GATE_H},
  {"groups of h from the rank's edge", DEFECT_ORIGIN_IGNORED, ROUTING_UNIFORM, CASE_NORMAL, GATE_Y_GIVEN_H},
};

START_TEST(every_defect_is_found_by_its_gate)
{
  const struct mf_problem p = small_problem();
  for(size_t i = 0; i < sizeof(defects) / sizeof(defects[0]); i++) {
    const struct test_case tc = {5, defects[i].routing, defects[i].data, 1};
    struct trial t;
    trial_open(&t, &p, &tc, defects[i].defect);
    trial_judge(&t);
    expect_failure(&t, defects[i].name, defects[i].gate);
    trial_close(&t);
  }
}
END_TEST

START_TEST(a_missing_clamp_is_found)
{
  const struct mf_problem p = sigmoid_problem();
  const struct test_case tc = {4, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_CLAMP_MISSING);
  trial_judge(&t);
  expect_failure(&t, "clamp missing", GATE_H);
  trial_close(&t);
}
END_TEST

/* --- Changes of what is handed back --- */

static void one_wrong_row(struct device_output *o) { o->y[384 + 77] = o->y[384 + 78]; }
static void one_row_off_by_two_percent(struct device_output *o) { o->y[384 + 80] = bf16_from_float(bf16_to_float(o->y[384 + 80]) * 1.02f); }
static void one_bit_of_a_large_row(struct device_output *o)
{
  int largest = 0; /* 8 steps of bf16 */
  for(int r = 1; r < 384; r++)
    largest = (o->y[r] & 0x7FFF) > (o->y[largest] & 0x7FFF) ? r : largest;
  o->y[largest] ^= 8;
}
static void tokens_swapped(struct device_output *o)
{
  for(int r = 0; r < 384; r++) {
    const uint16_t swap = o->y[r];
    o->y[r] = o->y[384 + r];
    o->y[384 + r] = swap;
  }
}
static void sign_of_one_element(struct device_output *o) { o->y[3 * 384 + 5] ^= 0x8000; }
static void token_left_zero(struct device_output *o) { memset(o->y + 4 * 384, 0, 384 * sizeof(*o->y)); }
static void stale_h_row(struct device_output *o) { memcpy(o->h, o->h + 4 * 192, 192 * sizeof(*o->h)); }
static void one_feature_of_h(struct device_output *o)
{
  int largest = 0; /* the row's largest element, one step off */
  for(int f = 1; f < 192; f++)
    largest = (o->h[f] & 0x7FFF) > (o->h[largest] & 0x7FFF) ? f : largest;
  o->h[largest] = (uint16_t)(o->h[largest] + 2);
}
static void rows_of_h_swapped(struct device_output *o)
{
  uint16_t row[192];
  memcpy(row, o->h, sizeof(row));
  memcpy(o->h, o->h + 192, sizeof(row));
  memcpy(o->h + 192, row, sizeof(row));
}
static void y_is_nan(struct device_output *o) { o->y[2 * 384 + 383] = 0x7FC0; }
static void y_is_infinite(struct device_output *o) { o->y[0] = 0xFF80; }
static void h_is_nan(struct device_output *o) { o->h[7 * 192 + 3] = 0xFFFF; }
static void element_not_written(struct device_output *o) { o->y[9] = 0xFFFF, o->poison_left = true; }
static void other_expert(struct device_output *o) { o->ids[5] = o->ids[5] == 15 ? 0 : o->ids[5] + 1; }
static void expert_missing(struct device_output *o) { o->ids[6] = -1; }
static void expert_twice(struct device_output *o) { o->ids[9] = o->ids[8]; }
static void reported_weights_swapped(struct device_output *o)
{
  const float swap = o->weights[0];
  o->weights[0] = o->weights[1];
  o->weights[1] = swap;
}
static void weight_off_by_1e_4(struct device_output *o) { o->weights[13] *= 1.0001f; }
static void weight_is_nan(struct device_output *o) { o->weights[3] = NAN; }
static void replay_differs(struct device_output *o) { o->replays_equal = false; }
static void guard_hit(struct device_output *o) { o->guard_damaged = true; }
static void nan_reported(struct device_output *o) { o->status = 1; }
static void watchdog_fired(struct device_output *o) { o->status = 2; }

#define CHANGE(function, gate) {#function, function, gate}
static const struct {
  const char *name;
  void (*change)(struct device_output *out);
  enum gate gate;
} changes[] = {
  CHANGE(one_wrong_row, GATE_Y_GIVEN_H),       CHANGE(one_row_off_by_two_percent, GATE_Y_GIVEN_H), CHANGE(one_bit_of_a_large_row, GATE_Y_GIVEN_H),
  CHANGE(tokens_swapped, GATE_Y_GIVEN_H),      CHANGE(sign_of_one_element, GATE_Y_GIVEN_H),        CHANGE(token_left_zero, GATE_Y_GIVEN_H),
  CHANGE(stale_h_row, GATE_H),                 CHANGE(one_feature_of_h, GATE_H),                   CHANGE(rows_of_h_swapped, GATE_H),
  CHANGE(y_is_nan, GATE_FINITE),               CHANGE(y_is_infinite, GATE_FINITE),                 CHANGE(h_is_nan, GATE_FINITE),
  CHANGE(element_not_written, GATE_WRITTEN),   CHANGE(other_expert, GATE_ROUTING),                 CHANGE(expert_missing, GATE_ROUTING),
  CHANGE(expert_twice, GATE_ROUTING),          CHANGE(reported_weights_swapped, GATE_WEIGHT),      CHANGE(weight_off_by_1e_4, GATE_WEIGHT),
  CHANGE(weight_is_nan, GATE_WEIGHT),          CHANGE(replay_differs, GATE_REPLAY),                CHANGE(guard_hit, GATE_GUARD),
  CHANGE(nan_reported, GATE_STATUS),           CHANGE(watchdog_fired, GATE_STATUS),
};

START_TEST(every_change_is_found_by_its_gate)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  for(size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
    model_output_free(&t.out);
    model_output(&t.model, &t.out);
    check_begin(&t.result);
    changes[i].change(&t.out);
    trial_judge(&t);
    expect_failure(&t, changes[i].name, changes[i].gate);
  }
  trial_close(&t);
}
END_TEST

/* --- Degenerate cases are judged without tolerance --- */

START_TEST(a_zero_token_must_give_zero)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_ZERO_TOKEN, 2};
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  t.out.y[2 * 384 + 9] = 0x8000; /* -0 is zero */
  trial_judge(&t);
  ck_assert_msg(t.result.passed, "%s", t.result.detail);
  t.out.y[2 * 384 + 9] = 0x0001; /* the least subnormal is not */
  trial_judge(&t);
  expect_failure(&t, "not quite zero", GATE_Y_GIVEN_H);
  ck_assert(isinf(t.result.worst[GATE_Y_GIVEN_H]));
  trial_close(&t);
}
END_TEST

START_TEST(a_token_without_finite_logits_must_give_zero)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {4, ROUTING_UNIFORM, CASE_NEG_INF, 0}; /* token 1 has none */
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  trial_judge(&t);
  ck_assert_msg(t.result.passed, "%s", t.result.detail);
  t.out.weights[4] = 0.25f;
  trial_judge(&t);
  expect_failure(&t, "a weight out of nothing", GATE_WEIGHT);
  trial_close(&t);
}
END_TEST

/* --- The end gate, which the staged gates leave little to do --- */

START_TEST(the_end_gate_can_fail)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {3, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct trial t;
  trial_open(&t, &p, &tc, DEFECT_NONE);
  for(int r = 0; r < 384; r++) { /* token 1: as if the faithful reference were right and the kernel were not */
    const int i = 384 + r;
    t.ref.y_unquantised[i] = 0.9f * bf16_to_float(t.out.y[i]);
    t.ref.y[i] = 0.95f * t.ref.y_unquantised[i];
  }
  trial_judge(&t);
  expect_failure(&t, "end to end", GATE_END);
  ck_assert_msg(strstr(t.result.detail, "token 1") != NULL, "%s", t.result.detail);
  trial_close(&t);
}
END_TEST

/* --- Bookkeeping --- */

START_TEST(the_first_failure_is_kept_and_the_worst_values_go_on)
{
  const struct mf_problem p = small_problem();
  const struct test_case tc = {5, ROUTING_UNIFORM, CASE_NORMAL, 1};
  struct strbuf text;
  struct trial t;
  char first[256];
  trial_open(&t, &p, &tc, DEFECT_NONE);
  weight_off_by_1e_4(&t.out);
  trial_judge(&t);
  expect_failure(&t, "weight", GATE_WEIGHT);
  ck_assert_msg(strstr(t.result.detail, "(B=5 uniform normal seed 1)") != NULL, "%s", t.result.detail);
  ck_assert_msg(strstr(t.result.detail, "token 3 expert") != NULL, "%s", t.result.detail);
  ck_assert(t.result.worst[GATE_H] > 0 && t.result.worst[GATE_END] > 0); /* later gates are measured all the same */
  memcpy(first, t.result.detail, sizeof(first));
  t.out.replays_equal = false;
  trial_judge(&t);
  ck_assert_int_eq(t.result.failed_gate, GATE_WEIGHT);
  ck_assert_str_eq(t.result.detail, first);
  ck_assert(t.result.worst[GATE_REPLAY] == 1);
  strbuf_init(&text, 10000);
  check_summary(&t.result, &text);
  for(int g = 0; g < GATES; g++)
    ck_assert(strstr(strbuf_text(&text), gate_name((enum gate)g)) != NULL);
  ck_assert(strstr(strbuf_text(&text), "FAILED") != NULL && strstr(strbuf_text(&text), "clean") != NULL);
  strbuf_free(&text);
  trial_close(&t);
}
END_TEST

START_TEST(cases_cover_every_kind_and_stay_within_bounds)
{
  const struct mf_problem p = small_problem();
  static struct test_case cases[CHECK_MAX_CASES];
  bool kinds[ROUTING_KINDS] = {false}, data[CASE_DATA_KINDS] = {false};
  int count = check_cases(&p, 8, 8, cases, CHECK_MAX_CASES), last = 0;
  for(int i = 0; i < count; i++) {
    kinds[cases[i].routing] = data[cases[i].data] = true;
    ck_assert_int_eq(cases[i].tokens, 8);
    for(int j = 0; j < i; j++)
      ck_assert(memcmp(&cases[i], &cases[j], sizeof(cases[i])) != 0);
  }
  for(int k = 0; k < ROUTING_KINDS; k++)
    ck_assert(kinds[k]);
  for(int d = 0; d < CASE_DATA_KINDS; d++)
    ck_assert(data[d]);
  count = check_cases(&p, 1, MAX_TOKENS, cases, CHECK_MAX_CASES);
  ck_assert_int_lt(count, CHECK_MAX_CASES);
  for(int i = 0; i < count; i++)
    last = cases[i].tokens > last ? cases[i].tokens : last;
  ck_assert_int_eq(last, MAX_TOKENS);
  ck_assert_int_eq(check_cases(&p, 33, 33, cases, CHECK_MAX_CASES), check_cases(&p, 8, 8, cases, CHECK_MAX_CASES));
  ck_assert_int_eq(check_cases(&p, 1, 8, cases, 5), 5);
}
END_TEST

START_TEST(names_and_limits)
{
  ck_assert_str_eq(gate_name(GATE_Y_GIVEN_H), "y_given_h");
  ck_assert_str_eq(gate_name((enum gate)99), "?");
  ck_assert(gate_limit(GATE_END) == 1.05);
  ck_assert(gate_limit(GATE_REPLAY) == 0 && gate_limit((enum gate)99) == 0);
}
END_TEST

static void add_all(TCase *tc)
{
  tcase_add_test(tc, a_right_kernel_passes_every_case);
  tcase_add_test(tc, a_right_kernel_passes_every_case_of_another_policy);
  tcase_add_test(tc, a_right_kernel_of_a_rank_passes);
  tcase_add_test(tc, a_right_kernel_with_shared_experts_passes);
  tcase_add_test(tc, rows_of_other_ranks_are_not_judged);
  tcase_add_test(tc, the_right_kernel_is_not_the_reference);
  tcase_add_test(tc, tiny_inputs_say_nothing_of_the_error);
  tcase_add_test(tc, noise_in_h_of_the_measured_size_passes);
  tcase_add_test(tc, every_defect_is_found_by_its_gate);
  tcase_add_test(tc, a_missing_clamp_is_found);
  tcase_add_test(tc, every_change_is_found_by_its_gate);
  tcase_add_test(tc, a_zero_token_must_give_zero);
  tcase_add_test(tc, a_token_without_finite_logits_must_give_zero);
  tcase_add_test(tc, the_end_gate_can_fail);
  tcase_add_test(tc, the_first_failure_is_kept_and_the_worst_values_go_on);
  tcase_add_test(tc, cases_cover_every_kind_and_stay_within_bounds);
  tcase_add_test(tc, names_and_limits);
}

int main(void)
{
  Suite *suite = suite_create("check");
  TCase *tc = tcase_create("gates");
  SRunner *runner;
  int failed;
  tcase_set_timeout(tc, 600);
  add_all(tc);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
