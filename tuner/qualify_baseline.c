/* qualify_baseline.c - reads baseline files. Unknown keys are errors: a misspelt "package_us" must not turn paired samples into separate ones. */
#include "qualify.h"
#include "faults.h"
#include "package_file.h"
#include "read_file.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BASELINE_MAX_BYTES ((size_t)64 << 20)
#define MAX_TOKENS_OF_POINT 65536
#define MIN_US 1e-3 /* ratios stay finite */
#define MAX_US 1e9

/* Where the reader is, for messages. */
struct place {
  const char *path;
  size_t point; /* counted from 0; SIZE_MAX: the file as a whole */
  struct error *err;
};

static enum mf_status wrong(const struct place *at, const char *key, const char *expected)
{
  if(at->point == SIZE_MAX)
    return error_set(at->err, MF_ERR_SPEC, "%s: %s: expected %s", at->path, key, expected);
  return error_set(at->err, MF_ERR_SPEC, "%s: points[%zu].%s: expected %s", at->path, at->point, key, expected);
}

/* Keys of 'object' must be among 'known', separated by '|'. */
static enum mf_status check_keys(const struct place *at, json_t *object, const char *known)
{
  const char *key;
  json_t *value;
  json_object_foreach(object, key, value)
  {
    const size_t length = strlen(key);
    const char *found = known;
    char near[64], expected[128];
    while(found != NULL && !(strncmp(found, key, length) == 0 && (found[length] == '|' || found[length] == '\0'))) {
      found = strchr(found, '|');
      found = found != NULL ? found + 1 : NULL;
    }
    if(found != NULL && length > 0)
      continue;
    snprintf(expected, sizeof(expected), "%s%s%s", nearest_name(key, known, near, sizeof(near)) != NULL ? "a known key, did you mean " : "a known key (",
             nearest_name(key, known, near, sizeof(near)) != NULL ? near : known, nearest_name(key, known, near, sizeof(near)) != NULL ? "" : ")");
    return wrong(at, length > 0 && length < 64 ? key : "?", expected);
  }
  return MF_OK;
}

/* Printable ASCII that fits; a missing key is an error unless there is a default. */
static enum mf_status read_name(const struct place *at, const json_t *object, const char *key, const char *otherwise, char *out, size_t space)
{
  const json_t *value = json_object_get(object, key);
  const char *text = json_string_value(value);
  if(value == NULL && otherwise != NULL)
    text = otherwise;
  if(text == NULL || text[0] == '\0' || strlen(text) >= space || !package_text_good(text, space))
    return wrong(at, key, "a text of printable ASCII, not empty and not longer than such names are");
  snprintf(out, space, "%s", text);
  return MF_OK;
}

/* A number of 0 or more; NAN if the key is missing. */
static enum mf_status read_number(const struct place *at, const json_t *object, const char *key, double *out)
{
  const json_t *value = json_object_get(object, key);
  *out = NAN;
  if(value == NULL)
    return MF_OK;
  *out = json_number_value(value);
  return json_is_number(value) && isfinite(*out) && *out >= 0 ? MF_OK : wrong(at, key, "a number of 0 or more");
}

static enum mf_status read_samples(const struct place *at, const json_t *object, const char *key, double **out, size_t *count)
{
  const json_t *list = json_object_get(object, key);
  *count = json_array_size(list);
  if(*count == 0)
    return wrong(at, key, "a list of microseconds, at least one");
  *out = calloc(*count, sizeof(**out));
  if(*out == NULL)
    return error_set(at->err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < *count; i++) {
    const json_t *value = json_array_get(list, i);
    (*out)[i] = json_number_value(value);
    if(!json_is_number(value) || !((*out)[i] >= MIN_US && (*out)[i] <= MAX_US))
      return wrong(at, key, "microseconds: numbers from 1e-3 to 1e9");
  }
  return MF_OK;
}

static enum mf_status read_pairs(const struct place *at, const json_t *object, struct baseline_point *out)
{
  size_t count = 0;
  enum mf_status rc;
  if(json_object_get(object, "package_us") == NULL)
    return MF_OK;
  rc = read_samples(at, object, "package_us", &out->package_us, &count);
  if(rc == MF_OK && count != out->count)
    rc = wrong(at, "package_us", "one sample for each of us: they are pairs of the same rounds");
  return rc;
}

