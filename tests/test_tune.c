/* test_tune.c - the whole command `tune` on a GPU whose kernels work and whose times are scripted (fake_gpu.c): winners, faults, resume after kill -9. */
#include "tool_fixture.h"

#include <sqlite3.h>

/* One token count and the quick effort keep a run within seconds; every stage takes part. */
#define TUNE "tune specs/models/tiny.yaml --tokens 1 --effort quick --quiet --jobs 2"

static struct tool tool;

static void begin(void)
{
  tool_begin(&tool);
  unsetenv("FAKEGPU_WRONG");
  unsetenv("FAKEGPU_HANG");
  unsetenv("FAKEGPU_CRASH");
  unsetenv("FAKEGPU_SLEEP_US");
}

static void end(void)
{
  tool_end(&tool);
}

/* The rows of a query as text, one line each. Freed by the caller. */
static char *query(const char *file, const char *sql)
{
  char path[512], *text = NULL;
  size_t length = 0;
  FILE *to = open_memstream(&text, &length);
  sqlite3 *db;
  sqlite3_stmt *stmt;
  snprintf(path, sizeof(path), "%s/%s", tool.folder, file);
  ck_assert_int_eq(sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL), SQLITE_OK);
  ck_assert_msg(sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) == SQLITE_OK, "%s: %s", sql, sqlite3_errmsg(db));
  while(sqlite3_step(stmt) == SQLITE_ROW) {
    for(int c = 0; c < sqlite3_column_count(stmt); c++)
      fprintf(to, "%s|", sqlite3_column_type(stmt, c) != SQLITE_NULL ? (const char *)sqlite3_column_text(stmt, c) : "-");
    fputc('\n', to);
  }
  sqlite3_finalize(stmt);
  sqlite3_close(db);
  fclose(to);
  return text;
}

static long number(const char *file, const char *sql)
{
  char *text = query(file, sql);
  const long value = atol(text);
  free(text);
  return value;
}

/* What must not depend on how often a run was interrupted. */
static const char samples_sql[] = "SELECT c.schedule, s.tokens, s.routing, s.seed, s.round, s.us, s.floor_us FROM sample s JOIN candidate c ON c.id=s.candidate_id "
                                  "ORDER BY 1,2,3,4,5";
static const char winners_sql[] = "SELECT tokens_min, tokens_max, c.schedule, us, floor_us, default_us, predicted FROM winner w JOIN candidate c ON "
                                  "c.id=w.candidate_id ORDER BY 1";
static const char twice_sql[] = "SELECT count(*) FROM (SELECT 1 FROM sample GROUP BY candidate_id, timing_id, tokens, routing, seed, round HAVING count(*) > 1)";

START_TEST(a_run_measures_and_ships)
{
  char *shipped;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  tool_says(&tool, out, "measured");
  ck_assert_ptr_null(strstr(tool.out, "predicted"));
  ck_assert_int_gt(number("work.db", "SELECT count(*) FROM sample"), 0);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM check_result WHERE passed=0"), 0);
  shipped = query("schedules.db", winners_sql);
  ck_assert_int_gt((long)strlen(shipped), 0);
  free(shipped);
  ck_assert_int_eq(number("schedules.db", "SELECT count(*) FROM sample"), 0);
  ck_assert_int_eq(number("schedules.db", "SELECT count(*) FROM winner WHERE predicted"), 0);
  tool_run(&tool, "show tiny --json");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "\"status\": \"measured\"");
}
END_TEST

START_TEST(a_second_run_does_nothing_twice)
{
  char *first, *second;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  first = query("work.db", samples_sql);
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 1 --effort quick --jobs 2");
  tool_expect(&tool, 0);
  tool_says(&tool, err, "0 kernels compiled");
  tool_says(&tool, err, "0 samples measured");
  second = query("work.db", samples_sql);
  ck_assert_str_eq(first, second);
  free(first);
  free(second);
}
END_TEST

