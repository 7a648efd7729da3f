// up.cuh - the consumers' up projection: gate and up rows of 8 features (or 4) over all of K.
//
// Who runs it   both consumer warpgroups, all 8 warps, unit by unit.
// Reads         the ring, stage_unit[], up_scale[], sm.x, x_scale.
// Writes        reduce[buffer][warp]: each lane's partial sums of two token columns, {gate, gate, up, up} (units of 4: gate or up); reduce_unit[].
// Waits for     full[] of each stage, scales[] of each unit, reduce_empty[] (the finaliser that owns the buffer).
// Visible by    empty[] (behind the products' completion) and reduce_full[], one arrival per warp, behind a sync_warp.
// No deadlock   a finaliser waits for nothing but reduce_full, so buffers always come back.
//
// The slab trick. A stage is 16 rows (8 gate, 8 up) x 8 k-blocks, landed as 8 slabs of 16 rows x 128 bytes. A wgmma tile of
// 64 rows takes four slabs, that is the same 16 rows in four successive k-blocks; its B operand is the four matching atoms
// of x, N = 32 columns = 4 k-blocks x 8 tokens:
//
//                 x atom 0  x atom 1  x atom 2  x atom 3
//   slab 0 (w 0)    keep       .         .         .        warp w of the group holds slab w's rows and keeps
//   slab 1 (w 1)     .        keep       .         .        column group w, its own k-block; the rest is waste
//   slab 2 (w 2)     .         .        keep       .        that costs next to nothing (N = 8 and N = 32 take
//   slab 3 (w 3)     .         .         .        keep      nearly the same time, and the smem bytes are equal)
//
// So a unit of work is 16 rows instead of 64 and every shape spreads evenly over the SMs without splitting K. Rows 0..7 of a
// slab are gate, 8..15 up: one thread holds gate (d0, d1) and up (d2, d3) of the same feature and tokens.
//
// If K / 128 is no multiple of 8, some warps' k-blocks of a unit's last stage do not exist: those warps take part in the
// product, whose column group is the only one that their operands reach, and keep nothing of it.
//
// Units of 4 features (unit_features 4). A stage is 8 rows (4 gate, 4 up) x 16 k-blocks: a slab is one atom of 8 rows, and a tile of 64 rows
// takes eight, the same 8 rows in eight successive k-blocks. B is the eight matching atoms of x, N = 64 columns, of which an eighth is kept:
//
//   warp, half of its rows    0a   0b   1a   1b   2a   2b   3a   3b
//   k-block = slab            0    1    2    3    4    5    6    7
//   columns that it keeps     0    8    16   24   32   40   48   56   (... + 7)
//
// The halves are the same 8 rows, so a lane adds both up: its row l / 4 is gate of feature l / 4, or up of feature l / 4 - 4. If K / 128 is no
// multiple of 16, one half or both may have no k-block in the last stage.
#pragma once
#include "stream/layout.cuh"
#include "stream/trace.cuh"

namespace stream {

// The column group of warp `w4` of its group out of a slab product.
MF_DEVICE void own_columns(float (&own)[4], const float (&d)[16], int w4)
{
  MF_UNROLL
  for(int i = 0; i < 4; ++i) {
    const float low = w4 & 1 ? d[4 + i] : d[i];
    const float high = w4 & 1 ? d[12 + i] : d[8 + i];
    own[i] = w4 & 2 ? high : low;
  }
}

// What a warp makes of a tile of a unit's rows: the scales of the k-blocks that it keeps, the products, what it adds to its sums. (Its members are
// constants and no accumulators, so that the compiler makes the same of them as of plain variables.)
template <class L, int kFeatures>
struct UnitTile;

template <class L>
struct UnitTile<L, 8> {
  static constexpr int kAccumulators = 16;
  static constexpr int kSums = 4; // {gate, gate, up, up}: two tokens
  const bool exists;              // the warp's k-block
  const hw::F32x2 sx;
  const float gate_scale, up_scale;

  MF_DEVICE static int scale_row(int) { return 0; } // of up_scale, that w_scale begins at

