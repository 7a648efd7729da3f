/* trace.h - where the time of a launch goes: what `moeforge trace` makes of the records that a traced kernel leaves (templates/stream/trace.h).
 *
 *   trace_read.c      raw clocks -> times on one axis; looks whether everything is there and in an order that makes sense
 *   trace_report.c    times -> phases (smallest, median, largest over CTAs), the critical path of one launch; text and JSON
 *   trace_svg.c       the picture
 *   trace.c           the command
 *
 * All but the command is pure. Times are microseconds, or steps on the emulated device; those of a launch count from its first CTA's begin. NAN: it did
 * not happen. */
#ifndef MOEFORGE_TUNER_TRACE_H
#define MOEFORGE_TUNER_TRACE_H

#include "error.h"
#include "strbuf.h"
#include "stream/trace.h"
#include "types.h"

#include <jansson.h>

struct trace_entry {
  double time;
  int what; /* unit or slot */
};

/* What one warp recorded. */
struct trace_track {
  double time[MF_TRACE_EVENTS];
  double value[MF_TRACE_VALUES]; /* counts as they are, waits in the unit of times */
  int entries;                   /* of the list that are there */
  struct trace_entry list[MF_TRACE_LIST];
};

struct trace_cta {
  int sm;
  struct trace_track track[MF_TRACE_TRACKS];
};

struct trace_launch {
  uint32_t number;               /* since the workspace was new */
  double length;                 /* until the last CTA has stored its rows of y (or has nothing left to do) */
  int active;
  int experts[MF_TRACE_LIST];    /* by slot; a launch with more slots than a list has room for shows the first */
  struct trace_cta *ctas;
};

struct trace {
  bool steps;                    /* of the emulated device */
  int ctas, down_ctas, finalisers, loaders, units;
  int launches;
  long dropped;                  /* list entries that had no room */
  double cycles_per_us;          /* of the SMs' clock */
  double uncertainty;            /* of a comparison between two SMs, at most */
  struct trace_launch launch[MF_TRACE_LAUNCHES];
};

/* 'area' as it lies in the workspace; launches first .. first + launches - 1 are in it. MF_ERR_CHECK: something is missing or out of order, and which. On
 * failure there is nothing to free. */
enum mf_status trace_read(const struct mf_trace_cta *area, int ctas, uint32_t first, int launches, bool steps, struct trace *out, struct error *err);
void trace_free(struct trace *trace);
/* How many tracks a CTA has, and what they are called: "producer", "consumers 0", "finaliser 1", "h loader 0". */
int trace_tracks(const struct trace *trace);
void trace_track_name(const struct trace *trace, int track, char *out, size_t space);
/* Name of an event or value of a track; NULL if it has no such number. */
const char *trace_event_name(int track, int event);
const char *trace_value_name(int track, int value);

/* ---- what people want to know ---- */
struct trace_phase {
  const char *name;
  bool wait;                     /* a sum of waits; else a moment */
  int count;                     /* CTAs and launches that have it */
  double low, median, high;
};
#define TRACE_PHASES_MAX 40
/* Over all CTAs of all launches. Returns the number of phases. */
int trace_phases(const struct trace *trace, struct trace_phase out[TRACE_PHASES_MAX]);
/* The same of one launch. */
int trace_launch_phases(const struct trace *trace, int launch, struct trace_phase out[TRACE_PHASES_MAX]);

/* One launch's way to its last y. */
struct trace_path {
  int launch;                    /* index into trace.launch */
  double first_copy, last_landed; /* of all CTAs */
  double idle_before, idle_ring, idle_tickets, idle_behind; /* of the stream: the first three are those of the median CTA */
  int h_slot, h_cta;             /* the slot whose h was complete last, and who published its last unit */
  double h_done, h_before;       /* when; and the slot before it, NAN if there is none */
  int y_cta;                     /* who stored y last */
  double y_fetched, y_written, y_down, y_done; /* its way there: h of the last slot fetched and written, products done, stored */
};
/* Of the launch of median length. */
struct trace_path trace_find_path(const struct trace *trace);
/* When the h of a slot was complete: its last unit published, and by which CTA. NAN if that is not in the lists. */
double trace_slot_done(const struct trace *trace, const struct trace_launch *launch, int slot, int *cta);

/* What was traced, for headings. */
struct trace_title {
  const char *shape, *device, *schedule, *routing;
  int tokens;
  uint32_t seed;
  double expert_bytes;
};
/* "9.71", "1234" (steps), "-" for NAN. */
void trace_number(const struct trace *trace, double v, char out[32]);
/* The lines about the path alone, and all there is to say. */
void trace_path_text(const struct trace *trace, const struct trace_path *path, const struct trace_title *title, struct strbuf *out);
void trace_text(const struct trace *trace, const struct trace_title *title, struct strbuf *out);
json_t *trace_json(const struct trace *trace, const struct trace_title *title); /* NULL: no memory */
void trace_svg(const struct trace *trace, const struct trace_title *title, struct strbuf *out);

#endif
