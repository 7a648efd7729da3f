/* qualify.c - `moeforge qualify PACKAGE --baseline FILE`.
 *
 *   package  --> entries, and from its validation and provenance sections what is on record of each
 *   specs    --> limits, per shape: --spec, or specs/models/<shape>.yaml; its problem must be the package's
 *   baseline --> samples
 *   each token count of each entry --> qualify_judge() --> table or JSON, and the record, which is written into the package (or a copy, -o)
 *
 * The record is written whatever it says. The exit code is 0 only if every point was kept. */
#include "qualify.h"
#include "commands.h"
#include "files.h"
#include "package_file.h"
#include "package_rewrite.h"
#include "package_write.h"
#include "read_file.h"
#include "spec.h"

#include <jansson.h>
#include <linux/limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SPEC_MAX_BYTES ((size_t)1 << 20)

/* What the steps share. */
struct work {
  const struct options *opt;
  const char *path; /* of the package */
  unsigned char *bytes;
  size_t size;
  struct mf_package *pkg;
  json_t *validation, *provenance; /* their "entries" */
  json_t *documents[2];            /* which own them */
  struct baseline base;
  struct qualify_result result;
};

/* ---- the package ---- */
static enum mf_status open_package(struct work *w, struct error *err)
{
  unsigned char *copy = NULL;
  char why[256] = "";
  enum mf_status rc = package_read_bytes(w->path, &w->bytes, &w->size, why, sizeof(why));
  if(rc == MF_OK) {
    copy = malloc(w->size + 1);
    rc = copy != NULL ? MF_OK : MF_ERR_NOMEM;
  }
  if(rc == MF_OK) {
    memcpy(copy, w->bytes, w->size);
    rc = package_parse(copy, w->size, &w->pkg, why, sizeof(why));
  }
  if(rc != MF_OK)
    return error_set(err, rc, "%s: %s: %s", w->path, mf_status_string(rc), why);
  w->documents[0] = json_loads(w->pkg->validation, 0, NULL);
  w->documents[1] = json_loads(w->pkg->provenance, 0, NULL);
  w->validation = json_object_get(w->documents[0], "entries");
  w->provenance = json_object_get(w->documents[1], "entries");
  return MF_OK;
}

/* The row of a JSON section that speaks of the entry; NULL if there is none. */
static const json_t *row_of(const json_t *list, const struct package_entry *e)
{
  for(size_t i = 0; i < json_array_size(list); i++) {
    const json_t *row = json_array_get(list, i);
    const char *shape = json_string_value(json_object_get(row, "shape")), *device = json_string_value(json_object_get(row, "device"));
    if(shape != NULL && device != NULL && strcmp(shape, e->shape_name) == 0 && strcmp(device, e->device_name) == 0 &&
       json_integer_value(json_object_get(row, "tokens_min")) == e->tokens_min)
      return row;
  }
  return NULL;
}

static double number_of(const json_t *row, const char *key)
{
  const json_t *value = json_object_get(row, key);
  return json_is_number(value) ? json_number_value(value) : NAN;
}

/* Workspace of an op for the entry's problem and device: a part for each of its kernels. */
static double workspace_bytes(const struct mf_package *pkg, const struct package_entry *e)
{
  double sum = 0;
  for(uint32_t i = 0; i < pkg->nentries; i++) {
    const struct package_entry *a = &pkg->entries[i];
    bool counts = package_problem_equal(&a->problem, &e->problem) && strcmp(a->device_name, e->device_name) == 0 && a->sms == e->sms;
    for(uint32_t k = 0; counts && k < i; k++) {
      const struct package_entry *b = &pkg->entries[k];
      counts = !(a->recipe == b->recipe && a->cubin == b->cubin && package_problem_equal(&b->problem, &e->problem) &&
                 strcmp(b->device_name, e->device_name) == 0 && b->sms == e->sms);
    }
    if(counts)
      sum += (double)pkg->recipes[a->recipe].workspace_bytes;
  }
  return sum;
}

/* Weights and scales of one layer, those of its shared experts included. */
static double weight_bytes(const struct package_problem *p)
{
  const double experts = (double)(p->expert_count > 0 ? p->expert_count : p->experts) + (p->shared_experts & ~MF_SHARED_GATED);
  const int64_t n_blocks = (p->intermediate_offset + (int64_t)p->intermediate + 127) / 128, k_blocks = ((int64_t)p->hidden + 127) / 128;
  return experts * (3.0 * p->intermediate * p->hidden + 3.0 * (double)(n_blocks * k_blocks) * 4) + (p->select_bias ? 4.0 * (p->experts + p->zero_experts) : 0);
}

