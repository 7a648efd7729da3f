/* floor_core.h - which pieces a CTA of the floor kernel copies, in the common subset of C11 and CUDA C++: the kernel and its test use the same lines. */
#ifndef MF_TOOLS_FLOOR_CORE_H
#define MF_TOOLS_FLOOR_CORE_H

#include "floor_params.h"

#ifdef __CUDACC__
#define MF_FLOOR_FN __device__ __forceinline__
#else
#define MF_FLOOR_FN static inline
#endif

/* A CTA's place in a section. */
struct mf_floor_walk {
  uint32_t left;        /* pieces still to copy */
  uint32_t slot, piece; /* the next one: of experts[slot], the piece of that number */
};

/* No division: the product with the inverse is the quotient, or one less. */
MF_FLOOR_FN struct mf_floor_walk mf_floor_begin(const struct mf_floor_section *s, uint32_t cta)
{
  struct mf_floor_walk w;
  const uint32_t first = cta * s->share + (cta < s->rest ? cta : s->rest);
  w.left = s->share + (cta < s->rest);
  w.slot = (uint32_t)(((uint64_t)first * s->inverse) >> 32);
  w.piece = first - w.slot * s->pieces;
  if(w.piece >= s->pieces) {
    w.piece -= s->pieces;
    w.slot++;
  }
  return w;
}

MF_FLOOR_FN uint32_t mf_floor_bytes(const struct mf_floor_section *s, const struct mf_floor_walk *w)
{
  return w->piece + 1 == s->pieces ? s->tail : MF_FLOOR_STAGE_BYTES;
}

/* Offset of the next piece from the section's base. */
MF_FLOOR_FN uint64_t mf_floor_offset(const struct mf_floor_section *s, const struct mf_floor_walk *w, uint32_t expert)
{
  return expert * s->expert_bytes + (uint64_t)w->piece * MF_FLOOR_STAGE_BYTES;
}

MF_FLOOR_FN void mf_floor_advance(const struct mf_floor_section *s, struct mf_floor_walk *w)
{
  w->left--;
  if(++w->piece == s->pieces) {
    w->piece = 0;
    w->slot++;
  }
}

#endif
