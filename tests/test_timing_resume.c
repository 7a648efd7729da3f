/* test_timing_resume.c - races that were interrupted, that failed, or that the store knows already: what is measured again (nothing). */
#include "timing_fixture.h"

#include <stdlib.h>

/* ---- resuming ---- */
/* No (candidate, profile, round) twice. */
static void nothing_twice(void)
{
  size_t i, j;
  for(i = 0; i < mem.count; i++)
    for(j = 0; j < i; j++)
      ck_assert(memcmp(&mem.samples[i].candidate_id, &mem.samples[j].candidate_id, sizeof(int64_t)) != 0 || mem.samples[i].tokens != mem.samples[j].tokens ||
                mem.samples[i].routing != mem.samples[j].routing || mem.samples[i].round != mem.samples[j].round);
}

START_TEST(warm_store_measures_nothing)
{
  struct timing_row first[MAX_CANDIDATES];
  const size_t bytes = 20 * sizeof(rows[0]);
  ck_ok(race(20, 4, NULL));
  memcpy(first, rows, bytes);
  dev.rounds_run = dev.profiles_opened = 0;
  ck_ok(race(20, 4, NULL));
  ck_assert_int_eq(dev.rounds_run, 0);
  ck_assert_int_eq(dev.profiles_opened, 0);
  ck_assert_mem_eq(first, rows, bytes);
  ck_ok(race(20, 5, NULL)); /* another profile */
  ck_assert_int_gt(dev.rounds_run, 0);
}
END_TEST

/* Interrupted after every possible number of rounds, then resumed: the same rounds in all, none twice. */
START_TEST(interrupted_and_resumed)
{
  int stop, rounds;
  size_t samples;
  dev.us[1] = 10.2;
  ck_ok(race(6, 4, NULL));
  rounds = dev.rounds_run;
  samples = mem.count;
  ck_assert_int_eq(rounds, ROUNDS);
  for(stop = 1; stop <= rounds; stop++) {
    setup();
    dev.us[1] = 10.2;
    mem.stop_after = stop;
    ck_assert_int_eq(race(6, 4, NULL), MF_ERR_INTERRUPTED);
    ck_assert_int_eq(dev.rounds_run, stop - 1);
    mem.stop_after = 0;
    ck_ok(race(6, 4, NULL));
    ck_assert_int_eq(dev.rounds_run, rounds);
    ck_assert_uint_eq(mem.count, samples);
    nothing_twice();
  }
}
END_TEST

/* Opening builds graphs: once per profile and heat or final. */
START_TEST(profiles_stay_open)
{
  dev.us[1] = 10.2;
  ck_ok(race(2, 4, NULL));
  ck_assert_int_eq(dev.profiles_opened, 8);
  ck_ok(race(6, 5, NULL));
  ck_assert_int_eq(dev.profiles_opened, 8 + 8);
}
END_TEST

START_TEST(new_candidate_runs_alone)
{
  dev.us[1] = 10.2;
  dev.us[2] = 10.1;
  ck_ok(race(2, 4, NULL));
  ck_ok(race(3, 4, NULL));
  nothing_twice();
  ck_assert_int_eq(dev.runs[0], ROUNDS);
  ck_assert_int_eq(dev.runs[2], ROUNDS);
  ck_assert(rows[2].finalist);
}
END_TEST

START_TEST(retime_takes_the_latest)
{
  ck_ok(race(2, 4, NULL));
  dev.us[0] = 20;
  mem.forget = true; /* --retime */
  ck_ok(race(2, 4, NULL));
  mem.forget = false;
  dev.rounds_run = 0;
  ck_ok(race(2, 4, NULL));
  ck_assert_int_eq(dev.rounds_run, 0);
  ck_assert_uint_eq(best_row(2), 1);
}
END_TEST

START_TEST(impossible_samples_are_measured_again)
{
  ck_ok(race(1, 4, NULL));
  mem.samples[0].us = 0;
  mem.samples[1].floors.copy_us = (double)NAN;
  mem.samples[2].round = -1;
  dev.rounds_run = 0;
  ck_ok(race(1, 4, NULL));
  ck_assert_int_eq(dev.rounds_run, 3);
  ck_assert(isfinite(rows[0].objective_us));
}
END_TEST

/* ---- failures ---- */
START_TEST(failures_are_passed_up)
{
  static const enum mf_status failures[] = {MF_ERR_WORKER, MF_ERR_TIMEOUT, MF_ERR_DEVICE};
  size_t i;
  for(i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
    setup();
    dev.fail_at = 3;
    dev.failure = failures[i];
    ck_assert_int_eq(race(4, 4, NULL), failures[i]);
    ck_assert_str_eq(err.text, "scripted failure");
    ck_assert_uint_eq(mem.count, 2U * 4); /* of the rounds before */
    dev.fail_at = 0;
    ck_ok(race(4, 4, NULL));
    nothing_twice();
  }
}
END_TEST

START_TEST(sink_failure_ends_it)
{
  mem.fail_samples_at = 2;
  ck_assert_int_eq(race(4, 4, NULL), MF_ERR_IO);
  ck_assert_int_eq(dev.rounds_run, 2);
}
END_TEST

START_TEST(impossible_time)
{
  dev.bad_us_at = 2;
  ck_assert_int_eq(race(4, 4, NULL), MF_ERR_DEVICE);
  ck_assert_ptr_nonnull(strstr(err.text, "candidate 0"));
  ck_assert_uint_eq(mem.count, 4);
}
END_TEST

int main(void)
{
  static const char *const name = "timing_resume";
  Suite *suite = suite_create(name);
  TCase *tcase = tcase_create(name);
  SRunner *runner;
  const TTest *const tests[] = {
      warm_store_measures_nothing, interrupted_and_resumed, profiles_stay_open, new_candidate_runs_alone, retime_takes_the_latest,
      impossible_samples_are_measured_again, failures_are_passed_up, sink_failure_ends_it, impossible_time,
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
