// up.cuh - the consumers' up projection: gate and up rows of 8 features over all of K, for every token of the expert.
//
// Who runs it   both consumer warpgroups, all 8 warps, unit by unit; a warpgroup has every other stage.
// Reads         the ring, stage_unit[], tokens[], up_scale[], sm.x, x_scale.
// Writes        reduce[buffer][warp][lane]: {gate, gate, up, up} partial sums of two tokens of a group; reduce_unit[].
// Waits for     full[] of each of its stages, scales[] of each unit, reduce_empty[] (the finaliser that owns the buffer).
// Visible by    empty[], as soon as all lanes have the stage in registers: behind a fence_async_proxy of each (below); x_free, unit_done[] (behind the last use of the
//               scale rows) and reduce_full[], one arrival per warp, behind a sync_warp. (kOverSums: x_free comes last, once reduce_empty[] has said that all is read.)
// No deadlock   a finaliser waits for nothing but reduce_full, so buffers always come back.
//
// A stage is 16 rows (8 gate, 8 up) in four k-blocks, one for each warp of its warpgroup. A warp brings its k-block into registers and
// multiplies it once per group of 8 tokens that the expert has: with uniform routing of 32 tokens about 1.4 passes per expert. Rows
// 0..7 are gate, 8..15 up: one lane holds gate (d0, d1) and up (d2, d3) of the same feature and tokens.
//
// Why not wgmma: its passes were what limited this family. A warpgroup's warps waited for each other and for each pass, a tile was
// read once per pass, and the slab trick (stream/up.cuh) and its descriptors cost more instructions than widening e4m3 does.
//
// Why the fence: what frees a stage is an ordinary read, what comes to lie there an async write, and an arrival alone does not keep the two apart. ptxas does not wait for
// ldmatrix ahead of it, and on an H200 the copy has overtaken the read, once in 10000 launches (docs/kernel.md).
//
// With an even number of stages per unit, and an even ring, each warpgroup has the same stages of the ring for ever: it sees every
// phase of their barriers.
#pragma once
#include "batch/layout.cuh"

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

// What a warp reads in all units, and where: its k-block of a stage and of the first chunk of x.
template <class L>
struct UpPlaces {
  hw::RowsAt rows;
  hw::ColumnsBase x;
  const float *x_scale; // two tokens of the first group

  MF_DEVICE UpPlaces(const Context<L> &c, int w4)
      : rows(hw::rows_at(c.sm.ring[0] + w4 * 2048, c.sm.ring[0] + w4 * 2048 + 1024)), x(hw::columns_base(c.sm.x[0][w4])),
        x_scale(&c.sm.cleared.x_scale[w4][2 * (c.lane & 3)]) {}
};

// A warp's k-block of a stage, in registers.
template <class L>
struct UpRows {
  hw::WideRows wide;
  float gate_scale, up_scale;
  int k;       // chunk of the unit
  bool exists; // else the k-block lies behind the end of k

  // Takes it out of the ring. `scale` is the warp's place in the unit's scale rows.
  MF_DEVICE void take(const Context<L> &c, const UpPlaces<L> &places, int stage, int chunk, int w4, const float *scale)
  {
    k = chunk;
    exists = L::kKBlocks % L::kStageKBlocks == 0 || k * L::kStageKBlocks + w4 < L::kKBlocks;
    hw::Rows rows;
    if(exists) {
      hw::load_rows(rows, places.rows, stage * L::kStageBytes);
      gate_scale = scale[k * L::kStageKBlocks];
      up_scale = scale[k * L::kStageKBlocks + L::kKBlocks];
    }
    hw::fence_async_proxy(); // (waits for what has been read: nothing that is needed soon should come behind it)
    hw::sync_warp(); // all lanes have read it
    if(c.lane == 0)
      hw::mbarrier_arrive(&c.sm.barrier.empty[stage]);
    if(exists)
      hw::widen(wide, rows);
  }

  // Adds the product with a group's x.
  MF_DEVICE void multiply(const UpPlaces<L> &places, int group, float (&sum)[4]) const
  {
    if(!exists)
      return;
    hw::Columns x;
    hw::load_columns(x, hw::columns_at(places.x, k * (L::kStageKBlocks * 1024)), group * (L::kKBlocks * 1024));
    const hw::F32x2 sx = *(const hw::F32x2 *)(places.x_scale + k * (L::kStageKBlocks * L::kMaxTokens) + 8 * group);
    float d[4];
    hw::multiply(d, wide, x);
    sum[0] = hw::fma_rn(d[0], gate_scale * sx.x, sum[0]);
    sum[1] = hw::fma_rn(d[1], gate_scale * sx.y, sum[1]);
    sum[2] = hw::fma_rn(d[2], up_scale * sx.x, sum[2]);
    sum[3] = hw::fma_rn(d[3], up_scale * sx.y, sum[3]);
  }
};

