/* timing.h - which candidate is fastest: interleaved rounds under several routing inputs, with racing.
 *
 * Timing talks to the device through two functions, so that tests can script the times. For each token count: a *heat* of all candidates
 * under the first routing input; those clearly slower than the best leave. A second heat of the rest under the other inputs: what is
 * best for the mix need not be among the best under its first input. The best by both run under every routing input for more rounds.
 * The default schedule and the incumbent never leave. Every round's samples go to the sink (and the store) before the next starts; samples
 * that the store already has for the same timing key are used, not measured again. */
#ifndef MOEFORGE_TUNER_TIMING_H
#define MOEFORGE_TUNER_TIMING_H

#include "error.h"
#include "types.h"

#define TIMING_POLICY_VERSION 2

/* Costs, for n candidates, of which s survive the first heat, and m routing inputs: heat_rounds * n + second_heat_rounds * (m - 1) * s + final_rounds * m * max_finalists
 * replays of 'launches' launches. */
struct timing_policy {
  int heat_rounds;        /* rounds of the first heat */
  int second_heat_rounds; /* of the second, under each of the other inputs */
  int final_rounds;       /* rounds of each final */
  int launches;           /* per graph */
  double leave_ratio;     /* leaves the first heat if its best round is slower than this x the best median */
  int max_finalists;
  uint32_t seed;          /* routing seed set; reporting uses another */
};
void timing_policy_default(struct timing_policy *policy);

struct timing_device {
  void *context;
  /* Prepares candidates (indices into the caller's list) for one profile. */
  enum mf_status (*open_profile)(void *context, const size_t *index, size_t count, int tokens, enum routing_kind routing, uint32_t seed, int launches,
                                 struct error *err);
  /* One round; us has 'count' entries in the order of open_profile. */
  enum mf_status (*round)(void *context, int round, double *us, struct floor_times *floors, double *active, struct error *err);
};

struct timing_sink {
  void *context;
  /* Samples of one finished round, to be stored. A failure ends the timing. */
  enum mf_status (*samples)(void *context, const struct sample *samples, size_t count, struct error *err);
  /* Samples known from earlier runs for one candidate and profile, in round order: writes to out, at most max; returns the number. Of several
   * samples of one round the last counts. May be NULL: everything is measured. */
  size_t (*known)(void *context, int64_t candidate_id, int tokens, enum routing_kind routing, uint32_t seed, struct sample *out, size_t max);
  /* Called between rounds; false stops (interrupt). May be NULL. */
  bool (*keep_going)(void *context, const char *what, size_t done, size_t total);
};

/* What is known of one candidate at one token count. */
struct timing_row {
  size_t candidate;                 /* index in the caller's list */
  bool finalist;
  bool is_default;                  /* as the candidate was flagged when this token count was timed */
  double median_us[MAX_ROUTING_MIX], low_us[MAX_ROUTING_MIX], high_us[MAX_ROUTING_MIX]; /* per routing input of the mix; NAN if not run */
  struct floor_times floors[MAX_ROUTING_MIX]; /* medians over the rounds; tensor_us NAN if no round of the input has it */
  double objective_us, objective_low, objective_high; /* weighted by the mix; NAN unless a finalist */
  struct floor_times objective_floors;                /* likewise */
};

/* Times 'count' candidates at one token count. 'rows' has count entries, in candidate order. 'pinned' (may be NULL): candidates that never leave;
 * those with is_default never do. A candidate whose recipe does not take 'tokens' is left out: its row stays empty.
 * MF_ERR_INTERRUPTED if keep_going said so; a failure of the device or of the sink is passed up, and the round in which it happened has no samples. */
enum mf_status timing_run(const struct timing_policy *policy, const struct model_spec *spec, int tokens, const struct candidate *candidates, size_t count,
                          const bool *pinned, const struct timing_device *dev, const struct timing_sink *sink, struct timing_row *rows, struct error *err);

/* Whether the candidate's kernel can be launched with that many tokens. */
bool timing_takes_tokens(const struct candidate *cand, int tokens);
/* Median and a distribution-free confidence interval of it (at least 95 %, order statistics; min and max below 6 values). Sorts 'values'. NaN for none. */
void timing_median(double *values, size_t count, double *median, double *low, double *high);

#endif
