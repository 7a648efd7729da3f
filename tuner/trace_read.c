/* trace_read.c - from the words that a traced kernel left to times on one axis; see trace.h.
 *
 * Clocks. A stamp is the low word of its SM's clock. Per CTA there are two pairs (clock, timer) of the same moment; the timer is common to all SMs but
 * advances in steps (32 ns, or 1 us). All SMs have one frequency: the median, over SMs, of cycles per nanosecond between an SM's first and last
 * pair. An SM's clock then lies on the timer's axis at
 *
 *   timer <= offset + clock / frequency < timer + step            for each of its pairs
 *
 * and all pairs together leave a narrower interval than one step: its middle is taken, and half its width is the uncertainty of comparing that SM
 * with another. Within an SM there is none. The emulated device has one clock, which counts steps. */
#include "trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_SMS 4096

/* ---- names ---- */
#define NAME_ROW(id, name) [id] = name,
static const char *const producer_events[MF_TRACE_EVENTS] = {MF_TRACE_PRODUCER_EVENTS(NAME_ROW)};
static const char *const consumer_events[MF_TRACE_EVENTS] = {MF_TRACE_CONSUMER_EVENTS(NAME_ROW)};
static const char *const helper_events[MF_TRACE_EVENTS] = {MF_TRACE_HELPER_EVENTS(NAME_ROW)};
static const char *const producer_values[MF_TRACE_VALUES] = {MF_TRACE_PRODUCER_VALUES(NAME_ROW)};
static const char *const consumer_values[MF_TRACE_VALUES] = {MF_TRACE_CONSUMER_VALUES(NAME_ROW)};
static const char *const helper_values[MF_TRACE_VALUES] = {MF_TRACE_HELPER_VALUES(NAME_ROW)};
#undef NAME_ROW

const char *trace_event_name(int track, int event)
{
  return event < 0 || event >= MF_TRACE_EVENTS ? NULL
         : track == MF_TRACE_PRODUCER          ? producer_events[event]
         : track < MF_TRACE_HELPER             ? consumer_events[event]
                                               : helper_events[event];
}

const char *trace_value_name(int track, int value)
{
  return value < 0 || value >= MF_TRACE_VALUES ? NULL
         : track == MF_TRACE_PRODUCER          ? producer_values[value]
         : track < MF_TRACE_HELPER             ? consumer_values[value]
                                               : helper_values[value];
}

int trace_tracks(const struct trace *trace)
{
  return MF_TRACE_HELPER + trace->finalisers + trace->loaders;
}

void trace_track_name(const struct trace *trace, int track, char *out, size_t space)
{
  if(track == MF_TRACE_PRODUCER)
    snprintf(out, space, "producer");
  else if(track < MF_TRACE_HELPER)
    snprintf(out, space, "consumers %d", track - MF_TRACE_CONSUMER);
  else if(track < MF_TRACE_HELPER + trace->finalisers)
    snprintf(out, space, "finaliser %d", track - MF_TRACE_HELPER);
  else
    snprintf(out, space, "h loader %d", track - MF_TRACE_HELPER - trace->finalisers);
}

/* Values from this one on are waits. */
static int first_wait(int track)
{
  return track == MF_TRACE_PRODUCER ? MF_PRODUCER_FLIGHT_WAIT : track < MF_TRACE_HELPER ? (int)MF_CONSUMER_UP_WAIT : (int)MF_HELPER_WAIT;
}

/* ---- clocks ---- */
struct sm_clock {
  bool known;
  uint64_t base_clock, base_timer; /* of the first pair seen */
  uint64_t last_clock, last_timer;
  double lower, upper;             /* timer - clock / frequency, in ns from the common base */
};

struct clocks {
  struct sm_clock sm[MOST_SMS];
  uint64_t timer;       /* common base */
  double per_ns;        /* cycles */
  double step;          /* of the timer, ns */
  double uncertainty;   /* ns */
};

static uint64_t pair_clock(const struct mf_trace_cta *r, int i)
{
  return (uint64_t)r->pair[i][1] << 32 | r->pair[i][0];
}

static uint64_t pair_timer(const struct mf_trace_cta *r, int i)
{
  return (uint64_t)r->pair[i][3] << 32 | r->pair[i][2];
}

static const struct mf_trace_cta *record(const struct mf_trace_cta *area, int ctas, uint32_t launch, int cta)
{
  return &area[(size_t)(launch % MF_TRACE_LAUNCHES) * (size_t)ctas + (size_t)cta];
}

