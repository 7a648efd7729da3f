/* floor_params.h - what host and device agree on about the HBM floor kernels. Plain C: the tuner includes it too. */
#ifndef MF_TOOLS_FLOOR_PARAMS_H
#define MF_TOOLS_FLOOR_PARAMS_H

#include "../hw/ints.h"

/* Part of the key of every sample, since samples of different rounds are compared by their ratio to this kernel's time: raise it when that may change. */
#define MF_FLOOR_VERSION 2

#define MF_FLOOR_STAGES 12         /* copies in flight per CTA at most: a launch of 8 small experts is in flight as a whole */
#define MF_FLOOR_STAGE_BYTES 16384
#define MF_FLOOR_THREADS 128
#define MF_FLOOR_SHARED_BYTES (MF_FLOOR_STAGES * MF_FLOOR_STAGE_BYTES + 1024) /* dynamic: ring, barriers */
#define MF_FLOOR_MAX_EXPERTS 1024  /* of a launch */

/* The same matrix of all active experts. Pieces are numbered expert by expert; CTA c of the grid copies share + (c < rest) of them, in turn. What a CTA
 * would have to divide for is worked out by the host: its first copy shall leave as early as that of a kernel can. */
struct mf_floor_section {
  const void *base;       /* [experts][expert_bytes], 16-byte aligned         */
  uint64_t expert_bytes;  /* a multiple of 16                                 */
  uint32_t pieces, tail;  /* of an expert: MF_FLOOR_STAGE_BYTES each, the last one 'tail' */
  uint32_t share, rest;   /* quotient and remainder of all pieces by CTAs     */
  uint32_t inverse;       /* 2^32 / pieces, rounded down                      */
};

/* The one argument of `mf_floor`. The experts are part of it, so that no load comes ahead of the first copy. */
struct mf_floor_params {
  struct mf_floor_section up, down;
  uint16_t experts[MF_FLOOR_MAX_EXPERTS]; /* numbers of the active experts */
};

/* First argument of `mf_floor_tensor`; the second and third are the tensor maps of w13 and w2 that the timed kernel has. */
struct mf_floor_tensor_params {
  int32_t active, ctas;
  int32_t units, unit_stages, box_blocks; /* up: units of an expert, copies of a unit, k-blocks of a copy              */
  int32_t hidden, down_ctas, down_rows;   /* down: CTAs that own rows of w2, and how many                              */
  int32_t down_blocks, piece_blocks;      /* k-blocks of w2; of them in a stage                                        */
  int32_t offset;                         /* -1: a stage is one box; else each k-block is, `offset` columns further left */
  uint16_t experts[MF_FLOOR_MAX_EXPERTS];
};

#endif
