/* params.h - what host and device agree on about the kernel family `batch`. Plain C: the tuner includes it too.
 *
 * The parameters are those of the family `stream` (struct mf_stream_params), with 9 .. 8 * groups tokens, stages of 8 KB, and the first eight down
 * stages under first_down_flight. So are the scoring functions, the status bits and the head of the workspace. Its own are the sizes of the rest and
 * the metadata symbol. */
#ifndef MF_BATCH_PARAMS_H
#define MF_BATCH_PARAMS_H

#include "stream/params.h"

#define MF_BATCH_MAGIC 0x3142464du /* the bytes "MFB1" */
#define MF_BATCH_VERSION 1u

#define MF_BATCH_MIN_TOKENS 9
#define MF_BATCH_MAX_TOKENS 32
#define MF_BATCH_MIN_GROUPS 2 /* of 8 tokens, compiled in */
#define MF_BATCH_MAX_GROUPS 4
#define MF_BATCH_MAX_TOPK MF_STREAM_MAX_TOPK

/* --- Workspace ------------------------------------------------------------------------------------------------
 * offset          what
 *      0          launch counts, ticket counters, status, watchdog: as in stream/params.h
 *   4096          h[parity][token * k + rank][N] for 8 * groups tokens: as in stream/params.h
 *   WS_IDS        int32_t ids[8 * groups][k]: the experts of each token in rank order, -1 for none (nor for a zero expert)
 *   WS_WEIGHTS    float weights[8 * groups][k]: their weights, scaling included; 0 where there is no expert
 * Here and above k counts the shared experts as well; they have the numbers behind those of the zero experts.
 * The rank order: by rising expert index, shared ones last; under expert parallelism, experts of other ranks come behind this rank's. Rows of tokens that the
 * launch did not have are left alone. */
#define MF_BATCH_WS_H MF_STREAM_WS_H
#define MF_BATCH_WS_H_BYTES(groups, topk, intermediate) (8 * (groups) * (topk) * (intermediate) * 2) /* of one parity */
#define MF_BATCH_WS_IDS(groups, topk, intermediate) (MF_BATCH_WS_H + 2 * MF_BATCH_WS_H_BYTES(groups, topk, intermediate))
#define MF_BATCH_WS_WEIGHTS(groups, topk, intermediate) (MF_BATCH_WS_IDS(groups, topk, intermediate) + 8 * (groups) * (topk) * 4)
#define MF_BATCH_WS_BYTES(groups, topk, intermediate) (MF_BATCH_WS_WEIGHTS(groups, topk, intermediate) + 8 * (groups) * (topk) * 4)

/* The symbol `mf_meta` of every cubin of this family. */
struct mf_batch_meta {
  uint32_t magic, version;    /* MF_BATCH_MAGIC, MF_BATCH_VERSION                                      */
  uint32_t params_bytes;      /* sizeof(struct mf_stream_params)                                       */
  uint32_t experts, topk, intermediate, hidden;
  uint32_t scoring, bias, groups, top_groups, renormalise, logits_f32, act_scale_ue8m0;
  uint32_t zero_experts, expert_begin, expert_count, intermediate_offset;
  uint32_t token_groups;                  /* of 8 tokens                                               */
  uint32_t overlay, low_ranks;            /* 1: h of the ranks from low_ranks on lies where x was      */
  uint32_t grid_ctas, threads, shared_bytes;
  uint32_t down_ctas, down_rows;          /* CTAs that own rows of w2, and how many rows each          */
  uint32_t ring_stages, stage_bytes, turn_slots, ticket_lookahead;
  uint32_t down_kblocks;                  /* box of the down tensor map: {128, down_rows, down_kblocks} */
  uint32_t watchdog;
  uint32_t workspace_bytes, h_offset, ids_offset, weights_offset, status_offset, launches_offset;
  uint32_t shared_experts, shared_gate, weight_on_input;
  float swiglu_limit, swiglu_alpha;       /* 0: none; 1: SiLU                                          */
};

#endif
