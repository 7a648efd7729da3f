/* test_store_faults.c - files that are no store, permissions, two writers, migrations: one clear line, and nothing touched. */
#include "store_fixture.h"

#include <math.h>
#include <signal.h>
#include <sys/wait.h>

/* ---- files that are not ours ---- */
/* Opening 'path' either way fails with a line that says 'part', and leaves its bytes and the folder alone. */
static void refused(enum mf_status status, const char *part)
{
  static const char *const suffixes[] = {".lock", ".new", "-journal", "-shm"};
  size_t before, after, i;
  char *bytes = file_bytes(path, &before), *now;
  struct store *st = (struct store *)dir;
  int read_only;
  for(read_only = 0; read_only < 2; read_only++) {
    ck_fails(store_open(path, read_only != 0, &st, &err), status);
    ck_assert_ptr_null(st);
    ck_says(part);
    ck_says("work.db");
  }
  now = file_bytes(path, &after);
  ck_assert_uint_eq(before, after);
  if(before > 0)
    ck_assert_mem_eq(bytes, now, before);
  for(i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++)
    ck_assert_msg(!exists(path, suffixes[i]), "left %s", suffixes[i]);
  free(bytes);
  free(now);
}

START_TEST(not_sqlite)
{
  write_file_bytes(path, "hello, this is text\n", 20);
  refused(MF_ERR_STORE, "not SQLite");
  write_file_bytes(path, "x", 1);
  refused(MF_ERR_STORE, "not SQLite");
  write_file_bytes(path, "", 0);
  refused(MF_ERR_STORE, "empty");
}
END_TEST

START_TEST(another_programs_database)
{
  raw_sql(path, "CREATE TABLE t(x); INSERT INTO t VALUES(1)");
  refused(MF_ERR_STORE, "another program");
  raw_sql(path, "PRAGMA application_id=1; PRAGMA journal_mode=WAL");
  refused(MF_ERR_STORE, "another program");
}
END_TEST

/* A killed program's log must not be moved into its database by us. */
START_TEST(another_programs_database_with_a_log)
{
  char *before, *after;
  size_t count, still;
  char wal[400];
  pid_t child;
  snprintf(wal, sizeof(wal), "%s-wal", path);
  raw_sql(path, "PRAGMA journal_mode=WAL; CREATE TABLE t(x)");
  child = fork();
  if(child == 0) {
    sqlite3 *db;
    sqlite3_open(path, &db);
    sqlite3_exec(db, "INSERT INTO t VALUES(1)", NULL, NULL, NULL);
    _exit(0);
  }
  ck_assert_int_eq(waitpid(child, NULL, 0), child);
  before = file_bytes(wal, &count);
  ck_assert_uint_gt(count, 0);
  snprintf(wal, sizeof(wal), "%s-shm", path);
  unlink(wal);
  refused(MF_ERR_STORE, "another program");
  snprintf(wal, sizeof(wal), "%s-wal", path);
  after = file_bytes(wal, &still);
  ck_assert_uint_eq(count, still);
  ck_assert_mem_eq(before, after, count);
  free(before);
  free(after);
}
END_TEST

START_TEST(truncated)
{
  static const size_t keep[] = {50, 99, 100, 3000, 4096, 8192, 20000};
  struct store *st = open_store();
  char *bytes;
  size_t count, i;
  put_rows(st, "a", 256, 132);
  store_close(st);
  bytes = file_bytes(path, &count);
  ck_assert_uint_gt(count, 20000);
  for(i = 0; i < sizeof(keep) / sizeof(keep[0]); i++) {
    write_file_bytes(path, bytes, keep[i]);
    refused(MF_ERR_STORE, "truncated");
  }
  write_file_bytes(path, bytes, count - 1);
  refused(MF_ERR_STORE, "truncated");
  write_file_bytes(path, bytes, count);
  st = open_store();
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 1);
  store_close(st);
  free(bytes);
}
END_TEST

START_TEST(damaged_inside)
{
  struct store *st = open_store();
  struct rows rows = put_rows(st, "a", 256, 132);
  struct artifact art;
  char *bytes;
  size_t count, i;
  store_close(st);
  bytes = file_bytes(path, &count);
  for(i = 4096; i < count; i++)
    bytes[i] = (char)(bytes[i] ^ 0x5a);
  write_file_bytes(path, bytes, count);
  free(bytes);
  if(store_open(path, false, &st, &err) == MF_OK) {
    struct candidate cand;
    ck_fails(store_get_candidate(st, rows.candidate, &cand, &art, &err), MF_ERR_STORE);
    ck_says("damaged");
  }
  store_close(st);
}
END_TEST

