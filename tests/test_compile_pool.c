/* test_compile_pool.c - the pool of compile workers, and how NVRTC is found: with a scripted NVRTC (data/fake_nvrtc.c, built here) that crashes, hangs
 * or fails as the source says, and once with the real one. `test_compile_pool --worker compile FD` is the worker. */
#include "compile_pool.h"
#include "worker.h"

#include <check.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_ARTS 24

static struct error err;
static char self[4096]; /* path of this program, links resolved: under valgrind /proc/self/exe itself is another one */
static char folder[256], fake_path[300];

/* ---- the scripted NVRTC ---- */
static void build(const char *source, const char *library, const char *flags)
{
  const char *cc = getenv("CC");
  char command[1024];
  snprintf(command, sizeof(command), "%s -D_GNU_SOURCE -shared -fPIC %s -o '%s' %s", cc != NULL ? cc : "cc", flags, library, source);
  ck_assert_msg(system(command) == 0, "cannot build %s: %s", library, command);
}

/* Once for the whole suite, before Check forks. */
static void build_fake(void)
{
  const char *tmp = getenv("TMPDIR");
  char data[4200], here[4096];
  snprintf(folder, sizeof(folder), "%s/moeforge-test-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
  snprintf(fake_path, sizeof(fake_path), "%s/libnvrtc.so.13", folder);
  build("tests/data/fake_nvrtc.c", fake_path, "");
  ck_assert_ptr_nonnull(getcwd(here, sizeof(here)));
  snprintf(data, sizeof(data), "%s/tests/data", here);
  setenv("FAKE_NVRTC_DATA", data, 1);
}

static void remove_fake(void)
{
  char command[300];
  snprintf(command, sizeof(command), "rm -rf '%s'", folder);
  ck_assert_int_eq(system(command), 0);
}

static void use_fake(void)
{
  setenv("MOEFORGE_NVRTC", fake_path, 1);
}

static void use_real(void)
{
  unsetenv("MOEFORGE_NVRTC");
}

/* ---- running the pool ---- */
static struct artifact arts[MAX_ARTS];
static struct compile_job jobs[MAX_ARTS];
static char closure_name[] = "a.h", closure_text[] = "// \xc3\xa9\n";
static const struct closure templates = {1, {closure_name}, {closure_text}};

/* What done() was told. */
static struct result {
  int times;
  enum mf_status status;
  char text[ERROR_TEXT_MAX];
} results[MAX_ARTS];
static int reported, stop_after;
static enum mf_status done_returns;

static enum mf_status done(void *context, size_t index, enum mf_status status, const struct error *why, struct error *out)
{
  ck_assert_ptr_eq(context, results);
  results[index].times++;
  results[index].status = status;
  snprintf(results[index].text, ERROR_TEXT_MAX, "%s", why->text);
  reported++;
  return done_returns == MF_OK ? MF_OK : error_set(out, done_returns, "done says no");
}

static bool keep_going(void *context)
{
  ck_assert_ptr_eq(context, results);
  return reported < stop_after;
}

static struct compile_pool pool_of(int workers)
{
  return (struct compile_pool){.program = self, .jobs = workers, .arch = "sm_90a", .context = results, .done = done};
}

/* Artifact 'index' with this source. */
static void put(size_t index, const char *source)
{
  arts[index].source = strdup(source);
  ck_assert_ptr_nonnull(arts[index].source);
  snprintf(arts[index].name, sizeof(arts[index].name), "art%zu", index);
  jobs[index] = (struct compile_job){&arts[index], &templates};
}

static int open_files(void)
{
  DIR *dir = opendir("/proc/self/fd");
  int count = 0;
  ck_assert_ptr_nonnull(dir);
  while(readdir(dir) != NULL)
    count++;
  closedir(dir);
  return count;
}

/* Runs, and checks that no process, no descriptor is left, and that nothing was reported twice. */
static enum mf_status run(const struct compile_pool *pool, size_t count)
{
  const int files = open_files();
  const enum mf_status rc = compile_pool_run(pool, jobs, count, &err);
  ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
  ck_assert_int_eq(errno, ECHILD);
  ck_assert_int_eq(open_files(), files);
  for(size_t i = 0; i < count; i++)
    ck_assert_int_le(results[i].times, 1);
  return rc;
}

static void expect(size_t index, enum mf_status status, const char *text)
{
  ck_assert_int_eq(results[index].times, 1);
  ck_assert_msg(results[index].status == status, "art%zu: status %d: %s", index, results[index].status, results[index].text);
  ck_assert_msg(strstr(results[index].text, text) != NULL, "\"%s\" lacks \"%s\"", results[index].text, text);
  ck_assert(status != MF_OK || (arts[index].cubin != NULL && arts[index].registers > 0 && arts[index].log != NULL));
}

static void free_arts(void)
{
  for(size_t i = 0; i < MAX_ARTS; i++)
    artifact_free(&arts[i]);
}

START_TEST(many_artifacts_few_children)
{
  const struct compile_pool pool = pool_of(3);
  for(size_t i = 0; i < MAX_ARTS; i++)
    put(i, "good");
  ck_assert_msg(run(&pool, MAX_ARTS) == MF_OK, "%s", err.text);
  for(size_t i = 0; i < MAX_ARTS; i++) {
    expect(i, MF_OK, "");
    ck_assert_int_eq(arts[i].registers, 12);
    ck_assert_int_eq(arts[i].static_shared_bytes, 1200);
    ck_assert_str_eq(arts[i].source, "good");
  }
  ck_assert_int_eq(compile_pool_run(&pool, jobs, 0, &err), MF_OK);
}
END_TEST

START_TEST(failures_cost_only_their_artifact)
{
  struct compile_pool pool = pool_of(2);
  char once[600], marker[400];
  FILE *file;
  snprintf(marker, sizeof(marker), "%s/marker", folder);
  file = fopen(marker, "w");
  ck_assert_ptr_nonnull(file);
  fclose(file);
  snprintf(once, sizeof(once), "FAKE_CRASH_ONCE %s\n", marker);
  pool.timeout_ms = 1500;
  put(0, "good");
  put(1, "FAKE_CRASH");
  put(2, "FAKE_HANG");
  put(3, once);
  put(4, "FAKE_NO_USAGE");
  put(5, "FAKE_REGISTERS");
  put(6, "good");
  ck_assert_msg(run(&pool, 7) == MF_OK, "%s", err.text);
  expect(0, MF_OK, "");
  expect(1, MF_ERR_WORKER, "killed by signal 9");
  expect(2, MF_ERR_TIMEOUT, "1500 ms");
  expect(3, MF_OK, ""); /* the second try succeeded */
  ck_assert_int_ne(access(marker, F_OK), 0);
  expect(4, MF_ERR_CORRUPT, "no ptxas -v lines");
  expect(5, MF_ERR_CORRUPT, "13 registers, the cubin's attributes 12");
  expect(6, MF_OK, "");
}
END_TEST

START_TEST(stops_when_told)
{
  struct compile_pool pool = pool_of(2);
  struct timespec start, end;
  pool.keep_going = keep_going;
  stop_after = 1;
  put(0, "good");
  put(1, "FAKE_HANG");
  put(2, "FAKE_HANG");
  put(3, "good");
  clock_gettime(CLOCK_MONOTONIC, &start);
  ck_assert_int_eq(run(&pool, 4), MF_ERR_INTERRUPTED);
  clock_gettime(CLOCK_MONOTONIC, &end);
  ck_assert_int_lt(end.tv_sec - start.tv_sec, 20);
  expect(0, MF_OK, "");
  ck_assert_int_eq(results[1].times + results[2].times, 0);
}
END_TEST

START_TEST(done_can_end_the_run)
{
  const struct compile_pool pool = pool_of(1);
  done_returns = MF_ERR_STORE;
  put(0, "good");
  put(1, "good");
  ck_assert_int_eq(run(&pool, 2), MF_ERR_STORE);
  ck_assert_str_eq(err.text, "done says no");
  ck_assert_int_eq(reported, 1);
}
END_TEST

START_TEST(toolkit_failures_end_the_run)
{
  struct compile_pool pool = pool_of(2);
  put(0, "FAKE_BUILTIN");
  put(1, "FAKE_BUILTIN");
  ck_assert_int_eq(run(&pool, 2), MF_ERR_TOOLKIT);
  ck_assert_ptr_nonnull(strstr(err.text, "libnvrtc-builtins"));
  setenv("MOEFORGE_NVRTC", "/no/such/lib.so", 1);
  ck_assert_int_eq(run(&pool, 2), MF_ERR_TOOLKIT);
  ck_assert_ptr_nonnull(strstr(err.text, "MOEFORGE_NVRTC=/no/such/lib.so"));
  ck_assert_int_eq(reported, 0);
  pool.program = "/no/such/program";
  ck_assert_int_eq(run(&pool, 2), MF_ERR_WORKER);
}
END_TEST

START_TEST(the_real_compiler)
{
  const struct compile_pool pool = pool_of(2);
  put(0, "#include \"a.h\"\nextern \"C\" __global__ void mf_moe(float *o) { o[0] = 1; }\n");
  put(1, "extern \"C\" __global__ void mf_moe(float *o) { o[0] = \xc3\xa9; }\n");
  put(2, "extern \"C\" __global__ void mf_moe(float *o) { __shared__ float s[32]; s[threadIdx.x] = o[1]; __syncthreads(); o[0] = s[5]; }\n");
  ck_assert_msg(run(&pool, 3) == MF_OK, "this test needs NVRTC: %s", err.text);
  expect(0, MF_OK, "");
  expect(1, MF_ERR_COMPILE, "art1.cu(1): error");
  ck_assert_ptr_nonnull(arts[1].log);
  expect(2, MF_OK, "");
  ck_assert_int_eq(arts[2].static_shared_bytes, 128);
}
END_TEST

/* ---- finding NVRTC ---- */
START_TEST(asks_the_children_for_the_toolkit)
{
  int version = 0;
  char path[400];
  setenv("FAKE_NVRTC_VERSION", "12090", 1);
  ck_assert_msg(compile_pool_toolkit(self, &version, path, sizeof(path), &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(version, 12090);
  ck_assert_ptr_nonnull(strstr(path, "libnvrtc.so.13"));
  setenv("MOEFORGE_NVRTC", "/no/such/lib.so", 1);
  ck_assert_int_eq(compile_pool_toolkit(self, &version, NULL, 0, &err), MF_ERR_TOOLKIT);
  ck_assert_int_eq(compile_pool_toolkit("/no/such/program", &version, NULL, 0, &err), MF_ERR_WORKER);
}
END_TEST

START_TEST(refuses_unusable_libraries)
{
  struct nvrtc *nvrtc;
  char other[400];
  setenv("FAKE_NVRTC_VERSION", "12020", 1);
  ck_assert_int_eq(nvrtc_open(&nvrtc, &err), MF_ERR_TOOLKIT);
  ck_assert_ptr_nonnull(strstr(err.text, "12.2, too old: 12.3 or newer"));
  ck_assert_ptr_null(nvrtc);
  snprintf(other, sizeof(other), "%s/libother.so", folder);
  build("-xc /dev/null", other, "");
  setenv("MOEFORGE_NVRTC", other, 1);
  ck_assert_int_eq(nvrtc_open(&nvrtc, &err), MF_ERR_TOOLKIT);
  ck_assert_ptr_nonnull(strstr(err.text, "has no function nvrtcVersion"));
}
END_TEST

static void make_folder(const char *name)
{
  char path[400];
  snprintf(path, sizeof(path), "%s/%s", folder, name);
  ck_assert(mkdir(path, 0755) == 0 || errno == EEXIST);
}

/* The linker's path has one that is too old, CUDA_HOME something that is no library and a good one: that is what a child finds. */
START_TEST(searches_past_unusable_libraries)
{
  char path[600], linker[400], home[400];
  int version = 0;
  FILE *file;
  make_folder("ld");
  make_folder("lib64");
  snprintf(path, sizeof(path), "%s/ld/libnvrtc.so.13", folder);
  build("tests/data/fake_nvrtc.c", path, "-DFAKE_DEFAULT_VERSION=12020");
  snprintf(path, sizeof(path), "%s/ld/libnvrtc.so.12", folder);
  ck_assert_int_eq(symlink("libnvrtc.so.13", path), 0);
  snprintf(path, sizeof(path), "%s/lib64/libnvrtc.so.99", folder); /* sorts first */
  file = fopen(path, "w");
  ck_assert_ptr_nonnull(file);
  fclose(file);
  snprintf(path, sizeof(path), "%s/lib64/libnvrtc.so.12", folder);
  build("tests/data/fake_nvrtc.c", path, "-DFAKE_DEFAULT_VERSION=12080");
  snprintf(linker, sizeof(linker), "%s/ld", folder);
  snprintf(home, sizeof(home), "%s/lib64/", folder);
  unsetenv("MOEFORGE_NVRTC");
  setenv("LD_LIBRARY_PATH", linker, 1);
  setenv("CUDA_HOME", folder, 1);
  ck_assert_msg(compile_pool_toolkit(self, &version, path, sizeof(path), &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(version, 12080);
  ck_assert_msg(strncmp(path, home, strlen(home)) == 0, "found %s", path);
}
END_TEST

static Suite *pool_suite(void)
{
  Suite *suite = suite_create("compile_pool");
  TCase *fake = tcase_create("fake"), *real = tcase_create("real");
  tcase_set_timeout(fake, 120);
  tcase_set_timeout(real, 120);
  tcase_add_checked_fixture(fake, use_fake, free_arts);
  tcase_add_checked_fixture(real, use_real, free_arts);
  tcase_add_test(fake, many_artifacts_few_children);
  tcase_add_test(fake, failures_cost_only_their_artifact);
  tcase_add_test(fake, stops_when_told);
  tcase_add_test(fake, done_can_end_the_run);
  tcase_add_test(fake, toolkit_failures_end_the_run);
  tcase_add_test(fake, asks_the_children_for_the_toolkit);
  tcase_add_test(fake, refuses_unusable_libraries);
  tcase_add_test(fake, searches_past_unusable_libraries);
  tcase_add_test(real, the_real_compiler);
  tcase_add_unchecked_fixture(fake, build_fake, remove_fake);
  suite_add_tcase(suite, fake);
  suite_add_tcase(suite, real);
  return suite;
}

int main(int argc, char **argv)
{
  SRunner *runner;
  int failed;
  if(argc == 4 && strcmp(argv[1], "--worker") == 0)
    return worker_main_compile(atoi(argv[3]));
  if(readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
    return EXIT_FAILURE;
  runner = srunner_create(pool_suite());
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
