/* test_install.c - `make install` into a folder that stands for /: what is there is enough to compile the documents' C example with pkg-config's flags and to
 * run it on the scripted driver, and the installed tool finds its templates. */
#include "fake_libcuda.h"
#include "package_fixture.h"

#include <check.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/wait.h>

#ifdef __SANITIZE_ADDRESS__
#define SANITIZE_VARIABLE "SANITIZE=1"
#define SANITIZE_FLAGS "-fsanitize=address,undefined"
#else
#define SANITIZE_VARIABLE ""
#define SANITIZE_FLAGS ""
#endif
#define PREFIX "/opt/moeforge" /* none of the folders that compilers search by themselves */

static char root[128], build[4096];

/* Runs a shell command, which must succeed; its output goes to 'text'. */
static void shell(char *text, size_t space, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void shell(char *text, size_t space, const char *fmt, ...)
{
  char command[8192];
  va_list args;
  FILE *f;
  int status;
  va_start(args, fmt);
  vsnprintf(command, sizeof(command), fmt, args);
  va_end(args);
  f = popen(command, "r");
  ck_assert_ptr_nonnull(f);
  text[fread(text, 1, space - 1, f)] = '\0';
  status = pclose(f);
  ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s\n%s", command, text);
}

static void start(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(root, sizeof(root), "%s/mf-install-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(root));
  snprintf(build, sizeof(build), "%s", fakecuda_path());
  for(int i = 0; i < 2; i++) /* .../build/tests/libfakecuda.so */
    *strrchr(build, '/') = '\0';
}

static void end(void)
{
  char text[4096];
  shell(text, sizeof(text), "rm -r '%s' 2>&1", root);
}

/* The build folder as make was told: relative to the source tree, in which the suites run. */
static const char *build_variable(void)
{
  char here[4096];
  const size_t length = getcwd(here, sizeof(here)) != NULL ? strlen(here) : 0;
  return strncmp(build, here, length) == 0 && build[length] == '/' ? build + length + 1 : build;
}

static void write_package(void)
{
  struct package_set set;
  struct error err;
  unsigned char *bytes;
  char path[256];
  size_t size;
  package_set_init(&set);
  package_set_add(&set, 1, 8);
  snprintf(path, sizeof(path), "%s/p.moeforge", root);
  ck_assert_int_eq(package_build(set.items, set.count, false, &bytes, &size, &err), MF_OK);
  ck_assert_int_eq(package_write_file(path, bytes, size, &err), MF_OK);
  free(bytes);
}

/* pkg-config as it is used on a system of which 'root' is the image. */
static const char *pkg_config(void)
{
  static char command[512];
  snprintf(command, sizeof(command), "PKG_CONFIG_SYSROOT_DIR='%s' PKG_CONFIG_LIBDIR='%s" PREFIX "/lib/pkgconfig' pkg-config", root, root);
  return command;
}

START_TEST(installed_library_serves)
{
  static char text[65536];
  if(system("command -v pkg-config >/dev/null 2>&1") != 0)
    return; /* scripts/bootstrap.sh test installs it */
  shell(text, sizeof(text), "MAKEFLAGS= make -s install %s BUILD='%s' DESTDIR='%s' PREFIX=" PREFIX " 2>&1", SANITIZE_VARIABLE, build_variable(), root);
  shell(text, sizeof(text), "cd '%s" PREFIX "' && ls bin/moeforge include/moeforge.h lib/libmoeforge.a lib/libmoeforge.so.1 lib/pkgconfig/moeforge.pc", root);
  shell(text, sizeof(text), "readlink '%s" PREFIX "/lib/libmoeforge.so'", root);
  ck_assert_str_eq(text, "libmoeforge.so.1\n");
  shell(text, sizeof(text), "%s --modversion moeforge", pkg_config());
  ck_assert_int_ge(text[0], '0');
  ck_assert_int_le(text[0], '9');
  shell(text, sizeof(text), "! grep -q '%s\\|@' '%s" PREFIX "/lib/pkgconfig/moeforge.pc'", root, root); /* nothing of the image, nothing unfilled */
  /* the example, from outside of the source tree */
  shell(text, sizeof(text), "cp docs/example.c '%s/'", root);
  shell(text, sizeof(text),
        "flags=$(%s --cflags --libs moeforge) && cd '%s' && ${CC:-cc} -std=c11 -Wall -Werror -isystem \"${CUDA_INCLUDE:-/usr/local/cuda/include}\" " SANITIZE_FLAGS
        " example.c -o example $flags '%s' -Wl,-rpath,'%s/tests' 2>&1",
        pkg_config(), root, fakecuda_path(), build);
  write_package();
  fakecuda_use("", NULL);
  shell(text, sizeof(text), "LD_LIBRARY_PATH='%s" PREFIX "/lib' '%s/example' '%s/p.moeforge' 2>&1", root, root, root);
  ck_assert_msg(strstr(text, "ran fixture for 1 to 8 tokens") != NULL, "%s", text);
  shell(text, sizeof(text), "LD_LIBRARY_PATH='%s" PREFIX "/lib' ldd '%s/example' | grep libmoeforge", root, root);
  ck_assert_msg(strstr(text, PREFIX "/lib/libmoeforge.so.1") != NULL, "%s", text);
}
END_TEST

START_TEST(installed_tool_works)
{
  static char text[65536];
  shell(text, sizeof(text), "MAKEFLAGS= make -s install %s BUILD='%s' DESTDIR='%s' PREFIX=" PREFIX " 2>&1", SANITIZE_VARIABLE, build_variable(), root);
  shell(text, sizeof(text), "cd '%s' && ." PREFIX "/bin/moeforge plan ." PREFIX "/share/moeforge/specs/models/tiny.yaml --device h100-pcie 2>&1", root);
  ck_assert_msg(strstr(text, "candidates") != NULL, "%s", text);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("install");
  TCase *tc = tcase_create("install");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, start, end);
  tcase_add_test(tc, installed_library_serves);
  tcase_add_test(tc, installed_tool_works);
  tcase_set_timeout(tc, 300);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