static void change(const char *file, const char *sql)
{
  char path[512];
  sqlite3 *db;
  snprintf(path, sizeof(path), "%s/%s", tool.folder, file);
  ck_assert_int_eq(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE, NULL), SQLITE_OK);
  ck_assert_msg(sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK, "%s: %s", sql, sqlite3_errmsg(db));
  ck_assert_int_eq(sqlite3_changes(db), 1);
  sqlite3_close(db);
}

/* A schedule that quick effort does not try on its own is timed by it if it won before, in the work store or in the shipped file; what is no longer a schedule is passed over. */
START_TEST(winners_of_longer_searches_stay_in_the_race)
{
#define ODD "stream/ring6-ld2-la2-fl4-fd4-st0-rk1-ho1"
  static const char timed_sql[] = "SELECT count(*) FROM sample s JOIN candidate c ON c.id=s.candidate_id WHERE c.schedule='" ODD "' AND s.run_id=(SELECT max(id) FROM run)";
  char path[512];
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE " --retime");
  tool_expect(&tool, 0);
  ck_assert_int_eq(number("work.db", timed_sql), 0);
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 1 --effort quick --jobs 2 --schedule " ODD);
  tool_expect(&tool, 0);
  tool_says(&tool, err, "schedules.db: schedules were named, the space was not searched; the winners are in");
  tool_run(&tool, TUNE " --retime");
  tool_expect(&tool, 0);
  ck_assert_int_gt(number("work.db", timed_sql), 0);
  for(int readable = 1; readable >= 0; readable--) {
    snprintf(path, sizeof(path), "%s/work.db", tool.folder);
    ck_assert_int_eq(unlink(path), 0);
    change("schedules.db", readable ? "UPDATE candidate SET schedule='" ODD "' WHERE id=(SELECT candidate_id FROM winner WHERE tokens_min=1)"
                                    : "UPDATE candidate SET schedule='stream/nonsense' WHERE id=(SELECT candidate_id FROM winner WHERE tokens_min=1)");
    tool_run(&tool, TUNE);
    tool_expect(&tool, 0);
    ck_assert_int_eq(number("work.db", timed_sql) > 0, readable);
  }
}
END_TEST

START_TEST(killed_at_random_moments_it_ends_the_same)
{
  char *samples, *winners, *samples_after, *winners_after;
  long before = 0;
  int killed = 0;
  struct timespec t0, t1;
  double whole;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  clock_gettime(CLOCK_MONOTONIC, &t0);
  tool_run(&tool, TUNE);
  clock_gettime(CLOCK_MONOTONIC, &t1);
  tool_expect(&tool, 0);
  whole = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
  samples = query("work.db", samples_sql);
  winners = query("work.db", winners_sql);
  tool_end(&tool);

  begin();
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  srand(1);
  setenv("FAKEGPU_SLEEP_US", "800", 1); /* an unbroken run takes many times as long, nearly all of it measuring */
  for(int i = 0; i < 10; i++) { /* each gets a small part of that, so that it is still there to be killed */
    const pid_t pid = tool_start(&tool, TUNE);
    const double wait = 0.25 + whole * rand() / RAND_MAX;
    long now;
    usleep((useconds_t)(1e6 * wait));
    kill(pid, SIGKILL);
    tool_wait(&tool, pid);
    killed += tool.code == 1000 + SIGKILL;
    if(i > 0) {
      now = number("work.db", "SELECT count(*) FROM sample");
      ck_assert_int_ge(now, before); /* nothing measured is lost */
      before = now;
    }
  }
  unsetenv("FAKEGPU_SLEEP_US");
  ck_assert_msg(killed >= 5, "only %d runs were still there to be killed", killed);
  ck_assert_int_gt(before, 0);
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  samples_after = query("work.db", samples_sql);
  winners_after = query("work.db", winners_sql);
  ck_assert_str_eq(samples, samples_after);
  ck_assert_str_eq(winners, winners_after);
  ck_assert_int_eq(number("work.db", twice_sql), 0);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM artifact"), number("work.db", "SELECT count(DISTINCT compile_key) FROM artifact"));
  free(samples);
  free(winners);
  free(samples_after);
  free(winners_after);
}
END_TEST

