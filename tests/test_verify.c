/* test_verify.c - `moeforge verify`: its judge, and the whole command over the scripted driver, whose kernel computes the reference on the CPU. */
#include "commands.h"
#include "datagen.h"
#include "fake_libcuda.h"
#include "package_fixture.h"
#include "verify_judge.h"

#include <check.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONTROL_SEED 9001u /* verify.c's */
#define SOAK_SEED 9002u    /* likewise */
#define RARE 100           /* a launch behind those of the cases */

/* ---- the judge ---- */
struct judged {
  struct mf_problem problem;
  struct test_case tc;
  struct reference_result ref;
  uint16_t y[4 * 512];
  struct verify_verdict verdict;
};

static void judged_make(struct judged *j)
{
  struct error err;
  memset(j, 0, sizeof(*j));
  j->problem = fixture_problem();
  j->tc = (struct test_case){.tokens = 4, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = 5};
  ck_assert_msg(reference_run(&j->problem, 1, data_layer_seed(0), &j->tc, &j->ref, &err) == MF_OK, "%s", err.text);
  for(int i = 0; i < 4 * 512; i++)
    j->y[i] = bf16_from_float(j->ref.y[i]);
  j->verdict.passed = true;
}

static bool judge(struct judged *j, const uint16_t *again, bool guards)
{
  const struct verify_output out = {.y = j->y, .y_again = again, .guards_intact = guards};
  verify_judge(&j->problem, &j->tc, &j->ref, &out, &j->verdict);
  return j->verdict.passed;
}

START_TEST(judge_accepts_the_reference)
{
  struct judged j;
  judged_make(&j);
  ck_assert_msg(judge(&j, j.y, true), "%s", j.verdict.detail);
  ck_assert_int_eq(j.verdict.cases, 1);
  ck_assert_double_lt(j.verdict.token, 0.005);
  reference_free(&j.ref);
}
END_TEST

/* Noise as quantisation makes it passes; what is more does not. */
START_TEST(judge_draws_the_line)
{
  static const struct {
    double noise;
    bool passes;
  } cases[] = {{0.01, true}, {0.02, true}, {0.08, false}, {0.3, false}};
  struct judged j;
  judged_make(&j);
  for(int t = 0; t < 4; t++) {
    double power = 0;
    for(int i = 0; i < 512; i++)
      power += (double)j.ref.y[t * 512 + i] * (double)j.ref.y[t * 512 + i];
    for(int i = 0; i < 512; i++) {
      const double sign = data_hash(1, DATA_PICK, (uint64_t)(t * 512 + i)) & 1 ? 1 : -1;
      j.y[t * 512 + i] = bf16_from_float((float)((double)j.ref.y[t * 512 + i] + sign * cases[_i].noise * sqrt(power / 512)));
    }
  }
  ck_assert_msg(judge(&j, j.y, true) == cases[_i].passes, "noise %g: %s", cases[_i].noise, j.verdict.detail);
  reference_free(&j.ref);
}
END_TEST

static float root_mean_square(const float *y)
{
  float sum = 0;
  for(int i = 0; i < 512; i++)
    sum += y[i] * y[i];
  return sqrtf(sum / 512);
}

#define WRONGS(X)                                                                                                    \
  X(j.y[520] = bf16_from_float(j.ref.y[520] + 0.9f * root_mean_square(j.ref.y + 512)), "8 rows against the reference: token 1") \
  X(memcpy(j.y, j.y + 512, 1024), "against the reference: token 0")                                                 \
  X(j.y[1030] = VERIFY_POISON, "token 2, column 6: never written")                                                   \
  X(j.y[1030] = 0x7f80, "token 2, column 6: not finite")                                                             \
  X(again[3] ^= 1, "two launches gave different results")                                                            \
  X(guards = false, "bytes beside")                                                                                  \
  X(for(int i = 0; i < 4 * 512; i++) j.y[i] = bf16_from_float(1.1f * bf16_to_float(j.y[i])), "against the reference")

