/* datagen.h - the numbers that kernels are checked and timed on: weights, inputs, router logits.
 *
 * All values come from one counter-based generator: value = f(seed, stream, index), so that any part can be made anywhere, in any order,
 * with identical bits on the CPU (datagen.c) and the GPU (templates/tools/datagen.cu); both include templates/tools/datagen_core.h, which says how.
 * Weights: 8 e4m3 bytes per 64-bit hash through a table of normal quantiles. x and logits are made on the CPU only (datagen.c, datagen_logits.c).
 * Nothing depends on the C library's math, so that results can be kept and compared across machines.
 *
 * Limits (asserted): experts + zero_experts <= DATA_MAX_LOGITS, as problem_validate() makes sure. */
#ifndef MOEFORGE_TUNER_DATAGEN_H
#define MOEFORGE_TUNER_DATAGEN_H

#include "types.h"

#define DATA_MAX_LOGITS 2048 /* columns of the router logits */

/* Streams of the generator. */
enum data_stream { DATA_W13 = 1, DATA_W2, DATA_S13, DATA_S2, DATA_X, DATA_LOGITS, DATA_BIAS, DATA_PICK, DATA_GATE };

/* The 64-bit hash that everything is made of. */
uint64_t data_hash(uint64_t seed, uint32_t stream, uint64_t index);
/* 'count' bytes of weights starting at byte 'first' (a multiple of 8) of the tensor. */
void data_weights(uint64_t layer_seed, enum data_stream stream, uint64_t first, size_t count, uint8_t *out);
/* Block scales; magnitude chosen so that activations stay near 1 for the problem (and scaled by the case's data kind at x). */
void data_scales(uint64_t layer_seed, enum data_stream stream, const struct mf_problem *problem, uint64_t first, size_t count, float *out);
/* The power of two that the scales of a stream (DATA_S13, DATA_S2) lie around; the last argument of the kernel mf_gen_scales. */
float data_scale_base(const struct mf_problem *problem, enum data_stream stream);
/* Router correction bias of a layer, one value per column of the logits: small normal values of either sign. */
void data_bias(uint64_t layer_seed, int columns, float *out);
/* x: bf16 bits [tokens][hidden] for a case. */
void data_x(const struct mf_problem *problem, const struct test_case *tc, uint16_t *out);
/* What the engine passes for routing, data_logits_bytes() of it. Router logits: bf16 bits (or f32 if problem says so) [tokens][experts + zero_experts].
 * With score given: i32 ids [tokens][top_k], then their f32 weights [tokens][top_k]. Gates of shared experts, if there are any, at the next multiple
 * of 16: [tokens][shared experts], of the logits' type. */
void data_logits(const struct mf_problem *problem, const struct test_case *tc, void *out);
size_t data_logits_bytes(const struct mf_problem *problem, int tokens);
/* Gate 'index' (token * shared experts + shared expert) of these bytes. */
float data_gate_at(const struct mf_problem *problem, const void *logits, int tokens, int index);
/* Fills in where a call of call->tokens finds them, if they lie at 'address' on the device. */
void data_logits_call(const struct mf_problem *problem, uint64_t address, struct mf_call *call);
/* Seed of the weights of layer 'layer'. */
uint64_t data_layer_seed(uint32_t layer);
/* Seed of everything else in a case: all its fields count. */
uint64_t data_case_seed(const struct test_case *tc);
/* Expected number of distinct active experts of this rank, by formula or by simulation with a fixed seed. */
double data_expected_active(const struct mf_problem *problem, int tokens, enum routing_kind routing);

#endif
