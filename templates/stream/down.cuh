// down.cuh - the consumers' down projection: this CTA's rows of y, over all active experts.
//
// Who runs it   both consumer warpgroups of the CTAs below kDownCtas.
// Reads         the ring, down_scale[], sm.h, h_scale, columns[].
// Writes        y, kDownRows rows of every token; reduce[0] (with dense tiles, one per tile) on the way.
// Waits for     down_scales once; full[] of each stage, h_loaded[] of the slot's loader; at the end kBarrierOutput among themselves.
// Visible by    empty[] (behind the products' completion); y by the end of the kernel.
// No deadlock   the producer's down stages wait for no h; the loaders wait for no consumer's down progress.
//
// A CTA owns its rows for all experts, so nothing is summed across CTAs: no atomics, and the order of additions is fixed.
// Accumulators stay in registers over all experts; a column of them is a (rank in group, token), always the same token.
// A slot's tokens may lie in several h groups (their ranks differ): then the tile is multiplied once per group.
// Columns that are not the slot's are masked: they may hold anything, even NaN, so they are never multiplied by 0.
//
// How the work is shared out (Layout: kSlab, kDense, kDownSlots, kDownPieces):
//   16 rows, two slots per stage:  a warpgroup takes every other slot; slabs are the k-blocks of h (up.cuh, slab trick)
//   16 rows, one slot per stage:   a warpgroup takes four of the stage's k-blocks
//   24 to 40 rows:                 dense tiles that run on over k-blocks (down_dense.cuh), where that makes fewer of them
//   else:                          plain m64n8 per k-block
// Dense and plain tiles: the warpgroups take turns at stages. The last slots' h comes all at once, and then two
// warpgroups are through with them in half the time.
#pragma once
#include "stream/handoff_batches.cuh"
#include "stream/up.cuh"

namespace stream {

template <class L>
struct DownTile {
  static constexpr int kProducts = L::kSlab ? 1 : L::kDownKBlocks; // accumulator sets per stage and h group
  static constexpr int kAccumulators = L::kSlab ? 16 : 4;
  float d[kProducts][kAccumulators];

  MF_DEVICE void multiply(uint64_t a, uint64_t b)
  {
    hw::count_rows(L::kSlab ? 64 : L::kDownRows); // a plain tile reads on into the next k-block, stage or x
    hw::wgmma_fence();
    MF_UNROLL
    for(int j = 0; j < kProducts; ++j) {
      MF_UNROLL
      for(int i = 0; i < 4; ++i) {
        const uint64_t rows = hw::advance_descriptor(a, j * L::kDownKBlockBytes + 32 * i);
        const uint64_t columns = hw::advance_descriptor(b, j * 1024 + 32 * i);
        if constexpr(L::kSlab)
          hw::wgmma_n32(d[j], rows, columns, i);
        else
          hw::wgmma_n8(d[j], rows, columns, i);
      }
    }
    hw::wgmma_commit();
    hw::wgmma_wait();
    MF_UNROLL
    for(int j = 0; j < kProducts; ++j)
      hw::keep_accumulators(d[j]);
  }

  MF_DEVICE void own(float (&o)[4], int j, int w4) const
  {
    if constexpr(L::kSlab) {
      own_columns(o, d[j], w4);
    } else {
      MF_UNROLL
      for(int i = 0; i < 4; ++i)
        o[i] = d[j][i];
    }
  }
};

// The h groups that hold a slot's tokens, one after the other; there is at least one.
template <class L>
struct SlotGroups {
  const typename L::ColumnMask &mask;
  uint64_t left;  // of the word, from the present group on
  int word = 0;   // of the mask
  int g;          // the present group, within the word

  MF_DEVICE explicit SlotGroups(const typename L::ColumnMask &m) : mask(m)
  {
    left = mask.groups[0];
    if constexpr(L::kMaskWords > 1)
      find_word();
    g = hw::lowest_bit(left) >> 3;
  }

  MF_DEVICE void find_word()
  {
    while(left == 0 && word + 1 < L::kMaskWords)
      left = mask.groups[++word];
  }

  MF_DEVICE int group() const { return L::kMaskWords > 1 ? word * 8 + g : g; }
  MF_DEVICE uint32_t columns() const { return (uint32_t)(left >> (8 * g)); } // bit i: column i is the slot's (and more bits)

