/* test_select.c - which candidate wins at which token counts: ties, neighbours, the default, intervals, regret, predictions. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "datagen.h"
#include "family.h"
#include "select.h"
#include "spec.h"

#define MAX_C 16

/* ---- a family whose cost model is its knob ---- */
static double knob_us(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, int tokens, double active)
{
  (void)problem;
  (void)dev;
  /* Knob 1: microseconds per active expert; knob 2: per token. */
  return 1 + active * sched->value[1] + (double)tokens * sched->value[2];
}

static void first_default(const struct mf_problem *problem, int tokens, const struct device_info *dev, struct schedule *out);

static const struct knob fake_knobs[] = {{.name = "ring_stages", .tag = "ring", .nvalues = 4, .values = {2, 4, 6, 8}},
                                         {.name = "expert_us", .tag = "e", .nvalues = 4, .values = {1, 2, 3, 4}},
                                         {.name = "token_us", .tag = "t", .nvalues = 4, .values = {0, 1, 2, 50}}};
static const struct family_ops fake = {.name = "fake", .knobs = fake_knobs, .nknobs = 3, .default_schedule = first_default, .predict_us = knob_us};

static void first_default(const struct mf_problem *problem, int tokens, const struct device_info *dev, struct schedule *out)
{
  (void)problem;
  (void)tokens;
  (void)dev;
  *out = (struct schedule){.family = &fake, .value = {8, 4, 2}};
}

/* ---- a table of times ---- */
static struct model_spec spec;
static struct candidate candidates[MAX_C];
static struct timing_row table[MAX_TOKEN_COUNTS][MAX_C];
static const struct timing_row *rows[MAX_TOKEN_COUNTS];
static struct winner winners[MAX_TOKEN_COUNTS];
static int nwinners;
static struct error err;

#define ck_ok(call) ck_assert_msg((call) == MF_OK, "%s: %s", #call, err.text)

static void setup(void)
{
  int t, i;
  memset(&spec, 0, sizeof(spec));
  memset(candidates, 0, sizeof(candidates));
  memset(table, 0, sizeof(table));
  snprintf(spec.name, sizeof(spec.name), "shape");
  spec.nmix = 1;
  spec.mix[0] = (struct routing_weight){ROUTING_UNIFORM, 1};
  for(i = 0; i < MAX_C; i++) {
    snprintf(candidates[i].name, sizeof(candidates[i].name), "c%02d", i);
    candidates[i].id = 100 + i;
    candidates[i].schedule = (struct schedule){.family = &fake, .value = {4, 1, 0}};
  }
  for(t = 0; t < MAX_TOKEN_COUNTS; t++)
    rows[t] = table[t];
}

/* Candidate i is a finalist at the t-th token count, with an interval of +- width. */
static void timed(int t, int i, double us, double width)
{
  struct timing_row *row = &table[t][i];
  *row = (struct timing_row){.candidate = (size_t)i, .finalist = true, .is_default = row->is_default, .objective_us = us, .objective_low = us - width,
                             .objective_high = us + width, .objective_floors = {5, 6}};
  row->median_us[0] = us;
}

static enum mf_status choose(const int *tokens, int ntokens, size_t count)
{
  err.text[0] = '\0';
  return select_winners(&spec, tokens, ntokens, candidates, count, rows, winners, &nwinners, &err);
}

/* "c00:1-2 c03:3-8" */
static const char *chosen(void)
{
  static char text[512];
  int i;
  size_t used = 0;
  text[0] = '\0';
  for(i = 0; i < nwinners; i++)
    used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s:%d-%d", i > 0 ? " " : "", winners[i].schedule_name, winners[i].tokens_min,
                             winners[i].tokens_max);
  return text;
}

static const int one_count[] = {1};

