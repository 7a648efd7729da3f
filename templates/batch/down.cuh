// down.cuh - the consumers' down projection: this CTA's rows of y, over all active experts.
//
// Who runs it   the consumers of the CTAs below kDownCtas.
// Reads         the down stages, down_scale[], the h sets, h_scale, passes[], slot_by_rank[].
// Writes        y, kDownRows rows of every token; reduce[group] on the way.
// Waits for     down_scales once; down_full[] of each of its stages, each pass's bit of h_done[]; at the end kBarrierOutput among the consumers (kOverSums: also ahead of
//               writing reduce[], where h sets of the others' last products may lie).
// Visible by    down_empty[], as soon as all lanes have the stage in registers, behind a fence_async_proxy of each (up.cuh says why); y by the end of the kernel.
// No deadlock   the producer's down stages wait for no h; the loaders wait for no consumer's down progress.
//
// A stage belongs to a set of warps (Layout: kSetWarps), of which there are kSets; they have the stages in turn. A warp multiplies the 16 rows of a tile, and of the stage's k-blocks
// those that it has, up to three: kSharers warps share a tile's. For instance
//   16 rows, 4 k-blocks in a stage   one tile, four sets of two warps: k-blocks 0 and 2, 1 and 3
//   24 rows, 2                       two tiles, four sets of two warps: a tile each, with both k-blocks
//   48 rows, 2                       three tiles, two sets of four warps: likewise, and one of them has no tile
// A warp for which a stage has no k-block, or whose tile has no rows, only frees the stage. What all warps with a tile have added up is combined once, at
// the end. A slot's tokens lie in the h sets (group, rank) that its passes[] name: the stage is multiplied once with each. An h set's column is the same
// token for every rank, so a group has four accumulators per lane for the whole phase: no scattering, no atomics, the same order of additions every time. Columns that are not the slot's may hold anything, even NaN: they are never multiplied by 0.
#pragma once
#include "batch/down_ring.cuh"
#include "batch/up.cuh"

namespace batch {

// The scale blocks of either half of a warp's 16 rows.
struct RowBlocks {
  int low, high;
};

// What is known of the slot's h: its byte of h_done[], asked for early. A pass whose bit is missing asks again until it is there.
template <class L>
struct SlotH {
  const uint32_t *word;
  int shift;
  uint32_t done;