  MF_DEVICE bool next()
  {
    left &= ~(255ull << (8 * g));
    if constexpr(L::kMaskWords > 1)
      find_word();
    if(left == 0)
      return false;
    g = hw::lowest_bit(left) >> 3;
    return true;
  }
};

// Accumulates the CTA's rows over all active experts: slabs and plain tiles.
template <class L>
MF_DEVICE void down_rows(const Context<L> &c, int consumer, RingReader<L> &ring, float (&sum)[4])
{
  using Tile = DownTile<L>;
  constexpr int kProducts = Tile::kProducts;
  constexpr bool kAlternate = L::kDownSlots == 2;
  auto &sm = c.sm;
  const int group = consumer >> 2, w4 = consumer & 3, column = 2 * (c.lane & 3);
  const int active = sm.active;

  // The scale block of either half of the warp's 16 rows (rows beyond the CTA's are never stored).
  int low_block = 0, high_block = 0;
  if constexpr(L::kDownRowBlocks == 2) {
    const int first_row = c.cta * L::kDownRows, first = first_row / 128;
    low_block = smaller((first_row + 16 * w4) / 128 - first, 1);
    high_block = smaller((first_row + 16 * w4 + 8) / 128 - first, 1);
  }

  // The warp's k-block of a piece (plain tiles: all of the piece's, from 0 on), and whether there is one (a slab product always has
  // four). Where the pieces are uneven, the last one has fewer blocks than products: nothing is kept of the rest.
  const int own_block = kAlternate ? w4 : L::kSlab ? group * 4 + w4 : 0;
  const bool exists = own_block < L::kDownKBlocks;
  const int block0 = exists ? own_block : 0;
  constexpr int kTileStep = kAlternate ? L::kDownCopyBytes : L::kSlab ? L::kStageBytes / 2 : 0;
  constexpr int kHStep = L::kSlab && !kAlternate ? 4 : 0;
  const uint64_t tile0 = hw::matrix_descriptor(sm.ring[0] + group * kTileStep);
  const uint64_t h0 = hw::matrix_descriptor(sm.h[0][0] + group * kHStep * 1024);
  const float *w_scale = &sm.down_scale[0][0][block0];
  const float *h_scale = &sm.cleared.h_scale[0][block0][column];

  const HBatches<L> batches(c);
  hw::Stopwatch stage_wait, h_wait;
  hw::Tally stages;
  hw::mbarrier_wait(&sm.barrier.down_scales, 0, c.dog, L::kWaitDownScales);
  int turn = group; // plain tiles: the warpgroup's stages are those at which this is even
  MF_LOOP
  for(int slot = kAlternate ? group : 0; slot < active; slot += L::kDownSlots) {
    MF_LOOP
    for(int piece = 0; piece < L::kDownPieces; ++piece, ++turn) {
      if(!L::kSlab && (turn & 1)) { // the other warpgroup's: nothing but the hand-over
        hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitDownStage);
        hw::sync_warp(); // no lane may still be waiting for the phase when lane 0 lets the producer set off the next one
        if(c.lane == 0)
          hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
        ring.advance();
        continue;
      }
      // Everything that does not depend on the stage's data or on h comes before the waits.
      const int blocks = L::kEvenPieces ? kProducts : L::kHBlocks - piece * L::kDownKBlocks - block0; // there are j < blocks
      float low_scale[kProducts], high_scale[kProducts];
      MF_UNROLL
      for(int j = 0; j < kProducts; ++j) {
        const float *s = w_scale + slot * (L::kDownRowBlocks * L::kHBlocks) + piece * L::kDownKBlocks + j;
        low_scale[j] = j < blocks ? s[low_block * L::kHBlocks] : 0.0f;
        high_scale[j] = L::kDownRowBlocks == 2 && j < blocks ? s[high_block * L::kHBlocks] : low_scale[j];
      }
      const uint64_t tile_rows = hw::advance_descriptor(tile0, ring.stage * L::kStageBytes);
      SlotGroups<L> groups(sm.cleared.columns[slot]);
      hw::compute_now(groups.g);
      stage_wait.start();
      hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitDownStage);
      stage_wait.stop();
      trace_first(c, MF_CONSUMER_DOWN_FIRST, stages);
      trace_event(c, MF_CONSUMER_LANDED);
      h_wait.start();
      batches.wait_for(c, slot);
      h_wait.stop();
      trace_first(c, MF_CONSUMER_H_FIRST, stages);
      trace_event(c, MF_CONSUMER_H_LAST);
      stages.add();
      MF_LOOP
      for(;;) { // usually once
        Tile tile;
        tile.multiply(tile_rows, hw::advance_descriptor(h0, (groups.group() * L::kHBlocks + piece * L::kDownKBlocks) * 1024));
        const uint32_t mine = exists ? groups.columns() >> column : 0u;
        MF_UNROLL
        for(int j = 0; j < kProducts; ++j) {
          if(j >= blocks)
            break;
          const hw::F32x2 sh = hw::load_shared_unordered((const hw::F32x2 *)(h_scale + (groups.group() * L::kHBlocks + piece * L::kDownKBlocks + j) * 8));
          float o[4];
          tile.own(o, j, w4);
          if(mine & 1) {
            sum[0] = hw::fma_rn(o[0], low_scale[j] * sh.x, sum[0]);
            sum[2] = hw::fma_rn(o[2], high_scale[j] * sh.x, sum[2]);
          }
          if(mine & 2) {
            sum[1] = hw::fma_rn(o[1], low_scale[j] * sh.y, sum[1]);
            sum[3] = hw::fma_rn(o[3], high_scale[j] * sh.y, sum[3]);
          }
        }
        if(!groups.next())
          break;
      }
      if(c.lane == 0)
        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
      ring.advance();
    }
  }
  trace_event(c, MF_CONSUMER_DOWN_DONE);
  trace_value(c, MF_CONSUMER_DOWN_STAGES, stages.total());
  trace_value(c, MF_CONSUMER_DOWN_WAIT, stage_wait.total());
  trace_value(c, MF_CONSUMER_H_WAIT, h_wait.total());
}