START_TEST(fastest_wins)
{
  timed(0, 0, 12, 0.01);
  timed(0, 1, 10, 0.01);
  timed(0, 2, 11, 0.01);
  ck_ok(choose(one_count, 1, 3));
  ck_assert_str_eq(chosen(), "c01:1-1");
  ck_assert_int_eq(winners[0].candidate_id, 101);
  ck_assert_double_eq(winners[0].us, 10);
  ck_assert_double_eq(winners[0].us_low, 9.99);
  ck_assert_double_eq(winners[0].us_high, 10.01);
  ck_assert_double_eq(winners[0].floor_us, 5);
  ck_assert_double_eq(winners[0].floors.copy_us, 5);
  ck_assert_double_eq(winners[0].floors.tensor_us, 6);
  ck_assert_double_eq(winners[0].default_us, 0);
  ck_assert_double_eq(winners[0].regret, 1);
  ck_assert(!winners[0].predicted);
}
END_TEST

START_TEST(only_finalists_win)
{
  timed(0, 0, 12, 0.01);
  timed(0, 1, 10, 0.01);
  table[0][1].finalist = false;
  timed(0, 2, (double)NAN, 0.01);
  timed(0, 3, 8, 0.01);
  candidates[3].recipe.tokens_min = 2; /* does not take one token */
  ck_ok(choose(one_count, 1, 4));
  ck_assert_str_eq(chosen(), "c00:1-1");
  table[0][0].finalist = false;
  ck_assert_int_eq(choose(one_count, 1, 4), MF_ERR_NOT_FOUND);
  ck_assert_ptr_nonnull(strstr(err.text, "at 1 tokens"));
}
END_TEST

/* Ties: fewest stages, then least shared memory, then the name. */
START_TEST(ties_are_resolved)
{
  timed(0, 0, 10.00, 0.01);
  timed(0, 1, 10.04, 0.01); /* within 0.5 % */
  timed(0, 2, 10.15, 0.20); /* its interval reaches the best */
  timed(0, 3, 10.15, 0.01); /* neither */
  timed(0, 4, 10.30, 1.00); /* reaches, but is 3 % slower: noise, no tie */
  candidates[3].schedule.value[0] = candidates[4].schedule.value[0] = 1;
  candidates[2].schedule.value[0] = 2;
  ck_ok(choose(one_count, 1, 5));
  ck_assert_str_eq(chosen(), "c02:1-1");
  candidates[2].schedule.value[0] = 4;
  candidates[1].recipe.shared_bytes = 100;
  candidates[0].recipe.shared_bytes = candidates[2].recipe.shared_bytes = 200;
  ck_ok(choose(one_count, 1, 5));
  ck_assert_str_eq(chosen(), "c01:1-1");
  candidates[1].recipe.shared_bytes = 200;
  ck_ok(choose(one_count, 1, 5));
  ck_assert_str_eq(chosen(), "c00:1-1");
  candidates[4].schedule.family = candidates[0].schedule.family = NULL; /* a family without that knob */
  ck_ok(choose(one_count, 1, 5));
  ck_assert_str_eq(chosen(), "c00:1-1");
}
END_TEST

/* The order of the candidates does not matter. */
START_TEST(deterministic)
{
  int turn, i;
  for(turn = 0; turn < 5; turn++) {
    setup();
    for(i = 0; i < 5; i++) {
      const int name = (i + turn) % 5;
      snprintf(candidates[i].name, sizeof(candidates[i].name), "name%d", name);
      timed(0, i, 10 + 0.001 * name, 0.01);
    }
    ck_ok(choose(one_count, 1, 5));
    ck_assert_str_eq(chosen(), "name0:1-1");
  }
}
END_TEST

START_TEST(default_wins_ties)
{
  timed(0, 0, 10.00, 0.01);
  timed(0, 1, 10.04, 0.01);
  table[0][1].is_default = true;
  candidates[1].schedule.value[0] = 8;
  ck_ok(choose(one_count, 1, 2));
  ck_assert_str_eq(chosen(), "c01:1-1");
  ck_assert_double_eq(winners[0].default_us, 10.04);
  timed(0, 1, 10.06, 0.01); /* better by more than the tie */
  ck_ok(choose(one_count, 1, 2));
  ck_assert_str_eq(chosen(), "c00:1-1");
  ck_assert_double_eq(winners[0].default_us, 10.06);
}
END_TEST

