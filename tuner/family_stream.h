/* family_stream.h - the kernel family `stream`: weight streaming, up to 8 tokens (templates/stream/, docs/kernel.md). */
#ifndef MOEFORGE_TUNER_FAMILY_STREAM_H
#define MOEFORGE_TUNER_FAMILY_STREAM_H

#include "family.h"

extern const struct family_ops family_stream;

/* ---- what the family `batch` has in common with it: router, parameters, tensor maps ---- */

/* The knobs that are run-time parameters. */
struct stream_knobs {
  int flight, first_down_flight, static_rounds, rotate_k;
};

/* MF_STREAM_* of the problem's policy (templates/stream/params.h). */
int stream_scoring(const struct mf_problem *p);
/* Whether selection goes through tables of scores in shared memory. */
bool stream_has_scores(const struct mf_problem *p);
/* The slope of the activation: 1 is SiLU, as 0 is in the problem. */
float stream_swiglu_alpha(const struct mf_problem *p);
/* The rules about the problem itself: router, sizes, features, rows of w2 per CTA. Not those about tokens and memory. */
enum mf_status stream_serves_problem(const struct mf_problem *p, const struct device_info *dev, struct verdict *why);
/* "struct Shape {...};" of the emitted source. */
void stream_emit_shape(const struct mf_problem *p, struct strbuf *out);
/* Fields of struct mf_stream_params. */
void stream_add_params(struct mf_recipe *r, const struct mf_problem *p, const struct stream_knobs *k);
/* The maps of w13 and w2, in this order: 'features' of a unit, 'kblocks' per copy, 'rows' of w2 per CTA. */
void stream_add_up_map(struct mf_recipe *r, const struct mf_problem *p, int features, int kblocks);
void stream_add_down_map(struct mf_recipe *r, const struct mf_problem *p, int rows, int kblocks);
/* The kernel's arguments: the parameters, then each map that has been added. */
void stream_add_arguments(struct mf_recipe *r);

#endif
