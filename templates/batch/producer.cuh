// producer.cuh - the weight stream: one lane that only waits for a free stage and issues the next copy.
//
// Who runs it   warp kProducerWarp: all lanes list the experts (route.cuh), lane 0 streams.
// Reads         w13, w2 (global); experts[], active; behind the static rounds queue[] (scheduler.cuh).
// Writes        the ring, stage_unit[].
// Waits for     kBarrierRouted; then free stages (empty[], by the stage's warpgroup), landed stages (full[], by its own copies: the cap on
//               bytes in flight) and the scheduler's turns.
// Visible by    full[]: bytes of the copies; stage_unit[] by the lane's own arrival.
// No deadlock   It waits for a consumer's progress only on stages already handed out, and for a turn that the scheduler gives without
//               waiting for anything but turns before it. It never waits for h: down weights do not depend on it.
//
// Why one lane and nothing else: a stage of 8 KB lasts about 400 cycles at full bandwidth. With tickets, scale rows and divisions in this
// warp the stream was limited by it.
#pragma once
#include "batch/route.cuh"
#include "stream/producer.cuh"

namespace batch {

// Barriers and small tables; before sync_cta.
template <class L>
MF_DEVICE void init_barriers(const Context<L> &c)
{
  auto &b = c.sm.barrier;
  if(c.lane == 0) {
    MF_UNROLL
    for(int i = 0; i < L::kReduceBuffers; ++i) {
      hw::mbarrier_init(&b.reduce_full[i], 8);
      hw::mbarrier_init(&b.reduce_empty[i], 1);
    }
    MF_UNROLL
    for(int i = 0; i < L::kScaleSlots; ++i) {
      hw::mbarrier_init(&b.scales[i], 32);
      hw::mbarrier_init(&b.unit_done[i], 8);
      hw::mbarrier_init(&b.turn[i], 1);
    }
    hw::mbarrier_init(&b.x_free, 8);
    hw::mbarrier_init(&b.down_scales, L::kHelperThreads);
    MF_UNROLL
    for(int i = 0; i < L::kRingStages; ++i) {
      hw::mbarrier_init(&b.full[i], 1);
      hw::mbarrier_init(&b.empty[i], 4);
    }
    hw::mbarrier_init_fence();
  }
  if(c.lane < L::kReduceBuffers)
    c.sm.published[c.lane] = 0;
  if(c.lane < 2 * L::kHLoaders)
    (&c.sm.h_loaded[0][0])[c.lane] = 0;
}

// The units of the up projection in the producer's order.
template <class L>
struct UpTurns {
  const Context<L> &c;
  const int units, static_rounds;
  int turn = 0, entry = 0; // the next turn; the queue's next entry
  uint32_t parity = 0;
  uint32_t unit;           // of the turn: itself, its row block in w13, the first chunk of k
  int row, k;

  MF_DEVICE UpTurns(const Context<L> &context, int active)
      : c(context), units(active * L::kUnits), static_rounds(context.static_rounds()) {}

  // Goes to the next unit. False behind the last one.
  MF_DEVICE bool next()
  {
    if(turn < static_rounds) {
      unit = c.cta + L::kGridCtas * turn++;
      if(unit >= (uint32_t)units)
        return false;
      const int slot = unit / L::kUnits;
      row = (int)c.sm.experts[slot] * (2 * L::kUnits) + (int)unit - slot * L::kUnits;
      k = c.p.rotate_k ? unit % L::kUnitStages : 0;
      return true;
    }
    if(!hw::mbarrier_wait(&c.sm.barrier.turn[entry], parity, c.dog, L::kWaitTicket))
      return false;
    const hw::U32x4 v = c.sm.queue[entry];
    unit = v.x, row = v.y, k = v.z;
    if(++entry == L::kScaleSlots) {
      entry = 0;
      parity ^= 1;
    }
    return unit != L::kEndOfUnits;
  }
};

// One stage of a unit: 4 k-blocks of its 16 rows. The last stages may lie behind the end of k, partly (zero fill) or wholly (no copy).
template <class L>
MF_DEVICE void copy_up_stage(const Context<L> &c, int stage, const hw::TensorMap &up_map, const UpTurns<L> &turns, int k, uint64_t policy)
{
  hw::Mbarrier *full = &c.sm.barrier.full[stage];
  c.sm.stage_unit[stage] = turns.unit;
  if(L::kKBlocks % (2 * L::kStageKBlocks) != 0 && k * L::kStageKBlocks >= L::kKBlocks) {
    hw::mbarrier_arrive(full);
  } else {
    hw::mbarrier_arrive_expect(full, L::kStageBytes);
    hw::copy_tensor_5d(c.sm.ring[stage], &up_map, 0, 0, 0, turns.row, k * L::kStageKBlocks, full, policy);
  }
}

// Lane 0's work behind the list.
template <class L>
MF_DEVICE void stream_weights(const Context<L> &c, const hw::TensorMap &up_map, const hw::TensorMap &down_map, int active)
{
  const uint64_t policy = c.p.evict_first ? hw::policy_evict_first() : hw::policy_evict_normal();
  stream::RingWriter<L> ring(c);
  UpTurns<L> turns(c, active);
  MF_LOOP
  while(turns.next()) {
    MF_LOOP
    for(int chunk = 0, k = turns.k; chunk < L::kUnitStages; ++chunk) {
      ring.acquire();
      copy_up_stage(c, ring.stage, up_map, turns, k, policy);
      ring.advance();
      if(++k == L::kUnitStages)
        k = 0;
    }
  }
  // Down: the CTA's rows of every active expert. The first stages are held back a little: other CTAs still need up weights.
  int slot = 0, piece = 0;
  const int stages = c.cta < L::kDownCtas ? active * L::kDownPieces : 0;
  MF_LOOP
  for(int i = 0; i < stages; ++i) {
    ring.set_limit(i < 8 ? c.p.first_down_flight : c.p.flight);
    ring.acquire();
    c.sm.stage_unit[ring.stage] = L::kEndOfUnits;
    stream::copy_down_piece(c, ring.stage, down_map, slot, piece, active, policy);
    ring.advance();
    if(++piece == L::kDownPieces) {
      piece = 0;
      ++slot;
    }
  }
  MF_LOOP
  for(int i = stages; i < 2; ++i) { // both warpgroups need a stage that ends their up phase
    ring.acquire();
    c.sm.stage_unit[ring.stage] = L::kEndOfUnits;
    hw::mbarrier_arrive(&c.sm.barrier.full[ring.stage]);
    ring.advance();
  }
}

} // namespace batch
