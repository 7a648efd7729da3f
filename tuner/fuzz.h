/* fuzz.h - the case of a seed, for fuzz.c and its test; the command itself is declared in commands.h. */
#ifndef MOEFORGE_TUNER_FUZZ_H
#define MOEFORGE_TUNER_FUZZ_H

#include "types.h"

/* Token count (one of 'tokens'), routing, data and inputs that 'seed' stands for. */
struct test_case fuzz_case(uint64_t seed, const int *tokens, int ntokens);

#endif