START_TEST(newer)
{
  struct store *st = open_store();
  store_close(st);
  raw_sql(path, "PRAGMA journal_mode=DELETE; PRAGMA user_version=99");
  refused(MF_ERR_STORE, "newer moeforge");
}
END_TEST

/* The version is in the log only, because the newer program was killed. */
START_TEST(newer_in_the_log)
{
  struct store *st = open_store();
  pid_t child;
  store_close(st);
  child = fork();
  if(child == 0) {
    sqlite3 *db;
    sqlite3_open(path, &db);
    sqlite3_exec(db, "PRAGMA user_version=99", NULL, NULL, NULL);
    _exit(0);
  }
  ck_assert_int_eq(waitpid(child, NULL, 0), child);
  ck_assert(exists(path, "-wal"));
  ck_fails(store_open(path, false, &st, &err), MF_ERR_STORE);
  ck_says("newer moeforge");
  ck_fails(store_open(path, true, &st, &err), MF_ERR_STORE);
  ck_says("newer moeforge");
  ck_assert(exists(path, "-wal")); /* still where its owner left it */
}
END_TEST

/* ---- places ---- */
START_TEST(places_that_cannot_be_used)
{
  struct store *st;
  ck_fails(store_open(path, true, &st, &err), MF_ERR_IO);
  ck_says("moeforge tune");
  ck_assert(!exists(path, ""));
  ck_fails(store_open(dir, false, &st, &err), MF_ERR_IO);
  ck_says("found a folder");
  ck_fails(store_open(dir, true, &st, &err), MF_ERR_IO);
  ck_fails(store_open("", false, &st, &err), MF_ERR_IO);
  snprintf(path, sizeof(path), "%.200s/no/such/work.db", dir);
  ck_fails(store_open(path, false, &st, &err), MF_ERR_IO);
  ck_says("work.db");
  ck_fails(store_open(path, true, &st, &err), MF_ERR_IO);
}
END_TEST

START_TEST(read_only_folder)
{
  struct store *st;
  obey_permissions();
  ck_assert_int_eq(chmod(dir, 0555), 0);
  ck_fails(store_open(path, false, &st, &err), MF_ERR_IO);
  ck_says("check the permissions");
  ck_assert_int_eq(chmod(dir, 0755), 0);
  st = open_store();
  put_rows(st, "a", 256, 132);
  store_close(st);
  ck_assert_int_eq(chmod(dir, 0555), 0);
  ck_fails(store_open(path, false, &st, &err), MF_ERR_IO);
  st = open_reader_of(path); /* there is no place for the log's index */
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 1);
  store_close(st);
}
END_TEST

START_TEST(read_only_file)
{
  struct store *st = open_store();
  store_close(st);
  obey_permissions();
  ck_assert_int_eq(chmod(path, 0444), 0);
  ck_fails(store_open(path, false, &st, &err), MF_ERR_IO);
  ck_says("read-only");
}
END_TEST

/* ---- two writers ---- */
/* A child that opens the store and holds it. Its pid. */
static pid_t hold_store(void)
{
  int ready[2];
  char byte;
  pid_t child;
  ck_assert_int_eq(pipe(ready), 0);
  child = fork();
  if(child == 0) {
    struct store *st;
    struct error why;
    if(store_open(path, false, &st, &why) == MF_OK && write(ready[1], "x", 1) == 1)
      for(;;)
        pause();
    _exit(1);
  }
  close(ready[1]);
  ck_assert_int_eq((int)read(ready[0], &byte, 1), 1);
  close(ready[0]);
  return child;
}

START_TEST(second_writer_waits_then_says_who)
{
  struct store *st;
  char who[64];
  pid_t child = hold_store();
  ck_fails(store_open(path, false, &st, &err), MF_ERR_STORE);
  snprintf(who, sizeof(who), "is being written by process %ld: ", (long)child);
  ck_says(who);
  ck_says("--store");
  st = open_reader_of(path); /* readers need not wait */
  store_close(st);
  kill(child, SIGKILL);
  ck_assert_int_eq(waitpid(child, NULL, 0), child);
  ck_assert(exists(path, ".lock")); /* left by the killed one, held by nobody */
  st = open_store();
  store_close(st);
  ck_assert(!exists(path, ".lock"));
}
END_TEST

