/* package_json.c - see package_json.h. Keys are sorted and numbers printed with a fixed precision, so that equal items make equal text. */
#include "package_json.h"
#include "package_format.h"

#include <jansson.h>
#include <math.h>

/* A number for people: null if it is none (not known, not measured). */
static json_t *number(double value)
{
  return isfinite(value) ? json_real(value) : json_null();
}

/* Ends a section: {key: list, ...}. Takes over 'list' and 'top'. */
static char *finish(json_t *top, const char *key, json_t *list)
{
  char *text = NULL;
  if(top != NULL && list != NULL && json_object_set_new(top, key, list) == 0)
    text = json_dumps(top, JSON_SORT_KEYS | JSON_INDENT(1) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
  json_decref(top);
  return text;
}

/* Which winner a row speaks of. */
static json_t *identity(const struct package_item *it)
{
  return json_pack("{s:s, s:s, s:i, s:i, s:s}", "shape", it->shape_name, "device", it->device->name, "tokens_min", it->tokens_min, "tokens_max",
                   it->tokens_max, "schedule", it->schedule);
}

/* Adds 'row' (taken over) with the members of 'more' (taken over) to 'list'. */
static void append(json_t *list, json_t *row, json_t *more)
{
  if(row != NULL && more != NULL && json_object_update(row, more) == 0)
    json_array_append(list, row);
  json_decref(row);
  json_decref(more);
}

static json_t *problem_json(const struct mf_problem *p)
{
  json_t *out = json_object();
#define ADD_int32_t(name) json_object_set_new(out, #name, json_integer(p->name));
#define ADD_float(name) json_object_set_new(out, #name, json_real((double)p->name));
#define ADD_FIELD(type, name) ADD_##type(name)
  PACKAGE_PROBLEM_TABLE(ADD_FIELD)
#undef ADD_FIELD
#undef ADD_float
#undef ADD_int32_t
  return out;
}

char *package_manifest_text(const struct package_item *const *items, size_t count)
{
  json_t *list = json_array();
  for(size_t i = 0; i < count; i++) {
    const struct package_item *it = items[i];
    append(list, identity(it),
           json_pack("{s:o, s:f, s:i, s:o, s:o, s:o, s:s, s:i, s:i, s:s, s:i}", "problem", problem_json(it->problem), "routed_scaling", it->routed_scaling,
                     "min_driver", package_min_driver(it->nvrtc_version), "us", it->predicted ? json_null() : number(it->us), "floor_us",
                     it->predicted ? json_null() : number(it->floor_us), "predicted_us", it->predicted ? number(it->us) : json_null(), "status",
                     it->predicted ? "predicted" : "measured", "sms", it->device->sms, "compute_capability",
                     it->device->cc_major * 10 + it->device->cc_minor, "source", it->shape_source, "workspace_bytes", (int)it->recipe->workspace_bytes));
  }
  return finish(json_pack("{s:s, s:i}", "format", "moeforge package", "version", (int)PACKAGE_VERSION), "entries", list);
}

static json_t *gates_json(const struct check_result *check)
{
  json_t *out = json_object();
  for(int g = 0; g < GATES; g++)
    json_object_set_new(out, gate_name((enum gate)g), json_pack("{s:o, s:o}", "worst", number(check->worst[g]), "limit", number(gate_limit((enum gate)g))));
  return out;
}

char *package_validation_text(const struct package_item *const *items, size_t count)
{
  json_t *list = json_array();
  for(size_t i = 0; i < count; i++)
    append(list, identity(items[i]),
           items[i]->check != NULL ? json_pack("{s:s, s:o, s:o}", "check", "passed", "gates", gates_json(items[i]->check), "error",
                                               items[i]->check->worst_error > 0 ? number(items[i]->check->worst_error) : json_null())
                                   : json_pack("{s:s}", "check", "none"));
  return finish(json_pack("{s:i}", "check_policy", CHECK_POLICY_VERSION), "entries", list);
}

char *package_provenance_text(const struct package_item *const *items, size_t count)
{
  json_t *list = json_array();
  for(size_t i = 0; i < count; i++) {
    const struct package_item *it = items[i];
    append(list, identity(it),
           json_pack("{s:i, s:i, s:s, s:s, s:s, s:b, s:o, s:o, s:o, s:o}", "nvrtc_version", it->nvrtc_version, "driver_version", it->driver_version,
                     "compile_key", it->compile_key, "selection_key", it->selection_key, "made_at", it->made_at, "emulated", it->device->emulated, "default_us",
                     number(it->default_us), "us_low", number(it->us_low), "us_high", number(it->us_high), "regret", number(it->regret)));
  }
  return finish(json_object(), "entries", list);
}
