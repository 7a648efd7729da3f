/* verify.c - `moeforge verify`: the numbers of a package again, on this machine, through the public API alone.
 *
 *   open    with --key the signature; hashes and structure          without a GPU it ends here, with MF_ERR_NO_DEVICE
 *   group   entries by problem: weights are made once per problem
 *   entry   op, layer, workspace -> every case of verify_cases(), twice -> verify_judge(); then a negative control: the output of another input
 *           must be refused, else the judge is blind and the entry fails. With --soak the case with the most tokens many times more: always the same bits
 *
 * An entry for another GPU is listed as such and does not count. The exit code is that of the first entry that failed or could not be served; of
 * MF_MISS_DEVICE if nothing in the package is for this GPU. */
#include "commands.h"
#include "package_file.h"
#include "progress.h"
#include "sign.h"
#include "target.h"
#include "verify_gpu.h"
#include "verify_judge.h"

#include <jansson.h>
#include <linux/limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CASES 64
#define CONTROL_SEED 9001u
#define SOAK_SEED 9002u
#define NO_GPU (-1)

enum row_state { ROW_NOT_RUN, ROW_OTHER_GPU, ROW_PASSED, ROW_FAILED };

struct row {
  struct mf_package_entry entry;
  enum row_state state;
  enum mf_status status; /* MF_OK, or why it failed */
  struct verify_verdict verdict;
  int soaked, different; /* launches with --soak; those whose y was another */
  char why[ERROR_TEXT_MAX];
};

struct report {
  struct row *rows;
  size_t count;
  int soak;       /* launches of each entry, 0: none */
  bool is_signed; /* and the signature matches */
  const char *qualification; /* what the package's record says, for people */
  bool is_qualified;
};

static const char *state_name(enum row_state state)
{
  static const char *const names[] = {[ROW_NOT_RUN] = "not run", [ROW_OTHER_GPU] = "other gpu", [ROW_PASSED] = "passed", [ROW_FAILED] = "FAILED"};
  return names[state];
}

/* ---- running ---- */
/* Both launches of a case, and the verdict on them. */
static enum mf_status run_case(struct verify_gpu *gpu, struct verify_kernel *k, const struct test_case *tc, const struct reference_result *ref,
                               struct verify_verdict *verdict, struct error *err)
{
  const struct mf_problem *p = k->weights->problem;
  const size_t count = (size_t)tc->tokens * (size_t)p->hidden;
  uint16_t *y = calloc(2 * count, sizeof(*y));
  struct verify_output out = {.y = y, .y_again = y + count, .guards_intact = true};
  enum mf_status rc = y == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : MF_OK;
  for(int i = 0; rc == MF_OK && i < 2; i++)
    rc = verify_run(gpu, k, tc, &ref->routing, y + (size_t)i * count, &out.guards_intact, err);
  if(rc == MF_OK)
    verify_judge(p, tc, ref, &out, verdict);
  free(y);
  return rc;
}

/* Runs other inputs and judges them by this case's reference: that must fail. */
static enum mf_status run_control(struct verify_gpu *gpu, struct verify_kernel *k, const struct test_case *tc, const struct reference_result *ref,
                                  struct verify_verdict *verdict, struct error *err)
{
  const struct mf_problem *p = k->weights->problem;
  const size_t count = (size_t)tc->tokens * (size_t)p->hidden;
  struct test_case other = *tc;
  struct verify_verdict control = {.passed = true};
  struct verify_output out = {.guards_intact = true};
  uint16_t *y = calloc(count, sizeof(*y));
  enum mf_status rc = y == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : MF_OK;
  other.seed = CONTROL_SEED;
  if(rc == MF_OK)
    rc = verify_run(gpu, k, &other, &ref->routing, y, &out.guards_intact, err);
  out.y = out.y_again = y;
  if(rc == MF_OK) {
    verify_judge(p, tc, ref, &out, &control);
    if(control.passed && verdict->passed) {
      verdict->passed = false;
      snprintf(verdict->detail, sizeof(verdict->detail), "negative control: the output of other inputs was accepted");
    }
  }
  free(y);
  return rc;
}

