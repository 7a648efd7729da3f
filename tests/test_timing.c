/* test_timing.c - racing on a scripted device: who wins, who leaves, what drift does (nothing), what it costs. */
#include "timing_fixture.h"

#include <stdlib.h>

static int finalists(size_t count)
{
  int n = 0;
  size_t i;
  for(i = 0; i < count; i++)
    n += rows[i].finalist;
  return n;
}

/* ---- statistics ---- */
static void expect_median(const double *values, size_t count, double median, double low, double high)
{
  double copy[64], got[3];
  memcpy(copy, values, count * sizeof(*values));
  timing_median(copy, count, &got[0], &got[1], &got[2]);
  ck_assert_double_eq(got[0], median);
  ck_assert_double_eq(got[1], low);
  ck_assert_double_eq(got[2], high);
}

START_TEST(median_and_interval)
{
  const double values[20] = {20, 1, 19, 2, 18, 3, 17, 4, 16, 5, 15, 6, 14, 7, 13, 8, 12, 9, 11, 10}, mixed[9] = {5, 3, 9, 1, 7, 2, 8, 4, 6};
  double none[3];
  expect_median(mixed, 1, 5, 5, 5);
  expect_median(mixed, 2, 4, 3, 5);
  expect_median(mixed, 5, 5, 1, 9);
  expect_median(mixed, 6, 4, 1, 9);     /* 96.9 % */
  expect_median(mixed, 8, 4.5, 1, 9);   /* 99.2 %; without the extremes 93.0 % */
  expect_median(mixed, 9, 5, 2, 8);     /* 96.1 % */
  expect_median(values, 20, 10.5, 6, 15); /* 95.9 % */
  timing_median(none, 0, &none[0], &none[1], &none[2]);
  ck_assert(isnan(none[0]) && isnan(none[1]) && isnan(none[2]));
}
END_TEST

/* The interval holds the true median about as often as it says. */
START_TEST(interval_covers)
{
  static const size_t counts[] = {6, 9, 12, 15, 30, 2000};
  size_t i, j;
  int trial;
  dev.noise = 1;
  for(i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
    static double values[2000];
    const int trials = counts[i] > 100 ? 400 : 4000;
    int hits = 0;
    for(trial = 0; trial < trials; trial++) {
      double median, low, high;
      for(j = 0; j < counts[i]; j++)
        values[j] = noise();
      timing_median(values, counts[i], &median, &low, &high);
      hits += low <= 0 && high >= 0;
    }
    ck_assert_msg(hits > trials * 0.94, "%zu values: %d of %d", counts[i], hits, trials);
    ck_assert_msg(hits < trials, "%zu values: interval too wide to be of use", counts[i]);
  }
}
END_TEST

/* ---- the race ---- */
START_TEST(right_winner)
{
  dev.us[7] = 9.9; /* by 1 %, with 0.2 % noise */
  ck_ok(race(20, 4, NULL));
  ck_assert_uint_eq(best_row(20), 7);
  ck_assert_double_eq_tol(rows[7].objective_us, 9.9, 0.03);
  ck_assert_double_le(rows[7].objective_low, rows[7].objective_us);
  ck_assert_double_ge(rows[7].objective_high, rows[7].objective_us);
  ck_assert_double_lt(rows[7].objective_high, rows[0].objective_low);
  ck_assert_double_eq_tol(rows[7].objective_floors.copy_us, 5, 1e-9);
  ck_assert_uint_eq(rows[7].candidate, 7);
}
END_TEST

/* The tensor floor's median is over the rounds that have it; without any it is not known. */
START_TEST(tensor_floor)
{
  ck_ok(race(2, 4, NULL));
  ck_assert(isnan(rows[0].objective_floors.tensor_us) && isnan(rows[0].floors[0].tensor_us));
  ck_assert_double_eq_tol(rows[0].objective_floors.copy_us, 5, 1e-9);
  setup();
  dev.tensor_from = policy.heat_rounds + SECOND_HEATS + policy.final_rounds; /* the last round of the first input: the others have it in all */
  ck_ok(race(2, 4, NULL));
  ck_assert_double_eq_tol(rows[0].floors[0].tensor_us, 6, 1e-9);
  ck_assert_double_eq_tol(rows[0].objective_floors.tensor_us, 6, 1e-9);
  setup();
  dev.tensor_from = policy.heat_rounds + SECOND_HEATS + policy.final_rounds + 1; /* the first input has none: nor has the mix */
  ck_ok(race(2, 4, NULL));
  ck_assert(isnan(rows[0].objective_floors.tensor_us));
  ck_assert_double_eq_tol(rows[0].floors[1].tensor_us, 6, 1e-9);
}
END_TEST

