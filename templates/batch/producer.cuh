// producer.cuh - the weight stream: one lane that only waits for a free stage and issues the next copy.
//
// Who runs it   warp kProducerWarp: all lanes list the experts (route.cuh), one of them streams.
// Reads         w13, w2 (global); experts[], active; behind the static rounds queue[] (scheduler.cuh).
// Writes        the ring, stage_unit[].
// Waits for     kBarrierRouted; then free stages (empty[], down_empty[], by the warps that it belongs to; x_free), landed stages (full[], down_full[], by its own
//               copies: the cap on bytes in flight) and the scheduler's turns.
// Visible by    full[], down_full[]: bytes of the copies; stage_unit[] by the lane's own arrival.
// No deadlock   It waits for a consumer's progress only on stages already handed out, and for a turn that the scheduler gives without
//               waiting for anything but turns before it. It never waits for h: down weights do not depend on it.
//
// Why one lane and nothing else: a stage of 8 KB lasts about 400 cycles at full bandwidth. With tickets, scale rows and divisions in this
// warp the stream was limited by it.
#pragma once
#include "batch/down_ring.cuh"
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
    MF_UNROLL
    for(int i = 0; i < L::kDownRing; ++i) {
      hw::mbarrier_init(&b.down_full[i], 1);
      hw::mbarrier_init(&b.down_empty[i], L::kSetWarps);
    }
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
}

// The lane's position in the ring. Stages are counted through all of the stream: number n lies in stage n % kRingStages.
template <class L>
struct RingLane {
  const Context<L> &c;
  int stage = 0;               // the next to hand out
  uint32_t empty_parity = 1;   // of this round through the ring; full[] has the other one
  int handed_out = 0;

  MF_DEVICE explicit RingLane(const Context<L> &context) : c(context) {}

  // Waits until the stage is free and, of those handed out before it, all but `flight` - 1 have landed. (That the stage is free says as much of a whole ring.)
  MF_DEVICE void acquire(int flight)
  {
    if(flight < L::kRingStages && handed_out >= flight) {
      const int behind = stage - flight; // number n - flight: the latest in its stage, so that a parity tells whether it has landed
      const bool before = behind < 0;    // in the round before
      hw::mbarrier_wait(&c.sm.barrier.full[before ? behind + L::kRingStages : behind], before ? empty_parity : empty_parity ^ 1, c.dog, L::kWaitFlight);
    }
    if(handed_out >= L::kRingStages)
      hw::mbarrier_wait(&c.sm.barrier.empty[stage], empty_parity, c.dog, L::kWaitRingFree);
    ++handed_out;
  }

  MF_DEVICE void advance()
  {
    if(++stage == L::kRingStages) {
      stage = 0;
      empty_parity ^= 1;
    }
  }
};

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

// The end of the up phase, for either warpgroup: the stage that it waits for next holds no unit. Nothing is copied there: the down phase begins with those stages.
template <class L>
MF_DEVICE void end_units(const Context<L> &c, RingLane<L> ring)
{
  MF_LOOP
  for(int i = 0; i < 2; ++i) {
    ring.acquire(L::kRingStages);
    c.sm.stage_unit[ring.stage] = L::kEndOfUnits;
    hw::mbarrier_arrive(&c.sm.barrier.full[ring.stage]);
    ring.advance();
  }
}

// The producer's place in the down ring, and the cap on what is in flight.
template <class L>
struct DownLane {
  const Context<L> &c;
  RingLane<L> &ring;
  DownRing<L> next, oldest; // to be handed out; in flight
  int number = 0, in_flight = 0, limit, later_limit;

  // Limits are in the ring's stages. The first 8 of those are held back a little: other CTAs still need up weights. What is in flight must be followed from the first stage
  // on or not at all, since a place must be seen to land before it is handed out again: rule `flight` of family_batch.c sees to it.
  MF_DEVICE DownLane(const Context<L> &context, RingLane<L> &up) : c(context), ring(up), next(up.stage, 0), oldest(up.stage, 0)
  {
    limit = larger(c.p.first_down_flight / L::kDownParts, 1);
    later_limit = c.p.flight < L::kRingStages ? larger(c.p.flight / L::kDownParts, 1) : L::kDownRing; // (the cap was the ring)
    hw::compute_now(limit), hw::compute_now(later_limit);
  }

  MF_DEVICE void acquire()
  {
    auto &b = c.sm.barrier;
    if(limit < L::kDownRing) {
      MF_LOOP
      for(; in_flight >= limit; --in_flight, oldest.advance(1))
        hw::mbarrier_wait(&b.down_full[oldest.place], oldest.parity, c.dog, L::kWaitFlight);
    }
    if(number < L::kInRing) {
      MF_UNROLL
      for(int i = 0; i < L::kDownParts; ++i) {
        ring.acquire(L::kRingStages);
        ring.advance();
      }
    } else if(number >= L::kDownRing) {
      hw::mbarrier_wait(&b.down_empty[next.place], next.parity ^ 1, c.dog, L::kWaitDownFree);
    } else if(number == L::kInRing) {
      hw::mbarrier_wait(&b.x_free, 0, c.dog, L::kWaitXFree);
    }
    ++number;
    ++in_flight;
    if(number == 8 / L::kDownParts)
      limit = later_limit;
  }
};

// The CTA's rows of w2 of every active expert. Per stage there is only what must be: with few bytes in each, a lane that looked up experts and limits between two copies was
// what the whole kernel waited for.
template <class L>
MF_DEVICE void stream_down(const Context<L> &c, RingLane<L> &ring, const hw::TensorMap &down_map, int active, uint64_t policy)
{
  DownLane<L> lane(c, ring);
  int row = (int)c.sm.experts[0] * L::kHidden + c.cta * L::kDownRows;
  MF_LOOP
  for(int slot = 0; slot < active; ++slot) {
    const uint32_t next = c.sm.experts[smaller(slot + 1, active - 1)]; // ahead of its use
    MF_LOOP
    for(int piece = 0; piece < L::kDownPieces; ++piece) {
      lane.acquire();
      hw::Mbarrier *full = &c.sm.barrier.down_full[lane.next.place];
      const int first_block = piece * L::kDownKBlocks, blocks = stream::down_blocks<L>(first_block);
      hw::mbarrier_arrive_expect(full, blocks * L::kDownKBlockBytes);
      stream::copy_down_tile<L>(c.sm.ring[0] + lane.next.offset(), down_map, row, first_block, blocks, full, policy);
      lane.next.advance(1);
    }
    row = (int)next * L::kHidden + c.cta * L::kDownRows;
  }
}

// The streaming lane's work behind the list.
template <class L>
MF_DEVICE void stream_weights(const Context<L> &c, const hw::TensorMap &up_map, const hw::TensorMap &down_map, int active)
{
  const uint64_t policy = c.p.evict_first ? hw::policy_evict_first() : hw::policy_evict_normal();
  RingLane<L> ring(c);
  UpTurns<L> turns(c, active);
  int flight = c.p.flight;
  hw::compute_now(flight);
  MF_LOOP
  while(turns.next()) {
    MF_LOOP
    for(int chunk = 0, k = turns.k; chunk < L::kUnitStages; ++chunk) {
      ring.acquire(flight);
      copy_up_stage(c, ring.stage, up_map, turns, k, policy);
      ring.advance();
      if(++k == L::kUnitStages)
        k = 0;
    }
  }
  end_units(c, ring);
  if(c.cta < L::kDownCtas && active > 0)
    stream_down(c, ring, down_map, active, policy);
}

} // namespace batch
