/* test_fuzz.c - `moeforge fuzz` as a user runs it: a kernel that is right, one that is broken (its templates are copied and a fence is taken out),
 * failures that can be shown again by the command line that is printed with them, interrupts, wrong command lines. */
#include "tool_fixture.h"

#include <jansson.h>

#include "fuzz.h"

#define FUZZ "fuzz specs/models/tiny.yaml --tokens 1,2"

static struct tool tool;

static void begin(void)
{
  tool_begin(&tool);
}

static void end(void)
{
  tool_end(&tool);
}

/* ---- the case of a seed ---- */
START_TEST(a_seed_is_a_case)
{
  static const int tokens[] = {1, 3, 8};
  int of_tokens[9] = {0}, of_routing[ROUTING_KINDS] = {0}, of_data[CASE_DATA_KINDS] = {0}, different = 0;
  for(uint64_t seed = 0; seed < 300; seed++) {
    const struct test_case a = fuzz_case(seed, tokens, 3), b = fuzz_case(seed, tokens, 3), next = fuzz_case(seed + 1, tokens, 3);
    ck_assert_mem_eq(&a, &b, sizeof(a));
    ck_assert(a.tokens == 1 || a.tokens == 3 || a.tokens == 8);
    ck_assert_uint_ge(a.seed, 1);
    of_tokens[a.tokens]++;
    of_routing[a.routing]++;
    of_data[a.data]++;
    different += memcmp(&a, &next, sizeof(a)) != 0;
  }
  ck_assert_int_gt(different, 270);
  ck_assert(of_tokens[1] > 60 && of_tokens[3] > 60 && of_tokens[8] > 60);
  for(int i = 0; i < ROUTING_KINDS; i++)
    ck_assert_int_gt(of_routing[i], 30);
  for(int i = 0; i < CASE_DATA_KINDS; i++)
    ck_assert_int_gt(of_data[i], 10);
  ck_assert_int_gt(of_data[CASE_NORMAL], 150);
}
END_TEST

/* ---- kernels ---- */
START_TEST(a_right_kernel_passes)
{
  json_t *all;
  tool_run(&tool, FUZZ " --seed 5 --seeds 3 --jobs 2 --quiet");
  tool_expect(&tool, 0);
  ck_assert_str_eq(tool.err, "");
  tool_says(&tool, out, "tiny on emu-sm90: 3 of 3 seeds from 5, 9 launches, 0 found");
  tool_run(&tool, FUZZ " --seed 5 --seeds 1 --json --quiet");
  tool_expect(&tool, 0);
  all = json_loads(tool.out, 0, NULL);
  ck_assert_ptr_nonnull(all);
  ck_assert_int_eq(json_integer_value(json_object_get(all, "launches")), 3);
  ck_assert_uint_eq(json_array_size(json_object_get(all, "findings")), 0);
  json_decref(all);
}
END_TEST

static void copy_templates(const char *file, const char *expression)
{
  char command[1024];
  snprintf(command, sizeof(command), "cp -r templates '%s/t' && sed -i '%s' '%s/t/%s' && ! cmp -s 'templates/%s' '%s/t/%s'", tool.folder, expression,
           tool.folder, file, file, tool.folder, file);
  ck_assert_msg(system(command) == 0, "%s", command);
}

START_TEST(a_failure_can_be_shown_again)
{
  char what[2048], again[2048];
  const json_t *first;
  json_t *all;
  copy_templates("stream/quantise.cuh", "/^ *hw::fence_async_proxy();$/d");
  tool_run(&tool, FUZZ " --templates %s/t --seed 7 --seeds 2 --jobs 2 --quiet --json", tool.folder);
  tool_expect(&tool, 11);
  tool_says(&tool, err, "2 of 2 seeds failed");
  all = json_loads(tool.out, 0, NULL);
  ck_assert_ptr_nonnull(all);
  ck_assert_uint_eq(json_array_size(json_object_get(all, "findings")), 2);
  first = json_array_get(json_object_get(all, "findings"), 0);
  snprintf(what, sizeof(what), "%s", json_string_value(json_object_get(first, "what")));
  snprintf(again, sizeof(again), "%s", json_string_value(json_object_get(first, "command")));
  ck_assert_msg(strstr(what, "missing proxy fence") != NULL && strstr(what, "stream/quantise.cuh:") != NULL, "%s", what);
  ck_assert_msg(strncmp(again, "moeforge fuzz ", 14) == 0, "%s", again);
  json_decref(all);
  tool_run(&tool, "%s --quiet", again + 9);
  tool_expect(&tool, 11);
  tool_says(&tool, out, what);
  tool_says(&tool, out, again);
  tool_says(&tool, out, "1 of 1 seeds from");
}
END_TEST