/* Launches a case of the most tokens 'launches' times more; its cases have passed. */
static enum mf_status run_soak(struct verify_gpu *gpu, struct verify_kernel *k, int launches, struct row *row, struct error *err)
{
  const struct test_case tc = {.tokens = row->entry.tokens_max, .routing = ROUTING_UNIFORM, .data = CASE_NORMAL, .seed = SOAK_SEED};
  const size_t count = (size_t)tc.tokens * (size_t)k->weights->problem->hidden;
  struct reference_result ref;
  bool intact = true;
  int first = 0;
  uint16_t *y;
  enum mf_status rc = reference_run(k->weights->problem, k->weights->routed_scaling, k->weights->layer_seed, &tc, &ref, err);
  if(rc != MF_OK)
    return rc;
  y = calloc(2 * count, sizeof(*y));
  rc = y == NULL ? error_set(err, MF_ERR_NOMEM, "out of memory") : MF_OK;
  for(int i = 0; rc == MF_OK && i < 2; i++)
    rc = verify_run(gpu, k, &tc, &ref.routing, y + (size_t)i * count, &intact, err);
  if(rc == MF_OK && memcmp(y, y + count, count * sizeof(*y)) != 0)
    rc = error_set(err, MF_ERR_CHECK, "two launches gave different results: a race; do not serve it");
  if(rc == MF_OK)
    rc = verify_soak(gpu, k, tc.tokens, launches, y, &row->different, &first, err);
  if(rc == MF_OK)
    row->soaked = launches;
  if(rc == MF_OK && row->different > 0)
    rc = error_set(err, MF_ERR_CHECK, "%d of %d launches gave another result, launch %d the first: a race; do not serve it", row->different, launches, first);
  free(y);
  reference_free(&ref);
  return rc;
}

