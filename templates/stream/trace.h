/* trace.h - what a traced build of the kernel family `stream` leaves behind, for host and device. Plain C: the tuner includes it too.
 *
 * Compiled with MF_TRACE, the kernel stamps its SM's clock wherever one piece of work ends and the next begins (hw/trace.cuh, stream/trace.cuh); without it
 * nothing of this exists. The trace area lies in the workspace, behind what params.h describes, at MF_TRACE_OFFSET:
 *
 *   struct mf_trace_cta [MF_TRACE_LAUNCHES][grid CTAs]      launch number n is at [n % MF_TRACE_LAUNCHES]
 *
 * A *track* is what one warp of a role records; only its lane 0 writes, so nothing is shared and nothing is atomic. Each event of a role has a
 * word of its own, what repeats (units, slots) goes to a list of fixed length: entries beyond it are dropped, and the count in value[0] tells how many
 * there were. A time is the low word of the SM's clock with its lowest bit set; 0 is "did not happen".
 *
 * Clocks of different SMs do not begin at the same moment, and the timer that all share (%globaltimer) may tick as slowly as once in a microsecond. So
 * each CTA leaves two pairs (clock, timer), taken one right behind the other: the host places an SM's clock on the timer's axis by all pairs of the SM
 * together, and everything within an SM is exact to the cycle (tuner/trace_read.c). */
#ifndef MF_STREAM_TRACE_H
#define MF_STREAM_TRACE_H

#include "params.h"

#define MF_TRACE_LAUNCHES 8
#define MF_TRACE_EVENTS 16  /* of a role at most */
#define MF_TRACE_VALUES 8
#define MF_TRACE_LIST 128   /* entries of a track */

/* Tracks of a CTA: the producer, the first warp of each consumer warpgroup, the helper warps (finalisers, then h loaders). */
#define MF_TRACE_PRODUCER 0
#define MF_TRACE_CONSUMER 1
#define MF_TRACE_HELPER 3
#define MF_TRACE_TRACKS 10

/* Events, in an order in which they can happen: X(identifier, name). */
#define MF_TRACE_PRODUCER_EVENTS(X)                                               \
  X(MF_PRODUCER_BEGIN, "begin")           /* the warp runs                      */ \
  X(MF_PRODUCER_READY, "barriers ready")  /* the whole CTA runs                 */ \
  X(MF_PRODUCER_ROUTED, "woken")          /* the first experts are known        */ \
  X(MF_PRODUCER_LISTED, "listed")         /* all of them are                    */ \
  X(MF_PRODUCER_FIRST_COPY, "first copy") /* issued; usually before LISTED      */ \
  X(MF_PRODUCER_LAST_UP, "last up copy")                                          \
  X(MF_PRODUCER_FIRST_DOWN, "first down copy")                                    \
  X(MF_PRODUCER_LAST_COPY, "last copy")   /* of all                             */ \
  X(MF_PRODUCER_EXIT, "exit")
#define MF_TRACE_CONSUMER_EVENTS(X)                                               \
  X(MF_CONSUMER_BEGIN, "begin")                                                   \
  X(MF_CONSUMER_LOGITS, "logits loaded")  /* of a warp that scores experts      */ \
  X(MF_CONSUMER_ROUTED, "routed")         /* the token's picks are made         */ \
  X(MF_CONSUMER_X, "x quantised")         /* the warp's share of x              */ \
  X(MF_CONSUMER_FRONT, "front done")      /* x and all tables are there         */ \
  X(MF_CONSUMER_UP_FIRST, "first stage landed")                                   \
  X(MF_CONSUMER_UP_DONE, "up done")       /* products of the last unit          */ \
  X(MF_CONSUMER_DOWN_FIRST, "first down stage landed")                            \
  X(MF_CONSUMER_H_FIRST, "first h there") /* the first wait for h is over       */ \
  X(MF_CONSUMER_LANDED, "last stage landed")                                      \
  X(MF_CONSUMER_H_LAST, "last h there")                                           \
  X(MF_CONSUMER_DOWN_DONE, "down done")                                           \
  X(MF_CONSUMER_STORED, "y stored")                                               \
  X(MF_CONSUMER_EXIT, "exit")
