/* floor_params.h - what host and device agree on about the HBM floor kernel. Plain C: the tuner includes it too. */
#ifndef MF_TOOLS_FLOOR_PARAMS_H
#define MF_TOOLS_FLOOR_PARAMS_H

#include "../hw/ints.h"

#define MF_FLOOR_STAGES 4          /* copies in flight per CTA: 64 KB saturate HBM; more of them slow each other down */
#define MF_FLOOR_STAGE_BYTES 16384
#define MF_FLOOR_THREADS 32
#define MF_FLOOR_SHARED_BYTES (MF_FLOOR_STAGES * MF_FLOOR_STAGE_BYTES + 1024) /* dynamic: ring, barriers */

/* The one argument of `mf_floor`. Tensors are dense; the bytes of an expert are multiples of 16. */
struct mf_floor_params {
  const void *w13;        /* [experts][up_bytes], 16-byte aligned         */
  const void *w2;         /* [experts][down_bytes], 16-byte aligned       */
  const int32_t *experts; /* [active] numbers of the experts to read      */
  int64_t up_bytes;       /* of one expert in w13: 2 * N * K              */
  int64_t down_bytes;     /* of one expert in w2: K * N                   */
  int32_t active;         /* may be 0                                     */
  int32_t ctas;           /* of the grid                                  */
};

#endif