/* A deadlock is told whole: each group of waiters with what it waits for, one a line, in the text and in JSON. */
START_TEST(all_waiters_are_told)
{
  char again[2048];
  const char *what;
  json_t *all;
  int groups = 0;
  copy_templates("stream/producer.cuh", "s/mbarrier_init(&sm.barrier.empty\\[i\\], 8)/mbarrier_init(\\&sm.barrier.empty[i], 9)/");
  tool_run(&tool, "fuzz specs/models/tiny.yaml --tokens 2 --templates %s/t --schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0-ho0 --seeds 1 --quiet --json",
           tool.folder);
  tool_expect(&tool, 11);
  all = json_loads(tool.out, 0, NULL);
  ck_assert_ptr_nonnull(all);
  what = json_string_value(json_object_get(json_array_get(json_object_get(all, "findings"), 0), "what"));
  ck_assert_msg(strstr(what, "deadlock: nobody can go on | ") != NULL, "%s", what);
  ck_assert_uint_gt(strlen(what), 600); /* longer than it was ever cut to; how many groups there are depends on the interleaving */
  snprintf(again, sizeof(again), "%s", json_string_value(json_object_get(json_array_get(json_object_get(all, "findings"), 0), "command")));
  tool_run(&tool, "%s --quiet", again + 9);
  tool_expect(&tool, 11);
  for(const char *bar = strstr(what, " | "); bar != NULL; groups++) {
    const char *next = strstr(bar + 3, " | ");
    char line[1024];
    snprintf(line, sizeof(line), "\n  %.*s\n", (int)(next != NULL ? next - bar - 3 : (ptrdiff_t)strlen(bar + 3)), bar + 3);
    ck_assert_msg(strstr(line, " lane") != NULL && strstr(line, " wait for ") != NULL, "cut short: %s", line);
    tool_says(&tool, out, line);
    bar = next;
  }
  ck_assert_int_gt(groups, 4);
  json_decref(all);
}
END_TEST

/* A schedule by name, wrong numbers instead of a finding. */
START_TEST(wrong_numbers_are_found)
{
  copy_templates("stream/up.cuh", "s/w_scale\\[k \\* L::kStageKBlocks + L::kKBlocks\\]/w_scale[k * L::kStageKBlocks]/");
  tool_run(&tool, "fuzz specs/models/tiny.yaml --tokens 2 --templates %s/t --schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0 --seeds 1 --quiet",
           tool.folder);
  tool_expect(&tool, 11);
  tool_says(&tool, out, "seed 1: 2 tokens");
  tool_says(&tool, out, "stream/ring4-ld2-la2-fl3-fd2-st0-rk0-ho0\n");
  tool_says(&tool, out, "  h: token ");
  tool_says(&tool, out, "--schedule stream/ring4-ld2-la2-fl3-fd2-st0-rk0 --tokens 2 --templates ");
}
END_TEST

START_TEST(an_interrupt_tells_what_was_done)
{
  struct timespec pause = {0, 100000000};
  const pid_t pid = tool_start(&tool, FUZZ " --seeds 1000 --jobs 1");
  do {
    nanosleep(&pause, NULL);
    tool_slurp(tool.folder, "stderr", tool.err, sizeof(tool.err));
  } while(strstr(tool.err, "/1000") == NULL && waitpid(pid, NULL, WNOHANG) == 0);
  kill(pid, SIGINT);
  tool_wait(&tool, pid);
  tool_expect(&tool, 130);
  tool_says(&tool, err, "interrupted after ");
  tool_says(&tool, out, " of 1000 seeds from 1, ");
}
END_TEST

/* ---- command lines ---- */
static const struct {
  const char *words, *says;
  int code;
} wrong[] = {
    {"fuzz", "expected one spec file", 2},
    {"fuzz specs/models/tiny.yaml specs/models/tiny.yaml", "expected one spec file", 2},
    {"fuzz specs/models/tiny.yaml --seeds 0", "--seeds: expected a whole number", 2},
    {"fuzz specs/models/tiny.yaml --seed -1", "--seed: expected a whole number", 2},
    {"fuzz specs/models/tiny.yaml --device none", "fuzz runs on the emulated device", 2},
    {"fuzz specs/models/tiny.yaml --device emu:nosuch", "--device emu:nosuch: expected emu", 2},
    {"fuzz specs/models/tiny.yaml --tokens 0", "--tokens: expected counts", 2},
    {"fuzz specs/models/tiny.yaml --tokens 40", "rule tokens", 4},
    {"fuzz specs/models/tiny.yaml --schedule stream/ring5", "moeforge: --schedule: schedule \"stream/ring5\": expected \"ld<number>\"", 2},
    {"fuzz specs/models/tiny.yaml --schedule stream/ring4-ld2-la2-fl6-fd2-st0-rk0", "rule flight", 4},
    {"fuzz specs/models/nosuch.yaml", "nosuch.yaml", 5},
    {"fuzz specs/models/tiny.yaml --templates /nonexistent", "/nonexistent", 5},
};

START_TEST(a_wrong_command_line)
{
  tool_run(&tool, "%s", wrong[_i].words);
  tool_expect(&tool, wrong[_i].code);
  tool_says(&tool, err, wrong[_i].says);
  ck_assert_str_eq(tool.out, "");
}
END_TEST

START_TEST(no_compiler)
{
  setenv("MOEFORGE_CXX", "/nonexistent/c++", 1);
  tool_run(&tool, FUZZ);
  tool_expect(&tool, 7);
  tool_says(&tool, err, "MOEFORGE_CXX");
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("fuzz");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_checked_fixture(tc, begin, end);
  tcase_add_test(tc, a_seed_is_a_case);
  tcase_add_test(tc, a_right_kernel_passes);
  tcase_add_test(tc, a_failure_can_be_shown_again);
  tcase_add_test(tc, all_waiters_are_told);
  tcase_add_test(tc, wrong_numbers_are_found);
  tcase_add_test(tc, an_interrupt_tells_what_was_done);
  tcase_add_loop_test(tc, a_wrong_command_line, 0, (int)(sizeof(wrong) / sizeof(wrong[0])));
  tcase_add_test(tc, no_compiler);
  tcase_set_timeout(tc, 240);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_ENV);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