/* A tie that is slower than the default is in no set, however few stages it has. */
START_TEST(never_slower_than_the_default)
{
  timed(0, 0, 10.00, 0.01);
  timed(0, 1, 10.06, 0.01);
  table[0][1].is_default = true;
  timed(0, 2, 10.10, 0.20);
  candidates[2].schedule.value[0] = 2;
  ck_ok(choose(one_count, 1, 3));
  ck_assert_str_eq(chosen(), "c00:1-1");
  table[0][1].is_default = false;
  ck_ok(choose(one_count, 1, 3));
  ck_assert_str_eq(chosen(), "c02:1-1");
}
END_TEST

/* Never slower, on random tables. */
START_TEST(never_slower_on_random_tables)
{
  static const int tokens[] = {1, 2, 4, 8};
  unsigned random = 99;
  int trial, t, i;
  for(trial = 0; trial < 2000; trial++) {
    setup();
    for(t = 0; t < 4; t++)
      for(i = 0; i < 8; i++) {
        random = random * 1664525u + 1013904223u;
        table[t][i].is_default = i == trial % 8;
        timed(t, i, 10 + (random >> 24) / 256.0 * 0.4, (random >> 16 & 255) / 256.0 * 0.3);
        candidates[i].schedule.value[0] = (int)(random >> 10 & 3) * 2 + 2;
      }
    ck_ok(choose(tokens, 4, 8));
    for(t = 0; t < nwinners; t++)
      ck_assert_double_le(winners[t].us, winners[t].default_us);
    ck_assert_int_eq(winners[0].tokens_min, 1);
    ck_assert_int_eq(winners[nwinners - 1].tokens_max, 8);
    for(t = 1; t < nwinners; t++)
      ck_assert_int_eq(winners[t].tokens_min, winners[t - 1].tokens_max + 1);
  }
}
END_TEST

START_TEST(neighbours_decide_ties)
{
  static const int tokens[] = {1, 2, 3};
  int t;
  for(t = 0; t < 3; t++) {
    timed(t, 0, 20, 0.01);
    timed(t, 1, 20, 0.01);
    timed(t, 2, 20, 0.01);
  }
  timed(1, 0, 10.00, 0.01);
  timed(1, 1, 10.01, 0.01); /* ties at 2 and, alone, at 3 */
  timed(2, 1, 10.00, 0.01);
  candidates[0].schedule.value[0] = 2;
  candidates[2].schedule.value[0] = 1;
  timed(0, 2, 15.00, 0.01);
  ck_ok(choose(tokens, 3, 3));
  ck_assert_str_eq(chosen(), "c02:1-1 c01:2-2 c01:3-3");
  ck_assert_double_eq(winners[1].us, 10.01);
  ck_assert_double_eq(winners[2].us, 10);
}
END_TEST

START_TEST(intervals)
{
  static const int tokens[] = {1, 2, 4, 8};
  int t;
  for(t = 0; t < 4; t++) {
    timed(t, 0, t < 2 ? 10 + t : 20, 0.01);
    timed(t, 1, t < 2 ? 20 : 10 + t, 0.01);
  }
  ck_ok(choose(tokens, 4, 2));
  ck_assert_str_eq(chosen(), "c00:1-1 c00:2-2 c01:3-4 c01:5-8"); /* each count keeps its own times */
  ck_assert_double_eq(winners[1].us, 11);
  ck_assert_int_eq(winners[1].tokens_timed, 2);
  ck_assert_double_eq(winners[3].us, 13);
  candidates[1].recipe.tokens_min = 4; /* 3 tokens are beyond this kernel */
  ck_ok(choose(tokens, 4, 2));
  ck_assert_str_eq(chosen(), "c00:1-1 c00:2-2 c01:4-4 c01:5-8");
}
END_TEST

