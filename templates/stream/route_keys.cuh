// route_keys.cuh - what both ways of selecting experts are made of: loads, and a lane's keys in falling order.
//
// Who runs it   one warp per token, its router (route.cuh). Registers only; the lanes meet in a redux per pick.
#pragma once
#include "stream/layout.cuh"

#ifndef MF_EXACT_FN
#define MF_EXACT_FN MF_DEVICE
#define MF_EXACT_FMA(a, b, c) hw::fma_rn(a, b, c)
#define MF_EXACT_MUL(a, b) hw::multiply_rn(a, b)
#define MF_EXACT_ADD(a, b) hw::add_rn(a, b)
#define MF_EXACT_RECIPROCAL(a) hw::reciprocal_rn(a)
#endif
#include "stream/exact_math.h"

namespace stream {

// `kWords` successive words at an address that is aligned to as many bytes (at most 16).
template <int kWords>
MF_DEVICE void load_words(uint32_t *word, const void *p)
{
  if constexpr(kWords == 1) {
    word[0] = *(const uint32_t *)p;
  } else if constexpr(kWords == 2) {
    const hw::U32x2 v = *(const hw::U32x2 *)p;
    word[0] = v.x, word[1] = v.y;
  } else {
    MF_UNROLL
    for(int i = 0; i < kWords; i += 4) {
      const hw::U32x4 v = ((const hw::U32x4 *)p)[i / 4];
      word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
    }
  }
}

// The largest power of two, up to `most`, that divides both.
MF_ANYWHERE constexpr int widest(int a, int b, int most)
{
  int width = 1;
  while(width < most && a % (2 * width) == 0 && b % (2 * width) == 0)
    width *= 2;
  return width;
}

// The elements lane * kCount ... of a row of kColumns, 16-byte aligned: words (bf16: pairs of them) that the row does not have
// read as `nothing`; of a pair its half. Loads are as wide as both numbers allow.
template <int kCount, int kColumns>
MF_DEVICE void load_lane_words(uint32_t (&word)[kCount], const void *row, int lane, uint32_t nothing)
{
  constexpr int kWide = widest(kCount, kColumns, 4);
  MF_UNROLL
  for(int i = 0; i < kCount; i += kWide) {
    const int first = lane * kCount + i;
    MF_UNROLL
    for(int j = 0; j < kWide; ++j)
      word[i + j] = nothing;
    if(kColumns == 32 * kCount || first < kColumns)
      load_words<kWide>(word + i, (const uint32_t *)row + first);
  }
}
template <int kCount, int kColumns>
MF_DEVICE void load_lane_bf16(uint32_t (&pair)[(kCount + 1) / 2], const void *row, int lane, uint32_t nothing)
{
  constexpr int kWide = widest(kCount, kColumns, 8);
  if constexpr(kWide >= 2) {
    MF_UNROLL
    for(int i = 0; i < kCount; i += kWide) {
      const int first = lane * kCount + i;
      MF_UNROLL
      for(int j = 0; j < kWide; j += 2)
        pair[(i + j) / 2] = nothing;
      if(kColumns == 32 * kCount || first < kColumns)
        load_words<kWide / 2>(pair + i / 2, (const uint16_t *)row + first);
    }
  } else {
    MF_UNROLL
    for(int i = 0; i < kCount; i += 2) {
      const int first = lane * kCount + i;
      uint32_t low = nothing & 0xFFFF, high = nothing >> 16;
      if(first < kColumns)
        low = ((const uint16_t *)row)[first];
      if(i + 1 < kCount && first + 1 < kColumns)
        high = ((const uint16_t *)row)[first + 1];
      pair[i / 2] = low | high << 16;
    }
  }
}

// Sum over each kLanes successive lanes, neighbours first, in all of them.
template <int kLanes>
MF_DEVICE float add_lanes(float sum)
{
  MF_UNROLL
  for(int o = 1; o < kLanes; o <<= 1)
    sum = mf_exact_add(sum, hw::shuffle_xor(sum, o));
  return sum;
}

// --- What both ways of selection share: each lane's keys in falling order ----------------------------------------------
// A key is 32 bits: the value's order-preserving bits above, the inverted expert index below. So all keys of selectable
// experts differ, the larger key is the larger value or, at equal values, the lower expert, and one redux per pick over the
// lanes' heads suffices. The redux of the next pick is issued with the pop of this one: `best` is always ahead by one.
// More than 8 keys of a lane are several queues: sorting and popping them costs less than one of all.
template <int kCount, int kTopK>
struct KeyQueue {
  static constexpr int kDepth = kCount > 4 ? 8 : kCount > 2 ? 4 : kCount; // of a queue
  static constexpr int kQueues = (kCount + kDepth - 1) / kDepth;
  uint32_t key[kQueues * kDepth]; // queue after queue; those behind the first kCount are 0
  uint32_t best;        // the largest key left in any lane
  uint32_t gap;         // the smallest difference between successive picks so far, the one to come included
  uint32_t mine;        // lane j: the key of pick j

  MF_DEVICE void order(int i, int j)
  {
    const uint32_t a = key[i], b = key[j];
    key[i] = a > b ? a : b;
    key[j] = a > b ? b : a;
  }

  // Sorting networks, largest first. Before: the keys 0 .. kCount - 1 are filled in.
  MF_DEVICE void sort()
  {
    MF_UNROLL
    for(int i = kCount; i < kQueues * kDepth; ++i)
      key[i] = 0;
    MF_UNROLL
    for(int q = 0; q < kQueues * kDepth; q += kDepth) {
      if constexpr(kDepth == 8) {
        order(q + 0, q + 2), order(q + 1, q + 3), order(q + 4, q + 6), order(q + 5, q + 7);
        order(q + 0, q + 4), order(q + 1, q + 5), order(q + 2, q + 6), order(q + 3, q + 7);
        order(q + 0, q + 1), order(q + 2, q + 3), order(q + 4, q + 5), order(q + 6, q + 7);
        order(q + 2, q + 4), order(q + 3, q + 5), order(q + 1, q + 4), order(q + 3, q + 6);
        order(q + 1, q + 2), order(q + 3, q + 4), order(q + 5, q + 6);
      } else if constexpr(kDepth == 4) {
        order(q + 0, q + 1), order(q + 2, q + 3), order(q + 0, q + 2), order(q + 1, q + 3), order(q + 1, q + 2);
      } else if constexpr(kDepth == 2) {
        order(q + 0, q + 1);
      }
    }
  }

  // The lane's largest key.
  MF_DEVICE uint32_t head() const
  {
    uint32_t largest = key[0];
    MF_UNROLL
    for(int q = 1; q < kQueues; ++q)
      largest = key[q * kDepth] > largest ? key[q * kDepth] : largest;
    return largest;
  }

  MF_DEVICE void start()
  {
    best = hw::reduce_max(head());
    gap = 0xFFFFFFFFu;
    mine = 0;
  }

  // Takes the best remaining key as pick j; returns it.
  MF_DEVICE uint32_t pop(int lane, int j)
  {
    const uint32_t taken = best;
    if(lane == j)
      mine = taken;
    MF_UNROLL
    for(int q = 0; q < kQueues * kDepth; q += kDepth) {
      const bool own = key[q] == taken;
      MF_UNROLL
      for(int i = q; i + 1 < q + kDepth; ++i)
        key[i] = own ? key[i + 1] : key[i];
      if(kDepth <= kTopK)
        key[q + kDepth - 1] = own ? 0u : key[q + kDepth - 1];
    }
    best = hw::reduce_max(head());
    gap = taken - best < gap ? taken - best : gap;
    return taken;
  }
};

} // namespace stream
