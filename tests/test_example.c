/* test_example.c - the program of docs/integrate-c.md compiles with the public header alone and behaves as the document says; the header is C++, too. */
#include "fake_libcuda.h"
#include "package_fixture.h"

#include <check.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>

#ifdef __SANITIZE_ADDRESS__
#define SANITIZER "-fsanitize=address,undefined"
#else
#define SANITIZER ""
#endif

static char folder[128];

static void make_folder(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/mf-example-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

/* Runs a shell command; its output (stdout and stderr) goes to 'text'. Returns the exit code. */
static int shell(char *text, size_t space, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int shell(char *text, size_t space, const char *fmt, ...)
{
  char command[4096];
  va_list args;
  FILE *f;
  size_t n;
  int status;
  va_start(args, fmt);
  vsnprintf(command, sizeof(command), fmt, args);
  va_end(args);
  f = popen(command, "r");
  ck_assert_ptr_nonnull(f);
  n = fread(text, 1, space - 1, f);
  text[n] = '\0';
  status = pclose(f);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

static void remove_folder(void)
{
  char text[256];
  shell(text, sizeof(text), "rm -r '%s' 2>&1", folder);
}

/* The folder that holds libmoeforge.a: the parent of the tests' own. */
static const char *build_folder(void)
{
  static char path[4096];
  snprintf(path, sizeof(path), "%s", fakecuda_path());
  for(int i = 0; i < 2; i++)
    *strrchr(path, '/') = '\0';
  return path;
}

static void build_example(void)
{
  char text[8192];
  const int code = shell(text, sizeof(text),
                         "${CC:-cc} -std=c11 -Wall -Wextra -Werror -Wconversion -I include -isystem \"${CUDA_INCLUDE:-/usr/local/cuda/include}\" " SANITIZER
                         " docs/example.c -o '%s/example' '%s/libmoeforge.a' '%s' -Wl,-rpath,'%s/tests' -ldl -lpthread 2>&1",
                         folder, build_folder(), fakecuda_path(), build_folder());
  ck_assert_msg(code == 0, "%s", text);
}

/* p.moeforge: the fixture's problem, routed by the engine or with gated shared experts if a test says so. */
static void write_package(int score, int shared_experts)
{
  struct package_set set;
  struct error err;
  unsigned char *bytes;
  char path[256];
  size_t size;
  package_set_init(&set);
  package_set_add(&set, 1, 8);
  set.problem.score = score;
  set.problem.shared_experts = shared_experts;
  snprintf(path, sizeof(path), "%s/p.moeforge", folder);
  ck_assert_int_eq(package_build(set.items, set.count, false, &bytes, &size, &err), MF_OK);
  ck_assert_int_eq(package_write_file(path, bytes, size, &err), MF_OK);
  free(bytes);
}

START_TEST(example_runs_or_falls_back)
{
  static const struct {
    const char *script, *file;
    int code;
    const char *words;
  } runs[] = {
      {"", "p.moeforge", 0, "ran fixture for 1 to 8 tokens"},
      {"cc=80", "p.moeforge", 0, "MF_MISS_DEVICE)\nusing the old kernel instead"},
      {"driver=12000", "p.moeforge", 0, "MF_MISS_DRIVER)\nusing the old kernel instead"},
      {"sms=100", "p.moeforge", 0, "MF_MISS_SMS)\nusing the old kernel instead"},
      {"map_fail", "p.moeforge", 0, "MF_MISS_LAYOUT)\nusing the old kernel instead"},
      {"launch_fail", "p.moeforge", 1, "MF_ERR_DEVICE"},
      {"", "missing", 1, "could not be read"},
  };
  char text[8192];
  build_example();
  write_package(MF_SCORE_SOFTMAX, 0);
  for(size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
    int code;
    fakecuda_use(runs[i].script, NULL);
    code = shell(text, sizeof(text), "'%s/example' '%s/%s' 2>&1", folder, folder, runs[i].file);
    ck_assert_msg(code == runs[i].code && strstr(text, runs[i].words) != NULL, "%s: exit code %d: %s", runs[i].script, code, text);
  }
}
END_TEST

START_TEST(header_is_cpp)
{
  char text[4096];
  if(shell(text, sizeof(text), "command -v c++ 2>&1") != 0)
    return; /* no C++ compiler on this machine */
  ck_assert_msg(shell(text, sizeof(text), "c++ -std=c++17 -Wall -Wextra -Werror -fsyntax-only -x c++ include/moeforge.h 2>&1") == 0, "%s", text);
}
END_TEST

/* What the library exports is the public API, all of it and nothing else: the functions that the header marks with MF_API. */
START_TEST(exports_only_the_api)
{
  char exported[8192], declared[8192];
  if(shell(exported, sizeof(exported), "test -e '%s/libmoeforge.so' && command -v nm", build_folder()) != 0)
    return; /* only the archive was built */
  ck_assert_int_eq(shell(exported, sizeof(exported), "nm -D --defined-only '%s/libmoeforge.so' | awk '{print $3}' | sort", build_folder()), 0);
  ck_assert_int_eq(shell(declared, sizeof(declared), "sed -n 's/^MF_API.*[ *]\\(mf_[a-z0-9_]*\\)(.*/\\1/p' include/moeforge.h | sort"), 0);
  ck_assert_ptr_nonnull(strstr(declared, "mf_moe_forward\n"));
  ck_assert_str_eq(exported, declared);
}
END_TEST

/* What a forward call costs beside the launch itself, on a driver whose launches do nothing: 2 us are allowed, a fortieth of it is usual. Whatever a call
 * has to pass: logits, ids and weights, gates of shared experts. */
START_TEST(forward_is_cheap)
{
  static const int problems[][2] = {{MF_SCORE_SOFTMAX, 0}, {MF_SCORE_GIVEN, 0}, {MF_SCORE_GIVEN, 2 + MF_SHARED_GATED}};
  char text[8192];
  const char *line;
  int lines = 0;
  if(shell(text, sizeof(text), "test -e '%s/bench/forward_cost'", build_folder()) != 0)
    return; /* only the suites were built */
  write_package(problems[_i][0], problems[_i][1]);
  fakecuda_use("light", NULL);
  ck_assert_msg(shell(text, sizeof(text), "'%s/bench/forward_cost' '%s/p.moeforge' 2>&1", build_folder(), folder) == 0, "%s", text);
  line = strstr(text, "over it   first 20   not cooperative\n");
  ck_assert_msg(line != NULL, "%s", text);
  for(line = strchr(line, '\n') + 1; *line != '\0'; line = strchr(line, '\n') + 1) {
    double tokens, bare, forward, over, first, alone;
    ck_assert_msg(sscanf(line, "%lf %lf %lf %lf %lf %lf", &tokens, &bare, &forward, &over, &first, &alone) == 6, "%s", text);
    ck_assert_msg(forward > 0 && first > 0 && alone > 0 && over < (SANITIZER[0] == '\0' ? 2000 : 20000), "%s", text);
    lines++;
  }
  ck_assert_int_eq(lines, 4); /* 1, 2, 4, 8 tokens */
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("example");
  TCase *tc = tcase_create("example");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_add_test(tc, example_runs_or_falls_back);
  tcase_add_test(tc, header_is_cpp);
  tcase_add_test(tc, exports_only_the_api);
  tcase_add_loop_test(tc, forward_is_cheap, 0, 3);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