static struct qualify_record record_of(const struct work *w, const struct package_entry *e, int tokens)
{
  const json_t *checked = row_of(w->validation, e), *timed = row_of(w->provenance, e);
  const char *verdict = json_string_value(json_object_get(checked, "check"));
  return (struct qualify_record){
      .shape = e->shape_name,
      .device = e->device_name,
      .tokens = tokens,
      .us = e->us > 0 ? e->us : NAN,
      .us_low = number_of(timed, "us_low"),
      .us_high = number_of(timed, "us_high"),
      .error = number_of(checked, "error"),
      .memory_gib = (weight_bytes(&e->problem) + workspace_bytes(w->pkg, e)) / (double)(1 << 30),
      .predicted = (e->flags & PACKAGE_PREDICTED) != 0,
      .checked = verdict != NULL && strcmp(verdict, "passed") == 0,
  };
}

/* ---- limits ---- */
static enum mf_status no_limits(const char *path, struct error *err)
{
  return error_set(err, MF_ERR_SPEC, "%s: limits: all are 0, nothing to judge by: set min_speedup, max_error or max_memory_gib before you measure", path);
}

static enum mf_status hash_file(const char *path, char out[QUALIFY_HASH_LEN], struct error *err)
{
  char *text = NULL;
  size_t count = 0;
  const enum mf_status rc = read_file(path, SPEC_MAX_BYTES, &text, &count, err);
  if(rc != MF_OK)
    return error_prefix(err, "%s", path);
  qualify_hash(text, count, out);
  free(text);
  return MF_OK;
}

/* The limits of an entry's shape, read when they are first asked for. */
static enum mf_status limits_of(struct work *w, const struct package_entry *e, const struct spec_limits **out, struct error *err)
{
  struct qualify_spec *slot;
  struct package_problem problem;
  struct model_spec spec;
  char path[PATH_MAX];
  enum mf_status rc;
  for(size_t i = 0; i < w->result.nspecs; i++)
    if(strcmp(w->result.specs[i].shape, e->shape_name) == 0) {
      *out = &w->result.specs[i].limits;
      return MF_OK;
    }
  if(w->opt->spec != NULL)
    snprintf(path, sizeof(path), "%s", w->opt->spec);
  else
    snprintf(path, sizeof(path), "%s/../models/%s.yaml", w->opt->device_dir, e->shape_name);
  rc = spec_read(path, &spec, NULL, NULL, err);
  if(rc == MF_ERR_IO && w->opt->spec == NULL)
    error_append(err, " (name the spec that the package was tuned from with --spec)");
  if(rc != MF_OK)
    return rc;
  package_problem_set(&spec.problem, &problem);
  if(!package_problem_equal(&problem, &e->problem))
    return error_set(err, MF_ERR_SPEC, "%s: is another problem than %s in the package: name the spec that it was tuned from with --spec", path, e->shape_name);
  if(!(spec.limits.max_error > 0) && !(spec.limits.min_speedup > 0) && !(spec.limits.max_memory_bytes > 0))
    return no_limits(path, err);
  slot = &w->result.specs[w->result.nspecs];
  rc = hash_file(path, slot->sha256, err);
  if(rc != MF_OK)
    return rc;
  memcpy(slot->shape, e->shape_name, sizeof(slot->shape));
  slot->limits = spec.limits;
  w->result.nspecs++;
  *out = &slot->limits;
  return MF_OK;
}

/* ---- judging ---- */
/* Token counts of all entries; 0 if there are more than a record can hold. */
static size_t count_points(const struct mf_package *pkg)
{
  size_t count = 0;
  for(uint32_t i = 0; i < pkg->nentries; i++) {
    count += (size_t)(pkg->entries[i].tokens_max - pkg->entries[i].tokens_min) + 1;
    if(count > PACKAGE_MAX_RECORDS)
      return 0;
  }
  return count;
}

static enum mf_status judge_point(struct work *w, const struct package_entry *e, int tokens, const struct spec_limits *limits, struct error *err)
{
  const struct qualify_record own = record_of(w, e, tokens);
  struct qualify_point *point = &w->result.points[w->result.count];
  const enum mf_status rc = qualify_judge(limits, &own, w->base.device, baseline_find(&w->base, e->shape_name, tokens), point, err);
  if(rc != MF_OK)
    return rc;
  w->result.count++;
  w->result.kept += point->verdict == VERDICT_KEEP;
  w->result.rejected += point->verdict == VERDICT_REJECT;
  w->result.not_compared += point->verdict == VERDICT_NOT_COMPARED;
  return MF_OK;
}

