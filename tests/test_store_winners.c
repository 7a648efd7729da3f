/* test_store_winners.c - winners: what is kept, what replaces what, what is stale. */
#include "store_fixture.h"

/* ---- winners ---- */
START_TEST(winners_round_trip)
{
  struct store *st = open_store();
  const struct rows b = put_rows(st, "b", 128, 132), a2 = put_rows(st, "a", 256, 114), a = put_rows(st, "a", 256, 132);
  const struct winner two[2] = {some_winner(a.candidate, 3, 8, 20, false), some_winner(a.candidate, 1, 2, 10, false)};
  struct winner_list list;
  ck_ok(store_put_winners(st, a.run, a.shape, a.device, two, 2, &err));
  put_winner(st, &a2, 1, 1, 30, false);
  put_winner(st, &b, 1, 1, 40, false);
  list = list_winners(st, "a");
  ck_assert_uint_eq(list.count, 3);
  list = list_winners(st, NULL);
  ck_assert_uint_eq(list.count, 4);
  ck_assert_str_eq(list.items[3].shape_name, "b");
  ck_assert_int_eq(list.items[2].device_id, a2.device);
  ck_assert_int_eq(list.items[0].tokens_min, 1);
  ck_assert_int_eq(list.items[1].tokens_min, 3);
  ck_assert_int_eq(list.items[1].tokens_max, 8);
  ck_assert_int_eq(list.items[1].tokens_timed, 8);
  ck_assert_str_eq(list.items[1].device_name, "NVIDIA H200");
  ck_assert_str_eq(list.items[1].schedule_name, "none/a1");
  ck_assert_str_eq(list.items[1].selection_key, "selection");
  ck_assert_int_eq(list.items[1].candidate_id, a.candidate);
  ck_assert_double_eq(list.items[1].us, 20);
  ck_assert_double_eq(list.items[1].floor_us, 10);
  ck_assert_double_eq(list.items[1].floors.copy_us, 10);
  ck_assert_double_eq(list.items[1].floors.tensor_us, 15);
  ck_assert_double_eq(list.items[1].default_us, 30);
  ck_assert_double_eq(list.items[1].us_low, 19.75);
  ck_assert_double_eq(list.items[1].us_high, 20.25);
  ck_assert_double_eq(list.items[1].regret, 1.25);
  ck_assert_int_eq(list.items[1].driver_version, DRIVER);
  ck_assert_int_eq(list.items[1].nvrtc_version, NVRTC);
  ck_assert_int_eq(list.items[1].made_at[10], 'T');
  ck_assert(!list.items[1].predicted && !list.items[1].stale);
  store_close(st);
}
END_TEST

START_TEST(winners_are_replaced_as_a_whole)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  struct winner win[2] = {some_winner(rows.candidate, 1, 8, 20, false), some_winner(rows.candidate, 8, 9, 10, false)};
  put_winner(st, &rows, 1, 16, 9, false);
  ck_fails(store_put_winners(st, rows.run, rows.shape, rows.device, win, 2, &err), MF_ERR_INTERNAL);
  ck_says("both serve 8 tokens");
  win[0].tokens_min = 0;
  ck_fails(store_put_winners(st, rows.run, rows.shape, rows.device, win, 1, &err), MF_ERR_INTERNAL);
  win[0] = some_winner(99, 1, 8, 20, false);
  ck_fails(store_put_winners(st, rows.run, rows.shape, rows.device, win, 1, &err), MF_ERR_INTERNAL);
  ck_assert_str_eq(winners_text(st, "a"), "1-16:9.0");
  put_winner(st, &rows, 2, 4, 8, false);
  ck_assert_str_eq(winners_text(st, "a"), "2-4:8.0");
  store_close(st);
}
END_TEST

START_TEST(predictions_fill_gaps_only)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  put_winner(st, &rows, 1, 64, 9, true);
  put_winner(st, &rows, 3, 4, 8, false);
  ck_assert_str_eq(winners_text(st, "a"), "3-4:8.0"); /* a measurement replaces predictions */
  put_winner(st, &rows, 1, 8, 7, true);
  ck_assert_str_eq(winners_text(st, "a"), "1-2:7.0p 3-4:8.0 5-8:7.0p");
  ck_assert_int_eq(list_winners(st, "a").items[0].tokens_timed, 8);
  put_winner(st, &rows, 1, 2, 6, true);
  ck_assert_str_eq(winners_text(st, "a"), "1-2:6.0p 3-4:8.0");
  store_close(st);
}
END_TEST

/* ---- staleness ---- */
static void begin_run_on(struct store *st, int sms, int nvrtc, int driver)
{
  const struct device_info dev = some_device(sms);
  int64_t run, device;
  ck_ok(store_put_device(st, &dev, &device, &err));
  ck_ok(store_begin_run(st, "tune other.yaml", nvrtc, driver, &run, &err));
}

START_TEST(driver_and_toolkit_make_stale)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  put_winner(st, &rows, 1, 8, 9, false);
  begin_run_on(st, 114, 13000, 13020); /* another device says nothing */
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0");
  begin_run_on(st, 132, NVRTC, DRIVER);
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0");
  begin_run_on(st, 132, 0, 0); /* a run that knows neither */
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0");
  begin_run_on(st, 132, NVRTC, DRIVER + 10);
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0s");
  begin_run_on(st, 132, NVRTC, DRIVER);
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0");
  begin_run_on(st, 132, NVRTC + 10, DRIVER);
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0s");
  store_close(st);
}
END_TEST

START_TEST(policies_make_stale)
{
  struct store *st = open_store();
  const struct rows rows = put_rows(st, "a", 256, 132);
  put_winner(st, &rows, 1, 8, 9, false);
  run_sql(st, "UPDATE winner SET timing_policy=timing_policy-1");
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0s");
  run_sql(st, "UPDATE winner SET timing_policy=timing_policy+2"); /* of a newer program: not older */
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0");
  run_sql(st, "UPDATE winner SET objective=objective-1");
  ck_assert_str_eq(winners_text(st, "a"), "1-8:9.0s");
  store_close(st);
}
END_TEST

int main(void)
{
  const struct test_group groups[] = {
      {"winners", {winners_round_trip, winners_are_replaced_as_a_whole, predictions_fill_gaps_only}},
      {"staleness", {driver_and_toolkit_make_stale, policies_make_stale}},
  };
  return run_groups("store winners", groups, sizeof(groups) / sizeof(groups[0]));
}
