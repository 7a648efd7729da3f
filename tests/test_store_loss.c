/* test_store_loss.c - full disks and kills: what was reported as stored stays stored, and nothing is there by half. */
#include "store_fixture.h"

#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

/* ---- full disks ---- */
/* Puts artifacts until one fails; returns how many were stored. */
static int put_until_full(struct store *st, int first)
{
  int i;
  for(i = first; i < first + 1000; i++) {
    const struct artifact art = some_artifact(i);
    int64_t id;
    err.text[0] = '\0';
    if(store_put_artifact(st, &art, NVRTC, &id, &err) != MF_OK)
      break;
  }
  ck_assert_int_lt(i, first + 1000);
  return i - first;
}

START_TEST(database_full)
{
  struct store *st = open_store();
  char sql[64];
  int stored;
  snprintf(sql, sizeof(sql), "PRAGMA max_page_count=%lld", number(st, "PRAGMA page_count") + 20);
  run_sql(st, sql);
  stored = put_until_full(st, 1);
  ck_assert_int_gt(stored, 2);
  ck_assert_int_eq(err.status, MF_ERR_IO);
  ck_says("the disk is full");
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), stored);
  run_sql(st, "PRAGMA max_page_count=100000");
  run_sql(st, "PRAGMA integrity_check");
  ck_ok(store_begin(st, &err)); /* goes on where it was */
  ck_ok(store_commit(st, &err));
  store_close(st);
  st = open_store();
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), stored);
  store_close(st);
}
END_TEST

/* Inside a batch: whatever SQLite undoes, nothing is committed half. */
START_TEST(database_full_in_a_batch)
{
  struct store *st = open_store();
  const struct artifact art = some_artifact(5000);
  char sql[64];
  int64_t id;
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), 0);
  snprintf(sql, sizeof(sql), "PRAGMA max_page_count=%lld", number(st, "PRAGMA page_count") + 20);
  run_sql(st, sql);
  ck_ok(store_begin(st, &err));
  ck_assert_int_gt(put_until_full(st, 1), 2);
  ck_says("the disk is full");
  if(st->batch_lost) {
    ck_fails(store_put_artifact(st, &art, NVRTC, &id, &err), MF_ERR_STORE);
    ck_says("undone");
    ck_fails(store_commit(st, &err), MF_ERR_STORE);
  }
  store_rollback(st);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), 0);
  run_sql(st, "PRAGMA max_page_count=100000");
  ck_ok(store_put_artifact(st, &art, NVRTC, &id, &err));
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), 1);
  store_close(st);
}
END_TEST

/* A batch that SQLite undid by itself (as it does after some I/O errors) does not go on as single calls. */
START_TEST(lost_batch_is_noticed)
{
  struct store *st = open_store();
  const struct artifact one = some_artifact(1), two = some_artifact(2);
  int64_t id;
  ck_ok(store_begin(st, &err));
  ck_ok(store_put_artifact(st, &one, NVRTC, &id, &err));
  run_sql(st, "CREATE TEMP TRIGGER stop BEFORE INSERT ON main.artifact BEGIN SELECT raise(ROLLBACK, 'stop'); END");
  ck_assert_int_ne(store_put_artifact(st, &two, NVRTC, &id, &err), MF_OK);
  ck_fails(store_put_artifact(st, &two, NVRTC, &id, &err), MF_ERR_STORE);
  ck_says("undone");
  ck_fails(store_commit(st, &err), MF_ERR_STORE);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), 0);
  ck_ok(store_begin(st, &err));
  ck_ok(store_commit(st, &err));
  store_close(st);
}
END_TEST

START_TEST(file_size_limit)
{
  struct store *st = open_store();
  const struct artifact last = some_artifact(5000);
  struct rlimit limit, small;
  int64_t id;
  int stored, i;
  ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
  small = limit;
  small.rlim_cur = 300000;
  signal(SIGXFSZ, SIG_IGN);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
  stored = put_until_full(st, 1);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
  ck_assert_int_eq(err.status, MF_ERR_IO);
  ck_says("work.db");
  ck_says("file size limit");
  ck_assert_int_gt(stored, 2);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), stored);
  ck_ok(store_put_artifact(st, &last, NVRTC, &id, &err)); /* there is room again */
  store_close(st);
  st = open_store();
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), stored + 1);
  ck_assert_int_eq(number(st, "SELECT integrity_check='ok' FROM pragma_integrity_check"), 1);
  for(i = 1; i <= stored; i++) {
    const struct artifact art = some_artifact(i);
    struct artifact back;
    ck_ok(store_get_artifact(st, art.compile_key, &back, &err));
    artifact_free(&back);
  }
  store_close(st);
}
END_TEST