START_TEST(judge_refuses)
{
#define TRY(change, words)                                                                                          \
  {                                                                                                                 \
    uint16_t again[4 * 512];                                                                                        \
    struct judged j;                                                                                                \
    bool guards = true;                                                                                             \
    judged_make(&j);                                                                                                \
    memcpy(again, j.y, sizeof(again));                                                                              \
    change;                                                                                                         \
    if(memcmp(again, j.y, sizeof(again)) != 0 && strstr(words, "two launches") == NULL)                             \
      memcpy(again, j.y, sizeof(again));                                                                            \
    ck_assert_msg(!judge(&j, again, guards) && strstr(j.verdict.detail, words) != NULL, "%s: %s", #change, j.verdict.detail); \
    reference_free(&j.ref);                                                                                         \
  }
  WRONGS(TRY)
#undef TRY
}
END_TEST

START_TEST(zero_token_is_exactly_zero)
{
  struct judged j;
  judged_make(&j);
  for(int i = 0; i < 512; i++)
    j.ref.y[i] = j.ref.y_unquantised[i] = 0;
  memset(j.y, 0, 1024);
  ck_assert_msg(judge(&j, j.y, true), "%s", j.verdict.detail);
  j.y[7] = 1; /* the smallest number that is not zero */
  ck_assert(!judge(&j, j.y, true));
  ck_assert_ptr_nonnull(strstr(j.verdict.detail, "token 0: not zero"));
  reference_free(&j.ref);
}
END_TEST

START_TEST(cases_cover_the_interval)
{
  struct test_case cases[64];
  const int count = verify_cases(1, 8, cases, 64);
  bool seen[9] = {false};
  ck_assert_int_eq(count, 3 * ROUTING_KINDS + 2);
  for(int i = 0; i < count; i++)
    seen[cases[i].tokens] = true;
  ck_assert(seen[1] && seen[4] && seen[8]);
  ck_assert_int_eq(verify_cases(3, 3, cases, 64), ROUTING_KINDS + 2);
  ck_assert_int_eq(verify_cases(1, 8, cases, 4), 4);
}
END_TEST

/* ---- the command ---- */
static char folder[128], package_path[256];
static int soak; /* --soak */

static void make_folder(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/mf-verify-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
  snprintf(package_path, sizeof(package_path), "%s/p.moeforge", folder);
}

static void remove_folder(void)
{
  char path[512];
  unlink(package_path);
  snprintf(path, sizeof(path), "%s/out", folder);
  unlink(path);
  rmdir(folder);
}

/* How the kernel of the scripted driver behaves. */
enum behaviour { RIGHT, RARELY_WRONG, NO_WRITE, ONE_ROW_WRONG, SHIFTED, UNSTEADY, WRITES_BESIDE, BLIND };

struct kernel {
  enum behaviour behaviour;
  struct mf_problem problem;
  int launches;
};

/* The case whose x this launch got. */
static bool find_case(const struct mf_problem *p, const struct fixture_params *params, struct test_case *out)
{
  struct test_case cases[66];
  uint16_t *x = malloc(8 * 512 * sizeof(*x));
  bool found = false;
  const int count = verify_cases(1, 4, cases, 64);
  cases[count] = cases[0];
  cases[count].seed = CONTROL_SEED;
  cases[count + 1] = (struct test_case){.tokens = 4, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = SOAK_SEED};
  for(int i = 0; i <= count + 1 && !found; i++)
    if(cases[i].tokens == params->tokens) {
      data_x(p, &cases[i], x);
      found = memcmp(x, (const void *)(uintptr_t)params->x, (size_t)params->tokens * 512 * sizeof(*x)) == 0;
      *out = cases[i];
    }
  free(x);
  return found;
}

static void on_launch(void *opaque, const struct fakecuda_launch *launch)
{
  struct kernel *k = opaque;
  struct fixture_params params;
  struct reference_result ref;
  struct test_case tc;
  struct error err;
  uint16_t *out;
  memcpy(&params, launch->params[0], sizeof(params));
  out = (uint16_t *)(uintptr_t)params.out;
  k->launches++;
  ck_assert(find_case(&k->problem, &params, &tc));
  if(k->behaviour == NO_WRITE)
    return;
  if(k->behaviour == BLIND && tc.seed == CONTROL_SEED)
    tc.seed = 7001;
  ck_assert_msg(reference_run(&k->problem, params.scaling, data_layer_seed(0), &tc, &ref, &err) == MF_OK, "%s", err.text);
  for(int i = 0; i < tc.tokens * 512; i++)
    out[i] = bf16_from_float(ref.y[i]);
  if(k->behaviour == ONE_ROW_WRONG)
    out[100] = bf16_from_float(-4.0f * bf16_to_float(out[100]) + 1.0f);
  if(k->behaviour == SHIFTED)
    memmove(out, out + 1, ((size_t)tc.tokens * 512 - 1) * sizeof(*out));
  if(k->behaviour == UNSTEADY)
    out[0] = (uint16_t)(out[0] ^ (k->launches & 1));
  if(k->behaviour == RARELY_WRONG && (k->launches == RARE || k->launches == RARE + 40))
    out[7] ^= 1;
  if(k->behaviour == WRITES_BESIDE)
    out[tc.tokens * 512] = 0;
  reference_free(&ref);
}

static void write_entry(int tokens_min, int tokens_max)
{
  struct package_set set;
  struct error err;
  unsigned char *bytes;
  size_t size;
  package_set_init(&set);
  package_set_add(&set, tokens_min, tokens_max);
  ck_assert_int_eq(package_build(set.items, set.count, false, &bytes, &size, &err), MF_OK);
  ck_assert_int_eq(package_write_file(package_path, bytes, size, &err), MF_OK);
  free(bytes);
}

static void write_package(void)
{
  write_entry(1, 4);
}

/* Runs the command with stdout in a file, whose text is returned (malloc). */
static enum mf_status verify(bool json, struct error *err, char **text)
{
  struct options opt;
  char path[512];
  const int kept = dup(STDOUT_FILENO);
  enum mf_status rc;
  FILE *f;
  memset(&opt, 0, sizeof(opt));
  opt.device = "auto";
  opt.json = json;
  opt.timeout_ms = 300;
  opt.soak = soak;
  snprintf(path, sizeof(path), "%s/out", folder);
  fflush(stdout);
  ck_assert_ptr_nonnull(freopen(path, "w", stdout));
  rc = verify_command(&opt, package_path, err);
  fflush(stdout);
  dup2(kept, STDOUT_FILENO);
  close(kept);
  f = fopen(path, "r");
  *text = calloc(1, 65536);
  ck_assert_uint_gt(fread(*text, 1, 65535, f) + 1, 0);
  fclose(f);
  return rc;
}

static const struct {
  enum behaviour behaviour;
  const char *script;
  enum mf_status status;
  const char *words; /* in the error, or in the output if all is well */
} runs[] = {
    {RIGHT, "", MF_OK, "passed"},
    {NO_WRITE, "", MF_ERR_CHECK, "never written"},
    {ONE_ROW_WRONG, "", MF_ERR_CHECK, "against the reference"},
    {SHIFTED, "", MF_ERR_CHECK, "against the reference"},
    {UNSTEADY, "", MF_ERR_CHECK, "two launches gave different results"},
    {WRITES_BESIDE, "", MF_ERR_CHECK, "bytes beside the output"},
    {BLIND, "", MF_ERR_CHECK, "negative control"},
    {RIGHT, "no_device", MF_ERR_NO_DEVICE, "hashes and structure are sound"},
    {RIGHT, "name=NVIDIA L40S", MF_MISS_DEVICE, "nothing in it is for this GPU (NVIDIA L40S)"},
    {RIGHT, "cc=80", MF_MISS_DEVICE, "mf_op_create"},
    {RIGHT, "driver=12000", MF_MISS_DRIVER, "mf_op_create"},
    {RIGHT, "sms=100", MF_MISS_SMS, "mf_op_create"},
    {RIGHT, "oom", MF_ERR_NOMEM, "GiB left for"},
    {RIGHT, "launch_fail", MF_ERR_DEVICE, "mf_moe_forward"},
    {RIGHT, "fault", MF_ERR_DEVICE, "CUDA_ERROR_ILLEGAL_ADDRESS"},
};

START_TEST(command)
{
  struct kernel k = {.behaviour = runs[_i].behaviour, .problem = fixture_problem()};
  fakecuda_on_launch_fn *hook;
  struct error err = {.text = ""};
  enum mf_status rc;
  char *text;
  fakecuda_use(runs[_i].script, NULL);
  *(void **)(void *)&hook = fakecuda_symbol("fakecuda_on_launch");
  hook(on_launch, &k);
  write_package();
  rc = verify(false, &err, &text);
  ck_assert_msg(rc == runs[_i].status, "%s: %s: %s", runs[_i].script, mf_status_name(rc), err.text);
  ck_assert_msg(strstr(rc == MF_OK ? text : err.text, runs[_i].words) != NULL, "%s\n%s", text, err.text);
  ck_assert_ptr_nonnull(strstr(text, "hashes and structure sound"));
  free(text);
}
END_TEST

/* An op serves every count from 1 on, so an entry behind a gap serves nobody. */
START_TEST(command_gap)
{
  struct error err = {.text = ""};
  char *text;
  fakecuda_use("", NULL);
  write_entry(3, 4);
  ck_assert_int_eq(verify(false, &err, &text), MF_MISS_TOKENS);
  ck_assert_msg(strstr(err.text, "tokens 3-4: no engine can call it: nothing in the package serves 1 to 2 tokens") != NULL, "%s", err.text);
  free(text);
}
END_TEST

/* After a hang the command frees nothing that belongs to the GPU, on purpose. So it runs in a process of its own, which no leak checker sees the end of. */
START_TEST(command_hang)
{
  struct {
    enum mf_status rc;
    struct error err;
  } result = {.rc = MF_OK};
  int ends[2];
  pid_t child;
  write_package();
  fakecuda_use("hang", NULL);
  ck_assert_int_eq(pipe(ends), 0);
  child = fork();
  if(child == 0) {
    char *text;
    result.rc = verify(false, &result.err, &text);
    if(write(ends[1], &result, sizeof(result)) != (ssize_t)sizeof(result))
      _exit(1);
    raise(SIGKILL);
  }
  close(ends[1]);
  ck_assert_int_eq((int)read(ends[0], &result, sizeof(result)), (int)sizeof(result));
  close(ends[0]);
  waitpid(child, NULL, 0);
  ck_assert_int_eq(result.rc, MF_ERR_TIMEOUT);
  ck_assert_ptr_nonnull(strstr(result.err.text, "did not end within 300 ms"));
}
END_TEST

/* The one entry of `verify --json`. */
static json_t *json_entry(enum behaviour behaviour, enum mf_status expected, struct kernel *k, json_t **top)
{
  fakecuda_on_launch_fn *hook;
  struct error err;
  char *text;
  *k = (struct kernel){.behaviour = behaviour, .problem = fixture_problem()};
  fakecuda_use("", NULL);
  *(void **)(void *)&hook = fakecuda_symbol("fakecuda_on_launch");
  hook(on_launch, k);
  write_package();
  ck_assert_int_eq(verify(true, &err, &text), expected);
  *top = json_loads(text, 0, NULL);
  free(text);
  ck_assert_uint_eq(json_array_size(json_object_get(*top, "entries")), 1);
  return json_array_get(json_object_get(*top, "entries"), 0);
}

START_TEST(command_json)
{
  struct kernel k;
  json_t *top, *row = json_entry(RIGHT, MF_OK, &k, &top);
  ck_assert_str_eq(json_string_value(json_object_get(row, "result")), "passed");
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "cases")), 3 * ROUTING_KINDS + 2);
  ck_assert_double_lt(json_real_value(json_object_get(row, "token_error")), 0.01);
  ck_assert_int_eq(k.launches, 2 * (3 * ROUTING_KINDS + 2) + 1);
  json_decref(top);
  row = json_entry(NO_WRITE, MF_ERR_CHECK, &k, &top);
  ck_assert_str_eq(json_string_value(json_object_get(row, "status")), "MF_ERR_CHECK");
  ck_assert_ptr_nonnull(strstr(json_string_value(json_object_get(row, "why")), "never written"));
  json_decref(top);
}
END_TEST

