/* test_qualify.c - `moeforge qualify`: baseline files good and malformed, verdicts, the record in the package, the command. */
#include "commands.h"
#include "package_fixture.h"
#include "package_rewrite.h"
#include "qualify.h"
#include "spec.h"

#include <check.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[128];

static void start(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/mf-qualify-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void end(void)
{
  char command[256];
  snprintf(command, sizeof(command), "rm -r '%s'", folder);
  ck_assert_int_eq(system(command), 0);
}

static const char *in_folder(const char *name)
{
  static char path[8][256];
  static int turn;
  turn = (turn + 1) % 8;
  snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name);
  return path[turn];
}

static void write_text(const char *name, const char *text, size_t length)
{
  FILE *f = fopen(in_folder(name), "wb");
  ck_assert_ptr_nonnull(f);
  ck_assert_uint_eq(fwrite(text, 1, length, f), length);
  fclose(f);
}

static unsigned char *read_bytes(const char *path, size_t *size)
{
  unsigned char *bytes;
  ck_assert_int_eq(package_read_bytes(path, &bytes, size, NULL, 0), MF_OK);
  return bytes;
}

/* ---- baseline files ---- */
#define HEAD "{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"old\", \"device\": \"NVIDIA H200\", \"points\": "
#define SIX "[20, 20.5, 21, 19.5, 20, 20.2]"
#define POINT(more) "{\"shape\": \"fixture\", \"tokens\": 1, \"us\": " SIX more "}"

START_TEST(a_good_baseline)
{
  static const char text[] = HEAD "[" POINT(", \"package_us\": [10, 10, 10, 10, 10, 10], \"error\": 0.04, \"memory_gib\": 1.5, \"routing\": \"uniform\"")
                                  ", {\"shape\": \"other\", \"tokens\": 1, \"us\": [3]}]}";
  struct baseline base;
  struct error err;
  const struct baseline_point *p;
  write_text("b", text, strlen(text));
  ck_assert_msg(baseline_read(in_folder("b"), &base, &err) == MF_OK, "%s", err.text);
  ck_assert_str_eq(base.name, "old");
  ck_assert_str_eq(base.device, "NVIDIA H200");
  ck_assert_uint_eq(strlen(base.sha256), 64);
  ck_assert_uint_eq(base.count, 2);
  p = baseline_find(&base, "fixture", 1);
  ck_assert_ptr_nonnull(p);
  ck_assert_uint_eq(p->count, 6);
  ck_assert_double_eq(p->us[3], 19.5);
  ck_assert_double_eq(p->package_us[5], 10);
  ck_assert_double_eq(p->error, 0.04);
  ck_assert_double_eq(p->memory_gib, 1.5);
  ck_assert_str_eq(p->routing, "uniform");
  p = baseline_find(&base, "other", 1);
  ck_assert_ptr_null(p->package_us);
  ck_assert(isnan(p->error) && isnan(p->memory_gib));
  ck_assert_str_eq(p->routing, "mix");
  ck_assert_ptr_null(baseline_find(&base, "fixture", 2));
  baseline_free(&base);
}
END_TEST