/* A call for one bucket of the spec begins after the counts of the bucket before. */
START_TEST(buckets_meet)
{
  static const int all[] = {1, 2, 4, 8, 16, 32}, bucket[] = {16, 32}, alone[] = {4};
  memcpy(spec.tokens, all, sizeof(all));
  spec.ntokens = 6;
  timed(0, 0, 10, 0.01);
  timed(1, 0, 11, 0.01);
  ck_ok(choose(bucket, 2, 1));
  ck_assert_str_eq(chosen(), "c00:9-16 c00:17-32");
  ck_ok(choose(alone, 1, 1));
  ck_assert_str_eq(chosen(), "c00:3-4");
  spec.ntokens = 0;
  ck_ok(choose(alone, 1, 1));
  ck_assert_str_eq(chosen(), "c00:4-4");
}
END_TEST

START_TEST(same_schedule_after_another)
{
  static const int tokens[] = {1, 2, 3};
  int t;
  for(t = 0; t < 3; t++) {
    timed(t, 0, t == 1 ? 20 : 10, 0.01);
    timed(t, 1, t == 1 ? 10 : 20, 0.01);
  }
  ck_ok(choose(tokens, 3, 2));
  ck_assert_str_eq(chosen(), "c00:1-1 c01:2-2 c00:3-3");
}
END_TEST

START_TEST(regret_is_the_worst)
{
  static const int tokens[] = {1, 2};
  int t;
  spec.nmix = 2;
  for(t = 0; t < 2; t++) {
    timed(t, 0, 10, 0.01);
    timed(t, 1, 12, 0.01);
    table[t][0].median_us[0] = 10;
    table[t][0].median_us[1] = t == 0 ? 9 : 6;
    table[t][1].median_us[0] = 14;
    table[t][1].median_us[1] = 6;
  }
  ck_ok(choose(tokens, 2, 2));
  ck_assert_int_eq(nwinners, 2);
  ck_assert_double_eq(winners[1].regret, 1);
  ck_assert_double_eq(winners[0].regret, 1.5);
}
END_TEST

START_TEST(wrong_arguments)
{
  static const int descending[] = {2, 1}, zero[] = {0};
  timed(0, 0, 10, 0.01);
  timed(1, 0, 10, 0.01);
  ck_assert_int_eq(choose(descending, 2, 1), MF_ERR_INTERNAL);
  ck_assert_int_eq(choose(zero, 1, 1), MF_ERR_INTERNAL);
  ck_assert_int_eq(choose(one_count, 0, 1), MF_ERR_INTERNAL);
  ck_assert_int_eq(choose(one_count, 1, 0), MF_ERR_INTERNAL);
  ck_assert_int_eq(nwinners, 0);
}
END_TEST

/* ---- predictions ---- */
static void some_problem(void)
{
  problem_init(&spec.problem);
  spec.problem.experts = spec.problem.expert_count = 256;
  spec.problem.top_k = 8;
  spec.problem.hidden = 2048;
  spec.problem.intermediate = 512;
  spec.nmix = 2;
  spec.mix[0] = (struct routing_weight){ROUTING_DISPERSED, 0.75};
  spec.mix[1] = (struct routing_weight){ROUTING_CONCENTRATED, 0.25};
}