/* Many launches of each entry: what goes wrong once in a while is found, and counted. */
START_TEST(command_soak)
{
  struct kernel k;
  json_t *top, *row;
  struct error err;
  const char *why;
  char *text;
  soak = 130; /* two batches and a rest */
  row = json_entry(RIGHT, MF_OK, &k, &top);
  ck_assert_int_eq(k.launches, 2 * (3 * ROUTING_KINDS + 2) + 1 + 2 + 130);
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "soaked")), 130);
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "different")), 0);
  json_decref(top);
  ck_assert_int_eq(verify(false, &err, &text), MF_OK);
  ck_assert_msg(strstr(text, "passed, 130 launches alike") != NULL, "%s", text);
  free(text);
  row = json_entry(RARELY_WRONG, MF_ERR_CHECK, &k, &top);
  why = json_string_value(json_object_get(row, "why"));
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "different")), 2);
  ck_assert_msg(strstr(why, "2 of 130 launches gave another result, launch ") != NULL && strstr(why, "a race; do not serve it") != NULL, "%s", why);
  json_decref(top);
  row = json_entry(WRITES_BESIDE, MF_ERR_CHECK, &k, &top); /* nothing is soaked that has failed */
  ck_assert_ptr_nonnull(strstr(json_string_value(json_object_get(row, "why")), "bytes beside the output"));
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "soaked")), 0);
  ck_assert_int_eq(k.launches, 2 * (3 * ROUTING_KINDS + 2) + 1);
  json_decref(top);
  soak = 0; /* the two that are wrong then do not come */
  row = json_entry(RARELY_WRONG, MF_OK, &k, &top);
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "soaked")), 0);
  json_decref(top);
}
END_TEST