static const struct {
  const char *text, *words;
} malformed[] = {
    {"", "not JSON"},
    {"[]", "expected a JSON object"},
    {"{", "not JSON"},
    {"{\"a\": 1, \"a\": 2}", "duplicate"},
    {"{}", "format: expected \"moeforge baseline\""},
    {"{\"format\": \"moeforge baseline\"}", "version: expected 1"},
    {"{\"format\": \"moeforge baseline\", \"version\": 2}", "version: expected 1"},
    {"{\"format\": \"moeforge baseline\", \"version\": 1, \"device\": \"x\", \"points\": []}", "name: expected a text"},
    {"{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"\", \"device\": \"x\", \"points\": []}", "name: expected a text"},
    {"{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"a\\u00e9\", \"device\": \"x\", \"points\": []}", "name: expected a text"},
    {"{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"n\", \"points\": []}", "device: expected a text"},
    {"{\"format\": \"moeforge baseline\", \"version\": 1, \"name\": \"n\", \"device\": \"x\", \"pionts\": []}", "pionts: expected a known key, did you mean points"},
    {HEAD "[]}", "points: expected a list"},
    {HEAD "{}}", "points: expected a list"},
    {HEAD "[7]}", "points[0].: expected an object"},
    {HEAD "[{}]}", "points[0].shape: expected a text"},
    {HEAD "[{\"shape\": \"s\"}]}", "points[0].tokens: expected a token count"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 0}]}", "points[0].tokens"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1.5}]}", "points[0].tokens"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1}]}", "points[0].us: expected a list"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": []}]}", "points[0].us: expected a list"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": [1, 0]}]}", "points[0].us: expected microseconds"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": [1, -2]}]}", "points[0].us: expected microseconds"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": [\"1\"]}]}", "points[0].us: expected microseconds"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": [1e300]}]}", "points[0].us: expected microseconds"},
    {HEAD "[{\"shape\": \"s\", \"tokens\": 1, \"us\": [1e-320]}]}", "points[0].us: expected microseconds: numbers from 1e-3"},
    {HEAD "[" POINT(", \"package_us\": [1]") "]}", "points[0].package_us: expected one sample for each"},
    {HEAD "[" POINT(", \"package_us\": null") "]}", "points[0].package_us: expected a list"},
    {HEAD "[" POINT(", \"packge_us\": [1]") "]}", "points[0].packge_us: expected a known key, did you mean package_us"},
    {HEAD "[" POINT(", \"error\": -1") "]}", "points[0].error: expected a number"},
    {HEAD "[" POINT(", \"error\": \"x\"") "]}", "points[0].error: expected a number"},
    {HEAD "[" POINT(", \"memory_gib\": []") "]}", "points[0].memory_gib: expected a number"},
    {HEAD "[" POINT(", \"routing\": 3") "]}", "points[0].routing: expected a text"},
    {HEAD "[" POINT("") ", " POINT("") "]}", "points[1].tokens: expected each token count of a shape once"},
};

START_TEST(malformed_baselines)
{
  struct baseline base;
  struct error err = {.text = ""};
  write_text("b", malformed[_i].text, strlen(malformed[_i].text));
  ck_assert_int_eq(baseline_read(in_folder("b"), &base, &err), MF_ERR_SPEC);
  ck_assert_msg(strstr(err.text, malformed[_i].words) != NULL && strchr(err.text, '\n') == NULL, "%s: %s", malformed[_i].text, err.text);
  ck_assert_msg(strstr(err.text, in_folder("b")) != NULL, "%s", err.text);
  ck_assert_uint_eq(base.count, 0);
}
END_TEST

/* A good file that is cut off anywhere, or has one byte changed, is read or refused, and never leaks or crashes. */
START_TEST(damaged_baselines)
{
  static const char good[] = HEAD "[" POINT(", \"package_us\": " SIX ", \"error\": 0.04, \"routing\": \"mix\"") "]}";
  char text[sizeof(good)];
  int refused = 0;
  for(size_t at = 0; at < sizeof(good) - 1; at++) {
    struct baseline base;
    struct error err;
    memcpy(text, good, sizeof(good));
    write_text("b", text, at);
    ck_assert_int_eq(baseline_read(in_folder("b"), &base, &err), MF_ERR_SPEC);
    text[at] = at % 2 == 0 ? '\0' : '"';
    write_text("b", text, sizeof(good) - 1);
    if(baseline_read(in_folder("b"), &base, &err) != MF_OK)
      refused++;
    baseline_free(&base);
  }
  ck_assert_int_gt(refused, (int)sizeof(good) / 2);
}
END_TEST

START_TEST(baselines_that_are_no_files)
{
  struct baseline base;
  struct error err;
  ck_assert_int_eq(baseline_read(in_folder("missing"), &base, &err), MF_ERR_IO);
  ck_assert_int_eq(baseline_read(folder, &base, &err), MF_ERR_IO);
}
END_TEST

/* ---- verdicts ---- */
#define MANY 15

struct trial {
  struct spec_limits limits;
  struct qualify_record own;
  struct baseline_point base;
  double us[MANY], package_us[MANY];
  const char *device;
  struct qualify_point out;
};

