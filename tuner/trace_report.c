/* trace_report.c - what people want to know of a trace: phases over all CTAs, the critical path of one launch; as text and as JSON. See trace.h. */
#include "trace.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- phases ---- */
enum who { PRODUCER, CONSUMERS, FINALISERS, LOADERS, HELPERS, EVERYBODY };
enum of_several { EARLIEST, LATEST };

struct phase_row {
  const char *name;
  enum who who;
  int index; /* of an event or value */
  enum of_several take;
};

static const struct phase_row moments[] = {
    {"CTA begins", EVERYBODY, 0, EARLIEST},
    {"logits loaded", CONSUMERS, MF_CONSUMER_LOGITS, EARLIEST},
    {"routed", CONSUMERS, MF_CONSUMER_ROUTED, LATEST},
    {"first copy issued", PRODUCER, MF_PRODUCER_FIRST_COPY, EARLIEST},
    {"experts listed", PRODUCER, MF_PRODUCER_LISTED, EARLIEST},
    {"x quantised", HELPERS, MF_HELPER_X, LATEST},
    {"front done", CONSUMERS, MF_CONSUMER_FRONT, LATEST},
    {"first stage landed", CONSUMERS, MF_CONSUMER_UP_FIRST, EARLIEST},
    {"last up copy issued", PRODUCER, MF_PRODUCER_LAST_UP, EARLIEST},
    {"up done", CONSUMERS, MF_CONSUMER_UP_DONE, LATEST},
    {"own last h published", FINALISERS, MF_HELPER_LAST, LATEST},
    {"first down copy issued", PRODUCER, MF_PRODUCER_FIRST_DOWN, EARLIEST},
    {"first down stage landed", CONSUMERS, MF_CONSUMER_DOWN_FIRST, EARLIEST},
    {"first h written", LOADERS, MF_HELPER_FIRST, EARLIEST},
    {"down begins", CONSUMERS, MF_CONSUMER_H_FIRST, EARLIEST},
    {"last copy issued", PRODUCER, MF_PRODUCER_LAST_COPY, EARLIEST},
    {"last stage landed", CONSUMERS, MF_CONSUMER_LANDED, LATEST},
    {"last h written", LOADERS, MF_HELPER_LAST, LATEST},
    {"last h there", CONSUMERS, MF_CONSUMER_H_LAST, LATEST},
    {"down done", CONSUMERS, MF_CONSUMER_DOWN_DONE, LATEST},
    {"y stored", CONSUMERS, MF_CONSUMER_STORED, LATEST},
};

static const struct phase_row waits[] = {
    {"producer: flight cap", PRODUCER, MF_PRODUCER_FLIGHT_WAIT, LATEST},
    {"producer: no free stage", PRODUCER, MF_PRODUCER_RING_WAIT, LATEST},
    {"producer: tickets", PRODUCER, MF_PRODUCER_TICKET_WAIT, LATEST},
    {"consumers: up stages", CONSUMERS, MF_CONSUMER_UP_WAIT, LATEST},
    {"consumers: finalisers", CONSUMERS, MF_CONSUMER_REDUCE_WAIT, LATEST},
    {"consumers: down stages", CONSUMERS, MF_CONSUMER_DOWN_WAIT, LATEST},
    {"consumers: h", CONSUMERS, MF_CONSUMER_H_WAIT, LATEST},
    {"finalisers: units", FINALISERS, MF_HELPER_WAIT, LATEST},
    {"h loaders: own progress", LOADERS, MF_HELPER_WAIT, LATEST},
    {"h loaders: others' h", LOADERS, MF_HELPER_H_WAIT, LATEST},
};

static void tracks_of(const struct trace *t, enum who who, int *from, int *to)
{
  const int loaders = MF_TRACE_HELPER + t->finalisers;
  const int first[] = {[PRODUCER] = MF_TRACE_PRODUCER, [CONSUMERS] = MF_TRACE_CONSUMER, [FINALISERS] = MF_TRACE_HELPER, [LOADERS] = loaders,
                       [HELPERS] = MF_TRACE_HELPER, [EVERYBODY] = 0};
  const int end[] = {[PRODUCER] = MF_TRACE_CONSUMER, [CONSUMERS] = MF_TRACE_HELPER, [FINALISERS] = loaders, [LOADERS] = trace_tracks(t),
                     [HELPERS] = trace_tracks(t), [EVERYBODY] = trace_tracks(t)};
  *from = first[who];
  *to = end[who];
}