START_TEST(damaged_package)
{
  struct error err;
  char *text;
  FILE *f;
  write_package();
  f = fopen(package_path, "r+");
  fseek(f, 700, SEEK_SET);
  fputc(0xff, f);
  fclose(f);
  ck_assert_int_eq(verify(false, &err, &text), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "section manifest: SHA-256 differs"));
  free(text);
  unlink(package_path);
  ck_assert_int_eq(verify(false, &err, &text), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "p.moeforge"));
  free(text);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("verify");
  TCase *judge_case = tcase_create("judge"), *command_case = tcase_create("command");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_test(judge_case, judge_accepts_the_reference);
  tcase_add_loop_test(judge_case, judge_draws_the_line, 0, 4);
  tcase_add_test(judge_case, judge_refuses);
  tcase_add_test(judge_case, zero_token_is_exactly_zero);
  tcase_add_test(judge_case, cases_cover_the_interval);
  tcase_add_checked_fixture(command_case, make_folder, remove_folder);
  tcase_add_loop_test(command_case, command, 0, (int)(sizeof(runs) / sizeof(runs[0])));
  tcase_add_test(command_case, command_hang);
  tcase_add_test(command_case, command_gap);
  tcase_add_test(command_case, command_json);
  tcase_add_test(command_case, command_soak);
  tcase_add_test(command_case, damaged_package);
  tcase_set_timeout(command_case, 120);
  suite_add_tcase(suite, judge_case);
  suite_add_tcase(suite, command_case);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