/* Baseline 20 us +- 1 %, package 10 us (9.9 to 10.1), all limits well kept. */
static void trial_init(struct trial *t)
{
  memset(t, 0, sizeof(*t));
  t->limits = (struct spec_limits){.max_error = 0.05, .min_speedup = 1.5, .max_memory_bytes = 1e9};
  t->own = (struct qualify_record){.shape = "fixture", .device = "NVIDIA H200", .tokens = 4, .us = 10, .us_low = 9.9, .us_high = 10.1, .error = 0.04,
                                   .memory_gib = 0.5, .checked = true};
  t->device = "NVIDIA H200";
  t->base = (struct baseline_point){.shape = "fixture", .tokens = 4, .routing = "mix", .us = t->us, .count = MANY, .error = NAN, .memory_gib = NAN};
  for(int i = 0; i < MANY; i++) {
    t->us[i] = 20 + 0.2 * ((i * 7) % MANY - MANY / 2) / (MANY / 2.0);
    t->package_us[i] = 10;
  }
}

static enum qualify_verdict judge(struct trial *t)
{
  struct error err;
  ck_assert_int_eq(qualify_judge(&t->limits, &t->own, t->device, &t->base, &t->out, &err), MF_OK);
  return t->out.verdict;
}

#define EXPECT(change, expected, words)                                                                                       \
  {                                                                                                                           \
    struct trial trial, *t = &trial;                                                                                          \
    trial_init(t);                                                                                                            \
    change;                                                                                                                   \
    ck_assert_msg(judge(t) == (expected), "%s: %s: %s", #change, verdict_name(t->out.verdict), t->out.why);                   \
    ck_assert_msg(strstr(t->out.why, words) != NULL && ((expected) != VERDICT_KEEP || t->out.why[0] == '\0'), "%s: %s", #change, t->out.why); \
  }

START_TEST(verdicts)
{
  EXPECT((void)0, VERDICT_KEEP, "")
  EXPECT(t->base.package_us = t->package_us, VERDICT_KEEP, "")
  /* nothing to compare */
  EXPECT(t->device = "NVIDIA H100", VERDICT_NOT_COMPARED, "the baseline is of NVIDIA H100")
  EXPECT(t->own.predicted = true, VERDICT_NOT_COMPARED, "only predicted")
  EXPECT(t->base.count = 5, VERDICT_NOT_COMPARED, "5 samples, at least 6")
  EXPECT(t->base.count = 6, VERDICT_KEEP, "")
  EXPECT(snprintf(t->base.routing, 32, "uniform"), VERDICT_NOT_COMPARED, "routing uniform")
  EXPECT(snprintf(t->base.routing, 32, "uniform"); t->base.package_us = t->package_us, VERDICT_KEEP, "")
  EXPECT(t->own.us_low = t->own.us_high = NAN, VERDICT_NOT_COMPARED, "no interval")
  EXPECT(t->own.us_low = NAN; t->base.package_us = t->package_us, VERDICT_KEEP, "")
  EXPECT(t->own.us = 0, VERDICT_NOT_COMPARED, "no interval")
  /* broken limits */
  EXPECT(t->own.checked = false, VERDICT_REJECT, "no check")
  EXPECT(t->own.error = 0.0501, VERDICT_REJECT, "error 0.0501 is above max_error 0.05")
  EXPECT(t->own.error = 0.05, VERDICT_KEEP, "")
  EXPECT(t->own.error = NAN, VERDICT_REJECT, "no error is on record")
  EXPECT(t->own.error = NAN; t->limits.max_error = 0, VERDICT_KEEP, "")
  EXPECT(t->own.memory_gib = 0.94, VERDICT_REJECT, "0.940 GiB are above max_memory_gib 0.931")
  EXPECT(t->own.memory_gib = 9; t->limits.max_memory_bytes = 0, VERDICT_KEEP, "")
  EXPECT(t->limits.min_speedup = 2.1, VERDICT_REJECT, "is below min_speedup 2.100")
  EXPECT(t->limits.min_speedup = 1.99, VERDICT_REJECT, "is not shown to reach min_speedup 1.990")
  EXPECT(t->limits.min_speedup = 1.95, VERDICT_KEEP, "")
  EXPECT(t->own.checked = false; t->own.error = 1; t->limits.min_speedup = 3, VERDICT_REJECT, "; error 1 is above max_error 0.05; speed-up")
}
END_TEST

START_TEST(no_baseline)
{
  struct trial t;
  struct error err;
  trial_init(&t);
  ck_assert_int_eq(qualify_judge(&t.limits, &t.own, t.device, NULL, &t.out, &err), MF_OK);
  ck_assert_int_eq(t.out.verdict, VERDICT_NOT_COMPARED);
  ck_assert_str_eq(t.out.why, "no baseline");
  ck_assert(isnan(t.out.speedup));
}
END_TEST

/* A machine that drifts by half: separate samples show nothing, pairs of the same rounds show a factor of two to the percent. */
START_TEST(pairs_see_through_drift)
{
  struct trial t;
  trial_init(&t);
  for(int i = 0; i < MANY; i++) {
    const double drift = 1 + 0.5 * i / (MANY - 1), noise = 1 + 0.005 * ((i * 5) % MANY - MANY / 2) / (MANY / 2.0);
    t.us[i] = 20 * drift * noise;
    t.package_us[i] = 10 * drift;
  }
  t.limits.min_speedup = 1.98;
  t.own.us = 12.5;
  t.own.us_low = 10;
  t.own.us_high = 15;
  ck_assert_int_eq(judge(&t), VERDICT_REJECT);
  ck_assert_double_lt(t.out.speedup_low, 1.8);
  t.base.package_us = t.package_us;
  ck_assert_msg(judge(&t) == VERDICT_KEEP, "%s", t.out.why);
  ck_assert_double_eq_tol(t.out.speedup, 2, 0.01);
  ck_assert_double_gt(t.out.speedup_low, 1.98);
  ck_assert_double_lt(t.out.speedup_high, 2.02);
  ck_assert(t.out.paired);
  ck_assert_double_eq_tol(t.out.package_us, 12.5, 0.5); /* of these rounds, not what was on record */
  t.package_us[0] = t.us[0]; /* one bad round changes no verdict */
  ck_assert_int_eq(judge(&t), VERDICT_KEEP);
}
END_TEST

/* ---- the record in the package ---- */
static unsigned char *fixture_package(size_t *size, double error)
{
  static struct package_set set;
  struct error err;
  unsigned char *bytes;
  package_set_init(&set);
  package_set_add(&set, 1, 2);
  package_set_add(&set, 3, 4);
  set.check.worst_error = error;
  ck_assert_msg(package_build(set.items, set.count, false, &bytes, size, &err) == MF_OK, "%s", err.text);
  return bytes;
}

START_TEST(rewriting_keeps_everything_else)
{
  struct mf_package *before, *after;
  struct error err;
  unsigned char *bytes, *first, *second, *copy;
  size_t size, first_size, second_size;
  bytes = fixture_package(&size, 0);
  ck_assert_int_eq(package_with_qualification(bytes, "{\"a\": \"first and long\"}", &first, &first_size, &err), MF_OK);
  ck_assert_int_eq(package_with_qualification(first, "{\"b\": 2}", &second, &second_size, &err), MF_OK);
  ck_assert_uint_lt(second_size, first_size);
  copy = malloc(size);
  memcpy(copy, bytes, size);
  ck_assert_int_eq(package_parse(copy, size, &before, NULL, 0), MF_OK);
  ck_assert_ptr_null(before->qualification); /* an old file opens, without one */
  ck_assert_int_eq(package_parse(second, second_size, &after, NULL, 0), MF_OK);
  ck_assert_str_eq(after->qualification, "{\"b\": 2}");
  ck_assert_str_eq(before->manifest, after->manifest);
  ck_assert_str_eq(before->validation, after->validation);
  ck_assert_str_eq(before->provenance, after->provenance);
  ck_assert_uint_eq(before->nentries, after->nentries);
  ck_assert_mem_eq(before->entries, after->entries, before->nentries * sizeof(*before->entries));
  ck_assert_mem_eq(before->recipes, after->recipes, before->nrecipes * sizeof(*before->recipes));
  ck_assert_mem_eq(package_cubin(before, 0), package_cubin(after, 0), strlen(FIXTURE_CUBIN));
  mf_package_close(before);
  mf_package_close(after);
  for(size_t at = 0; at < first_size; at++) { /* the new section is covered like the others */
    first[at] ^= 1;
    copy = malloc(first_size);
    memcpy(copy, first, first_size);
    ck_assert_msg(package_parse(copy, first_size, &after, NULL, 0) != MF_OK, "byte %zu", at);
    first[at] ^= 1;
  }
  free(bytes);
  free(first);
}
END_TEST

/* ---- the command ---- */
static void write_spec(const char *name, struct spec_limits limits)
{
  struct model_spec spec = {.name = "fixture", .problem = fixture_problem(), .routed_scaling = 2.5, .tokens = {1, 2, 3, 4}, .ntokens = 4, .limits = limits};
  struct strbuf text;
  spec.problem.hidden = 1024;
  strbuf_init(&text, 65536);
  spec_write(&spec, &text);
  write_text(name, text.text, strlen(text.text));
  strbuf_free(&text);
}

/* Points for tokens 1..count, 'us' around the middle, paired with 10 us or not. */
static void write_baseline(const char *name, int count, double us, bool paired)
{
  char text[8192];
  size_t n = (size_t)snprintf(text, sizeof(text), HEAD "[");
  for(int t = 1; t <= count; t++) {
    n += (size_t)snprintf(text + n, sizeof(text) - n, "%s{\"shape\": \"fixture\", \"tokens\": %d, \"us\": [", t > 1 ? ", " : "", t);
    for(int i = 0; i < 12; i++)
      n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%.3f", i > 0 ? ", " : "", us * (1 + 0.001 * (i - 6)));
    n += (size_t)snprintf(text + n, sizeof(text) - n, "]");
    if(paired)
      n += (size_t)snprintf(text + n, sizeof(text) - n, ", \"package_us\": [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]");
    n += (size_t)snprintf(text + n, sizeof(text) - n, "}");
  }
  n += (size_t)snprintf(text + n, sizeof(text) - n, "]}");
  write_text(name, text, n);
}

static void write_package(const char *name, double error)
{
  static struct package_set set;
  struct error err;
  unsigned char *bytes;
  size_t size;
  package_set_init(&set);
  set.problem.hidden = 1024; /* the least that a spec may have */
  package_set_add(&set, 1, 2);
  package_set_add(&set, 3, 4);
  set.check.worst_error = error;
  ck_assert_msg(package_build(set.items, set.count, false, &bytes, &size, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(package_write_file(in_folder(name), bytes, size, &err), MF_OK);
  free(bytes);
}

/* stdout of the command goes to a file that is returned. */
static char *qualify(const char *package, const char *baseline, const char *spec, const char *output, bool json, enum mf_status *rc, struct error *err)
{
  struct options opt;
  size_t size;
  char *text;
  int keep, fd;
  memset(&opt, 0, sizeof(opt));
  memset(err, 0, sizeof(*err));
  opt.baseline = baseline;
  opt.spec = spec;
  opt.output = output;
  opt.device_dir = "specs/devices";
  opt.json = json;
  opt.quiet = true;
  fflush(stdout);
  keep = dup(STDOUT_FILENO);
  fd = open(in_folder("out"), O_CREAT | O_TRUNC | O_WRONLY, 0644);
  dup2(fd, STDOUT_FILENO);
  *rc = qualify_command(&opt, package, err);
  fflush(stdout);
  dup2(keep, STDOUT_FILENO);
  close(keep);
  close(fd);
  text = (char *)read_bytes(in_folder("out"), &size);
  text[size] = '\0'; /* package_read_bytes() leaves room for it */
  return text;
}

static const struct spec_limits LIMITS = {.max_error = 0.05, .min_speedup = 1.5, .max_memory_bytes = 1e9};

START_TEST(qualified)
{
  char *table, *json;
  enum mf_status rc;
  struct error err;
  struct mf_package *pkg;
  json_t *record, *point;
  write_package("p", 0.042);
  write_spec("s.yaml", LIMITS);
  write_baseline("b", 4, 20, false);
  table = qualify(in_folder("p"), in_folder("b"), in_folder("s.yaml"), in_folder("q"), false, &rc, &err);
  ck_assert_msg(rc == MF_OK, "%s", err.text);
  ck_assert_msg(strstr(table, "qualified: 4 kept, 0 rejected, 0 not compared\n") != NULL && strstr(table, "not qualified") == NULL, "%s", table);
  ck_assert_int_eq(mf_package_open(in_folder("p"), &pkg), MF_OK);
  ck_assert_ptr_null(pkg->qualification); /* -o: the original is left alone */
  mf_package_close(pkg);
  json = qualify(in_folder("q"), in_folder("b"), in_folder("s.yaml"), NULL, true, &rc, &err); /* again, in place */
  ck_assert_msg(rc == MF_OK, "%s", err.text);
  ck_assert_int_eq(mf_package_open(in_folder("q"), &pkg), MF_OK);
  ck_assert_uint_eq(strlen(pkg->qualification) + 1, strlen(json));
  ck_assert_mem_eq(pkg->qualification, json, strlen(pkg->qualification));
  record = json_loads(pkg->qualification, 0, NULL);
  ck_assert(json_is_true(json_object_get(record, "qualified")));
  ck_assert_int_eq((int)json_integer_value(json_object_get(record, "kept")), 4);
  ck_assert_str_eq(json_string_value(json_object_get(json_object_get(record, "baseline"), "name")), "old");
  point = json_array_get(json_object_get(record, "points"), 2);
  ck_assert_int_eq((int)json_integer_value(json_object_get(point, "tokens")), 3);
  ck_assert_str_eq(json_string_value(json_object_get(point, "verdict")), "keep");
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "error")), 0.042, 1e-9);
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "package_us")), 9.75, 1e-9); /* the package's own record */
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "speedup")), 20 / 9.75, 0.02);
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "speedup_low")), 20 / 10.0, 0.02); /* us_high is 10 */
  /* 16 experts of 3 * 128 * 1024 bytes, 3 * 8 scales each, and 20000 bytes of workspace */
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "memory_gib")) * (1 << 30), 16 * (393216 + 96) + 20000, 1);
  json_decref(record);
  mf_package_close(pkg);
  free(table);
  free(json);
}
END_TEST

