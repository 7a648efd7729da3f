// down_dense.cuh - the down projection with 24 to 40 rows per CTA: 64-row tiles that run on over k-blocks.
//
// Who runs it   both consumer warpgroups of the CTAs below kDownCtas, in turn at stages.
// Reads         the ring, down_scale[], sm.h, h_scale, columns[].
// Writes        nothing but the warps' sums, in registers: store_rows (down.cuh) adds them up.
// Waits for     down_scales once; full[] of each stage, h_loaded[] of the slot's loader.
// Visible by    empty[] (behind the products' completion).
// No deadlock   as down.cuh.
//
// A stage is atoms of 8 rows x 128 bytes, one behind the other: group G = k-block * RG + row group, RG = kDownRows / 8. Tile t is the
// groups 8t ... 8t + 7, whatever their k-blocks; its B operand is those k-blocks' atoms of h, 8 columns each (as in the slab trick,
// up.cuh). Either half of a warp's 16 rows is one group, and keeps the columns of its own k-block; the rest is waste:
//
//   24 rows, 4 k-blocks     tile 0: h atoms 0, 1, 2                          tile 1: h atoms 2, 3
//   warp, half              0a   0b   1a   1b   2a   2b   3a   3b            0a   0b   1a   1b   2a   2b   3a   3b
//   k-block . row group     0.0  0.1  0.2  1.0  1.1  1.2  2.0  2.1           2.2  3.0  3.1  3.2   .    .    .    .
//   columns that it keeps    0    0    0    8    8    8    16   16            0    8    8    8              (... + 7)
//
// So a stage takes 2 tiles at most where one tile per k-block would be 2 to 5, most of their rows thrown away. A half's row group
// differs from tile to tile: each tile has sums of its own. Halves behind the last group (the dots) multiply whatever lies there in the
// stage, and their sums, which may be anything, are read by nobody. If the pieces are uneven, the last one lacks k-blocks: the halves that
// belong to those keep nothing of it.
//
// Tried: working out the next stage's scales and h group while the products run. ptxas then kept descriptors in vector registers, and moved
// them to uniform ones, two at a time, ahead of every stage's products. (By the machine code; it was not timed.)
#pragma once
#include "stream/down.cuh"

namespace stream {

// Tile `kTile` of a warp's stages.
template <class L, int kTile>
struct DenseTile {
  static constexpr int kFirst = 8 * kTile, kBehind = L::kDownKBlocks * L::kDownGroups;           // its first group; the one behind the stage's last
  static constexpr int kGroups = kBehind - kFirst < 8 ? kBehind - kFirst : 8;                    // that it has
  static constexpr int kFirstBlock = kFirst / L::kDownGroups;
  static constexpr int kBlocks = (kFirst + kGroups - 1) / L::kDownGroups - kFirstBlock + 1;      // k-blocks that they belong to
  static_assert(kGroups >= 1 && kBlocks <= 3, "down tile: at least three groups per k-block");
  int block[2];     // the k-block of either half of the warp's rows, from the piece's first on
  int w_scale[2];   // and its scale's place in a slot's of the piece
  float scale[2];   // the stage's
  hw::F32x2 factor[2]; // that times the scales of h, for the lane's two columns
  float d[4 * kBlocks];

  MF_DEVICE DenseTile(int cta, int w4)
  {
    MF_UNROLL
    for(int half = 0; half < 2; ++half) {
      const int group = smaller(kFirst + 2 * w4 + half, kBehind - 1); // (halves behind the last group do as it does)
      const int row = cta * L::kDownRows + group % L::kDownGroups * 8;
      block[half] = group / L::kDownGroups;
      w_scale[half] = block[half];
      if constexpr(L::kDownRowBlocks == 2)
        w_scale[half] += (row / 128 - cta * L::kDownRows / 128) * L::kHBlocks;
    }
  }

  // Does the half's k-block exist in a piece of `blocks` of them?
  MF_DEVICE bool exists(int half, int blocks) const { return L::kEvenPieces || block[half] < blocks; }

  // What depends neither on the stage's data nor on h. `scales`: of the slot, from the piece's first k-block on.
  MF_DEVICE void prepare(const float *scales, int blocks)
  {
    MF_UNROLL
    for(int half = 0; half < 2; ++half)
      scale[half] = exists(half, blocks) ? scales[w_scale[half]] : 0.0f;
  }

  // Issues the products. `rows`: the stage; `columns`: the h group's atoms, from the piece's first k-block on.
  MF_DEVICE void multiply(uint64_t rows, uint64_t columns)
  {
    hw::count_rows(8 * kGroups);
    MF_UNROLL
    for(int i = 0; i < 4; ++i) {
      const uint64_t a = hw::advance_descriptor(rows, kFirst * 1024 + 32 * i);
      const uint64_t b = hw::advance_descriptor(columns, kFirstBlock * 1024 + 32 * i);
      if constexpr(kBlocks == 1)
        hw::wgmma_n8(d, a, b, i);
      else if constexpr(kBlocks == 2)
        hw::wgmma_n16(d, a, b, i);
      else
        hw::wgmma_n24(d, a, b, i);
    }
  }

