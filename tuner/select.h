/* select.h - picks winners from timing rows, deterministically.
 *
 * At each token count the winner is a *set* of ties: the finalists within TIE_RATIO of the best objective, and those whose interval reaches it and whose
 * median is within TIE_MAX_RATIO (noise must not make a tie of everything). The default schedule wins if it is within TIE_RATIO. Of a set, the one
 * that also ties at the most neighbouring token counts is taken, then fewest ring stages, then least shared memory, then the name: the order of the
 * candidates does not matter. Whoever is slower than the default schedule is in no set. Where several finalists are flagged as the default, the fastest
 * of them is the default.
 *
 * Each tuned token count is one winner. A count that was not tuned is served by the winner of the next larger one that was: the interval of a count
 * begins after the next smaller one of the spec. */
#ifndef MOEFORGE_TUNER_SELECT_H
#define MOEFORGE_TUNER_SELECT_H

#include "error.h"
#include "store.h"
#include "timing.h"
#include "types.h"

#define OBJECTIVE_VERSION 1
#define TIE_RATIO 1.005
#define TIE_MAX_RATIO 1.02

/* rows[t] are the timing rows (count entries) of token count tokens[t], t < ntokens, ascending. Writes one winner per token count.
 * MF_ERR_NOT_FOUND if a token count has no finalist. Names, ids and keys of the winners other than candidate_id, schedule_name and times are the caller's. */
enum mf_status select_winners(const struct model_spec *spec, const int *tokens, int ntokens, const struct candidate *candidates, size_t count,
                              const struct timing_row *const *rows, struct winner *winners, int *nwinners, struct error *err);
/* The same from the cost model alone, with the routing mix's expected numbers of active experts; winners are marked predicted. */
enum mf_status select_predicted(const struct model_spec *spec, const int *tokens, int ntokens, const struct device_info *dev,
                                const struct candidate *candidates, size_t count, struct winner *winners, int *nwinners, struct error *err);

/* The floor formula under the routing mix: launch + expected bytes / bandwidth. The caller lowers measured winners' floor_us to it where it is smaller. */
double select_floor_us(const struct model_spec *spec, int tokens, const struct device_info *dev);

#endif