START_TEST(lock_is_of_the_file_not_of_its_name)
{
  struct store *st;
  char link[400];
  pid_t child = hold_store();
  snprintf(link, sizeof(link), "%.200s/link.db", dir);
  ck_assert_int_eq(symlink(path, link), 0);
  ck_fails(store_open(link, false, &st, &err), MF_ERR_STORE);
  ck_says("is being written by");
  kill(child, SIGKILL);
  ck_assert_int_eq(waitpid(child, NULL, 0), child);
}
END_TEST

/* Adds one to the number in 'name' while it holds the store, again and again. */
static void count_under_lock(const char *name, int times)
{
  while(times > 0) {
    struct store *st;
    struct error why;
    size_t bytes;
    char *text, next[16];
    if(store_open(path, false, &st, &why) != MF_OK)
      continue; /* busy for too long */
    text = file_bytes(name, &bytes);
    snprintf(next, sizeof(next), "%d", atoi(text) + 1);
    write_file_bytes(name, next, strlen(next));
    free(text);
    store_close(st);
    times--;
  }
  _exit(0);
}

/* The lock file comes and goes with its holders: never two of them at once. */
START_TEST(one_writer_at_a_time)
{
  char name[400], *text;
  size_t bytes;
  int i;
  snprintf(name, sizeof(name), "%.200s/count", dir);
  write_file_bytes(name, "0", 1);
  for(i = 0; i < 4; i++)
    if(fork() == 0)
      count_under_lock(name, 50);
  for(i = 0; i < 4; i++)
    ck_assert_int_gt(wait(NULL), 0);
  text = file_bytes(name, &bytes);
  ck_assert_int_eq(atoi(text), 200);
  free(text);
}
END_TEST

/* Another program's transaction (the sqlite3 shell) is not ours to lock out: we wait, and say so. */
START_TEST(another_programs_transaction)
{
  struct store *st = open_store();
  const struct artifact art = some_artifact(1);
  sqlite3 *db;
  int64_t id;
  ck_assert_int_eq(sqlite3_open(path, &db), SQLITE_OK);
  ck_assert_int_eq(sqlite3_exec(db, "BEGIN IMMEDIATE", NULL, NULL, NULL), SQLITE_OK);
  sqlite3_busy_timeout(st->db, 100);
  ck_fails(store_put_artifact(st, &art, NVRTC, &id, &err), MF_ERR_STORE);
  ck_says("another program is using it");
  ck_assert_int_eq(sqlite3_exec(db, "COMMIT", NULL, NULL, NULL), SQLITE_OK);
  sqlite3_close(db);
  ck_ok(store_put_artifact(st, &art, NVRTC, &id, &err));
  store_close(st);
}
END_TEST

/* ---- migrations ---- */
static void make_version_zero(void)
{
  char sql[128];
  snprintf(sql, sizeof(sql), "PRAGMA application_id=%d; CREATE TABLE note(text); INSERT INTO note VALUES('kept')", STORE_APPLICATION_ID);
  raw_sql(path, sql);
}

START_TEST(version_zero_is_migrated)
{
  struct store *st;
  size_t before, after;
  char *bytes, *now;
  make_version_zero();
  bytes = file_bytes(path, &before);
  st = open_reader_of(path); /* of a copy that is migrated */
  ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
  store_close(st);
  now = file_bytes(path, &after);
  ck_assert_uint_eq(before, after);
  ck_assert_mem_eq(bytes, now, before);
  free(bytes);
  free(now);
  st = open_store();
  ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
  ck_assert_int_eq(number(st, "SELECT text='kept' FROM note"), 1);
  put_rows(st, "a", 256, 132);
  store_close(st);
  st = open_reader_of(path);
  store_close(st);
}
END_TEST

