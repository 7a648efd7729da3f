/* space.h - the schedule space of one problem on one device: which candidates there are, and why others are not.
 *
 * The space is the product of the knobs' values of each family that serves the problem. Effort picks a subset:
 *   EFFORT_QUICK       the defaults, and the primary knobs that need no other kernel (or are marked so) varied one at a time
 *   EFFORT_DEFAULT     the product over the primary knobs; every other knob varied one at a time around the default, and one that is marked so
 *                      together with the primary ones that need another kernel
 *   EFFORT_EXHAUSTIVE  the whole product
 * The order is deterministic, defaults first. Rejected combinations go to the caller's function with the rule that rejected them. */
#ifndef MOEFORGE_TUNER_SPACE_H
#define MOEFORGE_TUNER_SPACE_H

#include "error.h"
#include "family.h"
#include "types.h"

enum effort { EFFORT_QUICK, EFFORT_DEFAULT, EFFORT_EXHAUSTIVE };

struct candidate_list {
  struct candidate *items; /* owned */
  size_t count, space;
  size_t considered;       /* combinations looked at, rejected ones included */
};

typedef void space_reject_fn(void *context, const struct schedule *sched, const struct verdict *why);

/* Appends the candidates for these token counts, of every family that serves some of them: which counts a candidate takes, its recipe says. Each has its
 * name, artifact_name and recipe filled in; is_default is set on a family's default schedule of any of the counts. MF_ERR_UNSUPPORTED, with the
 * rule, if there is a count that no family serves; then nothing is appended. */
enum mf_status space_enumerate_counts(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, enum effort effort,
                                      struct candidate_list *list, space_reject_fn *reject, void *context, struct error *err);
/* The same for every count lo..hi. */
enum mf_status space_enumerate(const struct mf_problem *problem, const struct device_info *dev, int tokens_lo, int tokens_hi, enum effort effort,
                               struct candidate_list *list, space_reject_fn *reject, void *context, struct error *err);
/* Appends the schedules that 'names' lists, comma-separated, and no others. A name that cannot be read, that no count needs or that a rule rejects is an
 * error: MF_ERR_USAGE, MF_ERR_NOT_FOUND, MF_ERR_UNSUPPORTED, MF_REJECTED. */
enum mf_status space_enumerate_names(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, const char *names,
                                     struct candidate_list *list, struct error *err);
/* Appends the schedule if a token count needs it, no rule rejects it and it is not there yet. */
enum mf_status space_add(const struct mf_problem *problem, const struct device_info *dev, const int *tokens, int ntokens, const struct schedule *sched,
                         struct candidate_list *list, struct error *err);
void candidate_list_free(struct candidate_list *list);
enum mf_status effort_from_name(const char *name, enum effort *out, struct error *err);
const char *effort_name(enum effort effort);

#endif
