// scheduler.cuh - which units this CTA computes, and their scale rows.
//
// Who runs it   warp kSchedulerWarp, turn after turn.
// Reads         experts[], active; s13 (global); the ticket counter of the launch's parity.
// Writes        queue[] (lane 0): what comes after the static rounds; up_scale[] of every turn (cp.async of all lanes).
// Waits for     kBarrierListed; unit_done[] of the turn kScaleSlots earlier, whose queue entry and scale rows it overwrites.
// Visible by    turn[] (the producer reads the entry behind it) and scales[] (arrivals of cp.async, for the consumers).
// No deadlock   It is ahead of the consumers by kScaleSlots turns, more than the ring holds: the producer always has a turn whose stages
//               the consumers wait for. A ticket is waited for by nobody else than this warp.
//
// Tickets are drawn kLookahead turns ahead. Nothing may be computed from one that is still under way: the warp would stand still
// for the latency of L2, which is 1.5 to 3 us under load. Hence a register for each, and a loop that is unrolled over them.
#pragma once
#include "batch/layout.cuh"
#include "stream/producer.cuh"

namespace batch {

// Lane 0: the queue's next entry.
template <class L>
MF_DEVICE void hand_turn_over(const Context<L> &c, int entry, hw::U32x4 what)
{
  c.sm.queue[entry] = what;
  hw::mbarrier_arrive(&c.sm.barrier.turn[entry]);
}

template <class L>
MF_DEVICE void schedule_units(const Context<L> &c, uint32_t launch)
{
  uint32_t *counter = (uint32_t *)c.workspace(MF_STREAM_WS_TICKETS + (launch & 1) * MF_STREAM_WS_TICKET_STRIDE);
  const int units = (int)c.sm.active * L::kUnits, static_rounds = c.static_rounds(); // (at least kLookahead)
  uint32_t ticket[L::kLookahead] = {}; // of the next turns; lane 0
  bool more = true;
  int slot = 0, entry = 0; // turn % kScaleSlots; entries written % kScaleSlots
  uint32_t parity = 1;     // of unit_done[slot], first waited for with turn kScaleSlots
  MF_LOOP
  for(int first = 0; more; first += L::kLookahead) {
    MF_UNROLL
    for(int i = 0; i < L::kLookahead; ++i) {
      const int turn = first + i;
      if(!more)
        continue;
      if(turn >= L::kScaleSlots && !hw::mbarrier_wait(&c.sm.barrier.unit_done[slot], parity, c.dog, L::kWaitUnitDone)) {
        more = false;
        continue;
      }
      const int drawn = (int)hw::shuffle(ticket[i], 0);
      const int unit = turn < static_rounds ? c.cta + L::kGridCtas * turn : L::kGridCtas * static_rounds + drawn;
      if(unit >= units) {
        more = false;
        if(turn >= static_rounds && c.lane == 0)
          hand_turn_over(c, entry, hw::U32x4{L::kEndOfUnits, 0, 0, 0});
        continue;
      }
      if(c.lane == 0 && turn + L::kLookahead >= static_rounds)
        ticket[i] = hw::increment_global(counter);
      const int position = unit / L::kUnits, block = unit - position * L::kUnits, expert = (int)c.sm.experts[position];
      if(turn >= static_rounds) {
        if(c.lane == 0)
          hand_turn_over(c, entry, hw::U32x4{(uint32_t)unit, (uint32_t)(expert * (2 * L::kUnits) + block),
                                             c.p.rotate_k ? (uint32_t)(unit % L::kUnitStages) : 0u, 0});
        if(++entry == L::kScaleSlots)
          entry = 0;
      }
      stream::copy_scale_rows(c, slot, expert, (L::kOffset / 8 + block) / 16);
      if(++slot == L::kScaleSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
  hw::copy_async_wait();
}

} // namespace batch
