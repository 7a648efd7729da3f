// watchdog.cuh - how waits give up.
//
// A kernel whose protocol is broken would spin for ever. Compiled with MF_WATCHDOG, every wait that has made no progress
// for kWatchdogCycles records itself in a word of the workspace and returns; every other wait sees the word and returns
// as well. Waits in loops without another end report that (false), so that the loop can end. The launch then ends (with
// wrong results) and the host finds the record. Named barriers are not watched. There is no trap and no printf: a
// call inside a spin loop would make the compiler serialise all wgmma of the kernel.
// Without MF_WATCHDOG all of this is empty.
#pragma once

namespace hw {

struct Watchdog {
#ifdef MF_WATCHDOG
  uint32_t *word; // 0, or 1 << 31 | wait id << 24 | cta << 12 | thread of the first wait that gave up
#endif
};

// The watchdog that records in *word.
MF_DEVICE Watchdog make_watchdog(uint32_t *word)
{
#ifdef MF_WATCHDOG
  return Watchdog{word};
#else
  (void)word;
  return Watchdog{};
#endif
}

// One spin wait's state: while(!condition()) if(!spin.again(dog, id)) break;
struct Spin {
#ifdef MF_WATCHDOG
  static constexpr uint64_t kWatchdogCycles = 20000000; // about 10 ms
  int turns = 0;
  uint64_t start = 0;
#endif
  // True to go on waiting, false to give up.
  MF_DEVICE bool again(const Watchdog &dog, int id)
  {
#ifdef MF_WATCHDOG
    if(turns == 0)
      start = clock();
    if((++turns & 63) == 0) {
      if(load_global_relaxed(dog.word) != 0)
        return false;
      if(clock() - start > kWatchdogCycles) {
        atomicCAS(dog.word, 0u, 1u << 31 | (uint32_t)id << 24 | (uint32_t)cta_index() << 12 | (uint32_t)thread_index());
        return false;
      }
    }
#else
    (void)dog;
    (void)id;
#endif
    return true;
  }
};

// Waits until the word in shared memory, read with acquire, is at least `value`.
MF_DEVICE void wait_shared_at_least(const uint32_t *p, uint32_t value, const Watchdog &dog, int id)
{
  Spin spin;
  while(load_shared_acquire(p) < value)
    if(!spin.again(dog, id))
      break;
}

} // namespace hw