/* The earliest or latest of the tracks' moments, or their longest wait; NAN if none has one. */
static double pick(const struct trace *t, const struct trace_cta *cta, const struct phase_row *row, bool wait)
{
  double best = NAN;
  int from, to;
  tracks_of(t, row->who, &from, &to);
  for(int track = from; track < to; track++) {
    const double v = wait ? cta->track[track].value[row->index] : cta->track[track].time[row->index];
    best = row->take == EARLIEST ? fmin(best, v) : fmax(best, v);
  }
  return best;
}

static int compare(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static struct trace_phase phase_of(const struct trace *t, int from, int to, const struct phase_row *row, bool wait, double *room)
{
  struct trace_phase phase = {.name = row->name, .wait = wait, .low = NAN, .median = NAN, .high = NAN};
  for(int l = from; l < to; l++) {
    for(int c = 0; c < t->ctas; c++) {
      const double v = pick(t, &t->launch[l].ctas[c], row, wait);
      if(!isnan(v))
        room[phase.count++] = v;
    }
  }
  if(phase.count == 0)
    return phase;
  qsort(room, (size_t)phase.count, sizeof(*room), compare);
  phase.low = room[0];
  phase.median = room[phase.count / 2];
  phase.high = room[phase.count - 1];
  return phase;
}

static int phases_between(const struct trace *t, int from, int to, struct trace_phase out[TRACE_PHASES_MAX])
{
  double *room = malloc((size_t)(to - from) * (size_t)t->ctas * sizeof(*room));
  int count = 0;
  for(size_t i = 0; room != NULL && i < sizeof(moments) / sizeof(moments[0]); i++)
    out[count++] = phase_of(t, from, to, &moments[i], false, room);
  for(size_t i = 0; room != NULL && i < sizeof(waits) / sizeof(waits[0]); i++)
    out[count++] = phase_of(t, from, to, &waits[i], true, room);
  free(room);
  return count;
}

int trace_phases(const struct trace *t, struct trace_phase out[TRACE_PHASES_MAX])
{
  return phases_between(t, 0, t->launches, out);
}

int trace_launch_phases(const struct trace *t, int launch, struct trace_phase out[TRACE_PHASES_MAX])
{
  return phases_between(t, launch, launch + 1, out);
}

/* ---- the critical path ---- */
double trace_slot_done(const struct trace *t, const struct trace_launch *launch, int slot, int *cta)
{
  double done = NAN;
  int seen = 0;
  for(int c = 0; c < t->ctas; c++) {
    for(int track = MF_TRACE_HELPER; track < MF_TRACE_HELPER + t->finalisers; track++) {
      const struct trace_track *tr = &launch->ctas[c].track[track];
      for(int i = 0; i < tr->entries; i++) {
        if(tr->list[i].what / t->units != slot)
          continue;
        seen++;
        if(isnan(done) || tr->list[i].time > done) {
          done = tr->list[i].time;
          *cta = c;
        }
      }
    }
  }
  return seen == t->units ? done : NAN;
}

/* Index of the launch of median length. */
static int median_launch(const struct trace *t)
{
  for(int l = 0; l < t->launches; l++) {
    int shorter = 0;
    for(int other = 0; other < t->launches; other++)
      shorter += other < l ? t->launch[other].length <= t->launch[l].length : t->launch[other].length < t->launch[l].length;
    if(shorter == t->launches / 2)
      return l;
  }
  return 0;
}

static void find_last_h(const struct trace *t, const struct trace_launch *launch, struct trace_path *path)
{
  for(int slot = 0; slot < launch->active; slot++) {
    int cta = -1;
    const double done = trace_slot_done(t, launch, slot, &cta);
    if(isnan(done))
      continue;
    if(isnan(path->h_done) || done > path->h_done) {
      path->h_before = path->h_done;
      path->h_done = done;
      path->h_slot = slot;
      path->h_cta = cta;
    } else if(isnan(path->h_before) || done > path->h_before) {
      path->h_before = done;
    }
  }
}

/* The CTA that stored y last, and how it got there. */
static void find_last_y(const struct trace *t, const struct trace_launch *launch, struct trace_path *path)
{
  for(int c = 0; c < t->ctas; c++) {
    for(int track = MF_TRACE_CONSUMER; track < MF_TRACE_HELPER; track++) {
      const double *time = launch->ctas[c].track[track].time;
      if(!isnan(time[MF_CONSUMER_STORED]) && !(time[MF_CONSUMER_STORED] <= path->y_done)) {
        path->y_done = time[MF_CONSUMER_STORED];
        path->y_cta = c;
      }
    }
  }
  if(path->y_cta < 0)
    return;
  for(int track = MF_TRACE_CONSUMER; track < MF_TRACE_HELPER; track++)
    path->y_down = fmax(path->y_down, launch->ctas[path->y_cta].track[track].time[MF_CONSUMER_DOWN_DONE]);
  for(int track = MF_TRACE_HELPER + t->finalisers; track < trace_tracks(t); track++) {
    const struct trace_track *tr = &launch->ctas[path->y_cta].track[track];
    for(int i = 0; i + 2 < tr->entries; i += 3) {
      if(tr->list[i].what == path->h_slot) {
        path->y_fetched = tr->list[i + 1].time;
        path->y_written = tr->list[i + 2].time;
      }
    }
  }
}

static double named(const struct trace_phase *phases, int count, const char *name, char what)
{
  for(int i = 0; i < count; i++)
    if(strcmp(phases[i].name, name) == 0)
      return what == 'l' ? phases[i].low : what == 'm' ? phases[i].median : phases[i].high;
  return NAN;
}

struct trace_path trace_find_path(const struct trace *t)
{
  struct trace_path path = {.h_slot = -1, .h_cta = -1, .y_cta = -1, .h_done = NAN, .h_before = NAN, .y_fetched = NAN, .y_written = NAN, .y_down = NAN, .y_done = NAN};
  struct trace_phase phases[TRACE_PHASES_MAX];
  int count;
  path.launch = median_launch(t);
  count = trace_launch_phases(t, path.launch, phases);
  path.first_copy = named(phases, count, "first copy issued", 'l');
  path.last_landed = named(phases, count, "last stage landed", 'h');
  path.idle_before = named(phases, count, "first copy issued", 'm');
  path.idle_ring = named(phases, count, "producer: no free stage", 'm');
  path.idle_tickets = named(phases, count, "producer: tickets", 'm');
  path.idle_behind = t->launch[path.launch].length - path.last_landed;
  find_last_h(t, &t->launch[path.launch], &path);
  find_last_y(t, &t->launch[path.launch], &path);
  return path;
}

/* ---- text ---- */
void trace_number(const struct trace *t, double v, char out[32])
{
  if(isnan(v))
    snprintf(out, 32, "-");
  else
    snprintf(out, 32, t->steps ? "%.0f" : "%.2f", v);
}

static void add_phase(const struct trace *t, const struct trace_phase *phase, struct strbuf *out)
{
  char low[32], median[32], high[32];
  trace_number(t, phase->low, low);
  trace_number(t, phase->median, median);
  trace_number(t, phase->high, high);
  strbuf_printf(out, "  %-25s %9s %9s %9s\n", phase->name, low, median, high);
}

/* "25.2 MB in 6.20 us, 4.06 TB/s" */
static void add_rate(const struct trace *t, double bytes, double time, struct strbuf *out)
{
  char text[32];
  trace_number(t, time, text);
  if(t->steps)
    strbuf_printf(out, "%.2f MB in %s steps, %.1f bytes a step", bytes / 1e6, text, bytes / time);
  else
    strbuf_printf(out, "%.2f MB in %s us, %.2f TB/s", bytes / 1e6, text, bytes / time / 1e6);
}

/* Appends "<text> <number>". */
static void add_number(const struct trace *t, const char *text, double v, struct strbuf *out)
{
  char number[32];
  trace_number(t, v, number);
  strbuf_printf(out, "%s %s", text, number);
}

static int expert_of(const struct trace_launch *launch, int slot)
{
  return slot >= 0 && slot < MF_TRACE_LIST ? launch->experts[slot] : -1;
}

void trace_path_text(const struct trace *t, const struct trace_path *path, const struct trace_title *title, struct strbuf *out)
{
  const struct trace_launch *launch = &t->launch[path->launch];
  const double bytes = launch->active * title->expert_bytes;
  strbuf_printf(out, "launch %u, of median length: %d experts, ", (unsigned)launch->number, launch->active);
  add_rate(t, bytes, launch->length, out);
  if(path->y_cta < 0) {
    strbuf_printf(out, "\n");
    return;
  }
  add_number(t, "\n  stream   from", path->first_copy, out);
  add_number(t, " to", path->last_landed, out);
  strbuf_printf(out, ": ");
  add_rate(t, bytes, path->last_landed - path->first_copy, out);
  add_number(t, "\n  idle    ", path->idle_before, out);
  add_number(t, " before the first copy,", path->idle_ring, out);
  add_number(t, " without a free stage,", path->idle_tickets, out);
  add_number(t, " for tickets (CTA medians),", path->idle_behind, out);
  strbuf_printf(out, " behind the last stage\n");
  if(path->h_slot >= 0) {
    strbuf_printf(out, "  last h   expert %d (slot %d of %d) complete at", expert_of(launch, path->h_slot), path->h_slot, launch->active);
    add_number(t, "", path->h_done, out);
    strbuf_printf(out, ", by CTA %d;", path->h_cta);
    add_number(t, " the last but one at", path->h_before, out);
    strbuf_printf(out, "\n");
  }
  strbuf_printf(out, "  last y   CTA %d: that h", path->y_cta);
  add_number(t, " fetched at", path->y_fetched, out);
  add_number(t, ", written at", path->y_written, out);
  add_number(t, ", down done at", path->y_down, out);
  add_number(t, ", y stored at", path->y_done, out);
  add_number(t, ":", path->y_done - path->h_done, out);
  strbuf_printf(out, " from h to y\n");
}

void trace_text(const struct trace *t, const struct trace_title *title, struct strbuf *out)
{
  const struct trace_path path = trace_find_path(t);
  struct trace_phase phases[TRACE_PHASES_MAX];
  const int count = trace_phases(t, phases);
  strbuf_printf(out, "%s on %s: %d token%s, %s, %s, %d launch%s\n", title->shape, title->device, title->tokens, title->tokens == 1 ? "" : "s", title->routing,
                title->schedule, t->launches, t->launches == 1 ? "" : "es");
  if(t->steps)
    strbuf_printf(out, "times are steps of the emulated device: an order of events, no prediction of a GPU's\n");
  else
    strbuf_printf(out, "times in us; SM clock %.0f MHz, SMs compared to %.3f us; stamps cost time: compare phases, not totals with untraced runs\n",
                  t->cycles_per_us, t->uncertainty);
  strbuf_printf(out, "\n  %-25s %9s %9s %9s\n", "since the launch began", "min", "median", "max");
  for(int i = 0; i < count; i++) {
    if(phases[i].wait && !phases[i - 1].wait)
      strbuf_printf(out, "\n  %-25s %9s %9s %9s\n", "waited, sum per CTA", "min", "median", "max");
    add_phase(t, &phases[i], out);
  }
  strbuf_printf(out, "\n");
  trace_path_text(t, &path, title, out);
  if(t->dropped > 0)
    strbuf_printf(out, "%ld entries of lists had no room: single units or slots are missing, sums are not\n", t->dropped);
}

/* ---- JSON ---- */
/* A time to a nanosecond; null for NAN. */
static json_t *number(double v)
{
  return isfinite(v) ? json_real(round(v * 1e3) / 1e3) : json_null();
}

static json_t *track_json(const struct trace *t, const struct trace_track *tr, int track)
{
  json_t *events = json_object(), *values = json_object(), *list = json_array();
  char name[32];
  trace_track_name(t, track, name, sizeof(name));
  for(int i = 0; trace_event_name(track, i) != NULL; i++)
    if(!isnan(tr->time[i]))
      json_object_set_new(events, trace_event_name(track, i), number(tr->time[i]));
  for(int i = 0; trace_value_name(track, i) != NULL; i++)
    json_object_set_new(values, trace_value_name(track, i), number(tr->value[i]));
  for(int i = 0; i < tr->entries; i++)
    json_array_append_new(list, json_pack("[o, i]", number(tr->list[i].time), tr->list[i].what));
  return json_pack("{s:s, s:o, s:o, s:o}", "name", name, "events", events, "values", values, "list", list);
}

static json_t *launch_json(const struct trace *t, const struct trace_launch *launch)
{
  json_t *experts = json_array(), *ctas = json_array();
  for(int i = 0; i < launch->active && i < MF_TRACE_LIST; i++)
    json_array_append_new(experts, json_integer(launch->experts[i]));
  for(int c = 0; c < t->ctas; c++) {
    json_t *tracks = json_array();
    for(int track = 0; track < trace_tracks(t); track++)
      json_array_append_new(tracks, track_json(t, &launch->ctas[c].track[track], track));
    json_array_append_new(ctas, json_pack("{s:i, s:i, s:o}", "cta", c, "sm", launch->ctas[c].sm, "tracks", tracks));
  }
  return json_pack("{s:I, s:o, s:i, s:o, s:o}", "launch", (json_int_t)launch->number, "length", number(launch->length), "active", launch->active, "experts",
                   experts, "ctas", ctas);
}

static json_t *path_json(const struct trace *t, const struct trace_path *p)
{
  const struct trace_launch *launch = &t->launch[p->launch];
  return json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:i, s:i, s:i, s:o, s:o, s:i, s:o, s:o, s:o, s:o}", "launch", (json_int_t)launch->number, "first_copy",
                   number(p->first_copy), "last_landed", number(p->last_landed), "idle_before", number(p->idle_before), "idle_ring", number(p->idle_ring),
                   "idle_tickets", number(p->idle_tickets), "idle_behind", number(p->idle_behind), "h_slot", p->h_slot, "h_expert",
                   expert_of(launch, p->h_slot), "h_cta", p->h_cta, "h_done", number(p->h_done), "h_before", number(p->h_before), "y_cta", p->y_cta,
                   "y_fetched", number(p->y_fetched), "y_written", number(p->y_written), "y_down", number(p->y_down), "y_done", number(p->y_done));
}