static enum mf_status run_cases(struct verify_gpu *gpu, struct verify_kernel *k, struct row *row, struct error *err)
{
  struct test_case cases[MAX_CASES];
  const int count = verify_cases(row->entry.tokens_min, row->entry.tokens_max, cases, MAX_CASES);
  enum mf_status rc = MF_OK;
  row->verdict.passed = true;
  for(int i = 0; rc == MF_OK && i < count; i++) {
    struct reference_result ref;
    if(interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted");
    rc = reference_run(k->weights->problem, k->weights->routed_scaling, k->weights->layer_seed, &cases[i], &ref, err);
    if(rc != MF_OK)
      break;
    rc = run_case(gpu, k, &cases[i], &ref, &row->verdict, err);
    if(rc == MF_OK && i == 0)
      rc = run_control(gpu, k, &cases[i], &ref, &row->verdict, err);
    reference_free(&ref);
  }
  return rc;
}

/* An op serves every token count from 1 on: says which one keeps this entry from being called. */
static void explain_gap(const struct mf_package *pkg, const struct mf_package_entry *entry, struct error *err)
{
  struct mf_package_entry other = {.struct_size = sizeof(other)};
  struct package_problem p, q;
  int first = 1; /* the smallest count that no entry seen so far covers */
  package_problem_set(&entry->problem, &p);
  for(bool more = true; more;) {
    more = false;
    for(size_t i = 0; mf_package_entry_at(pkg, i, &other) == MF_OK; i++) {
      package_problem_set(&other.problem, &q);
      if(!package_problem_equal(&p, &q) || strcmp(other.device_name, entry->device_name) != 0 || first < other.tokens_min || first > other.tokens_max)
        continue;
      first = other.tokens_max + 1;
      more = true;
    }
  }
  if(first < entry->tokens_min)
    error_set(err, MF_MISS_TOKENS, "no engine can call it: nothing in the package serves %d to %d tokens; tune these, too", first, entry->tokens_min - 1);
}

/* Fills in the row. Fails only if the GPU verify_gpu_is_busy(). */
static enum mf_status run_entry(struct verify_gpu *gpu, struct mf_package *pkg, const struct verify_weights *weights, int soak, struct row *row)
{
  struct verify_kernel kernel;
  struct error err = {.status = MF_OK};
  enum mf_status rc = verify_kernel_make(gpu, pkg, weights, row->entry.tokens_max, &kernel, &err);
  if(rc == MF_MISS_TOKENS)
    explain_gap(pkg, &row->entry, &err);
  if(rc == MF_OK)
    rc = run_cases(gpu, &kernel, row, &err);
  if(rc == MF_OK && !row->verdict.passed)
    rc = error_set(&err, MF_ERR_CHECK, "%s", row->verdict.detail);
  if(rc == MF_OK && soak > 0)
    rc = run_soak(gpu, &kernel, soak, row, &err);
  row->state = rc == MF_OK ? ROW_PASSED : ROW_FAILED;
  row->status = rc;
  snprintf(row->why, sizeof(row->why), "%s", rc == MF_OK ? "" : err.text);
  if(verify_gpu_is_busy(rc))
    return rc;
  verify_kernel_free(gpu, &kernel);
  return MF_OK;
}

static bool same_group(const struct row *a, const struct row *b)
{
  struct package_problem p, q;
  package_problem_set(&a->entry.problem, &p);
  package_problem_set(&b->entry.problem, &q);
  return package_problem_equal(&p, &q) && a->entry.routed_scaling == b->entry.routed_scaling;
}

/* Runs all entries of this GPU that share the problem of row 'first'. */
static enum mf_status run_group(struct verify_gpu *gpu, struct mf_package *pkg, struct report *rep, size_t first)
{
  struct verify_weights weights;
  struct error err = {.status = MF_OK};
  enum mf_status made = verify_weights_make(gpu, &rep->rows[first].entry.problem, rep->rows[first].entry.routed_scaling, &weights, &err);
  enum mf_status rc = MF_OK;
  for(size_t i = first; rc == MF_OK && i < rep->count; i++) {
    struct row *row = &rep->rows[i];
    if(row->state != ROW_NOT_RUN || !same_group(row, &rep->rows[first]))
      continue;
    if(made == MF_OK) {
      rc = run_entry(gpu, pkg, &weights, rep->soak, row);
      continue;
    }
    row->state = ROW_FAILED;
    row->status = made;
    snprintf(row->why, sizeof(row->why), "%s", err.text);
  }
  if(rc == MF_OK)
    verify_weights_free(gpu, &weights);
  else
    free(weights.uploaded);
  return rc;
}

static enum mf_status run_all(struct verify_gpu *gpu, struct mf_package *pkg, struct report *rep)
{
  enum mf_status rc = MF_OK;
  for(size_t i = 0; i < rep->count; i++)
    if(strcmp(rep->rows[i].entry.device_name, gpu->name) != 0)
      rep->rows[i].state = ROW_OTHER_GPU;
  for(size_t i = 0; rc == MF_OK && i < rep->count; i++)
    if(rep->rows[i].state == ROW_NOT_RUN)
      rc = run_group(gpu, pkg, rep, i);
  return rc;
}

/* ---- reporting ---- */
/* A measure in 10 columns, or a dash where nothing was measured. */
static void print_number(bool scientific, int cases, double value)
{
  if(cases == 0 || !isfinite(value))
    printf("%10s ", "-");
  else if(scientific)
    printf("%10.2e ", value);
  else
    printf("%10.3f ", value);
}

static json_t *json_number(int cases, double value)
{
  return cases == 0 || !isfinite(value) ? json_null() : json_real(value);
}

static void print_table(const struct report *rep, const char *path)
{
  printf("%s: %zu entries, hashes and structure sound%s, %s\n", path, rep->count, rep->is_signed ? ", signature good" : "", rep->qualification);
  printf("%-24s %-20s %-7s %5s %10s %10s %10s  %s\n", "shape", "device", "tokens", "cases", "token", "8 rows", "end ratio", "result");
  for(size_t i = 0; i < rep->count; i++) {
    const struct row *r = &rep->rows[i];
    char tokens[32];
    snprintf(tokens, sizeof(tokens), "%d-%d", r->entry.tokens_min, r->entry.tokens_max);
    printf("%-24s %-20s %-7s %5d ", r->entry.shape_name, r->entry.device_name, tokens, r->verdict.cases);
    print_number(true, r->verdict.cases, r->verdict.token);
    print_number(true, r->verdict.cases, r->verdict.rows);
    print_number(false, r->verdict.cases, r->verdict.end);
    if(r->soaked > 0 && r->state == ROW_PASSED)
      printf(" %s, %d launches alike\n", state_name(r->state), r->soaked);
    else
      printf(" %s%s%s\n", state_name(r->state), r->why[0] != '\0' ? ": " : "", r->why);
  }
}

static json_t *row_json(const struct row *r)
{
  const struct mf_package_entry *e = &r->entry;
  const struct verify_verdict *v = &r->verdict;
  return json_pack("{s:s, s:s, s:i, s:i, s:s, s:i, s:o, s:o, s:o, s:i, s:i, s:s, s:s, s:s}", "shape", e->shape_name, "device", e->device_name, "tokens_min",
                   e->tokens_min, "tokens_max", e->tokens_max, "schedule", e->schedule, "cases", v->cases, "token_error",
                   json_number(v->cases, v->token), "rows_error", json_number(v->cases, v->rows), "end_ratio", json_number(v->cases, v->end), "soaked", r->soaked,
                   "different", r->different, "result", state_name(r->state), "status", mf_status_name(r->status), "why", r->why);
}

static enum mf_status print_json(const struct report *rep, const char *path, struct error *err)
{
  json_t *list = json_array(), *top;
  char *text;
  for(size_t i = 0; i < rep->count; i++)
    json_array_append_new(list, row_json(&rep->rows[i]));
  top = json_pack("{s:s, s:b, s:b, s:b, s:s, s:o}", "package", path, "sound", 1, "signed", (int)rep->is_signed, "qualified", (int)rep->is_qualified,
                  "qualification", rep->qualification, "entries", list);
  text = top != NULL ? json_dumps(top, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) : NULL;
  json_decref(top);
  if(text == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  puts(text);
  free(text);
  return MF_OK;
}

/* The status of the whole: the first failure, or that nothing was for this GPU. */
static enum mf_status conclude(const struct report *rep, const char *path, const char *gpu_name, struct error *err)
{
  size_t passed = 0;
  for(size_t i = 0; i < rep->count; i++) {
    const struct row *r = &rep->rows[i];
    if(r->state == ROW_FAILED)
      return error_set(err, r->status, "%s: %s, tokens %d-%d: %s", path, r->entry.shape_name, r->entry.tokens_min, r->entry.tokens_max, r->why);
    passed += r->state == ROW_PASSED;
  }
  return passed > 0 ? MF_OK : error_set(err, MF_MISS_DEVICE, "%s: nothing in it is for this GPU (%s)", path, gpu_name);
}

/* ---- the command ---- */
/* With --key: the signature is checked over the very bytes that are then opened. */
static enum mf_status open_signed(const struct options *opt, const char *path, struct mf_package **pkg, struct error *err)
{
  char beside[PATH_MAX], why[256] = "";
  unsigned char *bytes;
  size_t size;
  enum mf_status rc = package_read_bytes(path, &bytes, &size, why, sizeof(why));
  if(rc != MF_OK)
    return error_set(err, rc, "%s: %s: %s", path, mf_status_string(rc), why);
  snprintf(beside, sizeof(beside), "%s.sig", path);
  rc = sign_check(bytes, size, opt->signature != NULL ? opt->signature : beside, opt->key, err);
  if(rc != MF_OK) {
    free(bytes);
    return error_prefix(err, "%s", path);
  }
  rc = package_parse(bytes, size, pkg, why, sizeof(why));
  return rc == MF_OK ? MF_OK : error_set(err, rc, "%s: %s: %s", path, mf_status_string(rc), why);
}

static enum mf_status open_unsigned(const char *path, struct mf_package **pkg, struct error *err)
{
  const enum mf_status rc = mf_package_open(path, pkg);
  struct mf_package *again = NULL;
  char why[256] = "";
  if(rc == MF_OK)
    return MF_OK;
  if(package_read(path, &again, why, sizeof(why)) == MF_OK) { /* only for its reason; the file may have changed meanwhile */
    mf_package_close(again);
    snprintf(why, sizeof(why), "try again");
  }
  return error_set(err, rc, "%s: %s: %s", path, mf_status_string(rc), why);
}

static enum mf_status open_package(const struct options *opt, const char *path, struct mf_package **pkg, struct error *err)
{
  if(opt->key == NULL && opt->signature != NULL)
    return error_set(err, MF_ERR_USAGE, "verify: --signature needs the public key of whoever signed: --key FILE");
  return opt->key != NULL ? open_signed(opt, path, pkg, err) : open_unsigned(path, pkg, err);
}

static enum mf_status collect_rows(const struct mf_package *pkg, struct report *rep, struct error *err)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  while(mf_package_entry_at(pkg, rep->count, &entry) == MF_OK)
    rep->count++;
  rep->rows = calloc(rep->count + 1, sizeof(*rep->rows));
  if(rep->rows == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < rep->count; i++) {
    rep->rows[i].entry.struct_size = sizeof(entry);
    mf_package_entry_at(pkg, i, &rep->rows[i].entry);
  }
  return MF_OK;
}

/* Qualified: there is a record, it says so, and it speaks of every token count that the package serves. */
static void read_qualification(const struct mf_package *pkg, struct report *rep)
{
  json_t *top = pkg->qualification != NULL ? json_loads(pkg->qualification, 0, NULL) : NULL;
  json_int_t points = 0;
  for(size_t i = 0; i < rep->count; i++)
    points += rep->rows[i].entry.tokens_max - rep->rows[i].entry.tokens_min + 1;
  rep->is_qualified = json_is_true(json_object_get(top, "qualified")) && json_integer_value(json_object_get(top, "kept")) == points;
  rep->qualification = pkg->qualification == NULL ? "never qualified" : rep->is_qualified ? "qualified" : "not qualified";
  json_decref(top);
}

/* The GPU that --device names; NO_GPU for "none". */
static enum mf_status read_device(const struct options *opt, int *ordinal, struct error *err)
{
  *ordinal = strcmp(opt->device, "none") == 0 ? NO_GPU : 0;
  if(*ordinal == NO_GPU || strcmp(opt->device, "auto") == 0 || target_cuda_ordinal(opt->device, ordinal))
    return MF_OK;
  return error_set(err, MF_ERR_USAGE, "verify: --device %s: expected auto, none, cuda or cuda:N", opt->device);
}

static enum mf_status open_gpu(const struct options *opt, int ordinal, struct verify_gpu *gpu, struct error *err)
{
  return ordinal != NO_GPU ? verify_gpu_open(ordinal, opt->timeout_ms, gpu, err) : error_set(err, MF_ERR_NO_DEVICE, "--device none");
}

static enum mf_status print_report(const struct options *opt, const struct report *rep, const char *path, struct error *err)
{
  if(opt->json)
    return print_json(rep, path, err);
  print_table(rep, path);
  return MF_OK;
}

enum mf_status verify_command(const struct options *opt, const char *package_path, struct error *err)
{
  struct mf_package *pkg = NULL;
  struct report rep = {.rows = NULL, .soak = opt->soak, .is_signed = opt->key != NULL};
  struct verify_gpu gpu = {.ordinal = -1};
  struct error no_gpu = {.status = MF_OK};
  int ordinal = 0;
  enum mf_status rc = read_device(opt, &ordinal, err), gpu_rc = MF_OK;
  if(rc == MF_OK)
    rc = open_package(opt, package_path, &pkg, err);
  if(rc == MF_OK)
    rc = collect_rows(pkg, &rep, err);
  if(rc != MF_OK || pkg == NULL)
    goto out;
  read_qualification(pkg, &rep);
  gpu_rc = open_gpu(opt, ordinal, &gpu, &no_gpu);
  if(gpu_rc == MF_OK)
    gpu_rc = run_all(&gpu, pkg, &rep);
  rc = print_report(opt, &rep, package_path, err);
  if(rc == MF_OK && (gpu_rc == MF_OK || verify_gpu_is_busy(gpu_rc)))
    rc = conclude(&rep, package_path, gpu.name, err);
  else if(rc == MF_OK)
    rc = error_set(err, gpu_rc, "%s: hashes and structure are sound; the numbers need a GPU: %s", package_path, no_gpu.text);
out:
  if(!verify_gpu_is_busy(gpu_rc))
    verify_gpu_close(&gpu);
  free(rep.rows);
  mf_package_close(pkg);
  return rc;
}
