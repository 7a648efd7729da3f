// up.cuh - the consumers' up projection: gate and up rows of 8 features over all of K, for every token of the expert.
//
// Who runs it   both consumer warpgroups, all 8 warps, unit by unit; a warpgroup has every other stage.
// Reads         the ring, stage_unit[], tokens[], up_scale[], sm.x, x_scale.
// Writes        reduce[buffer][warp][lane]: {gate, gate, up, up} partial sums of two tokens of a group; reduce_unit[].
// Waits for     full[] of each of its stages, scales[] of each unit, reduce_empty[] (the finaliser that owns the buffer).
// Visible by    empty[] and x_free (behind the products' completion), unit_done[] (behind the last use of the scale rows) and
//               reduce_full[], one arrival per warp, behind a sync_warp.
// No deadlock   a finaliser waits for nothing but reduce_full, so buffers always come back.
//
// A stage in shared memory is multiplied once per group of 8 tokens that the expert has (with uniform routing of 32 tokens about 1.4
// passes per expert), by the slab trick of stream/up.cuh: the four k-blocks of the stage are the four slabs of a tile.
// With an even number of stages per unit, and an even ring, each warpgroup has the same stages of the ring for ever: it sees every
// phase of their barriers.
#pragma once
#include "batch/layout.cuh"
#include "stream/up.cuh"

namespace batch {

// The groups that have a token in the mask: bit per group.
template <class L>
MF_DEVICE uint32_t groups_of(uint32_t tokens)
{
  uint32_t groups = 0;
  MF_UNROLL
  for(int g = 0; g < L::kGroups; ++g)
    groups |= tokens >> (8 * g) & 255 ? 1u << g : 0u;
  return groups;
}

// All passes of one stage: chunk k of a unit. `scale` is the warp's place in the unit's scale rows.
template <class L>
MF_DEVICE void up_stage(const Context<L> &c, int stage, int k, uint32_t groups, int w4, const float *scale, float (&sum)[L::kGroups][4])
{
  auto &sm = c.sm;
  const int block = k * L::kStageKBlocks + w4;
  const bool exists = L::kKBlocks % L::kStageKBlocks == 0 || block < L::kKBlocks;
  const float gate_scale = exists ? scale[k * L::kStageKBlocks] : 0.0f;
  const float up_scale = exists ? scale[k * L::kStageKBlocks + L::kKBlocks] : 0.0f;
  const float *x_scale = &sm.cleared.x_scale[0][2 * (c.lane & 3)] + (exists ? block : 0) * L::kMaxTokens;
  const uint64_t tile = hw::advance_descriptor(hw::matrix_descriptor(sm.ring[0]), stage * L::kStageBytes);
  const uint64_t x0 = hw::advance_descriptor(hw::matrix_descriptor(sm.x[0][0]), k * (L::kStageKBlocks * 1024));
  MF_UNROLL
  for(int g = 0; g < L::kGroups; ++g) {
    if(!(groups >> g & 1))
      continue;
    const hw::F32x2 sx = *(const hw::F32x2 *)(x_scale + 8 * g);
    const uint64_t x = hw::advance_descriptor(x0, g * (L::kKBlocks * 1024));
    float d[16];
    hw::wgmma_fence();
    MF_UNROLL
    for(int i = 0; i < 4; ++i)
      hw::wgmma_n32(d, hw::advance_descriptor(tile, 32 * i), hw::advance_descriptor(x, 32 * i), i);
    hw::wgmma_commit();
    hw::wgmma_wait();
    hw::keep_accumulators(d);
    if(groups < 2u << g && c.lane == 0) // the last pass
      hw::mbarrier_arrive(&sm.barrier.empty[stage]);
    float own[4];
    stream::own_columns(own, d, w4);
    if(exists) {
      sum[g][0] = hw::fma_rn(own[0], gate_scale * sx.x, sum[g][0]);
      sum[g][1] = hw::fma_rn(own[1], gate_scale * sx.y, sum[g][1]);
      sum[g][2] = hw::fma_rn(own[2], up_scale * sx.x, sum[g][2]);
      sum[g][3] = hw::fma_rn(own[3], up_scale * sx.y, sum[g][3]);
    }
  }
}

// All units of this CTA. `consumer` is 0..7. On return the ring stands at the warpgroup's first down stage.
template <class L>
MF_DEVICE void up_units(const Context<L> &c, int consumer, RingReader<L> &ring)
{
  auto &sm = c.sm;
  const int warpgroup = consumer >> 2, w4 = consumer & 3;
  int item = 0, slot = 0;
  uint32_t parity = 0; // of scales[slot]
  MF_LOOP
  for(;;) {
    if(!hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage))
      break;
    const uint32_t unit = hw::shuffle(sm.stage_unit[ring.stage], 0);
    if(unit == L::kEndOfUnits)
      break;
    hw::mbarrier_wait(&sm.barrier.scales[slot], parity, c.dog, L::kWaitScales);
    const uint32_t groups = groups_of<L>(hw::shuffle(sm.tokens[unit / L::kUnits], 0));
    float sum[L::kGroups][4];
    MF_UNROLL
    for(int g = 0; g < L::kGroups; ++g)
      sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
    int k = (c.p.rotate_k ? (int)(unit % L::kUnitStages) : 0) + warpgroup;
    k = k >= L::kUnitStages ? k - L::kUnitStages : k;
    MF_LOOP
    for(int chunk = 0; chunk < L::kUnitStages / 2; ++chunk) {
      if(chunk > 0)
        hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage);
      if(L::kKBlocks % (2 * L::kStageKBlocks) != 0 && k * L::kStageKBlocks >= L::kKBlocks) { // behind the end of k: nothing was copied
        hw::sync_warp(); // no lane may still be waiting for the phase when lane 0 lets the producer set off the next one
        if(c.lane == 0)
          hw::mbarrier_arrive(&sm.barrier.empty[ring.stage]);
      } else {
        up_stage(c, ring.stage, k, groups, w4, &sm.up_scale[slot][0][w4], sum);
      }
      ring.advance();
      k += 2;
      k = k >= L::kUnitStages ? k - L::kUnitStages : k;
    }
    hw::sync_warp();
    if(c.lane == 0)
      hw::mbarrier_arrive(&sm.barrier.unit_done[slot]);
    if(++slot == L::kScaleSlots) {
      slot = 0;
      parity ^= 1;
    }
    MF_UNROLL
    for(int g = 0; g < L::kGroups; ++g) {
      if(groups >> g & 1)
        stream::hand_over(c, item++, consumer, unit * 4 + g, sum[g]);
    }
  }
  if(c.lane == 0)
    hw::mbarrier_arrive(&sm.barrier.x_free);
  const float nothing[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  MF_LOOP
  for(int end = item + L::kReduceBuffers; item < end; ++item) // also waits until every buffer has been read
    stream::hand_over(c, item, consumer, L::kEndOfUnits, nothing);
}

} // namespace batch
