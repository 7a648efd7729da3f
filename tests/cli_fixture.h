/* cli_fixture.h - what test_cli.c and test_cli_gpu.c share. One tuning on the scripted GPU is made for all tests of a suite (seed); each test works on copies
 * of its files. */
#ifndef MOEFORGE_TESTS_CLI_FIXTURE_H
#define MOEFORGE_TESTS_CLI_FIXTURE_H

#include "tool_fixture.h"

#include <sched.h>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/stat.h>

#define TUNE "tune specs/models/tiny.yaml --tokens 1 --effort quick --jobs 2"
#define GPU "sms=132"
#define ROWS(table) ((int)(sizeof(table) / sizeof((table)[0])))

static struct tool seed, tool;

/* Runs a shell command in the test's folder; it must succeed. */
static inline void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static inline void shell(const char *fmt, ...)
{
  char command[2048], whole[2400];
  va_list args;
  va_start(args, fmt);
  vsnprintf(command, sizeof(command), fmt, args);
  va_end(args);
  snprintf(whole, sizeof(whole), "cd '%s' && { %s\n}", tool.folder, command);
  ck_assert_msg(system(whole) == 0, "%s", whole);
}

static inline void make_seed(void)
{
  tool_begin(&seed);
  setenv("MOEFORGE_LOCK_DIR", seed.folder, 1);
  tool_gpu(&seed, "libfakegpu.so", GPU);
  tool_run(&seed, TUNE);
  tool_expect(&seed, 0);
  tool_run(&seed, "export tiny -o %s/p.moeforge", seed.folder);
  tool_expect(&seed, 0);
}

static inline void remove_seed(void)
{
  tool_end(&seed);
}

static inline void begin(void)
{
  tool_begin(&tool);
  setenv("MOEFORGE_LOCK_DIR", tool.folder, 1); /* other suites tune on the same GPU */
  shell("cp '%s'/*.db '%s'/p.moeforge .", seed.folder, seed.folder);
}

static inline void end(void)
{
  tool_end(&tool);
}

static inline int lines(const char *text)
{
  int count = 0;
  for(; *text != '\0'; text++)
    count += *text == '\n';
  return count;
}

/* The last run ended with 'code' and one line that says 'text'. */
static inline void refused(int code, const char *text)
{
  tool_expect(&tool, code);
  tool_says(&tool, err, text);
  ck_assert_msg(lines(tool.err) == 1 && strncmp(tool.err, "moeforge: ", 10) == 0, "expected one line: %.1500s", tool.err);
}

/* The same, behind lines of progress. */
static inline void ended(int code, const char *text)
{
  tool_expect(&tool, code);
  tool_says(&tool, err, text);
  ck_assert_msg(strstr(tool.err, "moeforge: ") != NULL && lines(strstr(tool.err, "moeforge: ")) == 1, "expected one line of error: %.1500s", tool.err);
}

static inline double number(const char *sql)
{
  char path[512];
  sqlite3 *db;
  sqlite3_stmt *stmt;
  double value;
  snprintf(path, sizeof(path), "%s/work.db", tool.folder);
  ck_assert_int_eq(sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL), SQLITE_OK);
  ck_assert_msg(sqlite3_prepare_v2(db, sql, -1, &stmt, NULL) == SQLITE_OK, "%s: %s", sql, sqlite3_errmsg(db));
  ck_assert_int_eq(sqlite3_step(stmt), SQLITE_ROW);
  value = sqlite3_column_double(stmt, 0);
  sqlite3_finalize(stmt);
  sqlite3_close(db);
  return value;
}

/* Leaves nothing in the copy of the store but compiled kernels: tests of later stages need not compile again. */
static inline void forget_measurements(void)
{
  char path[512];
  sqlite3 *db;
  snprintf(path, sizeof(path), "%s/work.db", tool.folder);
  ck_assert_int_eq(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE, NULL), SQLITE_OK);
  ck_assert_int_eq(sqlite3_exec(db, "DELETE FROM sample; DELETE FROM winner; DELETE FROM check_gate; DELETE FROM check_result; DELETE FROM run_device;"
                                    "DELETE FROM candidate; DELETE FROM run", NULL, NULL, NULL), SQLITE_OK);
  sqlite3_close(db);
}

static inline bool put(const char *path, const char *text)
{
  FILE *f = fopen(path, "w");
  const bool good = f != NULL && fputs(text, f) >= 0;
  return f != NULL && fclose(f) == 0 && good;
}

/* A file system of the test's own, until it ends, on the folder "small" of its folder. False where this user may not mount. */
static inline bool mount_small(const char *options)
{
  const bool root = geteuid() == 0;
  char path[300], users[64], groups[64];
  snprintf(users, sizeof(users), "0 %ld 1", (long)geteuid());
  snprintf(groups, sizeof(groups), "0 %ld 1", (long)getegid());
  snprintf(path, sizeof(path), "%s/small", tool.folder);
  if(mkdir(path, 0777) != 0 || unshare(CLONE_NEWNS | (root ? 0 : CLONE_NEWUSER)) != 0)
    return false;
  if(!root && (!put("/proc/self/setgroups", "deny") || !put("/proc/self/uid_map", users) || !put("/proc/self/gid_map", groups)))
    return false;
  return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 && mount("tmpfs", path, "tmpfs", 0, options) == 0;
}

static inline int run_suite(Suite *suite, TCase *tc)
{
  SRunner *runner;
  int failed;
  tcase_add_unchecked_fixture(tc, make_seed, remove_seed);
  tcase_add_checked_fixture(tc, begin, end);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}

#endif
