/* test_package_export.c - `moeforge export`: what a store's winners become, and when there is nothing to export. */
#include "commands.h"
#include "compile.h"
#include "folder_fixture.h"
#include "package.h"
#include "package_fixture.h"

#include <check.h>
#include <stdint.h>

static void fill_store(const char *path, bool predicted)
{
  struct model_spec spec = {.name = "fixture", .source = "tests", .problem = fixture_problem(), .routed_scaling = 2.5, .tokens = {1, 2, 4}, .ntokens = 3};
  struct device_info dev = {.name = "NVIDIA H200", .cc_major = 9, .sms = 132, .l2_bytes = 62914560};
  struct artifact art = {.compile_key = "c0ffee", .name = "fixture", .source = strdup("source"), .log = strdup("log")};
  struct candidate cand = {.name = "stream/fixture", .artifact_name = "fixture", .recipe = fixture_recipe()};
  struct check_result check = {.passed = true};
  struct winner winners[2];
  struct store *st;
  struct error err;
  int64_t shape, device, run;
  art.cubin = (unsigned char *)strdup(FIXTURE_CUBIN);
  art.cubin_bytes = strlen(FIXTURE_CUBIN);
  check.worst[GATE_H] = 0.0008;
#define OK(call) ck_assert_msg((call) == MF_OK, "%s", err.text)
  OK(store_open(path, false, &st, &err));
  OK(store_put_shape(st, &spec, &shape, &err));
  OK(store_put_device(st, &dev, &device, &err));
  OK(store_begin_run(st, "tune fixture", 13000, 13000, &run, &err));
  OK(store_put_artifact(st, &art, 13000, &cand.artifact_id, &err));
  OK(store_put_candidate(st, shape, device, &cand, &err));
  OK(store_put_check(st, run, cand.id, "policy", &check, NULL, &err));
  memset(winners, 0, sizeof(winners));
  for(int i = 0; i < 2; i++) {
    struct winner *w = &winners[i];
    snprintf(w->shape_name, sizeof(w->shape_name), "fixture");
    snprintf(w->device_name, sizeof(w->device_name), "NVIDIA H200");
    snprintf(w->schedule_name, sizeof(w->schedule_name), "stream/fixture");
    snprintf(w->selection_key, sizeof(w->selection_key), "5e1ec7");
    w->shape_id = shape;
    w->device_id = device;
    w->candidate_id = cand.id;
    w->tokens_min = i == 0 ? 1 : 3;
    w->tokens_max = i == 0 ? 2 : 4;
    w->us = w->us_low = w->us_high = 9.75;
    w->floor_us = 7.25;
    w->predicted = predicted;
    w->driver_version = w->nvrtc_version = 13000;
  }
  OK(store_put_winners(st, run, shape, device, winners, 2, &err));
  OK(store_end_run(st, run, MF_OK, &err));
#undef OK
  store_close(st);
  artifact_free(&art);
}

static struct options export_options(const char *store, const char *output)
{
  struct options opt;
  memset(&opt, 0, sizeof(opt));
  opt.store_path = store;
  opt.shipped_path = "/nonexistent/schedules.db";
  opt.device = "auto";
  opt.output = output;
  opt.quiet = true;
  return opt;
}

static unsigned char *read_file(const char *path, size_t *size)
{
  FILE *f = fopen(path, "rb");
  unsigned char *bytes = malloc(1 << 20);
  ck_assert_ptr_nonnull(f);
  *size = fread(bytes, 1, 1 << 20, f);
  fclose(f);
  return bytes;
}

START_TEST(export_from_a_store)
{
  char store[256], first[256], second[256];
  struct mf_package *pkg;
  struct options opt;
  struct error err;
  unsigned char *a, *b;
  size_t a_size, b_size;
  snprintf(store, sizeof(store), "%s/work.db", folder);
  snprintf(first, sizeof(first), "%s/a.moeforge", folder);
  snprintf(second, sizeof(second), "%s/b.moeforge", folder);
  fill_store(store, false);
  opt = export_options(store, first);
  ck_assert_msg(export_command(&opt, "fixture", &err) == MF_OK, "%s", err.text);
  opt.output = second;
  ck_assert_msg(export_command(&opt, "fixture", &err) == MF_OK, "%s", err.text);
  a = read_file(first, &a_size);
  b = read_file(second, &b_size);
  ck_assert_uint_eq(a_size, b_size);
  ck_assert_mem_eq(a, b, a_size);
  ck_assert_int_eq(mf_package_open(first, &pkg), MF_OK);
  ck_assert_uint_eq(pkg->nentries, 2);
  ck_assert_uint_eq(pkg->nrecipes, 1);
  ck_assert_ptr_nonnull(strstr(pkg->validation, "\"check\": \"passed\""));
  mf_package_close(pkg);
  free(a);
  free(b);
}
END_TEST

START_TEST(export_errors)
{
  char store[256], output[256];
  struct options opt;
  struct error err;
  snprintf(store, sizeof(store), "%s/work.db", folder);
  snprintf(output, sizeof(output), "%s/a.moeforge", folder);
  opt = export_options(store, output);
  ck_assert_int_eq(export_command(&opt, "fixture", &err), MF_ERR_NOT_FOUND); /* no store */
  fill_store(store, true);
  ck_assert_int_eq(export_command(&opt, "other", &err), MF_ERR_NOT_FOUND);
  ck_assert_ptr_nonnull(strstr(err.text, "moeforge tune"));
  ck_assert_int_eq(export_command(&opt, "fixture", &err), MF_REJECTED);
  ck_assert_ptr_nonnull(strstr(err.text, "--allow-predicted"));
  ck_assert_int_eq(access(output, F_OK), -1);
  opt.device = "NVIDIA H100";
  ck_assert_int_eq(export_command(&opt, "fixture", &err), MF_ERR_NOT_FOUND);
  ck_assert_ptr_nonnull(strstr(err.text, "NVIDIA H100"));
  opt.device = "NVIDIA H200";
  opt.allow_predicted = true;
  ck_assert_msg(export_command(&opt, "fixture", &err) == MF_OK, "%s", err.text);
  opt.output = NULL;
  ck_assert_int_eq(export_command(&opt, "fixture", &err), MF_ERR_USAGE);
  opt.output = "/nonexistent/a.moeforge";
  ck_assert_int_eq(export_command(&opt, "fixture", &err), MF_ERR_IO);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("package_export");
  TCase *tc = tcase_create("package_export");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_add_test(tc, export_from_a_store);
  tcase_add_test(tc, export_errors);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
