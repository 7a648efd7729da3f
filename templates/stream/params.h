/* params.h - what host and device agree on about the kernel family `stream`. Plain C: the tuner includes it too.
 *
 * Three contracts live here: the kernel's parameter struct, its workspace and the metadata symbol `mf_meta` that every
 * cubin of the family exports so that the host can compare its own formulas with the device's. */
#ifndef MF_STREAM_PARAMS_H
#define MF_STREAM_PARAMS_H

#include "hw/ints.h"

#define MF_STREAM_MAGIC 0x3153464du /* the bytes "MFS1" */
#define MF_STREAM_VERSION 1u

#define MF_STREAM_MAX_TOKENS 8
#define MF_STREAM_MAX_TOPK 22
#define MF_STREAM_MAX_COLUMNS 1024 /* of the router logits: routed and zero experts */

/* First argument of `mf_moe`; the second and third are the tensor maps of w13 and w2 (128 bytes each, aligned to 64).
 * Pitches count elements, not bytes. The struct ends where a tensor map may begin (NVRTC: parameters from 528 on, maps at multiples of 64). Everything in this struct is a run-time value: no field needs another cubin. */
struct mf_stream_params {
  const void *x;              /* bf16 [tokens][K], rows x_pitch apart, 16-byte aligned rows                         */
  const void *logits;         /* bf16 or f32 [tokens][E], rows logits_pitch apart, 16-byte aligned rows; only E are read.
                                 MF_STREAM_GIVEN: the ids, int32_t [tokens][k], -1 for none                         */
  const float *bias;          /* f32 [E] (zero experts included) selection bias, 16-byte aligned; read only if the policy has one.
                                 MF_STREAM_GIVEN: the weights, [tokens][k], rows weights_pitch apart, in the order of the ids */
  const float *s13;           /* f32 [E][2][ceil((o+N)/128)][K/128], gate then up, 16-byte aligned                  */
  const float *s2;            /* f32 [E][K/128][ceil((o+N)/128)]; o: the first feature's offset in its 128-block    */
  void *out;                  /* bf16 [tokens][K], rows out_pitch apart                                             */
  void *workspace;            /* MF_STREAM_WS_BYTES bytes, aligned to 128, zeroed once (and after an aborted launch) */
  int32_t tokens;             /* 1 .. 8                                                                             */
  int32_t x_pitch;            /* multiple of 8                                                                      */
  int32_t logits_pitch;       /* multiple of 8 (bf16) or 4 (f32); MF_STREAM_GIVEN: any, at least k                  */
  int32_t out_pitch;          /* at least K                                                                         */
  float scaling;              /* every routing weight is multiplied by it                                           */
  int32_t flight;             /* copies in flight per CTA, in stages: 1 .. ring stages (larger is clamped)          */
  int32_t first_down_flight;  /* the same for the first four down stages                                            */
  int32_t static_rounds;      /* rounds of up units dealt statically before tickets; below the look-ahead acts as it */
  int32_t rotate_k;           /* 1: successive units start at successive k chunks                                   */
  int32_t evict_first;        /* 1: weights are read with L2 evict_first, 0: evict_normal                           */
  const void *gate;           /* gated shared experts: bf16 or f32 (as logits) [tokens][shared experts], rows gate_pitch apart */
  int32_t weights_pitch;      /* MF_STREAM_GIVEN: at least k                                                        */
  int32_t gate_pitch;         /* at least the number of shared experts                                              */
};

