/* qualify_record.c - the record of a qualification, as it goes into the package. Nothing of the moment is in it: equal inputs make equal text. */
#include "qualify.h"
#include "sha256.h"

#include <jansson.h>
#include <math.h>

void qualify_hash(const void *bytes, size_t count, char out[QUALIFY_HASH_LEN])
{
  unsigned char digest[32];
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, bytes, count);
  sha256_end(&ctx, digest);
  sha256_hex(digest, out);
}

bool qualify_is_qualified(const struct qualify_result *result)
{
  return result->kept > 0 && result->kept == result->count;
}

static json_t *number(double value)
{
  return isfinite(value) ? json_real(value) : json_null();
}

static json_t *point_json(const struct qualify_point *p)
{
  return json_pack("{s:s, s:s, s:i, s:s, s:s, s:b, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "shape", p->own.shape, "device", p->own.device, "tokens",
                   p->own.tokens, "verdict", verdict_name(p->verdict), "why", p->why, "paired", (int)p->paired, "samples", (json_int_t)p->samples,
                   "baseline_us", number(p->baseline_us), "package_us", number(p->package_us), "speedup", number(p->speedup), "speedup_low",
                   number(p->speedup_low), "speedup_high", number(p->speedup_high), "error", number(p->own.error), "baseline_error",
                   number(p->baseline_error), "memory_gib", number(p->own.memory_gib), "baseline_memory_gib", number(p->baseline_memory_gib));
}

static json_t *spec_json(const struct qualify_spec *s)
{
  return json_pack("{s:s, s:s, s:f, s:f, s:f}", "shape", s->shape, "sha256", s->sha256, "max_error", s->limits.max_error, "min_speedup",
                   s->limits.min_speedup, "max_memory_gib", s->limits.max_memory_bytes / (double)(1 << 30));
}

char *qualify_text(const struct qualify_result *result, const struct baseline *base)
{
  json_t *points = json_array(), *specs = json_array(), *top;
  bool good = points != NULL && specs != NULL;
  char *text = NULL;
  for(size_t i = 0; good && i < result->count; i++)
    good = json_array_append_new(points, point_json(&result->points[i])) == 0;
  for(size_t i = 0; good && i < result->nspecs; i++)
    good = json_array_append_new(specs, spec_json(&result->specs[i])) == 0;
  top = json_pack("{s:s, s:i, s:b, s:I, s:I, s:I, s:{s:s, s:s, s:s}, s:o, s:o}", "format", "moeforge qualification", "policy", QUALIFY_POLICY_VERSION,
                  "qualified", (int)qualify_is_qualified(result), "kept", (json_int_t)result->kept, "rejected", (json_int_t)result->rejected, "not_compared",
                  (json_int_t)result->not_compared, "baseline", "name", base->name, "device", base->device, "sha256", base->sha256, "limits", specs, "points",
                  points);
  if(good && top != NULL)
    text = json_dumps(top, JSON_SORT_KEYS | JSON_INDENT(1) | JSON_REAL_PRECISION(9) | JSON_ENSURE_ASCII);
  json_decref(top);
  return text;
}
