/* test_store_ship.c - the shipped file: what is in it, what it replaces, what it keeps, what can go wrong. */
#include "store_fixture.h"

#include <signal.h>
#include <sys/resource.h>

/* A store with one winner, a loser, samples, a rejection and a check of both candidates. */
static struct rows put_everything(struct store *st)
{
  const struct rows rows = put_rows(st, "a", 256, 132);
  const int64_t loser = put_candidate(st, &rows, "none/loser", 1);
  const struct sample smp[2] = {{.candidate_id = rows.candidate, .tokens = 1, .us = 9, .floors = {7, 8}},
                                {.candidate_id = loser, .tokens = 1, .us = 19, .floors = {7, 8}}};
  const struct verdict why = {.stage = "space", .rule = "r"};
  const struct check_result result = {.passed = true, .worst = {[GATE_H] = 8e-3}};
  const struct artifact unused = some_artifact(2);
  int64_t id;
  ck_ok(store_put_samples(st, rows.run, "k", smp, 2, &err));
  ck_ok(store_put_reject(st, rows.run, rows.shape, rows.device, "none/x", &why, &err));
  ck_ok(store_put_check(st, rows.run, rows.candidate, "check", &result, NULL, &err));
  ck_ok(store_put_check(st, rows.run, loser, "check", &result, NULL, &err));
  ck_ok(store_put_artifact(st, &unused, NVRTC, &id, &err));
  put_winner(st, &rows, 1, 8, 9, false);
  return rows;
}

START_TEST(winners_and_nothing_else)
{
  static const char *const empty[] = {"sample", "timing", "reject"}, *const one[] = {"shape", "shape_name", "device", "run", "run_device", "artifact",
                                                                                     "candidate", "check_result", "winner"};
  struct store *st = open_store(), *file;
  struct check_result back;
  char sql[128];
  int64_t other;
  size_t i;
  ck_ok(store_begin_run(st, "tune without winners", NVRTC, DRIVER, &other, &err));
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  file = open_reader_of(shipped);
  for(i = 0; i < sizeof(empty) / sizeof(empty[0]); i++) {
    snprintf(sql, sizeof(sql), "SELECT count(*) FROM %s", empty[i]);
    ck_assert_msg(number(file, sql) == 0, "%s", sql);
  }
  for(i = 0; i < sizeof(one) / sizeof(one[0]); i++) {
    snprintf(sql, sizeof(sql), "SELECT count(*) FROM %s", one[i]);
    ck_assert_msg(number(file, sql) == 1, "%s", sql);
  }
  ck_assert_int_eq(number(file, "SELECT count(*) FROM pragma_foreign_key_check"), 0);
  ck_assert_int_eq(number(file, "SELECT integrity_check='ok' FROM pragma_integrity_check"), 1);
  ck_assert_int_eq(number(file, "SELECT journal_mode='delete' FROM pragma_journal_mode"), 1);
  ck_assert_int_eq(number(file, "PRAGMA application_id"), STORE_APPLICATION_ID);
  ck_assert_int_eq(number(file, "PRAGMA user_version"), STORE_SCHEMA_VERSION);
  ck_assert_int_eq(number(file, "PRAGMA freelist_count"), 0);
  ck_ok(store_get_check(file, 1, "check", &back, &err));
  ck_assert_double_eq(back.worst[GATE_H], 8e-3);
  store_close(file);
  ck_assert(!exists(shipped, ".new") && !exists(shipped, ".lock") && !exists(shipped, "-journal") && !exists(shipped, "-wal"));
}
END_TEST

