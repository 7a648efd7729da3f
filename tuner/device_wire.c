/* device_wire.c - see device_wire.h. */
#include "device_wire.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- device_info: one row per field ---- */
enum field_type { FIELD_TEXT, FIELD_INT, FIELD_LONG, FIELD_DOUBLE, FIELD_BOOL };

struct field {
  const char *name;
  enum field_type type;
  size_t offset, size;
};

#define INFO_FIELD(name, type) {#name, type, offsetof(struct device_info, name), sizeof(((struct device_info *)0)->name)}
static const struct field info_fields[] = {
    INFO_FIELD(name, FIELD_TEXT),
    INFO_FIELD(emulated, FIELD_BOOL),
    INFO_FIELD(cc_major, FIELD_INT),
    INFO_FIELD(cc_minor, FIELD_INT),
    INFO_FIELD(sms, FIELD_INT),
    INFO_FIELD(shared_bytes_per_cta, FIELD_LONG),
    INFO_FIELD(shared_bytes_per_sm, FIELD_LONG),
    INFO_FIELD(registers_per_sm, FIELD_INT),
    INFO_FIELD(max_threads_per_cta, FIELD_INT),
    INFO_FIELD(l2_bytes, FIELD_LONG),
    INFO_FIELD(bandwidth_gbps, FIELD_DOUBLE),
    INFO_FIELD(launch_us, FIELD_DOUBLE),
    INFO_FIELD(memory_bytes, FIELD_DOUBLE),
    INFO_FIELD(driver_version, FIELD_INT),
    INFO_FIELD(memory_bus_bits, FIELD_INT),
    INFO_FIELD(memory_clock_khz, FIELD_INT),
    INFO_FIELD(mig, FIELD_BOOL),
    INFO_FIELD(uuid, FIELD_TEXT),
};
#define INFO_FIELDS (sizeof(info_fields) / sizeof(info_fields[0]))

static json_t *field_json(const struct field *field, const void *from)
{
  const char *at = (const char *)from + field->offset;
  switch(field->type) {
    case FIELD_TEXT: return json_string(at);
    case FIELD_INT: return json_integer(*(const int *)(const void *)at);
    case FIELD_LONG: return json_integer(*(const long *)(const void *)at);
    case FIELD_DOUBLE: return wire_number(*(const double *)(const void *)at);
    case FIELD_BOOL: return json_boolean(*(const bool *)(const void *)at);
  }
  return NULL;
}

static bool field_read(const struct field *field, const json_t *value, void *to)
{
  char *at = (char *)to + field->offset;
  switch(field->type) {
    case FIELD_TEXT:
      snprintf(at, field->size, "%s", json_is_string(value) ? json_string_value(value) : "");
      return json_is_string(value);
    case FIELD_INT: *(int *)(void *)at = (int)json_integer_value(value); return json_is_integer(value);
    case FIELD_LONG: *(long *)(void *)at = (long)json_integer_value(value); return json_is_integer(value);
    case FIELD_DOUBLE: *(double *)(void *)at = wire_read_number(value); return value != NULL;
    case FIELD_BOOL: *(bool *)(void *)at = json_is_true(value); return json_is_boolean(value);
  }
  return false;
}

json_t *wire_info(const struct device_info *info)
{
  json_t *out = json_object();
  for(size_t i = 0; i < INFO_FIELDS; i++)
    json_object_set_new(out, info_fields[i].name, field_json(&info_fields[i], info));
  return out;
}

enum mf_status wire_read_info(const json_t *from, struct device_info *out, struct error *err)
{
  memset(out, 0, sizeof(*out));
  for(size_t i = 0; i < INFO_FIELDS; i++)
    if(!field_read(&info_fields[i], json_object_get(from, info_fields[i].name), out))
      return error_set(err, MF_ERR_INTERNAL, "device frame: field %s is missing or of the wrong type", info_fields[i].name);
  return MF_OK;
}

/* ---- how a device is emulated ---- */
json_t *wire_emulation(const struct device_emulation *e)
{
  return json_pack("{s:o, s:s, s:s, s:s, s:s, s:I, s:I, s:b}", "info", wire_info(&e->info), "template_dir", e->template_dir, "emu_dir", e->emu_dir,
                   "cache_dir", e->cache_dir, "compiler", e->compiler, "seed", (json_int_t)e->seed, "max_steps", (json_int_t)e->max_steps, "sanitize",
                   (int)e->sanitize);
}

