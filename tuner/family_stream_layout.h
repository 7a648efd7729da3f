/* family_stream_layout.h - what family_stream.c and family_stream_recipe.c share, and nobody else: the knobs' places and the sizes that follow from them. */
#ifndef MOEFORGE_TUNER_FAMILY_STREAM_LAYOUT_H
#define MOEFORGE_TUNER_FAMILY_STREAM_LAYOUT_H

#include "family_stream.h"

#define REDUCE_BUFFERS 2 /* = finaliser warps */

enum { KNOB_RING, KNOB_LOADERS, KNOB_LOOKAHEAD, KNOB_FLIGHT, KNOB_FIRST_DOWN, KNOB_STATIC, KNOB_ROTATE, KNOB_HAND_OFF, KNOB_PDL, KNOB_UNIT, STREAM_KNOBS };

/* Sizes that follow from problem, schedule and device: the host's twin of struct Layout in layout.cuh. */
struct stream_layout {
  int kblocks, hblocks;   /* of w13 and of w2; the latter are those of the unsharded matrix, the first and last may be partly other ranks' */
  int unit_features, stage_kblocks; /* of an up unit, k-blocks of its rows in a stage */
  int units, unit_stages; /* up units per expert, stages per unit */
  int grid, down_ctas, down_rows;
  int down_row_blocks;    /* scale blocks that a CTA's rows touch */
  int down_kblocks;       /* k-blocks per down copy */
  int scale_slots;
  int threads;
  int slots;              /* active experts at most */
  long shared_bytes;
};

static inline long align_up(long value, long alignment)
{
  return (value + alignment - 1) / alignment * alignment;
}

struct stream_layout stream_make_layout(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev);

/* family_stream_recipe.c: members of struct family_ops. */
void stream_emit(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct strbuf *out);
enum mf_status stream_recipe(const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev, struct mf_recipe *out,
                             struct error *err);
enum mf_status stream_check_meta(const void *meta, size_t bytes, const struct mf_problem *p, const struct schedule *sched, const struct device_info *dev,
                                 struct verdict *why);

#endif