static const struct {
  int points;
  double us, error;
  bool paired;
  enum mf_status status;
  const char *words, *line;
} outcomes[] = {
    {4, 20, 0.042, true, MF_OK, "", "qualified: 4 kept"},
    {3, 20, 0.042, false, MF_ERR_NOT_FOUND, "1 of 4 token counts could not be compared", "not qualified: 3 kept, 0 rejected, 1 not compared"},
    {4, 12, 0.042, false, MF_REJECTED, "4 of 4 token counts were rejected", "not qualified: 0 kept, 4 rejected, 0 not compared"},
    {1, 12, 0.042, true, MF_REJECTED, "1 of 4 token counts were rejected", "not qualified: 0 kept, 1 rejected, 3 not compared"},
    {4, 20, 0.06, false, MF_REJECTED, "rejected", "error 0.06 is above max_error 0.05"},
    {4, 20, 0, false, MF_REJECTED, "rejected", "no error is on record"},
};

START_TEST(outcomes_of_the_command)
{
  char *table;
  enum mf_status rc;
  struct error err;
  struct mf_package *pkg;
  write_package("p", outcomes[_i].error);
  write_spec("s.yaml", LIMITS);
  write_baseline("b", outcomes[_i].points, outcomes[_i].us, outcomes[_i].paired);
  table = qualify(in_folder("p"), in_folder("b"), in_folder("s.yaml"), NULL, false, &rc, &err);
  ck_assert_msg(rc == outcomes[_i].status, "%s: %s", mf_status_name(rc), err.text);
  ck_assert_msg(strstr(err.text, outcomes[_i].words) != NULL, "%s", err.text);
  ck_assert_msg(strstr(table, outcomes[_i].line) != NULL, "%s", table);
  ck_assert_int_eq(mf_package_open(in_folder("p"), &pkg), MF_OK);
  ck_assert_msg((strstr(pkg->qualification, "\"qualified\": true") != NULL) == (rc == MF_OK), "%s", pkg->qualification); /* the record is there whatever it says */
  mf_package_close(pkg);
  free(table);
}
END_TEST