enum mf_status wire_read_emulation(const json_t *from, struct device_emulation *out, struct error *err)
{
  const struct {
    const char *name;
    char *to;
    size_t space;
  } texts[] = {{"template_dir", out->template_dir, sizeof(out->template_dir)}, {"emu_dir", out->emu_dir, sizeof(out->emu_dir)},
               {"cache_dir", out->cache_dir, sizeof(out->cache_dir)}, {"compiler", out->compiler, sizeof(out->compiler)}};
  const json_t *seed = json_object_get(from, "seed"), *steps = json_object_get(from, "max_steps");
  memset(out, 0, sizeof(*out));
  if(!json_is_integer(seed) || !json_is_integer(steps))
    return error_set(err, MF_ERR_INTERNAL, "device frame: emulated: seed or max_steps is missing");
  for(size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
    const char *text = json_string_value(json_object_get(from, texts[i].name));
    if(text == NULL || strlen(text) >= texts[i].space)
      return error_set(err, MF_ERR_INTERNAL, "device frame: emulated: %s is missing or too long", texts[i].name);
    snprintf(texts[i].to, texts[i].space, "%s", text);
  }
  out->seed = (uint64_t)json_integer_value(seed);
  out->max_steps = (uint64_t)json_integer_value(steps);
  out->sanitize = json_is_true(json_object_get(from, "sanitize"));
  return wire_read_info(json_object_get(from, "info"), &out->info, err);
}

/* ---- numbers, errors ---- */
json_t *wire_number(double value)
{
  return isfinite(value) ? json_real(value) : json_null();
}

double wire_read_number(const json_t *from)
{
  return json_is_number(from) ? json_number_value(from) : NAN;
}

json_t *wire_error(const struct error *err)
{
  return json_pack("{s:b, s:i, s:s}", "ok", 0, "status", (int)err->status, "text", err->text[0] != '\0' ? err->text : mf_status_string(err->status));
}

enum mf_status wire_read_status(const struct frame *reply, struct error *err)
{
  const json_t *status = json_object_get(reply->head, "status"), *text = json_object_get(reply->head, "text");
  if(json_is_true(json_object_get(reply->head, "ok")))
    return MF_OK;
  if(!json_is_integer(status) || !json_is_string(text) || json_integer_value(status) == MF_OK)
    return error_set(err, MF_ERR_INTERNAL, "device frame: neither ok nor an error");
  return error_set(err, (enum mf_status)json_integer_value(status), "%s", json_string_value(text));
}

bool wire_is_fatal(enum mf_status status)
{
  return status == MF_ERR_TIMEOUT || status == MF_ERR_DEVICE || status == MF_ERR_WORKER || status == MF_ERR_INTERNAL;
}

/* ---- check results ---- */
json_t *wire_check_result(const struct check_result *result)
{
  json_t *out = json_pack("{s:b, s:s, s:s}", "passed", (int)result->passed, "failed_gate", result->passed ? "" : gate_name(result->failed_gate), "detail",
                          result->detail);
  json_t *worst = json_object();
  for(int gate = 0; gate < GATES; gate++)
    json_object_set_new(worst, gate_name((enum gate)gate), wire_number(result->worst[gate]));
  json_object_set_new(out, "worst", worst);
  json_object_set_new(out, "worst_error", wire_number(result->worst_error));
  return out;
}

enum mf_status wire_read_check_result(const json_t *from, struct check_result *out, struct error *err)
{
  const json_t *passed = json_object_get(from, "passed"), *worst = json_object_get(from, "worst");
  const char *failed = json_string_value(json_object_get(from, "failed_gate")), *detail = json_string_value(json_object_get(from, "detail"));
  memset(out, 0, sizeof(*out));
  if(!json_is_boolean(passed) || !json_is_object(worst) || failed == NULL || detail == NULL)
    return error_set(err, MF_ERR_INTERNAL, "device frame: no check result");
  out->passed = json_is_true(passed);
  snprintf(out->detail, sizeof(out->detail), "%s", detail);
  out->worst_error = wire_read_number(json_object_get(from, "worst_error"));
  for(int gate = 0; gate < GATES; gate++) {
    out->worst[gate] = wire_read_number(json_object_get(worst, gate_name((enum gate)gate)));
    if(strcmp(gate_name((enum gate)gate), failed) == 0)
      out->failed_gate = (enum gate)gate;
  }
  return MF_OK;
}
