/* import_json.c - typed access to a config.json: values with type and range, or an error that names the key. See import_internal.h. */
#include "import_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define KEY_SPACE 64

/* 8.0 prints as 8: say what is wrong with it. */
static void describe_real(double value, char *out, size_t space)
{
  snprintf(out, space, "%.12g%s", value, value == floor(value) ? " (a decimal fraction)" : "");
}

const char *import_describe(const json_t *json, char *out, size_t space)
{
  switch(json_typeof(json)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "a list";
    case JSON_TRUE: return "true";
    case JSON_FALSE: return "false";
    case JSON_NULL: return "null";
    case JSON_INTEGER: snprintf(out, space, "%" JSON_INTEGER_FORMAT, json_integer_value(json)); break;
    case JSON_REAL: describe_real(json_real_value(json), out, space); break;
    case JSON_STRING: snprintf(out, space, "\"%.40s\"", json_string_value(json)); break;
  }
  for(char *c = out; *c != '\0'; c++)
    if((unsigned char)*c < 32 || *c == 127)
      *c = ' ';
  return out;
}

/* The first key of 'keys' whose value is not null; its name goes to 'name', else the first name. */
static const json_t *find(const struct import_object *object, const char *keys, char name[KEY_SPACE])
{
  for(const char *key = keys; *key != '\0';) {
    const int length = (int)strcspn(key, "|");
    const json_t *value;
    snprintf(name, KEY_SPACE, "%.*s", length, key);
    value = json_object_get(object->json, name);
    if(value != NULL && !json_is_null(value))
      return value;
    key += length + (key[length] == '|');
  }
  snprintf(name, KEY_SPACE, "%.*s", (int)strcspn(keys, "|"), keys);
  return NULL;
}

/* A list whose items are all equal stands for its item: some models write per-layer lists. */
static enum mf_status flatten(const struct import_object *object, const char *name, const json_t **value, struct error *err)
{
  const json_t *first = json_is_array(*value) ? json_array_get(*value, 0) : NULL;
  char got[96], other[96];
  if(first == NULL)
    return MF_OK;
  for(size_t i = 1; i < json_array_size(*value); i++) {
    const json_t *item = json_array_get(*value, i);
    if(!json_equal(first, item))
      return error_set(err, MF_ERR_UNSUPPORTED, "%s%s differs between layers (%s and %s): write one spec for each kind of layer by hand",
                       object->prefix, name, import_describe(first, got, sizeof(got)), import_describe(item, other, sizeof(other)));
  }
  *value = first;
  return MF_OK;
}

static enum mf_status lookup(const struct import_object *object, const char *keys, char name[KEY_SPACE], const json_t **value, struct error *err)
{
  enum mf_status rc = MF_OK;
  *value = find(object, keys, name);
  if(*value != NULL)
    rc = flatten(object, name, value, err);
  if(*value != NULL && json_is_null(*value))
    *value = NULL; /* a list of nulls */
  return rc;
}

enum mf_status import_int(const struct import_object *object, const char *keys, long low, long high, long *value, bool *found, struct error *err)
{
  char name[KEY_SPACE], got[96];
  const json_t *json = NULL;
  enum mf_status rc = lookup(object, keys, name, &json, err);
  json_int_t read;
  *found = json != NULL;
  if(rc != MF_OK || json == NULL)
    return rc;
  read = json_is_integer(json) ? json_integer_value(json) : 0;
  if(!json_is_integer(json))
    return error_set(err, MF_ERR_SPEC, "%s%s: expected an integer from %ld to %ld, got %s", object->prefix, name, low, high,
                     import_describe(json, got, sizeof(got)));
  if(read < low || read > high)
    return error_set(err, MF_ERR_SPEC, "%s%s: expected an integer from %ld to %ld, got %s (nearest legal value %ld)", object->prefix, name, low, high,
                     import_describe(json, got, sizeof(got)), read < low ? low : high);
  *value = (long)read;
  return MF_OK;
}

enum mf_status import_double(const struct import_object *object, const char *keys, double low, double high, double *value, bool *found,
                              struct error *err)
{
  char name[KEY_SPACE], got[96];
  const json_t *json = NULL;
  enum mf_status rc = lookup(object, keys, name, &json, err);
  *found = json != NULL;
  if(rc != MF_OK || json == NULL)
    return rc;
  if(!json_is_number(json) || !(json_number_value(json) >= low && json_number_value(json) <= high))
    return error_set(err, MF_ERR_SPEC, "%s%s: expected a number from %g to %g, got %s", object->prefix, name, low, high,
                     import_describe(json, got, sizeof(got)));
  *value = json_number_value(json);
  return MF_OK;
}

enum mf_status import_bool(const struct import_object *object, const char *keys, bool *value, bool *found, struct error *err)
{
  char name[KEY_SPACE], got[96];
  const json_t *json = NULL;
  enum mf_status rc = lookup(object, keys, name, &json, err);
  *found = json != NULL;
  if(rc != MF_OK || json == NULL)
    return rc;
  if(!json_is_boolean(json))
    return error_set(err, MF_ERR_SPEC, "%s%s: expected true or false, got %s", object->prefix, name, import_describe(json, got, sizeof(got)));
  *value = json_is_true(json);
  return MF_OK;
}

enum mf_status import_text(const struct import_object *object, const char *keys, const char **value, bool *found, struct error *err)
{
  char name[KEY_SPACE], got[96];
  const json_t *json = NULL;
  enum mf_status rc = lookup(object, keys, name, &json, err);
  *found = json != NULL;
  if(rc != MF_OK || json == NULL)
    return rc;
  if(!json_is_string(json))
    return error_set(err, MF_ERR_SPEC, "%s%s: expected text, got %s", object->prefix, name, import_describe(json, got, sizeof(got)));
  *value = json_string_value(json);
  return MF_OK;
}
