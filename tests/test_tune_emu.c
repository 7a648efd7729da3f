/* test_tune_emu.c - `moeforge tune --device emu`, as a user runs it: from a spec to winners whose numbers were checked by executing them on the CPU, and what is
 * said where that does not work. NVRTC and the C++ compiler are the real ones. */
#include "cli_fixture.h"

#undef TUNE
#define TUNE "tune specs/models/tiny.yaml --tokens 1 --effort quick --device emu"
#define ROOT_BYTES 4096

static char root[ROOT_BYTES];

/* One run for all tests that look at what it left. */
static void run_once(void)
{
  tool_begin(&seed);
  tool_run(&seed, TUNE);
  tool_expect(&seed, 0);
}

static void begin_copy(void)
{
  tool_begin(&tool);
  ck_assert_ptr_nonnull(getcwd(root, sizeof(root)));
  shell("cp -r '%s'/work.db* .", seed.folder);
}

START_TEST(a_run_checks_and_predicts)
{
  tool_says(&seed, err, "kernels are executed on the emulated device emu-sm90 (18 SMs), their times are predicted");
  tool_says(&seed, err, "right by emulation");
  tool_says(&seed, err, "times: predicted, they need a GPU");
  tool_says(&seed, out, "tiny on emu-sm90");
  tool_says(&seed, out, "predicted*: numbers checked on the emulated device, times predicted");
  ck_assert_ptr_null(strstr(seed.out, "nothing was run"));
  ck_assert_ptr_null(strstr(seed.out, "measured"));
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner WHERE predicted=0"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM sample"), 0);
  ck_assert_int_eq((int)number("SELECT emulated FROM device"), 1);
  /* whoever won was executed, whoever was not says so, and each candidate is the one or the other */
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner w WHERE NOT EXISTS(SELECT 1 FROM check_result k WHERE k.candidate_id=w.candidate_id AND k.passed)"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE detail NOT LIKE 'emu % seed 1: 3 of 7 cases, 3 launches each'"), 0);
  ck_assert_int_eq((int)number("SELECT (SELECT count(*) FROM check_result WHERE passed)+(SELECT count(*) FROM reject WHERE rule='not_executed')-"
                               "(SELECT count(*) FROM candidate)"), 0);
  ck_assert_int_gt((int)number("SELECT count(*) FROM reject WHERE rule='not_executed'"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result k JOIN candidate c ON c.id=k.candidate_id JOIN reject r ON r.schedule=c.schedule"), 0);
  tool_run(&tool, "show tiny --json");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "\"status\": \"predicted\"");
  tool_says(&tool, out, "\"numbers\": \"emulated\"");
  shell("test ! -e '%s/schedules.db'", seed.folder); /* never shipped */
}
END_TEST

START_TEST(a_second_run_executes_nothing)
{
  tool_run(&tool, TUNE);
  tool_expect(&tool, 0);
  tool_says(&tool, err, "0 kernels compiled, 1 from the store");
  ck_assert_ptr_null(strstr(tool.err, "emulated check"));
  tool_says(&tool, out, "predicted*");
}
END_TEST

/* The planned device has the same row: what was never executed must not look as if it had been. */
START_TEST(a_planned_run_is_told_apart)
{
  shell("rm -rf work.db*");
  tool_run(&tool, "tune specs/models/tiny.yaml --tokens 1 --effort quick --device emu-sm90");
  tool_expect(&tool, 0);
  tool_says(&tool, out, "nothing was run");
  ck_assert_ptr_null(strstr(tool.out, "predicted*"));
  tool_run(&tool, "show tiny --json");
  tool_says(&tool, out, "\"numbers\": \"unchecked\"");
}
END_TEST

START_TEST(what_needs_a_gpu_says_so)
{
  tool_run(&tool, "bench tiny --device emu");
  refused(8, "bench needs a GPU");
  tool_run(&tool, "export tiny -o %s/x", tool.folder);
  refused(4, "only predicted, not measured");
  tool_run(&tool, "verify x --device emu");
  refused(2, "verify: --device emu: expected");
}
END_TEST

/* ---- devices, compilers, folders that do not work ---- */
static const struct {
  const char *device;
  const char *spec;
  int code;
  const char *text;
} devices[] = {
    {"emu:nosuch", "tiny", 2, "--device emu:nosuch: expected emu, or emu: and the name of a file in"},
    {"emu:", "tiny", 2, "--device emu:: expected"},
    {"emulated", "tiny", 2, "--device emulated: expected"},
    {"emu", "qwen3.5-35b-a3b", 4, "the device has too few multiprocessors for this hidden size"},
};

