// up.cuh - the consumers' up projection: gate and up rows of 8 features over all of K.
//
// Who runs it   both consumer warpgroups, all 8 warps, unit by unit.
// Reads         the ring, stage_unit[], up_scale[], sm.x, x_scale.
// Writes        reduce[buffer][warp][lane]: {gate, gate, up, up} partial sums of two token columns; reduce_unit[].
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

// Hands a unit's partial sums (or the end mark) over to its finaliser.
template <class L>
MF_DEVICE void hand_over(const Context<L> &c, int turn, int consumer, uint32_t unit, const float (&sum)[4])
{
  auto &sm = c.sm;
  const int buffer = turn % L::kReduceBuffers;
  if(turn >= L::kReduceBuffers)
    hw::mbarrier_wait(&sm.barrier.reduce_empty[buffer], (turn / L::kReduceBuffers - 1) & 1, c.dog, L::kWaitReduceFree);
  if(unit != L::kEndOfUnits)
    sm.reduce[buffer][consumer][c.lane] = hw::F32x4{sum[0], sum[1], sum[2], sum[3]};
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
  auto &sm = c.sm;
  const int group = consumer >> 2, w4 = consumer & 3;
  const int first_block = group * 4 + w4; // the warp's k-block within a stage
  const uint64_t tile0 = hw::matrix_descriptor(sm.ring[0] + group * (L::kStageBytes / 2));
  const uint64_t x0 = hw::matrix_descriptor(sm.x[group * 4]);
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
    const float *w_scale = &sm.up_scale[slot][0][first_block];
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int k = c.p.rotate_k ? (int)(unit % L::kUnitStages) : 0;
    MF_LOOP
    for(int chunk = 0; chunk < L::kUnitStages; ++chunk) {
      const bool exists = L::kKBlocks % L::kStageKBlocks == 0 || k * L::kStageKBlocks + first_block < L::kKBlocks;
      const hw::F32x2 sx = exists ? *(const hw::F32x2 *)(x_scale + k * (L::kStageKBlocks * 8)) : hw::F32x2{0.0f, 0.0f};
      const float gate_scale = exists ? w_scale[k * L::kStageKBlocks] : 0.0f;
      const float up_scale = exists ? w_scale[k * L::kStageKBlocks + L::kKBlocks] : 0.0f;
      stage_wait.start();
      if(chunk > 0)
        hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage);
      stage_wait.stop();
      float d[16];
      const uint64_t tile = hw::advance_descriptor(tile0, ring.stage * L::kStageBytes);
      const uint64_t x = hw::advance_descriptor(x0, k * (L::kStageKBlocks * 1024));
      hw::wgmma_fence();
      MF_UNROLL
      for(int i = 0; i < 4; ++i)
        hw::wgmma_n32(d, hw::advance_descriptor(tile, 32 * i), hw::advance_descriptor(x, 32 * i), i);
      hw::wgmma_commit();
      hw::wgmma_wait();
      hw::keep_accumulators(d);
      if(c.lane == 0)
        hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
      float own[4];
      own_columns(own, d, w4);
      if(exists) {
        sum[0] = hw::fma_rn(own[0], gate_scale * sx.x, sum[0]);
        sum[1] = hw::fma_rn(own[1], gate_scale * sx.y, sum[1]);
        sum[2] = hw::fma_rn(own[2], up_scale * sx.x, sum[2]);
        sum[3] = hw::fma_rn(own[3], up_scale * sx.y, sum[3]);
      }
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
  const float nothing[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  MF_LOOP
  for(int end = turn + L::kReduceBuffers; turn < end; ++turn) // also waits until every buffer has been read
    hand_over(c, turn, consumer, L::kEndOfUnits, nothing);
}

} // namespace stream