#define MF_TRACE_HELPER_EVENTS(X)                                                 \
  X(MF_HELPER_BEGIN, "begin")                                                     \
  X(MF_HELPER_X, "x quantised")                                                   \
  X(MF_HELPER_PREPARED, "down prepared")  /* s2 is there, the next h is cleared */ \
  X(MF_HELPER_FRONT, "front done")                                                \
  X(MF_HELPER_FIRST, "first done")        /* finaliser: h of a unit published; loader: h of a slot written */ \
  X(MF_HELPER_LAST, "last done")                                                  \
  X(MF_HELPER_EXIT, "exit")

/* Sums of clock cycles and counts. */
#define MF_TRACE_PRODUCER_VALUES(X)                                               \
  X(MF_PRODUCER_ACTIVE, "active experts")  /* list: [slot] = {0, expert}, by CTA 0 */ \
  X(MF_PRODUCER_UP_STAGES, "up stages")                                           \
  X(MF_PRODUCER_DOWN_STAGES, "down stages")                                       \
  X(MF_PRODUCER_FLIGHT_WAIT, "waited for the flight cap")                         \
  X(MF_PRODUCER_RING_WAIT, "waited for a free stage")                             \
  X(MF_PRODUCER_TICKET_WAIT, "waited for tickets")
#define MF_TRACE_CONSUMER_VALUES(X)                                               \
  X(MF_CONSUMER_UNITS, "units")            /* list: {done, unit}                */ \
  X(MF_CONSUMER_DOWN_STAGES, "down stages") /* that the warpgroup multiplies    */ \
  X(MF_CONSUMER_UP_WAIT, "waited for up stages")                                  \
  X(MF_CONSUMER_REDUCE_WAIT, "waited for finalisers")                             \
  X(MF_CONSUMER_DOWN_WAIT, "waited for down stages")                              \
  X(MF_CONSUMER_H_WAIT, "waited for h")
#define MF_TRACE_HELPER_VALUES(X)                                                 \
  X(MF_HELPER_COUNT, "done")               /* finaliser: units, list {published, unit}; loader: slots, list of three each: {progress made, slot}, {h fetched, slot}, {h written, slot} */ \
  X(MF_HELPER_WAIT, "waited")              /* for units; for this CTA's progress */ \
  X(MF_HELPER_H_WAIT, "waited for h")      /* loader: from the first look for a slot's h until it is there */

#define MF_TRACE_ENUM(id, name) id,
enum mf_producer_event { MF_TRACE_PRODUCER_EVENTS(MF_TRACE_ENUM) MF_PRODUCER_EVENTS };
enum mf_consumer_event { MF_TRACE_CONSUMER_EVENTS(MF_TRACE_ENUM) MF_CONSUMER_EVENTS };
enum mf_helper_event { MF_TRACE_HELPER_EVENTS(MF_TRACE_ENUM) MF_HELPER_EVENTS };
enum mf_producer_value { MF_TRACE_PRODUCER_VALUES(MF_TRACE_ENUM) MF_PRODUCER_VALUES };
enum mf_consumer_value { MF_TRACE_CONSUMER_VALUES(MF_TRACE_ENUM) MF_CONSUMER_VALUES };
enum mf_helper_value { MF_TRACE_HELPER_VALUES(MF_TRACE_ENUM) MF_HELPER_VALUES };
#undef MF_TRACE_ENUM

struct mf_trace_track {
  uint32_t time[MF_TRACE_EVENTS];
  uint32_t value[MF_TRACE_VALUES];
  uint32_t list[MF_TRACE_LIST][2]; /* {time, what} */
};

struct mf_trace_cta {
  uint32_t launch;              /* 1 + the launch's number, which says that the record is this launch's */
  uint32_t sm;
  uint32_t pair[2][4];          /* {clock low, clock high, timer low, timer high}: behind the front, and at the end */
  uint32_t finalisers, loaders; /* of the helper tracks; the rest are not there */
  uint32_t down_ctas, units;    /* CTAs that own rows of w2; units of one expert */
  uint32_t spare[2];
  struct mf_trace_track track[MF_TRACE_TRACKS];
};

#define MF_TRACE_OFFSET(topk, intermediate) ((MF_STREAM_WS_BYTES(topk, intermediate) + 255) / 256 * 256)
#define MF_TRACE_BYTES(grid) ((uint64_t)sizeof(struct mf_trace_cta) * MF_TRACE_LAUNCHES * (uint64_t)(grid))

#endif