  MF_DEVICE SlotH(const Context<L> &c, int slot) : word(&c.sm.cleared.h_done[slot >> 2]), shift(8 * (slot & 3)), done(hw::load_shared_acquire(word) >> shift) {}
  MF_DEVICE void wait_for(const Context<L> &c, int bit)
  {
    hw::Spin spin;
    while(!(done >> bit & 1)) {
      if(!spin.again(c.dog, L::kWaitH))
        break;
      done = hw::load_shared_acquire(word) >> shift;
    }
  }
};

// Multiplies a warp's rows, in kBlocks k-blocks of the slot from `first` on (kSharers apart), with the h sets of all passes, and adds that to the sums of the columns that are the slot's.
template <class L, int kBlocks>
MF_DEVICE void multiply_rows(const Context<L> &c, const hw::Rows *rows, const hw::ColumnsBase &h_base, int slot, int first, const RowBlocks &scales, const Passes<L> &passes, SlotH<L> &there,
                             float (&sum)[L::kGroups][4])
{
  auto &sm = c.sm;
  const int column = 2 * (c.lane & 3);
  hw::WideRows wide[kBlocks];
  float low[kBlocks], high[kBlocks];
  MF_UNROLL
  for(int j = 0; j < kBlocks; ++j) {
    low[j] = sm.down_scale[slot][scales.low][first + j * L::kSharers];
    high[j] = L::kDownRowBlocks == 2 ? sm.down_scale[slot][scales.high][first + j * L::kSharers] : low[j];
    hw::widen(wide[j], rows[j]);
  }
  MF_UNROLL
  for(int g = 0; g < L::kGroups; ++g) {
    uint32_t left = passes.of(g);
    MF_LOOP
    while(left != 0) {
      const int rank = hw::highest_bit(left);
      left &= ~(1u << rank);
      const uint32_t slots = *(const typename L::TwoSlots *)&sm.slot_by_rank[rank][8 * g + column];
      there.wait_for(c, L::h_bit(g, L::kOverlay && rank >= L::kLowRanks));
      hw::Columns h[kBlocks];
      hw::F32x2 sh[kBlocks];
      float d[kBlocks][4];
      MF_UNROLL
      for(int j = 0; j < kBlocks; ++j) {
        const int block = first + j * L::kSharers;
        hw::load_columns(h[j], hw::columns_at(h_base, L::h_set(g, rank) + block * 1024), 0);
        sh[j] = hw::load_shared_unordered((const hw::F32x2 *)&sm.h_scale[g * L::kRanks + rank][block][column]);
      }
      if constexpr(kBlocks == 2 && L::kTwoKBlocks) {
        hw::multiply_two(d, wide, h);
      } else {
        MF_UNROLL
        for(int j = 0; j < kBlocks; ++j)
          hw::multiply(d[j], wide[j], h[j]);
      }
      MF_UNROLL
      for(int j = 0; j < kBlocks; ++j) {
        if((slots & L::kNoSlot) == (uint32_t)slot) {
          sum[g][0] = hw::fma_rn(d[j][0], low[j] * sh[j].x, sum[g][0]);
          sum[g][2] = hw::fma_rn(d[j][2], high[j] * sh[j].x, sum[g][2]);
        }
        if(slots >> L::kSlotBits == (uint32_t)slot) {
          sum[g][1] = hw::fma_rn(d[j][1], low[j] * sh[j].y, sum[g][1]);
          sum[g][3] = hw::fma_rn(d[j][3], high[j] * sh[j].y, sum[g][3]);
        }
      }
    }
  }
}

// A warp's way through the down stages of its set.
template <class L>
struct DownReader {
  const Context<L> &c;
  const int stages;
  DownRing<L> ring;
  int number, slot, piece; // of the stage whose rows come next
  hw::RowsAt rows_at;
  int block0;
  bool exists;  // the warp has rows and k-blocks at all
  hw::Rows rows[L::kWarpKBlocks];

  MF_DEVICE DownReader(const Context<L> &context, int consumer, int next_stage)
      : c(context), stages((int)context.sm.active * L::kDownPieces), ring(next_stage, consumer / L::kSetWarps), number(consumer / L::kSetWarps), slot(number / L::kDownPieces),
        piece(number - slot * L::kDownPieces)
  {
    // The warp's 16 rows, some or all of which may be none of the CTA's, and its first k-block of a stage, which may be none of the stage's.
    const int first_row = 16 * (consumer % L::kRowTiles);
    block0 = consumer % L::kSetWarps / L::kRowTiles;
    exists = first_row < L::kDownRows && block0 < L::kDownKBlocks;
    const uint8_t *low_atom = c.sm.ring[0] + (exists ? block0 * L::kDownKBlockBytes + first_row * 128 : 0);
    rows_at = hw::rows_at(low_atom, low_atom + (first_row + 8 < L::kDownRows ? 1024 : 0));
  }

  MF_DEVICE bool more() const { return number < stages; }
  MF_DEVICE int first() const { return piece * L::kDownKBlocks + block0; } // the warp's first k-block
  MF_DEVICE bool has_one() const { return exists && (L::kEvenPieces || first() < L::kHBlocks); }
  MF_DEVICE bool has_two() const // (of three it has all or none)
  {
    return L::kWarpKBlocks >= 2 && exists && block0 + L::kSharers < L::kDownKBlocks && (L::kEvenPieces || first() + L::kSharers < L::kHBlocks);
  }

  MF_DEVICE void wait() const { hw::mbarrier_wait(&c.sm.barrier.down_full[ring.place], ring.parity, c.dog, L::kWaitDownStage); }

  // Brings the warp's rows into registers. The stage must have landed.
  MF_DEVICE void load()
  {
    const uint32_t at = ring.offset();
    if(has_one())
      hw::load_rows(rows[0], rows_at, at);
    MF_UNROLL
    for(int j = 1; j < L::kWarpKBlocks; ++j) {
      if(has_two())
        hw::load_rows(rows[j], rows_at, at + j * L::kSharers * L::kDownKBlockBytes);
    }
  }