static int compare_doubles(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static int compare_timers(const void *a, const void *b)
{
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

static void note_pair(struct sm_clock *sm, uint64_t clock, uint64_t timer)
{
  if(!sm->known) {
    *sm = (struct sm_clock){.known = true, .base_clock = clock, .base_timer = timer, .last_clock = clock, .last_timer = timer, .lower = -INFINITY, .upper = INFINITY};
  } else if(timer > sm->last_timer) {
    sm->last_clock = clock;
    sm->last_timer = timer;
  }
}

/* The timer's step: the smallest difference between any two of its values. */
static double timer_step(uint64_t *timers, size_t count)
{
  uint64_t step = 0;
  qsort(timers, count, sizeof(*timers), compare_timers);
  for(size_t i = 1; i < count; i++)
    if(timers[i] > timers[i - 1] && (step == 0 || timers[i] - timers[i - 1] < step))
      step = timers[i] - timers[i - 1];
  return step > 0 ? (double)step : 1;
}

/* Median over SMs of cycles per nanosecond; 0 if no SM's timer has advanced. */
static double frequency(const struct clocks *k)
{
  double ratios[MOST_SMS] = {0};
  size_t count = 0;
  for(int i = 0; i < MOST_SMS; i++) {
    const struct sm_clock *sm = &k->sm[i];
    if(sm->known && sm->last_timer > sm->base_timer)
      ratios[count++] = (double)(sm->last_clock - sm->base_clock) / (double)(sm->last_timer - sm->base_timer);
  }
  qsort(ratios, count, sizeof(ratios[0]), compare_doubles);
  return count > 0 ? ratios[count / 2] : 0;
}

static void narrow(struct clocks *k, const struct mf_trace_cta *r, int pair)
{
  struct sm_clock *sm = &k->sm[r->sm];
  const double at = (double)(int64_t)(pair_timer(r, pair) - k->timer) - (double)(int64_t)(pair_clock(r, pair) - sm->base_clock) / k->per_ns;
  sm->lower = fmax(sm->lower, at);
  sm->upper = fmin(sm->upper, at + k->step);
}

static enum mf_status set_clocks(const struct mf_trace_cta *area, int ctas, uint32_t first, int launches, struct clocks *k, struct error *err)
{
  const size_t pairs = 2 * (size_t)launches * (size_t)ctas;
  uint64_t *timers = malloc(pairs * sizeof(*timers));
  if(timers == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  for(size_t i = 0; i < pairs; i++) {
    const struct mf_trace_cta *r = record(area, ctas, first + (uint32_t)(i / 2 / (size_t)ctas), (int)(i / 2 % (size_t)ctas));
    timers[i] = pair_timer(r, (int)(i % 2));
    note_pair(&k->sm[r->sm], pair_clock(r, (int)(i % 2)), timers[i]);
  }
  k->timer = timers[0];
  k->step = timer_step(timers, pairs);
  free(timers);
  k->per_ns = frequency(k);
  if(k->per_ns <= 0)
    return error_set(err, MF_ERR_CHECK, "trace: the GPU's timer did not advance between the launches: trace more of them (--launches)");
  for(size_t i = 0; i < pairs; i++)
    narrow(k, record(area, ctas, first + (uint32_t)(i / 2 / (size_t)ctas), (int)(i / 2 % (size_t)ctas)), (int)(i % 2));
  for(int i = 0; i < MOST_SMS; i++)
    if(k->sm[i].known)
      k->uncertainty = fmax(k->uncertainty, fabs(k->sm[i].upper - k->sm[i].lower) / 2);
  return MF_OK;
}

/* A stamp of the CTA as a time: microseconds from the common base, or steps. */
static double time_of(const struct clocks *k, const struct mf_trace_cta *r, uint32_t stamp, bool steps)
{
  const uint64_t near = pair_clock(r, 0), clock = near + (uint64_t)(int64_t)(int32_t)(stamp - (uint32_t)near);
  const struct sm_clock *sm = &k->sm[r->sm];
  if(stamp == 0)
    return NAN;
  if(steps)
    return (double)clock;
  return ((sm->lower + sm->upper) / 2 + (double)(int64_t)(clock - sm->base_clock) / k->per_ns) / 1e3;
}

/* ---- conversion ---- */
static void convert_track(const struct clocks *k, const struct mf_trace_cta *r, int track, struct trace *t, struct trace_track *out)
{
  const struct mf_trace_track *raw = &r->track[track];
  const bool loader = track >= MF_TRACE_HELPER + t->finalisers;
  const int per_item = track == MF_TRACE_PRODUCER ? 0 : loader ? 3 : 1;
  const long wanted = (long)raw->value[0] * per_item;
  for(int i = 0; i < MF_TRACE_EVENTS; i++)
    out->time[i] = time_of(k, r, raw->time[i], t->steps);
  for(int i = 0; i < MF_TRACE_VALUES; i++)
    out->value[i] = i < first_wait(track) || t->steps ? raw->value[i] : raw->value[i] / k->per_ns / 1e3;
  out->entries = wanted < MF_TRACE_LIST ? (int)wanted : MF_TRACE_LIST;
  t->dropped += wanted - out->entries;
  for(int i = 0; i < out->entries; i++)
    out->list[i] = (struct trace_entry){time_of(k, r, raw->list[i][0], t->steps), (int)raw->list[i][1]};
}

static void shift_track(struct trace_track *track, double by)
{
  for(int i = 0; i < MF_TRACE_EVENTS; i++)
    track->time[i] -= by;
  for(int i = 0; i < track->entries; i++)
    track->list[i].time -= by;
}

/* Times from the launch's begin on, and its end. */
static void shift_launch(const struct trace *t, struct trace_launch *launch)
{
  double begin = INFINITY, end = 0;
  for(int c = 0; c < t->ctas; c++)
    for(int k = 0; k < trace_tracks(t); k++)
      begin = fmin(begin, launch->ctas[c].track[k].time[0]); /* NAN loses */
  for(int c = 0; c < t->ctas; c++)
    for(int k = 0; k < trace_tracks(t); k++)
      shift_track(&launch->ctas[c].track[k], begin);
  for(int c = 0; c < t->ctas; c++) {
    for(int k = MF_TRACE_CONSUMER; k < MF_TRACE_HELPER; k++) {
      const double *time = launch->ctas[c].track[k].time;
      end = fmax(end, isnan(time[MF_CONSUMER_STORED]) ? time[MF_CONSUMER_UP_DONE] : time[MF_CONSUMER_STORED]);
    }
  }
  launch->length = end;
}

static enum mf_status convert_launch(const struct clocks *k, const struct mf_trace_cta *area, uint32_t number, struct trace *t, struct error *err)
{
  struct trace_launch *launch = &t->launch[t->launches];
  const struct mf_trace_track *slots = &record(area, t->ctas, number, 0)->track[MF_TRACE_PRODUCER];
  launch->ctas = calloc((size_t)t->ctas, sizeof(*launch->ctas));
  if(launch->ctas == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory for the trace of %d CTAs", t->ctas);
  t->launches++;
  launch->number = number;
  launch->active = (int)slots->value[MF_PRODUCER_ACTIVE];
  for(int i = 0; i < launch->active && i < MF_TRACE_LIST; i++)
    launch->experts[i] = (int)slots->list[i][1];
  for(int c = 0; c < t->ctas; c++) {
    const struct mf_trace_cta *r = record(area, t->ctas, number, c);
    launch->ctas[c].sm = (int)r->sm;
    for(int track = 0; track < trace_tracks(t); track++)
      convert_track(k, r, track, t, &launch->ctas[c].track[track]);
  }
  shift_launch(t, launch);
  return MF_OK;
}

/* ---- what must be there, and in which order ---- */
enum when { ALWAYS, IF_UP, IF_DOWN, IF_OWNER, IF_ROUTER, IF_WORK };
struct demand {
  int track; /* MF_TRACE_PRODUCER, _CONSUMER (both), _HELPER (all) */
  int event;
  enum when when;
  int after; /* event of the same track that may not be later; -1: any time */
};
static const struct demand demands[] = {
    {MF_TRACE_PRODUCER, MF_PRODUCER_BEGIN, ALWAYS, -1},
    {MF_TRACE_PRODUCER, MF_PRODUCER_READY, ALWAYS, MF_PRODUCER_BEGIN},
    {MF_TRACE_PRODUCER, MF_PRODUCER_ROUTED, ALWAYS, MF_PRODUCER_READY},
    {MF_TRACE_PRODUCER, MF_PRODUCER_LISTED, ALWAYS, MF_PRODUCER_ROUTED},
    {MF_TRACE_PRODUCER, MF_PRODUCER_FIRST_COPY, IF_UP, MF_PRODUCER_ROUTED},
    {MF_TRACE_PRODUCER, MF_PRODUCER_LAST_UP, IF_UP, MF_PRODUCER_FIRST_COPY},
    {MF_TRACE_PRODUCER, MF_PRODUCER_FIRST_DOWN, IF_DOWN, MF_PRODUCER_LISTED},
    {MF_TRACE_PRODUCER, MF_PRODUCER_FIRST_DOWN, IF_DOWN, MF_PRODUCER_LAST_UP},
    {MF_TRACE_PRODUCER, MF_PRODUCER_LAST_COPY, IF_DOWN, MF_PRODUCER_FIRST_DOWN},
    {MF_TRACE_PRODUCER, MF_PRODUCER_EXIT, ALWAYS, MF_PRODUCER_LAST_COPY},
    {MF_TRACE_CONSUMER, MF_CONSUMER_BEGIN, ALWAYS, -1},
    {MF_TRACE_CONSUMER, MF_CONSUMER_LOGITS, IF_ROUTER, MF_CONSUMER_BEGIN},
    {MF_TRACE_CONSUMER, MF_CONSUMER_ROUTED, IF_ROUTER, MF_CONSUMER_LOGITS},
    {MF_TRACE_CONSUMER, MF_CONSUMER_X, ALWAYS, MF_CONSUMER_ROUTED},
    {MF_TRACE_CONSUMER, MF_CONSUMER_FRONT, ALWAYS, MF_CONSUMER_X},
    {MF_TRACE_CONSUMER, MF_CONSUMER_UP_FIRST, IF_UP, MF_CONSUMER_FRONT},
    {MF_TRACE_CONSUMER, MF_CONSUMER_UP_DONE, ALWAYS, MF_CONSUMER_UP_FIRST},
    {MF_TRACE_CONSUMER, MF_CONSUMER_DOWN_FIRST, IF_DOWN, MF_CONSUMER_UP_DONE},
    {MF_TRACE_CONSUMER, MF_CONSUMER_H_FIRST, IF_DOWN, MF_CONSUMER_DOWN_FIRST},
    {MF_TRACE_CONSUMER, MF_CONSUMER_LANDED, IF_DOWN, MF_CONSUMER_DOWN_FIRST},
    {MF_TRACE_CONSUMER, MF_CONSUMER_H_LAST, IF_DOWN, MF_CONSUMER_LANDED},
    {MF_TRACE_CONSUMER, MF_CONSUMER_DOWN_DONE, IF_OWNER, MF_CONSUMER_H_LAST},
    {MF_TRACE_CONSUMER, MF_CONSUMER_STORED, IF_OWNER, MF_CONSUMER_DOWN_DONE},
    {MF_TRACE_CONSUMER, MF_CONSUMER_EXIT, ALWAYS, MF_CONSUMER_STORED},
    {MF_TRACE_HELPER, MF_HELPER_BEGIN, ALWAYS, -1},
    {MF_TRACE_HELPER, MF_HELPER_X, ALWAYS, MF_HELPER_BEGIN},
    {MF_TRACE_HELPER, MF_HELPER_PREPARED, ALWAYS, MF_HELPER_X},
    {MF_TRACE_HELPER, MF_HELPER_FRONT, ALWAYS, MF_HELPER_PREPARED},
    {MF_TRACE_HELPER, MF_HELPER_FIRST, IF_WORK, MF_HELPER_FRONT},
    {MF_TRACE_HELPER, MF_HELPER_LAST, IF_WORK, MF_HELPER_FIRST},
    {MF_TRACE_HELPER, MF_HELPER_EXIT, ALWAYS, MF_HELPER_LAST},
};

static bool wanted(const struct trace *t, const struct trace_cta *cta, int index, int track, enum when when)
{
  const double *value = cta->track[track].value;
  switch(when) {
    case ALWAYS: return true;
    case IF_UP: return track == MF_TRACE_PRODUCER ? value[MF_PRODUCER_UP_STAGES] > 0 : value[MF_CONSUMER_UNITS] > 0;
    case IF_DOWN: return track == MF_TRACE_PRODUCER ? value[MF_PRODUCER_DOWN_STAGES] > 0 : index < t->down_ctas && value[MF_CONSUMER_DOWN_STAGES] > 0;
    case IF_OWNER: return index < t->down_ctas;
    case IF_ROUTER: return track == MF_TRACE_CONSUMER;
    case IF_WORK: return value[MF_HELPER_COUNT] > 0;
  }
  return false;
}

static int role_of(int track)
{
  return track < MF_TRACE_CONSUMER ? MF_TRACE_PRODUCER : track < MF_TRACE_HELPER ? MF_TRACE_CONSUMER : MF_TRACE_HELPER;
}

static enum mf_status finding(const struct trace *t, const struct trace_launch *launch, int cta, int track, const char *what, struct error *err)
{
  char name[32];
  trace_track_name(t, track, name, sizeof(name));
  return error_set(err, MF_ERR_CHECK, "trace: launch %u, CTA %d, %s: %s", (unsigned)launch->number, cta, name, what);
}

static enum mf_status check_track(const struct trace *t, const struct trace_launch *launch, int index, int track, struct error *err)
{
  const struct trace_cta *cta = &launch->ctas[index];
  const struct trace_track *tr = &cta->track[track];
  char what[128];
  for(size_t i = 0; i < sizeof(demands) / sizeof(demands[0]); i++) {
    const struct demand *d = &demands[i];
    if(d->track != role_of(track))
      continue;
    if(isnan(tr->time[d->event]) && wanted(t, cta, index, track, d->when)) {
      snprintf(what, sizeof(what), "no \"%s\"", trace_event_name(track, d->event));
      return finding(t, launch, index, track, what, err);
    }
    if(d->after >= 0 && tr->time[d->event] < tr->time[d->after]) {
      snprintf(what, sizeof(what), "\"%s\" comes before \"%s\"", trace_event_name(track, d->event), trace_event_name(track, d->after));
      return finding(t, launch, index, track, what, err);
    }
  }
  for(int i = 0; i < tr->entries; i++)
    if(isnan(tr->list[i].time))
      return finding(t, launch, index, track, "an entry of its list was not written", err);
  return MF_OK;
}

static enum mf_status check_order(const struct trace *t, struct error *err)
{
  for(int l = 0; l < t->launches; l++)
    for(int c = 0; c < t->ctas; c++)
      for(int track = 0; track < trace_tracks(t); track++) {
        const enum mf_status rc = check_track(t, &t->launch[l], c, track, err);
        if(rc != MF_OK)
          return rc;
      }
  return MF_OK;
}

/* Whether the records are those of these launches. */
static enum mf_status check_records(const struct mf_trace_cta *area, int ctas, uint32_t first, int launches, struct error *err)
{
  const struct mf_trace_cta *one = record(area, ctas, first, 0);
  for(int l = 0; l < launches; l++) {
    for(int c = 0; c < ctas; c++) {
      const struct mf_trace_cta *r = record(area, ctas, first + (uint32_t)l, c);
      if(r->launch != first + (uint32_t)l + 1)
        return error_set(err, MF_ERR_CHECK, "trace: CTA %d left no record of launch %u: is this kernel built with MF_TRACE?", c, (unsigned)first + (unsigned)l);
      if(r->sm >= MOST_SMS || r->finalisers != one->finalisers || r->loaders != one->loaders || r->down_ctas > (uint32_t)ctas || r->units == 0 ||
         r->finalisers > MF_TRACE_TRACKS - MF_TRACE_HELPER || r->loaders > MF_TRACE_TRACKS - MF_TRACE_HELPER - r->finalisers)
        return error_set(err, MF_ERR_CHECK, "trace: CTA %d left a record of launch %u that makes no sense", c, (unsigned)first + (unsigned)l);
    }
  }
  return MF_OK;
}

enum mf_status trace_read(const struct mf_trace_cta *area, int ctas, uint32_t first, int launches, bool steps, struct trace *out, struct error *err)
{
  const struct mf_trace_cta *one = record(area, ctas, first, 0);
  struct clocks *k;
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  if(ctas < 1 || launches < 1 || launches > MF_TRACE_LAUNCHES)
    return error_set(err, MF_ERR_USAGE, "trace: expected 1..%d launches of at least one CTA, got %d of %d", MF_TRACE_LAUNCHES, launches, ctas);
  rc = check_records(area, ctas, first, launches, err);
  if(rc != MF_OK)
    return rc;
  k = calloc(1, sizeof(*k));
  if(k == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  if(!steps)
    rc = set_clocks(area, ctas, first, launches, k, err);
  *out = (struct trace){.steps = steps, .ctas = ctas, .down_ctas = (int)one->down_ctas, .finalisers = (int)one->finalisers, .loaders = (int)one->loaders,
                        .units = (int)one->units, .cycles_per_us = k->per_ns * 1e3, .uncertainty = k->uncertainty / 1e3};
  for(int l = 0; l < launches && rc == MF_OK; l++)
    rc = convert_launch(k, area, first + (uint32_t)l, out, err);
  if(rc == MF_OK)
    rc = check_order(out, err);
  free(k);
  if(rc != MF_OK)
    trace_free(out);
  return rc;
}

void trace_free(struct trace *trace)
{
  for(int l = 0; l < trace->launches; l++)
    free(trace->launch[l].ctas);
  memset(trace, 0, sizeof(*trace));
}
