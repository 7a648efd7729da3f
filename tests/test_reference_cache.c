/* test_reference_cache.c - kept reference results: read back exactly, made anew when damaged, safe for many processes, honest about what fails. */
#include "check.h"
#include "datagen.h"

#include <check.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char dir[256], cache[300];

static void make_dir(void)
{
  const char *base = getenv("TMPDIR");
  snprintf(dir, sizeof(dir), "%s/moeforge-cache-XXXXXX", base != NULL ? base : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(dir));
  snprintf(cache, sizeof(cache), "%s/refs", dir);
}

/* Path of the only file in the cache. */
static void only_file(char *path, size_t space)
{
  DIR *d = opendir(cache);
  struct dirent *entry;
  int count = 0;
  ck_assert_ptr_nonnull(d);
  while((entry = readdir(d)) != NULL) {
    if(entry->d_name[0] == '.')
      continue;
    snprintf(path, space, "%s/%s", cache, entry->d_name);
    count++;
  }
  closedir(d);
  ck_assert_int_eq(count, 1);
}

static void remove_dir(void)
{
  DIR *d;
  struct dirent *entry;
  char path[600];
  chmod(dir, 0700);
  d = opendir(cache);
  while(d != NULL && (entry = readdir(d)) != NULL) {
    snprintf(path, sizeof(path), "%s/%s", cache, entry->d_name);
    unlink(path);
  }
  if(d != NULL)
    closedir(d);
  rmdir(cache);
  unlink(cache);
  rmdir(dir);
}

static const struct mf_problem problem = {.struct_size = sizeof(problem), .experts = 8, .top_k = 2, .hidden = 128, .intermediate = 64,
                                          .expert_count = 8, .groups = 1, .groups_kept = 1, .renormalize = 1};
static const struct test_case one_case = {3, ROUTING_UNIFORM, CASE_NORMAL, 1};

static struct reference_result get(const struct mf_problem *p, float scaling, uint32_t layer, const struct test_case *tc)
{
  struct reference_result r;
  struct error err = {0};
  ck_assert_msg(reference_cached(cache, p, scaling, layer, tc, &r, &err) == MF_OK, "%s", err.text);
  return r;
}

static void expect_fresh(struct reference_result *have, float scaling, uint32_t layer, const struct test_case *tc)
{
  struct reference_result want;
  struct error err = {0};
  ck_assert_int_eq(reference_run(&problem, scaling, data_layer_seed(layer), tc, &want, &err), MF_OK);
  ck_assert_int_eq(have->routing.tokens, tc->tokens);
  ck_assert_int_eq(have->routing.top_k, 2);
  ck_assert_int_eq(have->routing.active, want.routing.active);
  ck_assert_mem_eq(have->routing.ids, want.routing.ids, (size_t)tc->tokens * 2 * sizeof(int32_t));
  ck_assert_mem_eq(have->routing.weights, want.routing.weights, (size_t)tc->tokens * 2 * sizeof(float));
  ck_assert_mem_eq(have->h, want.h, (size_t)tc->tokens * 2 * 64 * sizeof(uint16_t));
  ck_assert_mem_eq(have->h_unrounded, want.h_unrounded, (size_t)tc->tokens * 2 * 64 * sizeof(float));
  ck_assert_mem_eq(have->y, want.y, (size_t)tc->tokens * 128 * sizeof(float));
  ck_assert_mem_eq(have->y_unquantised, want.y_unquantised, (size_t)tc->tokens * 128 * sizeof(float));
  reference_free(&want);
  reference_free(have);
}

static ino_t inode_of(const char *path)
{
  struct stat st;
  ck_assert_int_eq(stat(path, &st), 0);
  return st.st_ino;
}

START_TEST(second_call_reads_the_file)
{
  struct reference_result r = get(&problem, 1, 0, &one_case);
  char path[600];
  ino_t before;
  expect_fresh(&r, 1, 0, &one_case);
  only_file(path, sizeof(path));
  before = inode_of(path);
  r = get(&problem, 1, 0, &one_case);
  expect_fresh(&r, 1, 0, &one_case);
  ck_assert(inode_of(path) == before); /* nothing was written */
}
END_TEST

