/* router_params.h - what host and device agree on about the stand-in for a router. Plain C: the tuner includes it too. */
#ifndef MF_TOOLS_ROUTER_PARAMS_H
#define MF_TOOLS_ROUTER_PARAMS_H

#include "../hw/ints.h"

#define MF_ROUTER_THREADS 256
#define MF_ROUTER_SHARED_BYTES (MF_ROUTER_THREADS / 32 * 4) /* dynamic: a partial sum per warp */

/* The one argument of `mf_router`. 'from' and 'to' are 16-byte aligned and begin with x, bf16 [tokens][hidden]. */
struct mf_router_params {
  const void *matrix; /* bf16 [rows][hidden], 16-byte aligned                 */
  const void *from;   /* x and what follows it, as the layer shall find it    */
  void *to;           /* where the layer looks for it                         */
  int32_t tokens, hidden, rows; /* hidden: a multiple of 8                    */
  int32_t words;      /* of 16 bytes that are copied                          */
  int32_t ctas;       /* of the grid                                          */
};

#endif