  // While the products run. `h_scale`: of the h group and the lane's first column, from the piece's first k-block on.
  MF_DEVICE void weigh(const float *h_scale, int blocks)
  {
    MF_UNROLL
    for(int half = 0; half < 2; ++half) {
      factor[half] = hw::F32x2{0.0f, 0.0f};
      if(exists(half, blocks)) {
        const hw::F32x2 h = hw::load_shared_unordered((const hw::F32x2 *)(h_scale + block[half] * 8));
        factor[half] = hw::F32x2{scale[half] * h.x, scale[half] * h.y};
      }
    }
  }

  // Element i of the half's own columns.
  MF_DEVICE float own(int half, int i) const
  {
    float own = d[2 * half + i];
    MF_UNROLL
    for(int b = 1; b < kBlocks; ++b) {
      const float other = d[4 * b + 2 * half + i];
      own = block[half] == kFirstBlock + b ? other : own;
    }
    return own;
  }

  // Behind the products. Bits 0 and 1 of `mine`: the lane's columns are the slot's.
  MF_DEVICE void add(float (&sum)[4], uint32_t mine, int blocks)
  {
    hw::keep_accumulators(d);
    MF_UNROLL
    for(int half = 0; half < 2; ++half) {
      if((mine & 1) && exists(half, blocks))
        sum[2 * half] = hw::fma_rn(own(half, 0), factor[half].x, sum[2 * half]);
      if((mine & 2) && exists(half, blocks))
        sum[2 * half + 1] = hw::fma_rn(own(half, 1), factor[half].y, sum[2 * half + 1]);
    }
  }
};

// The other warpgroup's stage: nothing but the hand-over.
template <class L>
MF_DEVICE void pass_stage(const Context<L> &c, RingReader<L> &ring)
{
  hw::mbarrier_wait(&c.sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitDownStage);
  hw::sync_warp(); // no lane may still be waiting for the phase when lane 0 lets the producer set off the next one
  if(c.lane == 0)
    hw::mbarrier_arrive(&c.sm.barrier.empty[ring.stage]);
  ring.advance();
}

// Accumulates the CTA's rows over all active experts: dense tiles.
template <class L>
MF_DEVICE void down_rows(const Context<L> &c, int consumer, RingReader<L> &ring, float (&sum)[L::kDownTiles][4])
{
  constexpr bool kTwo = L::kDownTiles == 2;
  auto &sm = c.sm;
  const int w4 = consumer & 3, column = 2 * (c.lane & 3), active = sm.active;
  DenseTile<L, 0> first(c.cta, w4);
  DenseTile<L, L::kDownTiles - 1> last(c.cta, w4); // the second one, if there are two
  const uint64_t ring0 = hw::matrix_descriptor(sm.ring[0]), h0 = hw::matrix_descriptor(sm.h[0][0]);
  const HBatches<L> batches(c);
  hw::Stopwatch stage_wait, h_wait;
  hw::Tally stages;
  hw::mbarrier_wait(&sm.barrier.down_scales, 0, c.dog, L::kWaitDownScales);
  int turn = consumer >> 2; // the warpgroup's stages are those at which this is even
  MF_LOOP
  for(int slot = 0; slot < active; ++slot) {
    MF_LOOP
    for(int piece = 0; piece < L::kDownPieces; ++piece, ++turn) {
      if(turn & 1) {
        pass_stage(c, ring);
        continue;
      }
      // Everything that does not depend on the stage's data or on h comes before the waits.
      const int first_block = piece * L::kDownKBlocks, blocks = L::kHBlocks - first_block; // those that exist, or more
      first.prepare(&sm.down_scale[slot][0][first_block], blocks);
      if constexpr(kTwo)
        last.prepare(&sm.down_scale[slot][0][first_block], blocks);
      const uint64_t rows = hw::advance_descriptor(ring0, ring.stage * L::kStageBytes);
      SlotGroups<L> groups(sm.cleared.columns[slot]);
      int h_block = groups.group() * L::kHBlocks + first_block; // of the h group, counted over all groups
      hw::compute_now(h_block);
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
        const uint64_t columns = hw::advance_descriptor(h0, h_block * 1024);
        hw::wgmma_fence();
        first.multiply(rows, columns);
        if constexpr(kTwo)
          last.multiply(rows, columns);
        hw::wgmma_commit();
        const float *h_scale = &sm.cleared.h_scale[0][0][column] + h_block * 8;
        first.weigh(h_scale, blocks);
        if constexpr(kTwo)
          last.weigh(h_scale, blocks);
        const uint32_t mine = groups.columns() >> column;
        const bool more = groups.next();
        hw::wgmma_wait();
        first.add(sum[0], mine, blocks);
        if constexpr(kTwo)
          last.add(sum[L::kDownTiles - 1], mine, blocks);
        if(!more)
          break;
        h_block = groups.group() * L::kHBlocks + first_block;
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

} // namespace stream
