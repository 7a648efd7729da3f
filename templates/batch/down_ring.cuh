// down_ring.cuh - where the stages of the down phase lie: in the ring of the up phase, and where x was.
//
// Why not the ring as it is: with 24 rows of w2 per CTA and more, the k-blocks that a set of warps multiplies at a time are 9 to 14 KB, and x is dead. So
// a down stage is one or two (kDownParts) stages of the ring, and there are more of them: kInRing in the ring, the rest, kDownRing in all, in the
// memory of x (behind what the higher ranks' h takes there).
//
// Down stage number n is of the place n % kDownRing and of the set of warps n % kSets: kDownRing is a multiple of that, so that a set has the same places for
// ever and sees every phase of their barriers, which are others than those of the up phase. Places 0 .. kInRing - 1 are the ring's, beginning with
// the stages that come next when the last unit has been handed out (the same in producer and consumers, and a multiple of kDownParts, since units have
// an even number of stages): they become free first. What the producer waits for:
//   number < kInRing      empty[] of the ring's stages that it is made of: their last up stages have been read
//   number = kInRing      x_free: this CTA's consumers are through with x
//   number >= kDownRing   down_empty[] of the place
#pragma once
#include "batch/layout.cuh"

namespace batch {

// A position in the down ring.
template <class L>
struct DownRing {
  int begin;           // which of the ring's down stages is place 0
  int place;
  uint32_t parity = 0; // of down_full[place]; down_empty[place] of the time before has it, too

  MF_DEVICE DownRing(int next_stage, int first) : begin(next_stage / L::kDownParts), place(first) {}

  // Where the place is, in bytes from the ring's first stage.
  MF_DEVICE uint32_t offset() const
  {
    if(place >= L::kInRing)
      return L::kXPlaces + (place - L::kInRing) * L::kDownStageBytes;
    const int at = begin + place;
    return (at >= L::kRingStages / L::kDownParts ? at - L::kRingStages / L::kDownParts : at) * L::kDownStageBytes;
  }

  MF_DEVICE void advance(int by)
  {
    place += by;
    if(place >= L::kDownRing) {
      place -= L::kDownRing;
      parity ^= 1;
    }
  }
};

} // namespace batch
