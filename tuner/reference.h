/* reference.h - the operator on the CPU, twice: with the kernel's quantisation points (f64 accumulation), and without activation
 * quantisation. It is the definition that kernels are checked against; OpenMP over output rows. DESIGN of the quantisation:
 *   s = max(amax, 1e-10f) / 448.0f (ue8m0: rounded up to a power of two), q = e4m3(x * (1.0f / s)), per token and 128 columns;
 *   h = bf16(silu(gate) * up), requantised the same way; y = sum_e weight * (W2_e h_e), rounded once to bf16.
 *
 * reference.c has the projections, reference_route.c the routing policies, numeric.c the number formats. docs/accuracy.md states every formula.
 * Results do not depend on the number of threads nor on the CPU. Weights are generated row by row and never stored. */
#ifndef MOEFORGE_TUNER_REFERENCE_H
#define MOEFORGE_TUNER_REFERENCE_H

#include "error.h"
#include "types.h"

/* Raise it when any bit of a reference result may change: cached results of another version are not used. */
#define REFERENCE_VERSION 1

/* Routing decisions in canonical order: per token the chosen experts by descending selection key, ties to the lowest index; -1 = none, at the end.
 * Shared experts come behind them, in the numbers behind those of the zero experts. (Score given: in the order of the call, zero experts as -1 among them.) */
struct routing_result {
  int tokens, top_k;                     /* with shared experts */
  int32_t ids[MAX_TOKENS * MAX_TOP_K];   /* [tokens][top_k], of all ranks */
  float weights[MAX_TOKENS * MAX_TOP_K]; /* with the scaling factor; 0 for none */
  int active;                            /* distinct experts of this rank */
};

struct reference_result {
  struct routing_result routing;
  uint16_t *h;          /* bf16 bits [tokens][top_k][N], canonical order; 0 for none and for experts of other ranks */
  float *h_unrounded;   /* the same before rounding to bf16 */
  float *y;             /* [tokens][K], before rounding to bf16 */
  float *y_unquantised; /* [tokens][K], activations and h kept in f32/f64 */
};

/* Routing alone. 'logits' as made by data_logits(), 'bias' may be NULL (none). routed_scaling 0 means 1. */
void reference_route(const struct mf_problem *problem, int tokens, const void *logits, const float *bias, float routed_scaling,
                     struct routing_result *out);
/* Everything, for the generated weights of layer 'layer_seed'. Frees nothing on success but what *out then owns (reference_free).
 * MF_ERR_USAGE for sizes beyond the MAX_ constants, MF_ERR_NOMEM; *out is then empty. */
enum mf_status reference_run(const struct mf_problem *problem, float routed_scaling, uint64_t layer_seed, const struct test_case *tc,
                             struct reference_result *out, struct error *err);
/* y from a given h (bf16 bits, canonical order), i.e. the down projection alone. 'y' has tokens * K floats. */
enum mf_status reference_down(const struct mf_problem *problem, uint64_t layer_seed, const struct routing_result *routing, const uint16_t *h,
                              float *y, struct error *err);
void reference_free(struct reference_result *result);
/* CPU threads that the functions above use in this process, from now on; at least 1. Without OpenMP there is one. */
void reference_set_threads(int threads);

/* The quantisation of one group of 128 (or fewer) values, shared by tests: returns the scale, writes the e4m3 bytes. */
float reference_quantise(const float *values, int count, enum mf_act_scale kind, uint8_t *out);
float e4m3_to_float(uint8_t bits);
uint8_t e4m3_from_float(float value); /* round to nearest even, saturating */
float bf16_to_float(uint16_t bits);
uint16_t bf16_from_float(float value); /* round to nearest even */

#endif