static enum mf_status judge_all(struct work *w, struct error *err)
{
  const size_t count = count_points(w->pkg);
  enum mf_status rc = MF_OK;
  if(count == 0)
    return error_set(err, MF_ERR_UNSUPPORTED, "%s: has no entries, or too many token counts to qualify", w->path);
  w->result.points = calloc(count, sizeof(*w->result.points));
  w->result.specs = calloc(w->pkg->nentries, sizeof(*w->result.specs));
  if(w->result.points == NULL || w->result.specs == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(uint32_t i = 0; rc == MF_OK && i < w->pkg->nentries; i++) {
    const struct package_entry *e = &w->pkg->entries[i];
    const struct spec_limits *limits = NULL;
    rc = limits_of(w, e, &limits, err);
    for(int tokens = e->tokens_min; rc == MF_OK && tokens <= e->tokens_max; tokens++)
      rc = judge_point(w, e, tokens, limits, err);
  }
  return rc;
}

/* ---- reporting ---- */
static void print_number(const char *format, double value)
{
  if(isfinite(value))
    printf(format, value);
  else
    printf("%9s ", "-");
}

static void print_table(const struct work *w)
{
  const struct qualify_result *r = &w->result;
  printf("%s against %s on %s\n", w->path, w->base.name, w->base.device);
  for(size_t i = 0; i < r->nspecs; i++)
    printf("limits of %s: min_speedup %g, max_error %g, max_memory_gib %g (0 = none)\n", r->specs[i].shape, r->specs[i].limits.min_speedup,
           r->specs[i].limits.max_error, r->specs[i].limits.max_memory_bytes / (double)(1 << 30));
  printf("%-24s %6s %9s %9s %9s %9s %9s %9s  %s\n", "shape", "tokens", "baseline", "package", "speed-up", "from", "to", "error", "verdict");
  for(size_t i = 0; i < r->count; i++) {
    const struct qualify_point *p = &r->points[i];
    printf("%-24s %6d ", p->own.shape, p->own.tokens);
    print_number("%9.2f ", p->baseline_us);
    print_number("%9.2f ", p->package_us);
    print_number("%9.3f ", p->speedup);
    print_number("%9.3f ", p->speedup_low);
    print_number("%9.3f ", p->speedup_high);
    print_number("%9.2e ", p->own.error);
    printf(" %s%s%s\n", verdict_name(p->verdict), p->why[0] != '\0' ? ": " : "", p->why);
  }
  printf("%s: %zu kept, %zu rejected, %zu not compared\n", qualify_is_qualified(r) ? "qualified" : "not qualified", r->kept, r->rejected, r->not_compared);
}

static enum mf_status write_record(const struct work *w, const char *text, struct error *err)
{
  const char *target = w->opt->output != NULL ? w->opt->output : w->path;
  unsigned char *made = NULL;
  size_t size = 0;
  enum mf_status rc = package_with_qualification(w->bytes, text, &made, &size, err);
  if(rc == MF_OK)
    rc = package_write_file(target, made, size, err);
  if(rc == MF_OK && !w->opt->quiet)
    fprintf(stderr, "wrote %s with the record; a signature of the old file does not match it\n", target);
  free(made);
  return rc;
}

static enum mf_status conclude(const struct work *w, struct error *err)
{
  const struct qualify_result *r = &w->result;
  if(r->rejected > 0)
    return error_set(err, MF_REJECTED, "%s: not qualified: %zu of %zu token counts were rejected", w->path, r->rejected, r->count);
  if(r->not_compared > 0)
    return error_set(err, MF_ERR_NOT_FOUND, "%s: not qualified: %zu of %zu token counts could not be compared", w->path, r->not_compared, r->count);
  return MF_OK;
}

static enum mf_status report(const struct work *w, struct error *err)
{
  char *text = qualify_text(&w->result, &w->base);
  enum mf_status rc;
  if(text == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = write_record(w, text, err);
  if(rc == MF_OK && w->opt->json)
    puts(text);
  else if(rc == MF_OK)
    print_table(w);
  free(text);
  return rc == MF_OK ? conclude(w, err) : rc;
}

enum mf_status qualify_command(const struct options *opt, const char *package_path, struct error *err)
{
  struct work w = {.opt = opt, .path = package_path};
  enum mf_status rc;
  if(opt->baseline == NULL)
    return error_set(err, MF_ERR_USAGE, "qualify: name the measurements to compare with: --baseline FILE (docs/qualify.md has the format)");
  rc = file_spare_input(opt->output, opt->baseline, err);
  if(rc == MF_OK)
    rc = file_spare_input(opt->output, opt->spec, err);
  if(rc == MF_OK)
    rc = baseline_read(opt->baseline, &w.base, err);
  if(rc == MF_OK)
    rc = open_package(&w, err);
  if(rc == MF_OK)
    rc = judge_all(&w, err);
  if(rc == MF_OK)
    rc = report(&w, err);
  baseline_free(&w.base);
  json_decref(w.documents[0]);
  json_decref(w.documents[1]);
  free(w.result.points);
  free(w.result.specs);
  mf_package_close(w.pkg);
  free(w.bytes);
  return rc;
}