// The warp's partial sums of an item go to the finaliser whose buffer is next. `free`: the buffer is known to have been read (an early look at reduce_empty).
template <class L>
MF_DEVICE void hand_over(const Context<L> &c, uint32_t item, bool free, int consumer, uint32_t what, const float (&sum)[4])
{
  auto &sm = c.sm;
  const uint32_t buffer = item % L::kReduceBuffers;
  if(!free)
    hw::mbarrier_wait(&sm.barrier.reduce_empty[buffer], (item / L::kReduceBuffers & 1) ^ 1, c.dog, L::kWaitReduceFree);
  if(what != L::kEndOfUnits)
    sm.reduce[buffer][consumer][c.lane] = hw::F32x4{sum[0], sum[1], sum[2], sum[3]};
  if(consumer == 0 && c.lane == 0)
    sm.reduce_unit[buffer] = what;
  hw::sync_warp();
  if(c.lane == 0)
    hw::mbarrier_arrive(&sm.barrier.reduce_full[buffer]);
}

// Whether the item's buffer has been read. (Items below kReduceBuffers find theirs free: an mbarrier's phase before the first one counts as completed.)
template <class L>
MF_DEVICE bool is_free(const Context<L> &c, uint32_t item)
{
  return hw::mbarrier_test(&c.sm.barrier.reduce_empty[item % L::kReduceBuffers], (item / L::kReduceBuffers & 1) ^ 1);
}

// All units of this CTA. `consumer` is 0..7. On return the ring stands behind the warpgroup's last up stage.
template <class L>
MF_DEVICE void up_units(const Context<L> &c, int consumer, RingReader<L> &ring)
{
  auto &sm = c.sm;
  const int warpgroup = consumer >> 2, w4 = consumer & 3;
  constexpr int kStages = L::kUnitStages / 2; // of a unit, the warpgroup's
  constexpr int kTogether = kStages % 2 == 0 && L::kKBlocks == L::kUnitStages * L::kStageKBlocks ? 2 : 1; // (registers)
  const UpPlaces<L> places(c, w4);
  int slot = 0;
  uint32_t item = 0, parity = 0; // of scales[slot]
  int rotate_k = c.p.rotate_k;
  hw::compute_now(rotate_k);
  MF_LOOP
  for(;;) {
    const bool landed = hw::mbarrier_test(&sm.barrier.full[ring.stage], ring.parity), scaled = hw::mbarrier_test(&sm.barrier.scales[slot], parity); // (side by side)
    if(!landed && !hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage))
      break;
    const uint32_t unit = sm.stage_unit[ring.stage];
    if(unit == L::kEndOfUnits)
      break;
    if(!scaled)
      hw::mbarrier_wait(&sm.barrier.scales[slot], parity, c.dog, L::kWaitScales);
    const uint32_t groups = groups_of<L>(sm.tokens[unit / L::kUnits]);
    float sum[L::kGroups][4];
    MF_UNROLL
    for(int g = 0; g < L::kGroups; ++g)
      sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
    int k = (rotate_k ? (int)(unit % L::kUnitStages) : 0) + warpgroup;
    k = k >= L::kUnitStages ? k - L::kUnitStages : k;
    const int own_slot = slot;
    if(++slot == L::kScaleSlots) {
      slot = 0;
      parity ^= 1;
    }
    bool free = is_free(c, item);
    MF_LOOP
    for(int chunk = 0; chunk < kStages; chunk += kTogether) {
      UpRows<L> rows[kTogether];
      MF_UNROLL
      for(int i = 0; i < kTogether; ++i) {
        if(chunk + i > 0)
          hw::mbarrier_wait(&sm.barrier.full[ring.stage], ring.parity, c.dog, L::kWaitUpStage);
        rows[i].take(c, places, ring.stage, k, w4, &sm.up_scale[own_slot][0][w4]);
        ring.advance();
        k += 2;
        k = k >= L::kUnitStages ? k - L::kUnitStages : k;
      }
      MF_UNROLL
      for(int g = 0; g < L::kGroups; ++g) {
        if(!(groups >> g & 1))
          continue;
        MF_UNROLL
        for(int i = 0; i < kTogether; ++i)
          rows[i].multiply(places, g, sum[g]);
      }
    }
    hw::sync_warp();
    if(c.lane == 0)
      hw::mbarrier_arrive(&sm.barrier.unit_done[own_slot]);
    MF_UNROLL
    for(int g = 0; g < L::kGroups; ++g) {
      if(groups >> g & 1)
        batch::hand_over(c, item++, free, consumer, unit * 4 + g, sum[g]), free = false;
    }
  }
  hw::fence_async_proxy(); // down stages may come to lie where x was
  hw::sync_warp();
  if(!L::kOverSums && c.lane == 0)
    hw::mbarrier_arrive(&sm.barrier.x_free);
  const float nothing[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  MF_LOOP
  for(const uint32_t end = item + L::kReduceBuffers; item < end; ++item) // also waits until every buffer has been read
    batch::hand_over(c, item, false, consumer, L::kEndOfUnits, nothing);
  if(L::kOverSums && c.lane == 0)
    hw::mbarrier_arrive(&sm.barrier.x_free); // and so are the partial sums
}

} // namespace batch
