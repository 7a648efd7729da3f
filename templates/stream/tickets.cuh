// tickets.cuh - units of the up projection behind the static rounds: numbers from a counter that all CTAs share, so that who is faster computes more of them.
//
// Who runs it   the producer, when a turn's copies have been issued, from kLookahead turns ahead of the first ticket on; lane 0 draws.
// Reads, writes the launch's counter (workspace, relaxed atomics). Each launch clears the other one for its successor (prepare_down).
// Waits for     nothing but the atomic itself.
// Visible by    the shuffle: a ticket is known to the producer alone, until it stands in stage_unit[].
// No deadlock   nobody waits for a ticket but the warp that has drawn it. One drawer per CTA, so that its tickets rise: the first one behind the last unit ends the
//               up phase, and those that are still under way then are behind it, too.
//
// One at a time: CTAs that draw two together end up to two units apart. And kLookahead turns ahead: an atomic takes 1.5 to 3 us under load. Nothing may be computed from
// a number that is still under way, not even a move between registers: the warp would stand still. Hence a register for each, and code of its own per register.
#pragma once
#include "stream/layout.cuh"

namespace stream {

template <class L>
struct Tickets {
  uint32_t drawn[L::kLookahead] = {}; // [turn % kLookahead]; lane 0

  // Turn `turn` has been issued: draws for kLookahead turns later, and returns the ticket of the next turn (which means nothing in the static rounds).
  template <int i = 0>
  MF_DEVICE uint32_t next(const Context<L> &c, int turn, uint32_t *counter)
  {
    if constexpr(i + 1 < L::kLookahead) {
      if(turn % L::kLookahead != i)
        return next<i + 1>(c, turn, counter);
    }
    if(c.lane == 0)
      drawn[i] = hw::increment_global(counter);
    return hw::shuffle(drawn[(i + 1) % L::kLookahead], 0);
  }
};

} // namespace stream