/* One kind of bad kernel: those with 3 stages in flight. The others must come through, and the reason must be on record. */
static const struct {
  const char *variable, *rule;
} bad_kernels[] = {{"FAKEGPU_WRONG", "y_given_h"}, {"FAKEGPU_HANG", "fault"}, {"FAKEGPU_CRASH", "fault"}};

START_TEST(bad_kernels_cost_only_themselves)
{
  char *rejects, *winners, pattern[64];
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  setenv(bad_kernels[_i].variable, "3", 1);
  tool_run(&tool, TUNE " --timeout-ms 1000");
  tool_expect(&tool, 0);
  rejects = query("work.db", "SELECT DISTINCT rule, schedule FROM reject WHERE stage='check'");
  winners = query("work.db", winners_sql);
  snprintf(pattern, sizeof(pattern), "%s|", bad_kernels[_i].rule);
  ck_assert_msg(strstr(rejects, pattern) != NULL, "no reject by %s in: %s", bad_kernels[_i].rule, rejects);
  for(char *line = rejects, *next; *line != '\0'; line = next) {
    next = strchr(line, '\n');
    *next++ = '\0';
    ck_assert_msg(strstr(line, "-fl3-") != NULL, "a good kernel was rejected: %s", line);
  }
  ck_assert_ptr_null(strstr(winners, "-fl3-"));
  ck_assert_int_gt((long)strlen(winners), 0);
  free(rejects);
  free(winners);
}
END_TEST

/* Kernels with the watchdog are checked, but neither timed nor made winners. */
START_TEST(debug_kernels_are_never_winners)
{
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE " --debug");
  tool_expect(&tool, 0);
  ck_assert_int_gt(number("work.db", "SELECT count(*) FROM check_result WHERE passed"), 0);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM sample"), 0);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM winner"), 0);
}
END_TEST

/* A program of tests/gpu on the package of a test, with the steps that a scripted GPU can play; its launches in graphs write zeros, which must be found. */
static void expect_program(const char *program, const char *steps, int code, const char *says)
{
  char command[8192], text[8192] = "";
  FILE *f;
  snprintf(command, sizeof(command), "'%s/gpu/%s' '%s/p.moeforge' %s 2>&1", tool.libraries, program, tool.folder, steps);
  f = popen(command, "r");
  ck_assert_ptr_nonnull(f);
  ck_assert_uint_lt(fread(text, 1, sizeof(text) - 1, f), sizeof(text) - 1);
  ck_assert_msg(WEXITSTATUS(pclose(f)) == code && strstr(text, says) != NULL, "%s: %s", command, text);
}

/* Winners of a part of the space, or of kernels for a sanitizer, are exported and not shipped. */
START_TEST(what_does_not_serve_is_not_shipped)
{
  char *winners;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE " --line-info --schedule stream/ring10-ld4-la2-fl4-fd4-st0-rk1-ho1");
  tool_expect(&tool, 0);
  winners = query("work.db", "SELECT c.schedule FROM winner w JOIN candidate c ON c.id=w.candidate_id");
  ck_assert_str_eq(winners, "stream/ring10-ld4-la2-fl4-fd4-st0-rk1-ho1|\n");
  free(winners);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM artifact WHERE instr(cubin, CAST('handoff.cuh' AS BLOB)) > 0"), 1);
  tool_run(&tool, "export tiny -o %s/p.moeforge", tool.folder);
  tool_expect(&tool, 0);
  expect_program("coexist", "poison pair", 0, "all as alone");
  expect_program("coexist", "graph", 1, "8 of 8 launches are not as alone");
  expect_program("coexist", "poison nosuch", 2, "no step \"nosuch\"");
  expect_program("several", "same", 77, "not run: GPUs: 1");
  tool_gpu(&tool, "libfakegpu.so", "sms=132,devices=3");
  expect_program("several", "same calls wrong turns threads release workspace", 0, "all as alone, on 3 GPUs");
  expect_program("several", "graphs", 1, "24 of 24 launches are not as alone");
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, "show tiny --store %s/nothing.db", tool.folder);
  ck_assert_msg(tool.code != 0 || strstr(tool.out, "-ho1") == NULL, "%s", tool.out);
  tool_run(&tool, TUNE " --line-info --store moeforge-work.db");
  tool_expect(&tool, 2);
  tool_says(&tool, err, "a --store of its own");
}
END_TEST