static enum mf_status read_point(const struct place *at, json_t *object, struct baseline_point *out)
{
  const json_t *tokens = json_object_get(object, "tokens");
  enum mf_status rc;
  if(!json_is_object(object))
    return wrong(at, "", "an object");
  rc = check_keys(at, object, "shape|tokens|routing|us|package_us|error|memory_gib");
  if(rc == MF_OK)
    rc = read_name(at, object, "shape", NULL, out->shape, sizeof(out->shape));
  if(rc == MF_OK && (!json_is_integer(tokens) || json_integer_value(tokens) < 1 || json_integer_value(tokens) > MAX_TOKENS_OF_POINT))
    rc = wrong(at, "tokens", "a token count from 1 to 65536");
  if(rc == MF_OK) {
    out->tokens = (int)json_integer_value(tokens);
    rc = read_name(at, object, "routing", "mix", out->routing, sizeof(out->routing));
  }
  if(rc == MF_OK)
    rc = read_samples(at, object, "us", &out->us, &out->count);
  if(rc == MF_OK)
    rc = read_pairs(at, object, out);
  if(rc == MF_OK)
    rc = read_number(at, object, "error", &out->error);
  return rc == MF_OK ? read_number(at, object, "memory_gib", &out->memory_gib) : rc;
}

static enum mf_status read_points(struct place *at, const json_t *list, struct baseline *out)
{
  const size_t count = json_array_size(list);
  enum mf_status rc = MF_OK;
  if(count == 0)
    return wrong(at, "points", "a list of measured points, at least one");
  out->points = calloc(count, sizeof(*out->points));
  if(out->points == NULL)
    return error_set(at->err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; rc == MF_OK && i < count; i++) {
    struct baseline_point *point = &out->points[i];
    at->point = i;
    out->count = i + 1; /* also if it fails: what it has is freed */
    rc = read_point(at, json_array_get(list, i), point);
    for(size_t k = 0; rc == MF_OK && k < i; k++)
      if(out->points[k].tokens == point->tokens && strcmp(out->points[k].shape, point->shape) == 0)
        rc = wrong(at, "tokens", "each token count of a shape once");
  }
  return rc;
}

static enum mf_status read_document(const char *path, json_t *top, struct baseline *out, struct error *err)
{
  struct place at = {.path = path, .point = SIZE_MAX, .err = err};
  const char *format = json_string_value(json_object_get(top, "format"));
  const json_t *version = json_object_get(top, "version");
  enum mf_status rc;
  if(format == NULL || strcmp(format, "moeforge baseline") != 0)
    return wrong(&at, "format", "\"moeforge baseline\" (docs/qualify.md describes such files)");
  if(!json_is_integer(version) || json_integer_value(version) != 1)
    return wrong(&at, "version", "1");
  rc = check_keys(&at, top, "format|version|name|device|points");
  if(rc == MF_OK)
    rc = read_name(&at, top, "name", NULL, out->name, sizeof(out->name));
  if(rc == MF_OK)
    rc = read_name(&at, top, "device", NULL, out->device, sizeof(out->device));
  return rc == MF_OK ? read_points(&at, json_object_get(top, "points"), out) : rc;
}

enum mf_status baseline_read(const char *path, struct baseline *out, struct error *err)
{
  char *text = NULL;
  size_t size = 0;
  json_error_t why;
  json_t *top = NULL;
  enum mf_status rc = read_file(path, BASELINE_MAX_BYTES, &text, &size, err);
  memset(out, 0, sizeof(*out));
  if(rc != MF_OK)
    return error_prefix(err, "%s", path);
  qualify_hash(text, size, out->sha256);
  top = json_loadb(text, size, JSON_REJECT_DUPLICATES, &why);
  free(text);
  if(top == NULL)
    return error_set(err, MF_ERR_SPEC, "%s:%d: not JSON: %s", path, why.line, why.text);
  rc = json_is_object(top) ? read_document(path, top, out, err) : error_set(err, MF_ERR_SPEC, "%s: expected a JSON object", path);
  json_decref(top);
  if(rc != MF_OK)
    baseline_free(out);
  return rc;
}

void baseline_free(struct baseline *base)
{
  for(size_t i = 0; i < base->count; i++) {
    free(base->points[i].us);
    free(base->points[i].package_us);
  }
  free(base->points);
  base->points = NULL;
  base->count = 0;
}

const struct baseline_point *baseline_find(const struct baseline *base, const char *shape, int tokens)
{
  for(size_t i = 0; i < base->count; i++)
    if(base->points[i].tokens == tokens && strcmp(base->points[i].shape, shape) == 0)
      return &base->points[i];
  return NULL;
}
