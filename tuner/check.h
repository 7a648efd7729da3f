/* check.h - is a kernel right? Staged gates, each tight (docs/accuracy.md has the measured distributions that justify them):
 *
 *   routing   ids exactly the reference's; weights within GATE_WEIGHT
 *   h         per (token, expert) row: what the kernel's h is off the unrounded reference beyond rounding to bf16, relative L2 within GATE_H
 *   y|h       against the reference down projection of the kernel's own h, per token and per 8 output rows, likewise: within GATE_Y_GIVEN_H
 *   end       against the unquantised operator, per token: error no more than GATE_END x the faithful reference's own, plus a slack
 *   and       every output written, finite, bitwise equal over replays, guards intact, status word clean
 * A candidate passes if every gate passes on every case. Reference results are made once per (problem, case) and kept in a cache. */
#ifndef MOEFORGE_TUNER_CHECK_H
#define MOEFORGE_TUNER_CHECK_H

#include "device.h"
#include "error.h"
#include "reference.h"
#include "strbuf.h"
#include "types.h"

#define GATE_TABLE(X)                                                                                             \
  X(GATE_ROUTING, "routing")                                                                                      \
  X(GATE_WEIGHT, "routing_weight")                                                                                \
  X(GATE_H, "h")                                                                                                  \
  X(GATE_Y_GIVEN_H, "y_given_h")                                                                                  \
  X(GATE_END, "end_to_end")                                                                                       \
  X(GATE_WRITTEN, "written")                                                                                      \
  X(GATE_FINITE, "finite")                                                                                        \
  X(GATE_REPLAY, "replay")                                                                                        \
  X(GATE_GUARD, "guard")                                                                                          \
  X(GATE_STATUS, "status")
enum gate {
#define GATE_ENUM(name, text) name,
  GATE_TABLE(GATE_ENUM)
#undef GATE_ENUM
  GATES
};
const char *gate_name(enum gate gate);
/* The limit that a gate compares with; 0 for the yes/no gates. */
double gate_limit(enum gate gate);

/* Start with check_begin(). */
struct check_result {
  bool passed;
  enum gate failed_gate;      /* first failing gate */
  double worst[GATES];        /* worst value seen per gate over the cases so far; infinite where no number says how bad it is */
  double worst_error;         /* largest relative L2 error of a token against the unquantised operator so far, but in tiny_scale, where quantisation gives
                               * zeros and the error is 1 (not a gate: spec_limits.max_error);
                               * 0: not on record */
  char detail[256];           /* "h: token 3 expert 17: 4.1e-2 > 7.0e-4 (B=5 zipf normal seed 2)" */
};

#define CHECK_POLICY_VERSION 2
#define CHECK_MAX_CASES 512
/* The cases for token counts lo..hi: every count x routing kind x data kind that is worth it, several seeds. Returns their number. */
int check_cases(const struct mf_problem *problem, int tokens_lo, int tokens_hi, struct test_case *out, int max);
/* Nothing judged yet: passed, all worst values 0. */
void check_begin(struct check_result *result);
/* Judges one output. 'ref' is the case's reference. Updates *result; result->passed turns false at the first failing gate. Gates are taken in the
 * order in which they explain each other: guard, status, written, finite, replay, routing, routing_weight, h, y_given_h, end_to_end;
 * behind a failing guard .. routing the case's later ones are not measured. MF_OK whatever the verdict; MF_ERR_NOMEM. */
enum mf_status check_judge(const struct mf_problem *problem, uint64_t layer_seed, const struct test_case *tc, const struct reference_result *ref,
                           const struct device_output *out, struct check_result *result, struct error *err);
/* One line per gate: name, worst value, limit. */
void check_summary(const struct check_result *result, struct strbuf *out);

/* Reference cache: files in 'dir', named by problem key, reference version and case; written by temporary name and rename. A file that is damaged or
 * of another version is made anew. 'dir' is made if it is missing; NULL: no cache. Any number of processes may use it at once. */
enum mf_status reference_cached(const char *dir, const struct mf_problem *problem, float routed_scaling, uint32_t layer, const struct test_case *tc,
                                struct reference_result *out, struct error *err);

#endif