START_TEST(an_interrupt_is_orderly)
{
  pid_t pid;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  setenv("FAKEGPU_SLEEP_US", "2000", 1);
  pid = tool_start(&tool, TUNE);
  usleep(1500000);
  kill(pid, SIGINT);
  tool_wait(&tool, pid);
  tool_expect(&tool, 130);
  ck_assert_int_eq(number("work.db", "SELECT count(*) FROM run WHERE ended_at IS NULL"), 0);
  unsetenv("FAKEGPU_SLEEP_US");
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
}
END_TEST

START_TEST(two_runs_do_not_share_a_store)
{
  pid_t pid;
  struct tool other;
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  setenv("FAKEGPU_SLEEP_US", "2000", 1);
  pid = tool_start(&tool, TUNE);
  usleep(700000);
  other = tool;
  tool_run(&other, TUNE);
  ck_assert_msg(other.code == 6, "exit code %d: %s", other.code, other.err);
  kill(pid, SIGKILL);
  tool_wait(&tool, pid);
}
END_TEST

START_TEST(package_from_spec_to_file)
{
  tool_gpu(&tool, "libfakegpu.so", "sms=132");
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  tool_run(&tool, "export tiny -o %s/tiny.moeforge", tool.folder);
  tool_expect(&tool, 0);
  tool_run(&tool, "verify %s/tiny.moeforge", tool.folder);
  tool_expect(&tool, 0);
  for(int flight = 3; flight <= 6; flight++) { /* the winners' kernels go wrong on this machine: verify must notice */
    char text[16];
    snprintf(text, sizeof(text), "%d", flight);
    setenv("FAKEGPU_WRONG", text, 1);
    tool_run(&tool, "verify %s/tiny.moeforge", tool.folder);
    if(tool.code != 0)
      break;
  }
  tool_expect(&tool, 11);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("tune");
  TCase *tc = tcase_create("all"), *apart = tcase_create("apart");
  SRunner *runner;
  int failed;
  tcase_add_checked_fixture(tc, begin, end);
  tcase_add_test(tc, a_run_measures_and_ships);
  tcase_add_test(tc, a_second_run_does_nothing_twice);
  tcase_add_test(tc, winners_of_longer_searches_stay_in_the_race);
  tcase_add_test(tc, killed_at_random_moments_it_ends_the_same);
  tcase_add_loop_test(tc, bad_kernels_cost_only_themselves, 0, 3);
  tcase_add_test(tc, debug_kernels_are_never_winners);
  tcase_add_test(tc, an_interrupt_is_orderly);
  tcase_add_test(tc, two_runs_do_not_share_a_store);
  tcase_add_test(tc, package_from_spec_to_file);
  tcase_set_timeout(tc, 300);
  suite_add_tcase(suite, tc);
  tcase_add_checked_fixture(apart, begin, end);
  tcase_add_test(apart, what_does_not_serve_is_not_shipped);
  tcase_set_timeout(apart, 300);
  suite_add_tcase(suite, apart);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