START_TEST(slow_ones_leave)
{
  size_t i;
  dev.us[1] = 10.4;
  ck_ok(race(20, 4, NULL));
  ck_assert(rows[0].finalist && rows[1].finalist);
  for(i = 2; i < 20; i++) {
    ck_assert(!rows[i].finalist);
    ck_assert_int_eq(dev.runs[i], policy.heat_rounds);
    ck_assert(isnan(rows[i].objective_us));
    ck_assert_double_eq_tol(rows[i].median_us[0], 10 + (double)i, 0.2); /* the heat is known */
    ck_assert(isnan(rows[i].median_us[1]));
  }
  ck_assert_int_eq(dev.runs[0], ROUNDS);
}
END_TEST

/* One lucky round is enough to stay: best round against best median. */
START_TEST(best_round_counts)
{
  dev.noise = 0;
  dev.us[1] = 10.59;
  dev.us[2] = 10.61;
  dev.us[3] = 12;
  dev.lucky_us[3] = 10.5;
  ck_ok(race(4, 4, NULL));
  ck_assert(rows[1].finalist);
  ck_assert(!rows[2].finalist);
  ck_assert(rows[3].finalist);
}
END_TEST

START_TEST(default_and_incumbent_never_leave)
{
  bool pinned[20] = {false};
  candidates[15].is_default = true;
  pinned[19] = true;
  ck_ok(race(20, 4, pinned));
  ck_assert(rows[0].finalist && rows[15].finalist && rows[19].finalist);
  ck_assert_int_eq(finalists(20), 3);
  ck_assert(rows[15].is_default && !rows[19].is_default);
  ck_assert_double_eq_tol(rows[15].objective_us, 25, 0.1);
  candidates[15].is_default = false;
  ck_ok(race(20, 4, NULL));
  ck_assert_int_eq(finalists(20), 1);
}
END_TEST

START_TEST(no_more_than_max_finalists)
{
  bool pinned[40] = {false};
  size_t i;
  dev.noise = 0;
  for(i = 0; i < 40; i++)
    dev.us[i] = 10 + 0.001 * (double)i;
  pinned[39] = pinned[38] = true;
  ck_ok(race(40, 4, pinned));
  ck_assert_int_eq(finalists(40), policy.max_finalists);
  for(i = 0; i < 10; i++)
    ck_assert(rows[i].finalist);
  ck_assert(!rows[10].finalist && rows[38].finalist && rows[39].finalist);
  for(i = 0; i < 40; i++)
    pinned[i] = true;
  ck_ok(race(40, 4, pinned)); /* more pinned than places: all stay */
  ck_assert_int_eq(finalists(40), 40);
}
END_TEST

START_TEST(objective_is_the_mix)
{
  dev.noise = 0;
  dev.us[1] = 10.1;
  dev.routing_factor[1][ROUTING_CONCENTRATED] = 0.5; /* slower in the heat, better overall */
  dev.routing_factor[0][ROUTING_DISPERSED] = 2;
  ck_ok(race(2, 4, NULL));
  ck_assert_double_eq_tol(rows[0].objective_us, 10 * (0.4 + 0.3 + 0.1 + 0.2 * 2), 1e-9);
  ck_assert_double_eq_tol(rows[1].objective_us, 10.1 * (0.4 + 0.3 + 0.1 * 0.5 + 0.2), 1e-9);
  ck_assert_double_eq_tol(rows[1].median_us[2], 5.05, 1e-9);
  ck_assert_uint_eq(best_row(2), 1);
}
END_TEST

START_TEST(drift_cancels)
{
  dev.drift = 0.03; /* the machine gets 3 % slower with every round */
  dev.us[1] = 10.1;
  ck_ok(race(2, 4, NULL));
  ck_assert_double_eq_tol(rows[1].objective_us / rows[0].objective_us, 1.01, 0.002);
  ck_assert_double_lt(rows[0].objective_high / rows[0].objective_low, 1.005);
}
END_TEST

/* Far from the best under the first input, by little; the best over the mix: the second heat keeps it. */
START_TEST(second_heat_knows_the_mix)
{
  size_t i;
  dev.noise = 0;
  for(i = 0; i < 40; i++)
    dev.us[i] = 10 + 0.001 * (double)i;
  dev.routing_factor[39][ROUTING_CONCENTRATED] = 0.5;
  ck_ok(race(40, 4, NULL));
  ck_assert_int_eq(finalists(40), policy.max_finalists);
  ck_assert(rows[39].finalist && !rows[policy.max_finalists - 1].finalist);
  ck_assert_uint_eq(best_row(40), 39);
  ck_assert_int_eq(dev.runs[20], policy.heat_rounds + SECOND_HEATS); /* stays for both heats */
}
END_TEST