/* Shared experts are weights like the others, gated or not; the record counts them. */
START_TEST(memory_of_shared_experts)
{
  static const int shared[] = {0, 2, 2 + MF_SHARED_GATED};
  static struct package_set set;
  struct model_spec spec = {.name = "fixture", .routed_scaling = 2.5, .tokens = {1, 2, 3, 4}, .ntokens = 4, .limits = LIMITS};
  struct strbuf text;
  unsigned char *bytes;
  size_t size;
  char *json;
  enum mf_status rc;
  struct error err;
  json_t *record, *point;
  package_set_init(&set);
  set.problem.hidden = 1024;
  set.problem.shared_experts = shared[_i];
  package_set_add(&set, 1, 4);
  ck_assert_msg(package_build(set.items, set.count, false, &bytes, &size, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(package_write_file(in_folder("p"), bytes, size, &err), MF_OK);
  spec.problem = set.problem;
  strbuf_init(&text, 65536);
  spec_write(&spec, &text);
  write_text("s.yaml", text.text, strlen(text.text));
  write_baseline("b", 4, 20, false);
  json = qualify(in_folder("p"), in_folder("b"), in_folder("s.yaml"), NULL, true, &rc, &err);
  record = json_loads(json, 0, NULL);
  ck_assert_msg(record != NULL, "%s", err.text);
  point = json_array_get(json_object_get(record, "points"), 0);
  ck_assert_double_eq_tol(json_number_value(json_object_get(point, "memory_gib")) * (1 << 30), (_i == 0 ? 16 : 18) * (393216 + 96) + 20000, 1);
  json_decref(record);
  strbuf_free(&text);
  free(bytes);
  free(json);
}
END_TEST

/* Nothing is written if the inputs are not as they should be. */
START_TEST(refusals)
{
  struct error err;
  enum mf_status rc;
  unsigned char *before, *after;
  size_t size, after_size;
  write_package("p", 0.042);
  before = read_bytes(in_folder("p"), &size);
  write_spec("s.yaml", LIMITS);
  write_spec("none.yaml", (struct spec_limits){.max_error = 0});
  write_baseline("b", 4, 20, false);
  write_text("bad", "{}", 2);
#define TRY(package, baseline, spec, status, words)                                                               \
  free(qualify(package, baseline, spec, NULL, false, &rc, &err));                                                 \
  ck_assert_msg(rc == (status) && strstr(err.text, words) != NULL, "%s: %s", mf_status_name(rc), err.text);
  TRY(in_folder("p"), NULL, in_folder("s.yaml"), MF_ERR_USAGE, "--baseline FILE")
  TRY(in_folder("p"), in_folder("missing"), in_folder("s.yaml"), MF_ERR_IO, "missing")
  TRY(in_folder("p"), in_folder("bad"), in_folder("s.yaml"), MF_ERR_SPEC, "format")
  TRY(in_folder("missing"), in_folder("b"), in_folder("s.yaml"), MF_ERR_IO, "missing")
  TRY(in_folder("b"), in_folder("b"), in_folder("s.yaml"), MF_ERR_CORRUPT, "not a moeforge package")
  TRY(in_folder("p"), in_folder("b"), in_folder("none.yaml"), MF_ERR_SPEC, "all are 0")
  TRY(in_folder("p"), in_folder("b"), "specs/models/tiny.yaml", MF_ERR_SPEC, "is another problem")
  TRY(in_folder("p"), in_folder("b"), NULL, MF_ERR_IO, "--spec") /* specs/models/fixture.yaml */
#undef TRY
  free(qualify(in_folder("p"), in_folder("b"), in_folder("s.yaml"), in_folder("b"), false, &rc, &err)); /* what was measured is not written over */
  ck_assert_msg(rc == MF_ERR_USAGE && strstr(err.text, "which is read here") != NULL, "%s: %s", mf_status_name(rc), err.text);
  free(qualify(in_folder("p"), in_folder("b"), in_folder("s.yaml"), in_folder("s.yaml"), false, &rc, &err));
  ck_assert_msg(rc == MF_ERR_USAGE && strstr(err.text, "which is read here") != NULL, "%s: %s", mf_status_name(rc), err.text);
  after = read_bytes(in_folder("p"), &after_size);
  ck_assert_uint_eq(after_size, size);
  ck_assert_mem_eq(before, after, size);
  free(before);
  free(after);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("qualify");
  TCase *tc = tcase_create("qualify");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, start, end);
  tcase_add_test(tc, a_good_baseline);
  tcase_add_loop_test(tc, malformed_baselines, 0, (int)(sizeof(malformed) / sizeof(malformed[0])));
  tcase_add_test(tc, damaged_baselines);
  tcase_add_test(tc, baselines_that_are_no_files);
  tcase_add_test(tc, verdicts);
  tcase_add_test(tc, no_baseline);
  tcase_add_test(tc, pairs_see_through_drift);
  tcase_add_test(tc, rewriting_keeps_everything_else);
  tcase_add_test(tc, qualified);
  tcase_add_loop_test(tc, outcomes_of_the_command, 0, (int)(sizeof(outcomes) / sizeof(outcomes[0])));
  tcase_add_loop_test(tc, memory_of_shared_experts, 0, 3);
  tcase_add_test(tc, refusals);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
