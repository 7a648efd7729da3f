/* store_fixture.h - rows and files for the tests of the store: a folder of its own per test, and one of everything to put in. */
#ifndef MOEFORGE_TESTS_STORE_FIXTURE_H
#define MOEFORGE_TESTS_STORE_FIXTURE_H

#include <check.h>
#include <errno.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "compile.h"
#include "family.h"
#include "spec.h"
#include "store.h"
#include "store_internal.h"

#define FIXTURE __attribute__((unused)) static
#define DRIVER 13000
#define NVRTC 12080

static char dir[256], path[300], shipped[300];
static struct error err;

#define ck_ok(call) ck_assert_msg((call) == MF_OK, "%s: %s", #call, err.text)
#define ck_fails(call, status)                                                                                    \
  do {                                                                                                            \
    err.text[0] = '\0';                                                                                           \
    ck_assert_int_eq((call), (status));                                                                           \
    ck_assert_str_ne(err.text, "");                                                                               \
    ck_assert_ptr_null(strchr(err.text, '\n'));                                                                   \
  } while(0)
#define ck_says(part) ck_assert_msg(strstr(err.text, part) != NULL, "\"%s\" does not say \"%s\"", err.text, part)

FIXTURE void setup(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(dir, sizeof(dir), "%s/moeforge-store-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(dir));
  snprintf(path, sizeof(path), "%s/work.db", dir);
  snprintf(shipped, sizeof(shipped), "%s/schedules.db", dir);
}

FIXTURE void teardown(void)
{
  char command[512];
  chmod(dir, 0700);
  snprintf(command, sizeof(command), "rm -rf '%s'", dir);
  ck_assert_int_eq(system(command), 0);
}

FIXTURE struct store *open_store(void)
{
  struct store *st = NULL;
  ck_ok(store_open(path, false, &st, &err));
  return st;
}

FIXTURE struct store *open_reader_of(const char *name)
{
  struct store *st = NULL;
  ck_ok(store_open(name, true, &st, &err));
  return st;
}

/* One number from the open store, past the interface. */
FIXTURE long long number(struct store *st, const char *sql)
{
  int64_t value = 0;
  ck_ok(store_int(st, sql, &value, &err));
  return (long long)value;
}

FIXTURE void run_sql(struct store *st, const char *sql)
{
  ck_ok(store_exec(st, sql, "test", &err));
}

/* Runs statements on a file with plain SQLite. */
FIXTURE void raw_sql(const char *file, const char *sql)
{
  sqlite3 *db;
  ck_assert_int_eq(sqlite3_open(file, &db), SQLITE_OK);
  ck_assert_msg(sqlite3_exec(db, sql, NULL, NULL, NULL) == SQLITE_OK, "%s", sqlite3_errmsg(db));
  ck_assert_int_eq(sqlite3_close(db), SQLITE_OK);
}

/* The whole file, NUL-terminated (malloc); NULL if it is not there. */
FIXTURE char *file_bytes(const char *name, size_t *count)
{
  FILE *f = fopen(name, "rb");
  char *bytes;
  *count = 0;
  if(f == NULL)
    return NULL;
  bytes = malloc(64u << 20);
  ck_assert_ptr_nonnull(bytes);
  *count = fread(bytes, 1, (64u << 20) - 1, f);
  bytes[*count] = '\0';
  fclose(f);
  return bytes;
}

FIXTURE void write_file_bytes(const char *name, const void *bytes, size_t count)
{
  FILE *f = fopen(name, "wb");
  ck_assert_ptr_nonnull(f);
  ck_assert_uint_eq(fwrite(bytes, 1, count, f), count);
  ck_assert_int_eq(fclose(f), 0);
}

FIXTURE bool exists(const char *base, const char *suffix)
{
  char name[400];
  snprintf(name, sizeof(name), "%s%s", base, suffix);
  return access(name, F_OK) == 0;
}

/* Root ignores permissions unless it gives that up. */
FIXTURE void obey_permissions(void)
{
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct data[2];
  ck_assert_int_eq((int)syscall(SYS_capget, &header, data), 0);
  data[0].effective &= ~(1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH);
  ck_assert_int_eq((int)syscall(SYS_capset, &header, data), 0);
}

/* ---- rows ---- */
FIXTURE struct model_spec some_spec(const char *name, int experts)
{
  struct model_spec spec;
  memset(&spec, 0, sizeof(spec));
  snprintf(spec.name, sizeof(spec.name), "%s", name);
  snprintf(spec.source, sizeof(spec.source), "config.json of %s", name);
  problem_init(&spec.problem);
  spec.problem.experts = spec.problem.expert_count = experts;
  spec.problem.top_k = 8;
  spec.problem.hidden = 2048;
  spec.problem.intermediate = 512;
  spec.routed_scaling = 2.5;
  return spec;
}

FIXTURE struct device_info some_device(int sms)
{
  return (struct device_info){.name = "NVIDIA H200", .cc_major = 9, .sms = sms, .shared_bytes_per_cta = 232448, .shared_bytes_per_sm = 233472,
                              .registers_per_sm = 65536, .max_threads_per_cta = 1024, .l2_bytes = 60L << 20, .bandwidth_gbps = 4670, .launch_us = 1.8,
                              .memory_bytes = 150e9, .driver_version = DRIVER, .memory_bus_bits = 6144, .memory_clock_khz = 3201000, .uuid = "GPU-1"};
}

/* An artifact whose every byte depends on 'number'. The text is static. */
FIXTURE struct artifact some_artifact(int number)
{
  static char source[64], log[64];
  static unsigned char cubin[5000];
  struct artifact art = {.source = source, .log = log, .cubin = cubin, .cubin_bytes = sizeof(cubin), .registers = 72 + number, .spill_bytes = number,
                         .stack_bytes = 16, .static_shared_bytes = 48, .wgmma_serialised = number % 2 != 0, .compile_seconds = 0.75};
  memset(cubin, number, sizeof(cubin));
  snprintf(source, sizeof(source), "// source %d", number);
  snprintf(log, sizeof(log), "log %d", number);
  snprintf(art.name, sizeof(art.name), "artifact%d", number);
  snprintf(art.compile_key, sizeof(art.compile_key), "%064d", number);
  return art;
}

/* Ids of one of everything. */
struct rows {
  int64_t shape, device, run, artifact, candidate;
};

FIXTURE int64_t put_candidate(struct store *st, const struct rows *rows, const char *name, unsigned shared_bytes)
{
  struct candidate cand;
  memset(&cand, 0, sizeof(cand));
  snprintf(cand.name, sizeof(cand.name), "%s", name);
  cand.artifact_id = rows->artifact;
  cand.recipe.shared_bytes = shared_bytes;
  ck_ok(store_put_candidate(st, rows->shape, rows->device, &cand, &err));
  ck_assert_int_gt(cand.id, 0);
  return cand.id;
}

FIXTURE struct rows put_rows(struct store *st, const char *shape_name, int experts, int sms)
{
  const struct model_spec spec = some_spec(shape_name, experts);
  const struct device_info dev = some_device(sms);
  const struct artifact art = some_artifact(1);
  struct rows rows;
  ck_ok(store_put_shape(st, &spec, &rows.shape, &err));
  ck_ok(store_put_device(st, &dev, &rows.device, &err));
  ck_ok(store_begin_run(st, "tune x.yaml", NVRTC, DRIVER, &rows.run, &err));
  ck_ok(store_put_artifact(st, &art, NVRTC, &rows.artifact, &err));
  rows.candidate = put_candidate(st, &rows, "none/a1", 1000);
  return rows;
}

FIXTURE struct winner some_winner(int64_t candidate, int tokens_min, int tokens_max, double us, bool predicted)
{
  struct winner win = {.candidate_id = candidate, .tokens_min = tokens_min, .tokens_max = tokens_max, .us = us, .floor_us = us / 2, .floors = {us * 0.5, us * 0.75}, .default_us = us * 1.5,
                       .us_low = us - 0.25, .us_high = us + 0.25, .regret = 1.25, .predicted = predicted, .selection_key = "selection"};
  return win;
}

FIXTURE void put_winner(struct store *st, const struct rows *rows, int tokens_min, int tokens_max, double us, bool predicted)
{
  const struct winner win = some_winner(rows->candidate, tokens_min, tokens_max, us, predicted);
  ck_ok(store_put_winners(st, rows->run, rows->shape, rows->device, &win, 1, &err));
}

/* Winners in order, as far as there is room. */
struct winner_list {
  size_t count;
  struct winner items[16];
};

FIXTURE bool take_winner(void *context, const struct winner *win)
{
  struct winner_list *list = context;
  if(list->count < 16)
    list->items[list->count] = *win;
  list->count++;
  return true;
}

FIXTURE struct winner_list list_winners(struct store *st, const char *name)
{
  struct winner_list list = {0};
  ck_ok(store_each_winner(st, name, take_winner, &list, &err));
  return list;
}

/* "1-4:9.5 5-8:7.0p", p = predicted, s = stale. */
FIXTURE const char *winners_text(struct store *st, const char *name)
{
  static char text[1024];
  const struct winner_list list = list_winners(st, name);
  size_t i, used = 0;
  text[0] = '\0';
  for(i = 0; i < list.count && i < 16; i++)
    used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%d-%d:%.1f%s%s", i > 0 ? " " : "", list.items[i].tokens_min, list.items[i].tokens_max,
                             list.items[i].us, list.items[i].predicted ? "p" : "", list.items[i].stale ? "s" : "");
  return text;
}

/* ---- running ---- */
#define CASE_TESTS 10
struct test_group {
  const char *name;
  const TTest *tests[CASE_TESTS]; /* NULL-terminated if fewer */
};

/* Each test with a folder of its own. Returns the exit code. */
FIXTURE int run_groups(const char *suite_name, const struct test_group *groups, size_t count)
{
  Suite *suite = suite_create(suite_name);
  SRunner *runner;
  size_t i, j;
  int failed;
  for(i = 0; i < count; i++) {
    TCase *tcase = tcase_create(groups[i].name);
    tcase_set_timeout(tcase, 120);
    tcase_add_checked_fixture(tcase, setup, teardown);
    for(j = 0; j < CASE_TESTS && groups[i].tests[j] != NULL; j++)
      tcase_add_test(tcase, groups[i].tests[j]);
    suite_add_tcase(suite, tcase);
  }
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

#endif