/* Everything that the result depends on is part of the name. */
START_TEST(different_questions_do_not_share_a_file)
{
  const struct test_case others[] = {{2, ROUTING_UNIFORM, CASE_NORMAL, 1},
                                     {3, ROUTING_ZIPF, CASE_NORMAL, 1},
                                     {3, ROUTING_UNIFORM, CASE_TINY_SCALE, 1},
                                     {3, ROUTING_UNIFORM, CASE_NORMAL, 2}};
  struct mf_problem other = problem;
  struct reference_result r = get(&problem, 1, 0, &one_case), s;
  for(size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
    s = get(&problem, 1, 0, &others[i]);
    expect_fresh(&s, 1, 0, &others[i]);
  }
  s = get(&problem, 2.5f, 0, &one_case);
  expect_fresh(&s, 2.5f, 0, &one_case);
  s = get(&problem, 1, 7, &one_case);
  expect_fresh(&s, 1, 7, &one_case);
  other.act_scale = MF_ACT_SCALE_UE8M0;
  s = get(&other, 1, 0, &one_case);
  ck_assert(memcmp(s.y, r.y, 3 * 128 * sizeof(float)) != 0);
  reference_free(&s);
  reference_free(&r);
}
END_TEST

static void change_byte(const char *path, long at)
{
  FILE *file = fopen(path, "r+b");
  int byte;
  ck_assert_ptr_nonnull(file);
  ck_assert_int_eq(fseek(file, at, at < 0 ? SEEK_END : SEEK_SET), 0);
  byte = fgetc(file);
  ck_assert_int_ne(byte, EOF);
  ck_assert_int_eq(fseek(file, at, at < 0 ? SEEK_END : SEEK_SET), 0);
  fputc(byte ^ 1, file);
  fclose(file);
}

START_TEST(damaged_files_are_made_anew)
{
  static const long places[] = {0, 10, 13, 30, 100, 140, 160, 200, 600, -1};
  char path[600];
  struct stat st;
  struct reference_result r = get(&problem, 1, 0, &one_case);
  reference_free(&r);
  only_file(path, sizeof(path));
  for(size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
    change_byte(path, places[i]);
    r = get(&problem, 1, 0, &one_case);
    expect_fresh(&r, 1, 0, &one_case);
    only_file(path, sizeof(path)); /* and the damage is repaired */
  }
  ck_assert_int_eq(stat(path, &st), 0);
  for(int i = 0; i < 3; i++) {
    FILE *file;
    ck_assert_int_eq(truncate(path, i == 0 ? 0 : i == 1 ? 100 : st.st_size - 1), 0);
    r = get(&problem, 1, 0, &one_case);
    expect_fresh(&r, 1, 0, &one_case);
    file = fopen(path, "ab"); /* one byte too many */
    fputc('x', file);
    fclose(file);
    r = get(&problem, 1, 0, &one_case);
    expect_fresh(&r, 1, 0, &one_case);
  }
  ck_assert_int_eq(stat(path, &st), 0);
}
END_TEST

/* A file of another case under this case's name is not believed. */
START_TEST(renamed_files_are_not_believed)
{
  const struct test_case other = {3, ROUTING_UNIFORM, CASE_NORMAL, 2};
  char path[600], moved[600];
  struct reference_result r = get(&problem, 1, 0, &other);
  reference_free(&r);
  only_file(path, sizeof(path));
  snprintf(moved, sizeof(moved), "%s", path);
  ck_assert_ptr_nonnull(strstr(moved, "-2.ref"));
  memcpy(strstr(moved, "-2.ref"), "-1.ref", 6);
  ck_assert_int_eq(rename(path, moved), 0);
  r = get(&problem, 1, 0, &one_case);
  expect_fresh(&r, 1, 0, &one_case);
}
END_TEST

