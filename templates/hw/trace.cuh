// trace.cuh - stamps of the SM's clock, for builds that show where the time of a launch goes.
//
// Compiled with MF_TRACE, stage code leaves the clock's low word at places of a record in global memory. Without it all of this is empty: no
// instruction, no register, so a build that is served is not another one than before. A stamp is one read of the clock and one ordinary store that nobody
// waits for; who gets a record is decided when it is made (one lane of a warp), and nobody else writes there, so there are no atomics.
// The CPU twin's clock counts the emulator's steps.
#pragma once

namespace hw {

// A moment that is kept for later: the address of the record may not be known yet.
struct Moment {
#ifdef MF_TRACE
  uint32_t clock;
#endif
};

struct Trace {
#ifdef MF_TRACE
  uint32_t *record = nullptr; // nullptr: this thread leaves nothing
#endif
};

MF_DEVICE Trace make_trace(uint32_t *record)
{
#ifdef MF_TRACE
  return Trace{record};
#else
  (void)record;
  return Trace{};
#endif
}

MF_DEVICE Moment now()
{
#ifdef MF_TRACE
  return Moment{clock_low()};
#else
  return Moment{};
#endif
}

// record[word] = moment. Never 0, which says that nothing was stamped.
MF_DEVICE void stamp(const Trace &trace, int word, const Moment &moment)
{
#ifdef MF_TRACE
  if(trace.record != nullptr)
    trace.record[word] = moment.clock | 1;
#else
  (void)trace, (void)word, (void)moment;
#endif
}
MF_DEVICE void stamp(const Trace &trace, int word) { stamp(trace, word, now()); }

// The moment at which `loaded`, the result of a load, has arrived.
MF_DEVICE void stamp_arrival(const Trace &trace, int word, uint32_t loaded)
{
#ifdef MF_TRACE
  stamp(trace, word, Moment{clock_behind(loaded)});
#else
  (void)trace, (void)word, (void)loaded;
#endif
}

// record[word] = value.
MF_DEVICE void note(const Trace &trace, int word, uint32_t value)
{
#ifdef MF_TRACE
  if(trace.record != nullptr)
    trace.record[word] = value;
#else
  (void)trace, (void)word, (void)value;
#endif
}

// record[word ...] = {clock, timer}, 64 bits each: the same moment on the SM's clock and on the timer that all SMs share.
MF_DEVICE void note_pair(const Trace &trace, int word)
{
#ifdef MF_TRACE
  if(trace.record != nullptr) {
    const uint64_t timer = global_timer(), cycles = clock();
    trace.record[word] = (uint32_t)cycles;
    trace.record[word + 1] = (uint32_t)(cycles >> 32);
    trace.record[word + 2] = (uint32_t)timer;
    trace.record[word + 3] = (uint32_t)(timer >> 32);
  }
#else
  (void)trace, (void)word;
#endif
}

// Adds up how long some wait took.
struct Stopwatch {
#ifdef MF_TRACE
  uint32_t sum = 0, since = 0;
  MF_DEVICE void start() { since = clock_low(); }
  MF_DEVICE void stop() { sum += clock_low() - since; }
  MF_DEVICE uint32_t total() const { return sum; }
#else
  MF_DEVICE void start() {}
  MF_DEVICE void stop() {}
  MF_DEVICE uint32_t total() const { return 0; }
#endif
};

// Counts, in traced builds only.
struct Tally {
#ifdef MF_TRACE
  uint32_t count = 0;
  MF_DEVICE void add() { ++count; }
  MF_DEVICE uint32_t total() const { return count; }
#else
  MF_DEVICE void add() {}
  MF_DEVICE uint32_t total() const { return 0; }
#endif
};

} // namespace hw