  // Gives the stage back.
  MF_DEVICE void release() const
  {
    hw::fence_async_proxy();
    hw::sync_warp(); // all lanes have read it
    if(c.lane == 0)
      hw::mbarrier_arrive(&c.sm.barrier.down_empty[ring.place]);
  }

  // Goes on to the set's next stage.
  MF_DEVICE void advance()
  {
    ring.advance(L::kSets);
    number += L::kSets;
    slot = number / L::kDownPieces;
    piece = number - slot * L::kDownPieces;
  }
};

// Accumulates the CTA's rows over all active experts. `next_stage`: of the ring, behind the last up stage of either warpgroup.
template <class L>
MF_DEVICE void down_rows(const Context<L> &c, int consumer, int next_stage, float (&sum)[L::kGroups][4])
{
  auto &sm = c.sm;
  const hw::ColumnsBase h_base = hw::columns_base((const uint8_t *)&sm);
  RowBlocks scales{0, 0};
  if constexpr(L::kDownRowBlocks == 2) {
    const int cta_row = c.cta * L::kDownRows, first = cta_row / 128, first_row = 16 * (consumer % L::kRowTiles);
    scales.low = smaller((cta_row + first_row) / 128 - first, 1);
    scales.high = smaller((cta_row + first_row + 8) / 128 - first, 1);
  }
  DownReader<L> next(c, consumer, next_stage);
  hw::mbarrier_wait(&sm.barrier.down_scales, 0, c.dog, L::kWaitDownScales);
  MF_LOOP
  while(next.more()) {
    next.wait();
    next.load();
    next.release();
    const int slot = next.slot, first = next.first();
    const bool one = next.has_one(), two = next.has_two();
    next.advance();
    const Passes<L> passes(c, slot);
    SlotH<L> there(c, slot);
    if(two) {
      multiply_rows<L, 2>(c, next.rows, h_base, slot, first, scales, passes, there, sum);
      if constexpr(L::kWarpKBlocks == 3)
        multiply_rows<L, 1>(c, next.rows + 2, h_base, slot, first + 2 * L::kSharers, scales, passes, there, sum);
    } else if(one) {
      multiply_rows<L, 1>(c, next.rows, h_base, slot, first, scales, passes, there, sum);
    }
  }
}

// Adds up the warps' sums and stores y.
template <class L>
MF_DEVICE void store_rows(const Context<L> &c, int consumer, const float (&sum)[L::kGroups][4])
{
  constexpr int kRows = 16 * L::kRowTiles, kCount = kRows * L::kMaxTokens;
  auto &sm = c.sm;
  if constexpr(L::kOverSums)
    hw::barrier_sync(L::kBarrierOutput, L::kConsumerThreads); // h sets lie there: all consumers are through with them
  MF_UNROLL
  for(int g = 0; g < L::kGroups; ++g)
    sm.reduce[g][consumer][c.lane] = hw::F32x4{sum[g][0], sum[g][1], sum[g][2], sum[g][3]};
  hw::barrier_sync(L::kBarrierOutput, L::kConsumerThreads);
  const int thread = consumer * 32 + c.lane;
  MF_UNROLL
  for(int first = 0; first < kCount; first += L::kConsumerThreads) {
    const int index = first + thread, row = index % kRows, token = index / kRows, column = token & 7;
    if(index >= kCount)
      continue;
    const float *parts = &sm.reduce[token >> 3][0][0].x; // [warp][lane][4]
    const int at = ((row & 7) * 4 + (column >> 1)) * 4 + ((row >> 3) & 1) * 2 + (column & 1);
    float y = 0.0f;
    if constexpr(L::kRowTiles < 4) { // all warps in the row's tile
      const int tile = L::kRowTiles == 1 ? 0 : row >> 4;
      MF_UNROLL
      for(int w = 0; w < 8; w += L::kRowTiles)
        y += parts[(tile + w) * 128 + at];
    } else {
      y = parts[(row >> 4) * 128 + at] + parts[(4 + (row >> 4)) * 128 + at];
    }
    if(token < c.p.tokens && row < L::kDownRows && (L::kHidden % L::kDownRows == 0 || c.cta * L::kDownRows + row < L::kHidden))
      ((uint16_t *)c.p.out)[(size_t)token * c.p.out_pitch + c.cta * L::kDownRows + row] = hw::to_bf16(y);
  }
}

} // namespace batch
