/* verify_judge.h - is an output right, seen from outside? For `moeforge verify`, which has only y: the kernel is behind the public API.
 *
 *   token   relative L2 of a token against the faithful reference, within VERIFY_TOKEN_LIMIT. Correct kernels reach 1e-2 and now and then 2.2e-2,
 *           since an h that differs in its last bit may be quantised to the neighbouring e4m3 value (docs/accuracy.md)
 *   rows    the same over 8 output rows of a token, relative to the token's mean, within VERIFY_ROWS_LIMIT: a few wrong rows do not vanish in the mean
 *   end     error of all tokens against the unquantised operator beyond VERIFY_END_SLACK of their norm, as a multiple of the faithful reference's own;
 *           limit gate_limit(GATE_END)
 *   and     everything written, finite, equal in both launches, nothing written beside the output */
#ifndef MOEFORGE_TUNER_VERIFY_JUDGE_H
#define MOEFORGE_TUNER_VERIFY_JUDGE_H

#include "check.h"
#include "reference.h"
#include "types.h"

#define VERIFY_TOKEN_LIMIT 0.05
#define VERIFY_ROWS_LIMIT 0.25
#define VERIFY_END_SLACK 0.02 /* as in check.c: legal differences of h re-draw some roundings */
#define VERIFY_POISON 0xffffu /* a bf16 NaN that kernels do not produce */

/* What the launches of a case left behind. y has tokens * K bf16 values each. */
struct verify_output {
  const uint16_t *y, *y_again;
  bool guards_intact;
};

struct verify_verdict {
  bool passed;             /* so far; set it to true before the first case */
  double token, rows, end; /* worst so far */
  int cases;
  char detail[256];        /* the first failure, one line */
};

/* Judges one case and adds to *verdict. */
void verify_judge(const struct mf_problem *problem, const struct test_case *tc, const struct reference_result *ref, const struct verify_output *out,
                  struct verify_verdict *verdict);
/* The cases for an entry's token counts, at most 'max'; returns their number. */
int verify_cases(int tokens_min, int tokens_max, struct test_case *out, int max);

#endif
