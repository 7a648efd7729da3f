/* qualify_judge.c - one token count of a package against its baseline.
 *
 *   not compared   there is nothing that could be compared: no baseline, another GPU, too few samples, a time that was only predicted, other routing
 *   reject         every limit that is broken is named
 *   keep           every limit holds, and the speed-up does so at the unfavourable end of its interval
 *
 * Pairs of one round share the clock, the temperature and the neighbours of that round, so the ratio of each pair is formed first and their median judged.
 * Separate samples have but two medians with an interval each; the ratio's interval goes from the worst to the best of them, which is wider. */
#include "qualify.h"
#include "timing.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *verdict_name(enum qualify_verdict verdict)
{
  static const char *const names[] = {[VERDICT_NOT_COMPARED] = "not compared", [VERDICT_KEEP] = "keep", [VERDICT_REJECT] = "reject"};
  return names[verdict];
}

/* Adds a reason; the first one decides the verdict. */
static void because(struct qualify_point *out, enum qualify_verdict verdict, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static void because(struct qualify_point *out, enum qualify_verdict verdict, const char *fmt, ...)
{
  const size_t have = strlen(out->why);
  va_list args;
  char text[256];
  va_start(args, fmt);
  vsnprintf(text, sizeof(text), fmt, args);
  va_end(args);
  snprintf(out->why + have, sizeof(out->why) - have, "%s%s", have > 0 ? "; " : "", text);
  out->verdict = verdict;
}

/* What cannot be compared, and why; verdict is left alone if it can. */
static void check_comparable(const struct qualify_record *own, const char *baseline_device, const struct baseline_point *base, struct qualify_point *out)
{
  const bool paired = base != NULL && base->package_us != NULL;
  if(base == NULL)
    because(out, VERDICT_NOT_COMPARED, "no baseline");
  else if(strcmp(baseline_device, own->device) != 0)
    because(out, VERDICT_NOT_COMPARED, "the baseline is of %s", baseline_device);
  else if(own->predicted)
    because(out, VERDICT_NOT_COMPARED, "the package's time is only predicted");
  else if(base->count < QUALIFY_LEAST_SAMPLES)
    because(out, VERDICT_NOT_COMPARED, "%zu samples, at least %d are needed", base->count, QUALIFY_LEAST_SAMPLES);
  else if(!paired && strcmp(base->routing, "mix") != 0)
    because(out, VERDICT_NOT_COMPARED, "the baseline is over routing %s, the package's record over the spec's mix: give package_us of the same rounds",
            base->routing);
  else if(!paired && !(own->us > 0 && own->us_low > 0 && own->us_high >= own->us_low))
    because(out, VERDICT_NOT_COMPARED, "the package has no interval of its time on record: give package_us of the same rounds");
}

/* Median and interval of a copy, since timing_median() sorts. 'by' NULL: of the values, else of values[i] / by[i]. */
static enum mf_status interval(const double *values, const double *by, size_t count, double *median, double *low, double *high, struct error *err)
{
  double *copy = calloc(count, sizeof(*copy));
  if(copy == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < count; i++)
    copy[i] = by != NULL ? values[i] / by[i] : values[i];
  timing_median(copy, count, median, low, high);
  free(copy);
  return MF_OK;
}

static enum mf_status measure(const struct qualify_record *own, const struct baseline_point *base, struct qualify_point *out, struct error *err)
{
  double low = NAN, high = NAN, unused_low, unused_high;
  enum mf_status rc = interval(base->us, NULL, base->count, &out->baseline_us, &low, &high, err);
  if(rc != MF_OK)
    return rc;
  if(base->package_us != NULL) {
    rc = interval(base->package_us, NULL, base->count, &out->package_us, &unused_low, &unused_high, err);
    return rc != MF_OK ? rc : interval(base->us, base->package_us, base->count, &out->speedup, &out->speedup_low, &out->speedup_high, err);
  }
  out->package_us = own->us;
  out->speedup = out->baseline_us / own->us;
  out->speedup_low = low / own->us_high;
  out->speedup_high = high / own->us_low;
  return MF_OK;
}

static void judge_limits(const struct spec_limits *limits, const struct qualify_record *own, struct qualify_point *out)
{
  const double gib = limits->max_memory_bytes / (double)(1 << 30);
  if(!own->checked)
    because(out, VERDICT_REJECT, "no check of its numbers is on record");
  if(limits->max_error > 0 && !isfinite(own->error))
    because(out, VERDICT_REJECT, "no error is on record, max_error is %.3g: tune again", limits->max_error);
  else if(limits->max_error > 0 && own->error > limits->max_error)
    because(out, VERDICT_REJECT, "error %.3g is above max_error %.3g", own->error, limits->max_error);
  if(gib > 0 && !(own->memory_gib <= gib))
    because(out, VERDICT_REJECT, "%.3f GiB are above max_memory_gib %.3f", own->memory_gib, gib);
  if(limits->min_speedup > 0 && !(out->speedup_high >= limits->min_speedup))
    because(out, VERDICT_REJECT, "speed-up %.3f (%.3f to %.3f) is below min_speedup %.3f", out->speedup, out->speedup_low, out->speedup_high,
            limits->min_speedup);
  else if(limits->min_speedup > 0 && !(out->speedup_low >= limits->min_speedup))
    because(out, VERDICT_REJECT, "speed-up %.3f is not shown to reach min_speedup %.3f: its interval is %.3f to %.3f", out->speedup, limits->min_speedup,
            out->speedup_low, out->speedup_high);
}

enum mf_status qualify_judge(const struct spec_limits *limits, const struct qualify_record *own, const char *baseline_device,
                             const struct baseline_point *base, struct qualify_point *out, struct error *err)
{
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  out->own = *own;
  out->verdict = VERDICT_KEEP;
  out->baseline_us = out->package_us = out->speedup = out->speedup_low = out->speedup_high = NAN;
  out->baseline_error = base != NULL ? base->error : NAN;
  out->baseline_memory_gib = base != NULL ? base->memory_gib : NAN;
  out->samples = base != NULL ? base->count : 0;
  out->paired = base != NULL && base->package_us != NULL;
  check_comparable(own, baseline_device, base, out);
  if(base == NULL || out->verdict != VERDICT_KEEP)
    return MF_OK;
  rc = measure(own, base, out, err);
  if(rc == MF_OK)
    judge_limits(limits, own, out);
  return rc;
}