START_TEST(no_room_to_create)
{
  struct store *st;
  struct rlimit limit, small;
  ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
  small = limit;
  small.rlim_cur = 8192;
  signal(SIGXFSZ, SIG_IGN);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
  ck_fails(store_open(path, false, &st, &err), MF_ERR_IO);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
  ck_assert(!exists(path, "") && !exists(path, ".new") && !exists(path, ".new-journal") && !exists(path, ".lock"));
  st = open_store();
  store_close(st);
}
END_TEST

/* ---- kills ---- */
static void sleep_us(long us)
{
  const struct timespec pause_time = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&pause_time, NULL);
}

/* Stores samples for ever, each call one round of three; reports each round number once it is stored. */
static void write_samples(int fd, int64_t candidate, int64_t run, int first)
{
  struct store *st;
  struct error why;
  int round, i;
  if(store_open(path, false, &st, &why) != MF_OK)
    _exit(1);
  for(round = first;; round++) {
    struct sample smp[3];
    for(i = 0; i < 3; i++)
      smp[i] = (struct sample){.candidate_id = candidate, .tokens = i + 1, .seed = 1, .round = round, .us = 10, .floors = {7, NAN}};
    if(store_put_samples(st, run, "key", smp, 3, &why) != MF_OK || write(fd, &round, sizeof(round)) != (ssize_t)sizeof(round))
      _exit(2);
  }
}

START_TEST(kill_loses_no_reported_sample)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  unsigned random = 12345;
  int kills, next = 0, reported = 0;
  store_close(st);
  for(kills = 0; kills < 40; kills++) {
    int report[2], round;
    pid_t child;
    ck_assert_int_eq(pipe(report), 0);
    child = fork();
    if(child == 0) {
      close(report[0]);
      write_samples(report[1], rows.candidate, rows.run, next);
    }
    close(report[1]);
    random = random * 1664525u + 1013904223u;
    sleep_us((long)(2000 + random % 40000));
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    ck_assert_int_eq(waitpid(child, &round, 0), child);
    ck_assert_msg(WIFSIGNALED(round), "the writer ended by itself");
    while(read(report[0], &round, sizeof(round)) == (ssize_t)sizeof(round))
      reported = round + 1;
    close(report[0]);
    st = open_store();
    ck_assert_int_eq(number(st, "SELECT integrity_check='ok' FROM pragma_integrity_check"), 1);
    next = (int)number(st, "SELECT coalesce(max(round)+1,0) FROM sample");
    ck_assert_int_ge(next, reported);     /* at most the call in flight was stored without a report */
    ck_assert_int_le(next, reported + 1);
    ck_assert_int_eq(number(st, "SELECT count(*) FROM sample"), 3LL * next); /* each round whole */
    store_close(st);
  }
  ck_assert_int_gt(reported, 20);
}
END_TEST

START_TEST(kill_while_creating)
{
  unsigned random = 777;
  int kills;
  for(kills = 0; kills < 40; kills++) {
    struct store *st;
    pid_t child;
    unlink(path);
    child = fork();
    if(child == 0) {
      struct error why;
      _exit(store_open(path, false, &st, &why) == MF_OK ? 0 : 1);
    }
    random = random * 1664525u + 1013904223u;
    sleep_us((long)(random % 12000));
    kill(child, SIGKILL);
    ck_assert_int_eq(waitpid(child, NULL, 0), child);
    st = open_store();
    ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
    ck_assert_int_eq(number(st, "SELECT count(*) FROM run"), 0);
    store_close(st);
    ck_assert(!exists(path, ".new") && !exists(path, ".lock"));
  }
}
END_TEST

int main(void)
{
  const struct test_group groups[] = {
      {"full", {database_full, database_full_in_a_batch, lost_batch_is_noticed, file_size_limit, no_room_to_create}},
      {"kills", {kill_loses_no_reported_sample, kill_while_creating}},
  };
  return run_groups("store loss", groups, sizeof(groups) / sizeof(groups[0]));
}