/* Format 1 with a winner and a sample in it: what it does not know is not known afterwards, the rest is as it was. */
static void make_version_one(void)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  const struct sample smp = {.candidate_id = rows.candidate, .tokens = 1, .us = 9, .floors = {7, 8}};
  put_winner(st, &rows, 1, 8, 20, false);
  ck_ok(store_put_samples(st, rows.run, "k", &smp, 1, &err));
  store_close(st);
  raw_sql(path, "ALTER TABLE sample DROP COLUMN floor_tensor_us; ALTER TABLE winner DROP COLUMN floor_tensor_us; ALTER TABLE winner DROP COLUMN floor_copy_us;"
                "PRAGMA journal_mode=DELETE; PRAGMA user_version=1");
}

static void winner_without_floors(struct store *st)
{
  const struct winner_list list = list_winners(st, "a");
  ck_assert_uint_eq(list.count, 1);
  ck_assert_double_eq(list.items[0].us, 20);
  ck_assert_double_eq(list.items[0].floor_us, 10);
  ck_assert(isnan(list.items[0].floors.copy_us) && isnan(list.items[0].floors.tensor_us));
  ck_assert_int_eq(number(st, "SELECT count(*) FROM sample WHERE us=9 AND floor_us=7 AND floor_tensor_us IS NULL"), 1);
}

START_TEST(version_one_has_no_measured_floors)
{
  struct store *st;
  size_t before, after;
  char *bytes, *now;
  make_version_one();
  bytes = file_bytes(path, &before);
  st = open_reader_of(path);
  winner_without_floors(st);
  store_close(st);
  now = file_bytes(path, &after);
  ck_assert_uint_eq(before, after);
  ck_assert_mem_eq(bytes, now, before);
  free(bytes);
  free(now);
  st = open_store();
  winner_without_floors(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  st = open_reader_of(shipped);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM winner WHERE floor_us=10 AND floor_copy_us IS NULL"), 1);
  store_close(st);
}
END_TEST

START_TEST(steps_are_run_once_in_order)
{
  static const struct store_migration steps[] = {
      {STORE_SCHEMA_VERSION, "this was done long ago"},
      {STORE_SCHEMA_VERSION + 1, "ALTER TABLE run ADD COLUMN host TEXT NOT NULL DEFAULT 'unknown'"},
      {STORE_SCHEMA_VERSION + 2, "UPDATE run SET host='here'"},
  };
  struct store *st = open_store();
  int64_t run;
  ck_ok(store_begin_run(st, "tune", NVRTC, DRIVER, &run, &err));
  ck_ok(store_migrate(st, steps, 2, &err));
  ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION + 1);
  ck_assert_int_eq(number(st, "SELECT host='unknown' FROM run"), 1);
  ck_ok(store_migrate(st, steps, 3, &err));
  ck_assert_int_eq(number(st, "SELECT host='here' FROM run"), 1);
  ck_ok(store_migrate(st, steps, 3, &err)); /* nothing left to do */
  ck_fails(store_migrate(st, steps, 2, &err), MF_ERR_STORE);
  ck_says("newer moeforge");
  store_close(st);
}
END_TEST

START_TEST(failed_step_is_undone)
{
  static const struct store_migration steps[] = {{99, "ALTER TABLE run ADD COLUMN host TEXT; INSERT INTO no_such_table VALUES(1)"}};
  struct store *st = open_store();
  ck_fails(store_migrate(st, steps, 1, &err), MF_ERR_STORE);
  ck_says("migrating to format 99");
  ck_assert_int_eq(number(st, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM pragma_table_info('run') WHERE name='host'"), 0);
  store_close(st);
}
END_TEST

START_TEST(released_steps_are_ascending)
{
  size_t count, i;
  const struct store_migration *steps = store_migrations(&count);
  for(i = 0; i < count; i++)
    ck_assert_int_eq(steps[i].to, (int)i + 1);
  ck_assert_int_eq((int)count, STORE_SCHEMA_VERSION);
}
END_TEST

int main(void)
{
  const struct test_group groups[] = {
      {"files", {not_sqlite, another_programs_database, another_programs_database_with_a_log, truncated, damaged_inside, newer, newer_in_the_log}},
      {"places", {places_that_cannot_be_used, read_only_folder, read_only_file}},
      {"writers", {second_writer_waits_then_says_who, lock_is_of_the_file_not_of_its_name, one_writer_at_a_time, another_programs_transaction}},
      {"migrations", {version_zero_is_migrated, version_one_has_no_measured_floors, steps_are_run_once_in_order, failed_step_is_undone, released_steps_are_ascending}},
  };
  return run_groups("store faults", groups, sizeof(groups) / sizeof(groups[0]));
}