/* Half of the rounds on a slower machine: neither of two equals is better for it, and the interval does not widen. */
START_TEST(runs_are_not_pooled_blindly)
{
  dev.us[1] = 10.1;
  mem.stop_after = 8; /* after the heats and a round or two */
  ck_assert_int_eq(race(2, 4, NULL), MF_ERR_INTERRUPTED);
  mem.stop_after = 0;
  dev.clock = 1.3;
  ck_ok(race(2, 4, NULL));
  ck_assert_double_eq_tol(rows[1].median_us[0] / rows[0].median_us[0], 1.01, 0.002);
  ck_assert_double_lt(rows[0].high_us[0] / rows[0].low_us[0], 1.005);
}
END_TEST

START_TEST(kernel_that_does_not_take_the_tokens)
{
  candidates[0].recipe.tokens_min = 1;
  candidates[0].recipe.tokens_max = 8;
  candidates[1].recipe.tokens_min = 9;
  candidates[1].recipe.tokens_max = 32;
  ck_assert(timing_takes_tokens(&candidates[0], 8) && !timing_takes_tokens(&candidates[0], 9));
  ck_assert(timing_takes_tokens(&candidates[1], 9) && !timing_takes_tokens(&candidates[1], 8));
  ck_assert(timing_takes_tokens(&candidates[2], 64));
  ck_ok(race(3, 16, NULL));
  ck_assert(!rows[0].finalist && rows[1].finalist);
  ck_assert_int_eq(dev.runs[0], 0);
  ck_assert_int_eq(race(1, 16, NULL), MF_ERR_NOT_FOUND);
}
END_TEST

/* ---- the call ---- */
START_TEST(wrong_arguments)
{
  ck_assert_int_eq(race(0, 4, NULL), MF_ERR_INTERNAL);
  spec.nmix = 0;
  ck_assert_int_eq(race(4, 4, NULL), MF_ERR_INTERNAL);
  spec.nmix = 1;
  policy.heat_rounds = 0;
  ck_assert_int_eq(race(4, 4, NULL), MF_ERR_INTERNAL);
}
END_TEST

START_TEST(progress_is_told)
{
  ck_ok(race(4, 4, NULL));
  ck_assert_str_eq(mem.what, "dispersed");
  ck_assert_uint_eq(mem.total, (size_t)ROUNDS);
  ck_assert_uint_eq(mem.done, mem.total - 1);
}
END_TEST

/* ---- cost ---- */
/* 64 candidates, 8 token counts, 4 routing inputs, the worst case: nobody leaves before max_finalists does it. */
START_TEST(default_policy_is_affordable)
{
  static const double us[8] = {10, 17, 22, 27, 32, 37, 41, 45};
  double spent = 0;
  int t;
  size_t i;
  for(t = 0; t < 8; t++) {
    dev.spent_us = 0;
    for(i = 0; i < 64; i++)
      dev.us[i] = us[t] * (1 + 0.0005 * (double)i);
    ck_ok(race(64, t + 1, NULL));
    ck_assert_int_eq(finalists(64), policy.max_finalists);
    spent += dev.spent_us;
  }
  ck_assert_double_lt(spent / 1e6, 25.0 / 2); /* the other half is for synchronising and storing */
}
END_TEST

int main(void)
{
  static const char *const name = "timing";
  Suite *suite = suite_create(name);
  TCase *tcase = tcase_create(name);
  SRunner *runner;
  const TTest *const tests[] = {
      median_and_interval, interval_covers, right_winner, tensor_floor, slow_ones_leave, best_round_counts,
      default_and_incumbent_never_leave, no_more_than_max_finalists, second_heat_knows_the_mix, objective_is_the_mix, drift_cancels,
      runs_are_not_pooled_blindly, kernel_that_does_not_take_the_tokens, wrong_arguments, progress_is_told, default_policy_is_affordable,
  };
  size_t i;
  int failed;
  tcase_set_timeout(tcase, 60);
  tcase_add_checked_fixture(tcase, setup, NULL);
  for(i = 0; i < sizeof(tests) / sizeof(tests[0]); i++)
    tcase_add_test(tcase, tests[i]);
  suite_add_tcase(suite, tcase);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