json_t *trace_json(const struct trace *t, const struct trace_title *title)
{
  const struct trace_path path = trace_find_path(t);
  struct trace_phase phases[TRACE_PHASES_MAX];
  const int count = trace_phases(t, phases);
  json_t *all = json_pack("{s:s, s:s, s:s, s:i, s:s, s:I, s:s, s:o, s:o, s:i, s:i, s:I, s:f, s:o}", "shape", title->shape, "device", title->device, "schedule",
                          title->schedule, "tokens", title->tokens, "routing", title->routing, "seed", (json_int_t)title->seed, "unit",
                          t->steps ? "steps" : "us", "cycles_per_us", t->steps ? json_null() : number(t->cycles_per_us), "uncertainty",
                          number(t->uncertainty), "ctas", t->ctas, "down_ctas", t->down_ctas, "dropped", (json_int_t)t->dropped, "expert_bytes",
                          title->expert_bytes, "path", path_json(t, &path));
  json_t *moment_rows = json_array(), *wait_rows = json_array(), *launches = json_array();
  for(int i = 0; i < count; i++)
    json_array_append_new(phases[i].wait ? wait_rows : moment_rows,
                          json_pack("{s:s, s:i, s:o, s:o, s:o}", "name", phases[i].name, "count", phases[i].count, "min", number(phases[i].low), "median",
                                    number(phases[i].median), "max", number(phases[i].high)));
  for(int l = 0; l < t->launches; l++)
    json_array_append_new(launches, launch_json(t, &t->launch[l]));
  json_object_set_new(all, "moments", moment_rows);
  json_object_set_new(all, "waits", wait_rows);
  json_object_set_new(all, "launches", launches);
  return all;
}