START_TEST(everything_of_a_winner_is_there)
{
  struct store *st = open_store(), *file;
  struct winner_list list;
  struct candidate cand;
  struct artifact art;
  struct model_spec spec;
  struct device_info dev;
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  file = open_reader_of(shipped);
  list = list_winners(file, "a");
  ck_assert_uint_eq(list.count, 1);
  ck_assert_double_eq(list.items[0].us, 9);
  ck_assert_double_eq(list.items[0].us_low, 8.75);
  ck_assert_double_eq(list.items[0].regret, 1.25);
  ck_assert_int_eq(list.items[0].tokens_timed, 8);
  ck_assert_str_eq(list.items[0].selection_key, "selection");
  ck_assert_int_eq(list.items[0].driver_version, DRIVER);
  ck_assert(!list.items[0].stale);
  ck_ok(store_get_candidate(file, list.items[0].candidate_id, &cand, &art, &err));
  ck_assert_str_eq(cand.name, "none/a1");
  ck_assert_uint_eq(cand.recipe.shared_bytes, 1000);
  ck_assert_uint_eq(art.cubin_bytes, 5000);
  ck_assert_str_eq(art.source, "// source 1");
  artifact_free(&art);
  ck_ok(store_get_shape(file, list.items[0].shape_id, &spec, &err));
  ck_assert_int_eq(spec.problem.experts, 256);
  ck_assert_double_eq(spec.routed_scaling, 2.5);
  ck_ok(store_get_device(file, list.items[0].device_id, &dev, &err));
  ck_assert_int_eq(dev.sms, 132);
  store_close(file);
}
END_TEST

START_TEST(readable_in_a_read_only_folder)
{
  struct store *st = open_store(), *file;
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  obey_permissions();
  ck_assert_int_eq(chmod(shipped, 0444), 0);
  ck_assert_int_eq(chmod(dir, 0555), 0);
  file = open_reader_of(shipped);
  ck_assert_str_eq(winners_text(file, "a"), "1-8:9.0");
  store_close(file);
}
END_TEST

/* The commands of docs/database.md work, on the kind of file that they name. */
START_TEST(documented_one_liners)
{
  struct store *st = open_store(), *file;
  size_t count;
  char *text = file_bytes("docs/database.md", &count), *line;
  int commands = 0;
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  file = open_reader_of(shipped);
  ck_assert_ptr_nonnull(text);
  for(line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
    char *sql = strchr(line, '"');
    if(strncmp(line, "sqlite3 ", 8) != 0)
      continue;
    ck_assert_ptr_nonnull(sql);
    *strrchr(line, '"') = '\0';
    run_sql(strstr(line, " schedules.db ") != NULL ? file : st, sql + 1);
    commands++;
  }
  ck_assert_int_ge(commands, 10);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM sample"), 2); /* the last one drops only what it says */
  store_close(file);
  store_close(st);
  free(text);
}
END_TEST

/* ---- merging ---- */
/* Another machine's work store, for the same shipped file. */
static struct store *open_other(const char *name)
{
  struct store *st = NULL;
  char other[400];
  snprintf(other, sizeof(other), "%s/%s", dir, name);
  ck_ok(store_open(other, false, &st, &err));
  return st;
}

static const char *shipped_text(const char *shape)
{
  struct store *file = open_reader_of(shipped);
  const char *text = winners_text(file, shape);
  store_close(file);
  return text;
}

START_TEST(predictions_never_replace_measurements)
{
  struct store *one = open_store(), *two = open_other("two.db");
  struct rows rows = put_rows(one, "a", 256, 132);
  put_winner(one, &rows, 3, 8, 9, false);
  ck_ok(store_ship(one, shipped, &err));
  rows = put_rows(two, "a", 256, 132);
  put_winner(two, &rows, 1, 16, 5, true);
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-2:5.0p 3-8:9.0 9-16:5.0p");
  store_close(one);
  store_close(two);
}
END_TEST