  // Of chunk k of K. `block`: the warp's first k-block in it.
  MF_DEVICE UnitTile(int k, int block, const float *w_scale, const float *x_scale)
      : exists(L::kKBlocks % L::kStageKBlocks == 0 || k * L::kStageKBlocks + block < L::kKBlocks),
        sx(exists ? *(const hw::F32x2 *)(x_scale + k * (L::kStageKBlocks * 8)) : hw::F32x2{0.0f, 0.0f}),
        gate_scale(exists ? w_scale[k * L::kStageKBlocks] : 0.0f), up_scale(exists ? w_scale[k * L::kStageKBlocks + L::kKBlocks] : 0.0f)
  {
  }

  MF_DEVICE static void multiply(float (&d)[16], uint64_t a, uint64_t b, int accumulate) { hw::wgmma_n32(d, a, b, accumulate); }

  MF_DEVICE void add_to(float (&sum)[4], const float (&d)[16], int w4) const
  {
    float own[4];
    own_columns(own, d, w4);
    if(exists) {
      sum[0] = hw::fma_rn(own[0], gate_scale * sx.x, sum[0]);
      sum[1] = hw::fma_rn(own[1], gate_scale * sx.y, sum[1]);
      sum[2] = hw::fma_rn(own[2], up_scale * sx.x, sum[2]);
      sum[3] = hw::fma_rn(own[3], up_scale * sx.y, sum[3]);
    }
  }
};

template <class L>
struct UnitTile<L, 4> {
  static constexpr int kAccumulators = 32;
  static constexpr int kSums = 2; // of the lane's row: two tokens
  bool exists[2];                 // the k-block of either half of the warp's rows
  hw::F32x2 sx[2];
  float scale[2];

  MF_DEVICE static int scale_row(int lane) { return lane >> 4; } // gate or up

  MF_DEVICE UnitTile(int k, int block, const float *w_scale, const float *x_scale)
  {
    MF_UNROLL
    for(int half = 0; half < 2; ++half) {
      exists[half] = L::kKBlocks % L::kStageKBlocks == 0 || k * L::kStageKBlocks + block + half < L::kKBlocks;
      sx[half] = exists[half] ? *(const hw::F32x2 *)(x_scale + (k * L::kStageKBlocks + half) * 8) : hw::F32x2{0.0f, 0.0f};
      scale[half] = exists[half] ? w_scale[k * L::kStageKBlocks + half] : 0.0f;
    }
  }

  MF_DEVICE static void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) { hw::wgmma_n64(d, a, b, accumulate); }

  // Of the warp's accumulators, which are eight per pair of slabs, number `first` of its own pair.
  MF_DEVICE static float own(const float (&d)[32], int first, int w4)
  {
    const float low = w4 & 1 ? d[8 + first] : d[first];
    const float high = w4 & 1 ? d[24 + first] : d[16 + first];
    return w4 & 2 ? high : low;
  }

  MF_DEVICE void add_to(float (&sum)[2], const float (&d)[32], int w4) const
  {
    MF_UNROLL
    for(int half = 0; half < 2; ++half) {
      const float own0 = own(d, 6 * half, w4), own1 = own(d, 6 * half + 1, w4); // the lower rows' first columns, the upper rows' second ones
      if(exists[half]) {
        sum[0] = hw::fma_rn(own0, scale[half] * sx[half].x, sum[0]);
        sum[1] = hw::fma_rn(own1, scale[half] * sx[half].y, sum[1]);
      }
    }
  }
};

// Hands a unit's partial sums (or the end mark) over to its finaliser.
template <class L, int kSums>
MF_DEVICE void hand_over(const Context<L> &c, int turn, int consumer, uint32_t unit, const float (&sum)[kSums])
{
  auto &sm = c.sm;
  const int buffer = turn % L::kReduceBuffers;
  if(turn >= L::kReduceBuffers)
    hw::mbarrier_wait(&sm.barrier.reduce_empty[buffer], (turn / L::kReduceBuffers - 1) & 1, c.dog, L::kWaitReduceFree);
  if(unit != L::kEndOfUnits) {
    if constexpr(kSums == 4)
      sm.reduce[buffer][consumer][c.lane] = hw::F32x4{sum[0], sum[1], sum[2], sum[3]};
    else
      ((hw::F32x2 *)sm.reduce[buffer][consumer])[c.lane] = hw::F32x2{sum[0], sum[1]}; // (the buffers are as large as those of y)
  }
  if(consumer == 0 && c.lane == 0)
    sm.reduce_unit[buffer] = unit;
  hw::sync_warp();
  if(c.lane == 0)
    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);
}

