/* problem_fixture.h - problems for the tests of datagen.c and of the reference, each to be changed as a test needs it. */
#ifndef MOEFORGE_TESTS_PROBLEM_FIXTURE_H
#define MOEFORGE_TESTS_PROBLEM_FIXTURE_H

#include "moeforge.h"

/* As large as a model's. */
static inline struct mf_problem plain_problem(void)
{
  const struct mf_problem p = {.struct_size = sizeof(p), .experts = 256, .top_k = 8, .hidden = 2048, .intermediate = 512, .expert_count = 256,
                               .groups = 1, .groups_kept = 1, .renormalize = 1};
  return p;
}

/* Small enough for the second implementation. */
static inline struct mf_problem small_problem(void)
{
  const struct mf_problem p = {.struct_size = sizeof(p), .experts = 16, .top_k = 4, .hidden = 256, .intermediate = 128, .expert_count = 16,
                               .groups = 1, .groups_kept = 1, .renormalize = 1};
  return p;
}

#endif