START_TEST(measurements_replace_predictions)
{
  struct store *one = open_store(), *two = open_other("two.db");
  struct rows rows = put_rows(one, "a", 256, 132);
  put_winner(one, &rows, 1, 16, 5, true);
  ck_ok(store_ship(one, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-16:5.0p");
  rows = put_rows(two, "a", 256, 132);
  put_winner(two, &rows, 1, 8, 9, false);
  run_sql(two, "UPDATE winner SET made_at='2000-01-01T00:00:00.000Z'"); /* however old */
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0 9-16:5.0p");
  store_close(one);
  store_close(two);
}
END_TEST

START_TEST(newer_measurements_win)
{
  struct store *one = open_store(), *two = open_other("two.db");
  struct rows rows = put_rows(one, "a", 256, 132);
  put_winner(one, &rows, 1, 8, 9, false);
  ck_ok(store_ship(one, shipped, &err));
  rows = put_rows(two, "a", 256, 132);
  put_winner(two, &rows, 1, 4, 7, false);
  run_sql(two, "UPDATE winner SET made_at='2000-01-01T00:00:00.000Z'");
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0"); /* what is shipped is newer */
  run_sql(two, "UPDATE winner SET made_at='2100-01-01T00:00:00.000Z'");
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-4:7.0 5-8:9.0"); /* counts that were not tuned again stay served */
  store_close(one);
  store_close(two);
}
END_TEST

START_TEST(shipping_again_replaces)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  struct rows next = rows;
  const struct artifact art = some_artifact(3);
  put_winner(st, &rows, 1, 8, 9, false);
  ck_ok(store_ship(st, shipped, &err));
  ck_ok(store_ship(st, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0");
  ck_ok(store_put_artifact(st, &art, NVRTC, &next.artifact, &err));
  next.candidate = put_candidate(st, &next, "none/better", 5);
  put_winner(st, &next, 1, 8, 8, false);
  ck_ok(store_ship(st, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:8.0");
  store_close(st);
  st = open_reader_of(shipped);
  ck_assert_int_eq(number(st, "SELECT count(*) FROM candidate"), 1); /* the loser is gone */
  ck_assert_int_eq(number(st, "SELECT count(*) FROM artifact"), 1);
  ck_assert_str_eq(list_winners(st, "a").items[0].schedule_name, "none/better");
  store_close(st);
}
END_TEST

/* Two work stores mean different problems by one name: it stays with the one that used it last. */
START_TEST(name_of_the_last_user)
{
  struct store *one = open_store(), *two = open_other("two.db");
  struct rows rows = put_rows(one, "a", 256, 132);
  put_winner(one, &rows, 1, 8, 9, false);
  ck_ok(store_ship(one, shipped, &err));
  rows = put_rows(two, "a", 64, 132);
  put_winner(two, &rows, 1, 8, 19, false);
  run_sql(two, "UPDATE shape_name SET used_at='2000-01-01T00:00:00.000Z'");
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0");
  run_sql(two, "UPDATE shape_name SET used_at='2100-01-01T00:00:00.000Z'");
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:19.0");
  ck_assert_str_eq(shipped_text(NULL), "1-8:19.0 1-8:9.0");
  store_close(one);
  store_close(two);
}
END_TEST

START_TEST(others_rows_are_kept)
{
  struct store *one = open_store(), *two = open_other("two.db"), *file;
  struct rows rows = put_rows(one, "a", 256, 132), next;
  put_winner(one, &rows, 1, 8, 9, false);
  next = put_rows(one, "b", 128, 132);
  put_winner(one, &next, 1, 8, 19, false);
  next = put_rows(one, "c", 64, 132);
  put_winner(one, &next, 1, 8, 39, false);
  next = put_rows(one, "a", 256, 114); /* another device */
  put_winner(one, &next, 1, 8, 29, false);
  ck_ok(store_ship(one, shipped, &err));
  ck_assert_str_eq(shipped_text("b"), "1-8:19.0");
  ck_assert_str_eq(shipped_text("c"), "1-8:39.0");
  rows = put_rows(two, "b", 128, 132);
  ck_ok(store_begin_run(two, "newer driver", NVRTC, DRIVER + 10, &rows.run, &err));
  put_winner(two, &rows, 1, 4, 18, false);
  ck_ok(store_ship(two, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0s 1-8:29.0"); /* stale, still there */
  ck_assert_str_eq(shipped_text("b"), "1-4:18.0 5-8:19.0s");
  file = open_reader_of(shipped);
  ck_assert_int_eq(number(file, "SELECT count(*) FROM pragma_foreign_key_check"), 0);
  ck_assert_int_eq(number(file, "SELECT count(*) FROM device"), 2);
  store_close(file);
  store_close(one);
  store_close(two);
}
END_TEST

/* ---- what can go wrong ---- */
START_TEST(nothing_to_ship_makes_no_file)
{
  struct store *st = open_store();
  put_rows(st, "a", 256, 132);
  ck_ok(store_ship(st, shipped, &err));
  ck_assert(!exists(shipped, ""));
  store_close(st);
}
END_TEST

START_TEST(not_over_a_work_store)
{
  struct store *st = open_store(), *other = open_other("two.db");
  char name[400];
  put_everything(st);
  put_everything(other);
  store_close(other);
  ck_fails(store_ship(st, path, &err), MF_ERR_USAGE);
  ck_says("work store itself");
  snprintf(name, sizeof(name), "%s/two.db", dir);
  ck_fails(store_ship(st, name, &err), MF_ERR_STORE);
  ck_says("is a work store");
  store_close(st);
  other = open_other("two.db");
  ck_assert_int_eq(number(other, "SELECT count(*) FROM sample"), 2);
  store_close(other);
}
END_TEST

START_TEST(shipped_file_is_no_work_store)
{
  struct store *st = open_store();
  size_t before, after;
  char *bytes, *now;
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  bytes = file_bytes(shipped, &before);
  ck_fails(store_open(shipped, false, &st, &err), MF_ERR_STORE);
  ck_says("shipped file");
  ck_assert_ptr_null(st);
  now = file_bytes(shipped, &after);
  ck_assert_uint_eq(before, after);
  ck_assert_mem_eq(bytes, now, before);
  free(bytes);
  free(now);
}
END_TEST

START_TEST(foreign_target_is_left_alone)
{
  struct store *st = open_store();
  size_t count;
  char *bytes;
  put_everything(st);
  write_file_bytes(shipped, "my diary", 8);
  ck_fails(store_ship(st, shipped, &err), MF_ERR_STORE);
  ck_says("schedules.db");
  bytes = file_bytes(shipped, &count);
  ck_assert_str_eq(bytes, "my diary");
  free(bytes);
  snprintf(shipped, sizeof(shipped), "%.200s/no/folder.db", dir);
  ck_fails(store_ship(st, shipped, &err), MF_ERR_IO);
  store_close(st);
}
END_TEST

START_TEST(full_disk_keeps_the_old_file)
{
  struct store *st = open_store();
  const struct rows rows = put_everything(st);
  struct rlimit limit, small;
  ck_ok(store_ship(st, shipped, &err));
  put_winner(st, &rows, 1, 8, 8, false);
  ck_assert_int_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
  small = limit;
  small.rlim_cur = 20000;
  signal(SIGXFSZ, SIG_IGN);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
  ck_fails(store_ship(st, shipped, &err), MF_ERR_IO);
  ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
  ck_says("schedules.db");
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0");
  ck_assert(!exists(shipped, ".new") && !exists(shipped, ".new-journal"));
  ck_ok(store_ship(st, shipped, &err));
  ck_assert_str_eq(shipped_text("a"), "1-8:8.0");
  store_close(st);
}
END_TEST

START_TEST(strange_path_names)
{
  struct store *st = NULL;
  snprintf(path, sizeof(path), "%.200s/50%% off?#'x' .db", dir);
  snprintf(shipped, sizeof(shipped), "%.200s/ship %%41?mode=memory.db", dir);
  st = open_store();
  put_everything(st);
  ck_ok(store_ship(st, shipped, &err));
  store_close(st);
  ck_assert(exists(path, "") && exists(shipped, ""));
  ck_assert_str_eq(shipped_text("a"), "1-8:9.0");
}
END_TEST

START_TEST(not_inside_a_batch)
{
  struct store *st = open_store();
  put_everything(st);
  ck_ok(store_begin(st, &err));
  ck_fails(store_ship(st, shipped, &err), MF_ERR_INTERNAL);
  store_close(st);
}
END_TEST

int main(void)
{
  const struct test_group groups[] = {
      {"contents", {winners_and_nothing_else, everything_of_a_winner_is_there, readable_in_a_read_only_folder, documented_one_liners}},
      {"merging", {predictions_never_replace_measurements, measurements_replace_predictions, newer_measurements_win, shipping_again_replaces,
                   name_of_the_last_user, others_rows_are_kept}},
      {"failures", {nothing_to_ship_makes_no_file, not_over_a_work_store, shipped_file_is_no_work_store, foreign_target_is_left_alone,
                    full_disk_keeps_the_old_file, strange_path_names, not_inside_a_batch}},
  };
  return run_groups("store ship", groups, sizeof(groups) / sizeof(groups[0]));
}