START_TEST(many_processes_at_once)
{
  enum { PROCESSES = 6 };
  pid_t child[PROCESSES];
  char path[600];
  struct reference_result r = get(&problem, 1, 0, &one_case);
  reference_free(&r);
  only_file(path, sizeof(path));
  for(int i = 0; i < PROCESSES; i++) {
    child[i] = fork();
    ck_assert_int_ge(child[i], 0);
    if(child[i] == 0) {
      bool good = true;
      for(int round = 0; round < 20 && good; round++) {
        struct error err = {0};
        good = reference_cached(cache, &problem, 1, 0, &one_case, &r, &err) == MF_OK && r.routing.tokens == 3;
        reference_free(&r);
        if(i == 0 && round % 4 == 1 && truncate(path, 50) != 0) /* somebody damages it meanwhile */
          good = false;
      }
      _exit(good ? 0 : 1);
    }
  }
  for(int i = 0; i < PROCESSES; i++) {
    int status;
    ck_assert_int_eq(waitpid(child[i], &status, 0), child[i]);
    ck_assert_int_eq(status, 0);
  }
  r = get(&problem, 1, 0, &one_case);
  expect_fresh(&r, 1, 0, &one_case);
  only_file(path, sizeof(path)); /* no temporary files are left */
}
END_TEST

START_TEST(no_folder_no_cache)
{
  struct reference_result r;
  struct error err = {0};
  ck_assert_int_eq(reference_cached(NULL, &problem, 1, 0, &one_case, &r, &err), MF_OK);
  expect_fresh(&r, 1, 0, &one_case);
}
END_TEST

START_TEST(what_fails_is_said)
{
  struct reference_result r;
  struct error err = {0};
  struct mf_problem p = problem;
  struct test_case tc = one_case;
  char deep[400], longer[1200];
  FILE *file;
  snprintf(deep, sizeof(deep), "%s/a/b", dir);
  ck_assert_int_eq(reference_cached(deep, &problem, 1, 0, &one_case, &r, &err), MF_ERR_IO);
  ck_assert_msg(strstr(err.text, "a/b") != NULL, "%s", err.text);
  ck_assert_ptr_null(r.h);
  file = fopen(cache, "wb"); /* a file where the folder should be */
  ck_assert_ptr_nonnull(file);
  fclose(file);
  ck_assert_int_eq(reference_cached(cache, &problem, 1, 0, &one_case, &r, &err), MF_ERR_IO);
  ck_assert_msg(strstr(err.text, "cannot keep a reference result") != NULL, "%s", err.text);
  ck_assert_ptr_null(r.h);
  memset(longer, 'x', sizeof(longer) - 1);
  longer[sizeof(longer) - 1] = '\0';
  ck_assert_int_eq(reference_cached(longer, &problem, 1, 0, &one_case, &r, &err), MF_ERR_IO);
  ck_assert_msg(strstr(err.text, "too long") != NULL, "%s", err.text);
  p.top_k = MAX_TOP_K + 1;
  ck_assert_int_eq(reference_cached(dir, &p, 1, 0, &one_case, &r, &err), MF_ERR_USAGE);
  tc.tokens = 0;
  ck_assert_int_eq(reference_cached(dir, &problem, 1, 0, &tc, &r, &err), MF_ERR_USAGE);
  p = problem;
  p.top_k = MAX_TOP_K;
  p.shared_experts = 1;
  ck_assert_int_eq(reference_cached(dir, &p, 1, 0, &one_case, &r, &err), MF_ERR_USAGE);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("reference_cache");
  TCase *tc = tcase_create("files");
  SRunner *runner;
  int failed;
  tcase_set_timeout(tc, 120);
  tcase_add_checked_fixture(tc, make_dir, remove_dir);
  tcase_add_test(tc, second_call_reads_the_file);
  tcase_add_test(tc, different_questions_do_not_share_a_file);
  tcase_add_test(tc, damaged_files_are_made_anew);
  tcase_add_test(tc, renamed_files_are_not_believed);
  tcase_add_test(tc, many_processes_at_once);
  tcase_add_test(tc, no_folder_no_cache);
  tcase_add_test(tc, what_fails_is_said);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