START_TEST(devices_that_do_not_do)
{
  tool_run(&tool, "tune specs/models/%s.yaml --quiet --device %s", devices[_i].spec, devices[_i].device);
  refused(devices[_i].code, devices[_i].text);
}
END_TEST

START_TEST(no_compiler)
{
  shell("rm -rf work.db*");
  setenv("MOEFORGE_CXX", "no-such-compiler", 1);
  tool_run(&tool, TUNE);
  refused(7, "\"no-such-compiler\" does not run (No such file or directory): install one (apt-get install g++), or name it in MOEFORGE_CXX");
  unsetenv("MOEFORGE_CXX");
}
END_TEST

START_TEST(a_compiler_that_fails)
{
  char path[512];
  shell("rm -rf work.db*; printf '#!/bin/sh\\ntest $1 = --version && exec c++ --version\\necho x.cc:7: error: out of ideas\\nexit 1\\n' >cxx; chmod +x cxx");
  snprintf(path, sizeof(path), "%s/cxx", tool.folder);
  setenv("MOEFORGE_CXX", path, 1);
  tool_run(&tool, TUNE);
  ended(10, "x.cc:7: error: out of ideas");
  unsetenv("MOEFORGE_CXX");
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner"), 0);
  tool_run(&tool, "show --rejects");
  tool_says(&tool, out, "out of ideas");
}
END_TEST

START_TEST(a_cache_that_cannot_be_written)
{
  char place[300];
  shell("rm -rf work.db*; : >work.db.cache");
  tool_run(&tool, TUNE);
  refused(5, "work.db.cache");
  if(!mount_small("size=1m"))
    return;
  shell("rm -rf work.db*; mkdir small/c; ln -s small/c work.db.cache");
  snprintf(place, sizeof(place), "%s/small", tool.folder);
  ck_assert_int_eq(mount(NULL, place, NULL, MS_REMOUNT | MS_RDONLY, "size=1m"), 0);
  tool_run(&tool, TUNE);
  refused(5, "kernels for the emulated device cannot be kept there: Read-only file system");
  ck_assert_int_eq(umount2(place, MNT_DETACH), 0);
}
END_TEST

/* ---- wrong kernels ---- */
static const struct {
  const char *file, *edit, *text;
} wrong[] = {
    {"stream/handoff.cuh", "s/hw::fast_divide(gate, 1.0f/hw::fast_divide(gate, 1.01f/", "h: token 0"},
    {"stream/handoff.cuh", "s/hw::fence_async_proxy();//", "seed 1, launch 0: missing proxy fence"},
};

START_TEST(a_wrong_kernel_is_found)
{
  shell("rm -rf work.db*; cp -r '%s/templates' t; sed -i '%s' t/%s; ! cmp -s t/%s '%s/templates/%s'", root, wrong[_i].edit, wrong[_i].file, wrong[_i].file, root,
        wrong[_i].file);
  tool_run(&tool, TUNE " --templates %s/t", tool.folder);
  ended(11, wrong[_i].text);
  ck_assert_int_eq((int)number("SELECT count(*) FROM winner"), 0);
  ck_assert_int_eq((int)number("SELECT count(*) FROM check_result WHERE passed"), 0);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("tune_emu");
  TCase *tc = tcase_create("all");
  SRunner *runner;
  int failed;
  tcase_add_unchecked_fixture(tc, run_once, remove_seed);
  tcase_add_checked_fixture(tc, begin_copy, end);
  tcase_add_test(tc, a_run_checks_and_predicts);
  tcase_add_test(tc, a_second_run_executes_nothing);
  tcase_add_test(tc, a_planned_run_is_told_apart);
  tcase_add_test(tc, what_needs_a_gpu_says_so);
  tcase_add_loop_test(tc, devices_that_do_not_do, 0, ROWS(devices));
  tcase_add_test(tc, no_compiler);
  tcase_add_test(tc, a_compiler_that_fails);
  tcase_add_test(tc, a_cache_that_cannot_be_written);
  tcase_add_loop_test(tc, a_wrong_kernel_is_found, 0, ROWS(wrong));
  tcase_set_timeout(tc, 300);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? 0 : 1;
}
