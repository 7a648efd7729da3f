// down.cuh - the consumers' down projection: this CTA's rows of y, over all active experts.
//
// Who runs it   both consumer warpgroups of the CTAs below kDownCtas; they take turns at stages.
// Reads         the ring, down_scale[], the h sets, h_scale, passes[], slot_by_rank[].
// Writes        y, kDownRows rows of every token; reduce[group] on the way.
// Waits for     full[] of each of its stages, h_loaded[] of each pass's loader; at the end kBarrierOutput among the consumers.
// Visible by    empty[] (behind the last pass's completion); y by the end of the kernel.
// No deadlock   the producer's down stages wait for no h; the loaders wait for no consumer's down progress.
//
// A slot's tokens lie in the h sets (group, rank) that its passes[] name: the stage is multiplied once with each. A set's column is the
// same token for every rank, so a group has four accumulators per lane for the whole phase: no scattering, no atomics, the same
// order of additions every time. Columns that are not the slot's may hold anything, even NaN: they are never multiplied by 0.
#pragma once
#include "batch/up.cuh"
#include "stream/down.cuh"

namespace batch {

// A warp's part of a stage: scale factors of its rows, by product.
template <class L>
struct DownScales {
  static constexpr int kProducts = stream::DownTile<L>::kProducts;
  float low[kProducts], high[kProducts];
  int blocks; // there are j < blocks

  // low_block, high_block: scale blocks of either half of the warp's rows. block0: the warp's first k-block of a piece.
  MF_DEVICE void load(const Context<L> &c, int slot, int piece, int block0, int low_block, int high_block)
  {
    blocks = L::kEvenPieces ? kProducts : L::kHBlocks - piece * L::kDownKBlocks - block0;
    MF_UNROLL
    for(int j = 0; j < kProducts; ++j) {
      const float *s = &c.sm.down_scale[slot][0][block0] + piece * L::kDownKBlocks + j;
      low[j] = j < blocks ? s[low_block * L::kHBlocks] : 0.0f;
      high[j] = L::kDownRowBlocks == 2 && j < blocks ? s[high_block * L::kHBlocks] : low[j];
    }
  }
};

// Accumulates the CTA's rows over all active experts.
template <class L>
MF_DEVICE void down_rows(const Context<L> &c, int consumer, RingReader<L> &ring, float (&sum)[L::kGroups][4])
{
  using Tile = stream::DownTile<L>;
  constexpr int kProducts = Tile::kProducts;
  auto &sm = c.sm;
  const int w4 = consumer & 3, column = 2 * (c.lane & 3);
  const int stages = (int)sm.active * L::kDownPieces;

  // The scale block of either half of the warp's 16 rows (rows beyond the CTA's are never stored).
  int low_block = 0, high_block = 0;
  if constexpr(L::kDownRowBlocks == 2) {
    const int first_row = c.cta * L::kDownRows, first = first_row / 128;
    low_block = smaller((first_row + 16 * w4) / 128 - first, 1);
    high_block = smaller((first_row + 16 * w4 + 8) / 128 - first, 1);
  }
  const bool exists = !L::kSlab || w4 < L::kDownKBlocks; // (a slab product always has four k-blocks, a piece may have fewer)
  const int block0 = L::kSlab && exists ? w4 : 0;
  const uint64_t tile0 = hw::matrix_descriptor(sm.ring[0]), memory0 = hw::matrix_descriptor(&sm);

  MF_LOOP
  for(int i = consumer >> 2; i < stages; i += 2) {
    const int slot = i / L::kDownPieces, piece = i - slot * L::kDownPieces;
    DownScales<L> scales;
    scales.load(c, slot, piece, block0, low_block, high_block);
    const uint32_t passes = hw::shuffle(sm.cleared.passes[slot], 0);
    const uint64_t rows = hw::advance_descriptor(tile0, ring.stage * L::kStageBytes);
    hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitDownStage);
    MF_UNROLL
    for(int g = 0; g < L::kGroups; ++g) {
      uint32_t left = passes >> (8 * g) & 255;
      MF_LOOP
      while(left != 0) {
        const int rank = hw::lowest_bit(left), item = slot * L::kGroups + g;
        const int half = L::kOverlay && rank >= L::kLowRanks;
        left &= left - 1;
        const uint32_t slots = *(const uint16_t *)&sm.slot_by_rank[rank][8 * g + column];
        hw::wait_shared_at_least(&sm.h_loaded[half][item % L::kHLoaders], item / L::kHLoaders + 1, c.dog, L::kWaitH);
        Tile tile;
        tile.multiply(rows, hw::advance_descriptor(memory0, L::h_set(g, rank) + piece * (L::kDownKBlocks * 1024)));
        if(left == 0 && passes >> (8 * g) >> 8 == 0 && c.lane == 0) // the last pass
          hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
        const bool first = exists && (slots & 255) == (uint32_t)slot, second = exists && slots >> 8 == (uint32_t)slot;
        MF_UNROLL
        for(int j = 0; j < kProducts; ++j) {
          if(j >= scales.blocks)
            break;
          const hw::F32x2 sh = hw::load_shared_unordered(
              (const hw::F32x2 *)&sm.h_scale[g * L::kRanks + rank][piece * L::kDownKBlocks + block0 + j][column]);
          float o[4];
          tile.own(o, j, w4);
          if(first) {
            sum[g][0] = hw::fma_rn(o[0], scales.low[j] * sh.x, sum[g][0]);
            sum[g][2] = hw::fma_rn(o[2], scales.high[j] * sh.x, sum[g][2]);
          }
          if(second) {
            sum[g][1] = hw::fma_rn(o[1], scales.low[j] * sh.y, sum[g][1]);
            sum[g][3] = hw::fma_rn(o[3], scales.high[j] * sh.y, sum[g][3]);
          }
        }
      }
    }
    ring.advance();
  }
}

// Adds up the warps' sums and stores y.
template <class L>
MF_DEVICE void store_rows(const Context<L> &c, int consumer, const float (&sum)[L::kGroups][4])
{
  constexpr int kRows = L::kSlab ? 16 : 64, kCount = kRows * L::kMaxTokens;
  auto &sm = c.sm;
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
    if constexpr(L::kSlab) {
      MF_UNROLL
      for(int w = 0; w < 8; ++w)
        y += parts[w * 128 + at];
    } else {
      y = parts[(row >> 4) * 128 + at] + parts[(4 + (row >> 4)) * 128 + at];
    }
    if(token < c.p.tokens && row < L::kDownRows && (L::kHidden % L::kDownRows == 0 || c.cta * L::kDownRows + row < L::kHidden))
      ((uint16_t *)c.p.out)[(size_t)token * c.p.out_pitch + c.cta * L::kDownRows + row] = hw::to_bf16(y);
  }
}

} // namespace batch