/* --- Workspace ------------------------------------------------------------------------------------------------
 * offset  bytes         what
 *      0  2048          uint32_t launches[grid CTAs]: launches that this CTA has completed, equal for all CTAs between
 *                       launches. Its lowest bit is the parity of the NEXT launch.
 *   2048  2 x 128       uint32_t ticket[parity * 32]: the counters that up units are drawn from
 *   2304  4             uint32_t status: bits MF_STREAM_STATUS_*, only ever set by the kernel
 *   2308  4             uint32_t watchdog: 0, or the first wait that gave up: 1 << 31 | wait id << 24 | cta << 12 | thread
 *   3072  8 * k * 4     int32_t ids[8][k]: the experts of each token in rank order, -1 for none (nor for a zero expert). Here and below k counts
 *                       the shared experts as well; they have the numbers behind those of the zero experts.
 *                       Rows of tokens that the launch did not have are left alone. From 2560 on if k > 16.
 *   3584  8 * k * 4     float weights[8][k]: their weights, scaling included; 0 where there is no expert. From 3328 on if k > 16.
 *   4096  2 * 8*k*N*2   h[parity][token * k + rank][N]: bf16 bits inverted (stored word = ~bits); 0 = not there yet.
 *                       After L launches the last one's h is at parity (L - 1) & 1; the other half is all zero.
 *                       Rows of ranks without an expert are zero.
 * The rank order: shared experts; then those that token 0 has, by its falling score (ties: lowest expert first; given ids as they come); then the
 * others by rising expert index. Under expert parallelism, experts of other ranks come behind this rank's, in any order; their rows of h are zero. */
#define MF_STREAM_WS_LAUNCHES 0
#define MF_STREAM_WS_TICKETS 2048
#define MF_STREAM_WS_TICKET_STRIDE 128
#define MF_STREAM_WS_STATUS 2304
#define MF_STREAM_WS_WATCHDOG 2308
/* topk: ranks per token, shared experts included. */
#define MF_STREAM_WS_IDS(topk) ((topk) <= 16 ? 3072 : 2560)
#define MF_STREAM_WS_WEIGHTS(topk) ((topk) <= 16 ? 3584 : 3328)
#define MF_STREAM_WS_H 4096
#define MF_STREAM_WS_MAX_GRID 512
#define MF_STREAM_WS_H_ROWS(topk) (MF_STREAM_MAX_TOKENS * (topk))
#define MF_STREAM_WS_H_BYTES(topk, intermediate) (MF_STREAM_WS_H_ROWS(topk) * (intermediate) * 2) /* of one parity */
#define MF_STREAM_WS_BYTES(topk, intermediate) (MF_STREAM_WS_H + 2 * MF_STREAM_WS_H_BYTES(topk, intermediate))

#define MF_STREAM_STATUS_NAN 1u /* a router logit (or its biased score) was NaN: that expert was not selected */
#define MF_STREAM_STATUS_ID 4u  /* a given id does not exist: it selected nothing */

/* Scoring function of Shape::kScoring. */
#define MF_STREAM_SOFTMAX 0       /* the logits select */
#define MF_STREAM_SIGMOID 1       /* the score selects, or score + bias */
#define MF_STREAM_SQRT_SOFTPLUS 2 /* likewise */
#define MF_STREAM_PROBABILITY 3   /* softmax whose probability selects, or probability + bias */
#define MF_STREAM_GIVEN 4         /* nothing is scored: ids and weights are parameters */

/* The symbol `mf_meta` of every cubin of this family. */
struct mf_stream_meta {
  uint32_t magic, version;    /* MF_STREAM_MAGIC, MF_STREAM_VERSION                        */
  uint32_t params_bytes;      /* sizeof(struct mf_stream_params)                           */
  uint32_t experts, topk, intermediate, hidden;
  uint32_t scoring, bias, groups, top_groups, renormalise, logits_f32, act_scale_ue8m0;
  uint32_t grid_ctas, threads, shared_bytes;
  uint32_t down_ctas, down_rows;          /* CTAs that own rows of w2, and how many rows each  */
  uint32_t ring_stages, stage_bytes;
  uint32_t reduce_buffers, h_loaders, ticket_lookahead, scale_slots;
  uint32_t down_kblocks;                  /* box of the down tensor map: {128, down_rows, down_kblocks} */
  uint32_t pdl, watchdog;                 /* compiled with programmatic dependent launch / watchdog     */
  uint32_t workspace_bytes, h_offset, ids_offset, weights_offset, status_offset, launches_offset;
  uint32_t zero_experts, expert_begin, expert_count;
  uint32_t intermediate_offset;           /* of the rank's first feature in its 128-block               */
  uint32_t hand_off;
  uint32_t unit_features;
  uint32_t shared_experts, shared_gate, weight_on_input;
  float swiglu_limit, swiglu_alpha;       /* 0: none; 1: SiLU                                           */
};

#endif