// All units of this CTA. `consumer` is 0..7. On return the ring stands at the first down stage.
template <class L>
MF_DEVICE void up_units(const Context<L> &c, int consumer, RingReader<L> &ring)
{
  using Tile = UnitTile<L, L::kUnitFeatures>;
  auto &sm = c.sm;
  const int group = consumer >> 2, w4 = consumer & 3;
  const int first_block = group * L::kTileKBlocks + w4 * L::kWarpKBlocks; // the warp's k-block within a stage, or the first of two
  const uint64_t tile0 = hw::matrix_descriptor(sm.ring[0] + group * (L::kStageBytes / 2));
  const uint64_t x0 = hw::matrix_descriptor(sm.x[group * L::kTileKBlocks]);
  const float *x_scale = &sm.cleared.x_scale[first_block][2 * (c.lane & 3)];
  int turn = 0;
  hw::Stopwatch stage_wait, reduce_wait;
  MF_LOOP
  for(;; ++turn) {
    stage_wait.start();
    if(!hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage))
      break;
    stage_wait.stop();
    const uint32_t unit = sm.stage_unit[ring.stage];
    if(unit == L::kEndOfUnits)
      break;
    if(turn == 0)
      trace_event(c, MF_CONSUMER_UP_FIRST);
    const int slot = turn % L::kScaleSlots;
    hw::mbarrier_wait(&sm.barrier.scales[slot], (turn / L::kScaleSlots) & 1, c.dog, L::kWaitScales);
    const float *w_scale = &sm.up_scale[slot][Tile::scale_row(c.lane)][first_block];
    float sum[Tile::kSums] = {};
    int k = c.p.rotate_k ? (int)(unit % L::kUnitStages) : 0;
    MF_LOOP
    for(int chunk = 0; chunk < L::kUnitStages; ++chunk) {
      const Tile t(k, first_block, w_scale, x_scale);
      stage_wait.start();
      if(chunk > 0)
        hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage);
      stage_wait.stop();
      float d[Tile::kAccumulators];
      const uint64_t tile = hw::advance_descriptor(tile0, ring.stage * L::kStageBytes);
      const uint64_t x = hw::advance_descriptor(x0, k * (L::kStageKBlocks * 1024));
      hw::wgmma_fence();
      MF_UNROLL
      for(int i = 0; i < 4; ++i)
        Tile::multiply(d, hw::advance_descriptor(tile, 32 * i), hw::advance_descriptor(x, 32 * i), i);
      hw::wgmma_commit();
      hw::wgmma_wait();
      hw::keep_accumulators(d);
      if(c.lane == 0)
        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
      t.add_to(sum, d, w4);
      ring.advance();
      if(++k == L::kUnitStages)
        k = 0;
    }
    trace_entry(c, turn, unit);
    reduce_wait.start();
    hand_over(c, turn, consumer, unit, sum);
    reduce_wait.stop();
  }
  trace_event(c, MF_CONSUMER_UP_DONE);
  trace_value(c, MF_CONSUMER_UNITS, turn);
  trace_value(c, MF_CONSUMER_UP_WAIT, stage_wait.total());
  trace_value(c, MF_CONSUMER_REDUCE_WAIT, reduce_wait.total());
  const float nothing[Tile::kSums] = {};
  MF_LOOP
  for(int end = turn + L::kReduceBuffers; turn < end; ++turn) // also waits until every buffer has been read
    hand_over(c, turn, consumer, L::kEndOfUnits, nothing);
}

} // namespace stream