START_TEST(predicted_by_the_cost_model)
{
  static const int tokens[] = {1, 4};
  const struct device_info dev = {.launch_us = 1.8, .bandwidth_gbps = 4670};
  double expert_us;
  some_problem();
  expert_us = problem_expert_bytes(&spec.problem) / (dev.bandwidth_gbps * 1e3);
  candidates[0].schedule.value[1] = 2; /* experts dear, tokens free: 8 or 32 experts */
  candidates[1].schedule.value[1] = 1;
  candidates[1].schedule.value[2] = 50; /* the other way round */
  candidates[2].schedule = (struct schedule){.family = &fake, .value = {8, 4, 2}}; /* the default */
  ck_ok(select_predicted(&spec, tokens, 2, &dev, candidates, 3, winners, &nwinners, &err));
  ck_assert_str_eq(chosen(), "c00:1-1 c00:2-4");
  ck_assert(winners[1].predicted);
  ck_assert_double_eq_tol(winners[1].us, 0.75 * (1 + 32 * 2) + 0.25 * (1 + 8 * 2), 1e-6);
  ck_assert_double_eq(winners[1].us, winners[1].us_low);
  ck_assert_double_eq_tol(winners[1].default_us, 0.75 * (1 + 32 * 4 + 8) + 0.25 * (1 + 8 * 4 + 8), 1e-6);
  ck_assert_double_eq_tol(winners[1].floor_us, 1.8 + (0.75 * 32 + 0.25 * 8) * expert_us, 1e-6);
  ck_assert_double_eq_tol(select_floor_us(&spec, 4, &dev), winners[1].floor_us, 1e-9);
  ck_assert_double_eq(winners[1].regret, 1);
  candidates[1].schedule.value[2] = 0;
  ck_ok(select_predicted(&spec, tokens, 2, &dev, candidates, 3, winners, &nwinners, &err));
  ck_assert_str_eq(chosen(), "c01:1-1 c01:2-4");
}
END_TEST

START_TEST(predicted_needs_a_cost_model)
{
  const struct device_info dev = {.launch_us = 1.8};
  some_problem();
  candidates[0].schedule.family = NULL;
  ck_assert_int_eq(select_predicted(&spec, one_count, 1, &dev, candidates, 1, winners, &nwinners, &err), MF_ERR_INTERNAL);
  ck_assert_int_eq(nwinners, 0);
}
END_TEST

/* The real family on a real device: something wins, and it is not slower than the default. */
START_TEST(predicted_for_the_real_family)
{
  static const int tokens[] = {1, 2, 4, 8};
  const struct device_info dev = {.name = "NVIDIA H200", .cc_major = 9, .sms = 132, .shared_bytes_per_cta = 232448, .shared_bytes_per_sm = 233472,
                                  .registers_per_sm = 65536, .max_threads_per_cta = 1024, .l2_bytes = 60L << 20, .bandwidth_gbps = 4670, .launch_us = 1.8};
  const struct family_ops *family = families_all()[0];
  int i;
  some_problem();
  for(i = 0; i < 4; i++) {
    struct candidate *cand = &candidates[i];
    cand->schedule.family = family;
    family->default_schedule(&spec.problem, tokens[i], &dev, &cand->schedule);
    schedule_name(&cand->schedule, cand->name, sizeof(cand->name));
  }
  ck_ok(select_predicted(&spec, tokens, 4, &dev, candidates, 4, winners, &nwinners, &err));
  for(i = 0; i < nwinners; i++) {
    ck_assert_double_gt(winners[i].floor_us, 1.8);
    ck_assert_double_gt(winners[i].us, 0);
    ck_assert_double_le(winners[i].us, winners[i].default_us);
  }
}
END_TEST

int main(void)
{
  static const char *const name = "select";
  Suite *suite = suite_create(name);
  TCase *tcase = tcase_create(name);
  SRunner *runner;
  const TTest *const tests[] = {
      fastest_wins, only_finalists_win, ties_are_resolved, deterministic, default_wins_ties, never_slower_than_the_default, never_slower_on_random_tables,
      neighbours_decide_ties, intervals, buckets_meet, same_schedule_after_another, regret_is_the_worst, wrong_arguments, predicted_by_the_cost_model,
      predicted_needs_a_cost_model, predicted_for_the_real_family,
  };
  size_t i;
  int failed;
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