// Element (row, column) of dense tiles out of the warps' sums: those of the row's group in every k-block, from both warpgroups. `parts`: [tile][warp][lane][4].
template <class L>
MF_DEVICE float dense_sum(const float *parts, int row, int column)
{
  float y = 0.0f;
  MF_UNROLL
  for(int block = 0; block < L::kDownKBlocks; ++block) {
    const int group = block * L::kDownGroups + (row >> 3), warp = (group & 7) >> 1, half = group & 1;
    const float *part = parts + (group >> 3) * 1024 + warp * 128 + ((row & 7) * 4 + (column >> 1)) * 4 + half * 2 + (column & 1);
    y += part[0] + part[4 * 128];
  }
  return y;
}

// Adds up the warps' sums and the ranks that share a token, and stores y.
template <class L>
MF_DEVICE void store_rows(const Context<L> &c, int consumer, const typename L::DownSums &sum)
{
  constexpr int kRows = L::kSlab ? 16 : L::kDense ? L::kDownRows : 64;
  auto &sm = c.sm;
  if constexpr(L::kDense) {
    MF_UNROLL
    for(int t = 0; t < L::kDownTiles; ++t)
      sm.reduce[t][consumer][c.lane] = hw::F32x4{sum[t][0], sum[t][1], sum[t][2], sum[t][3]};
  } else {
    sm.reduce[0][consumer][c.lane] = hw::F32x4{sum[0], sum[1], sum[2], sum[3]};
  }
  hw::barrier_sync(L::kBarrierOutput, L::kConsumerThreads);
  const float *parts = &sm.reduce[0][0][0].x; // [warp][lane][4]
  const int thread = consumer * 32 + c.lane, columns = c.columns_per_rank();
  MF_UNROLL
  for(int first = 0; first < kRows * 8; first += L::kConsumerThreads) {
    const int index = first + thread, row = index >> 3, column = index & 7;
    if(index < kRows * 8) { // whole warps
      const int at = ((row & 7) * 4 + (column >> 1)) * 4 + ((row >> 3) & 1) * 2 + (column & 1);
      float y = 0.0f;
      if constexpr(L::kSlab) {
        MF_UNROLL
        for(int w = 0; w < 8; ++w)
          y += parts[w * 128 + at];
      } else if constexpr(L::kDense) {
        y = dense_sum<L>(parts, row, column);
      } else {
        y = parts[(row >> 4) * 128 + at] + parts[(4 + (row >> 4)) * 128 + at];
      }
      MF_UNROLL
      for(int o = 1; o < 8; o <<= 1) {
        const float other = hw::shuffle_xor(y, o);
        if(o >= columns)
          y += other;
      }
      if(column < columns && column < c.p.tokens && row < L::kDownRows &&
         (L::kHidden % L::kDownRows == 0 || c.cta * L::kDownRows + row < L::kHidden))
        ((uint16_t *)c.p.out)[(size_t)column * c.p.out_pitch + c.cta * L::kDownRows + row] = hw::to_bf16(y);
    }
  }
}

} // namespace stream
