// trace.cuh - the trace points of the family: which warps have a record, and where its words are. trace.h has the layout.
//
// Who runs it   the producer, the first warp of each consumer warpgroup, the helpers; lane 0 of each. Only in builds with MF_TRACE.
// Reads         its CTA's launch count, before the helpers raise it (prepare_down runs behind barriers that every reader has arrived at).
// Writes        the CTA's record of the launch in the trace area, every word by one thread.
// Waits for     nobody. The host reads behind the end of the kernel.
#pragma once
#include "stream/layout.cuh"
#include "stream/trace.h"

namespace stream {

constexpr int kTraceValueWord = MF_TRACE_EVENTS, kTraceListWord = MF_TRACE_EVENTS + MF_TRACE_VALUES;

// The track of a warp, -1 if it has none.
template <class L>
MF_DEVICE int track_of(int warp)
{
  const int consumer = warp - L::kConsumerWarp;
  if(warp == L::kProducerWarp)
    return MF_TRACE_PRODUCER;
  if(consumer >= 0 && consumer < 8)
    return consumer % 4 == 0 ? MF_TRACE_CONSUMER + consumer / 4 : -1;
  return L::helper_of(warp) < L::kHelpers ? MF_TRACE_HELPER + L::helper_of(warp) : -1;
}

template <class L>
MF_DEVICE mf_trace_cta *trace_record(const Context<L> &c, uint32_t launch)
{
  mf_trace_cta *records = (mf_trace_cta *)c.workspace(MF_TRACE_OFFSET(L::kRanks, L::kIntermediate));
  return records + (size_t)(launch % MF_TRACE_LAUNCHES) * L::kGridCtas + c.cta;
}

// From here on the warp's stamps have a place. `launch`: launches that the CTA has completed; `begin`: when the warp began, stamped now, because
// nothing may wait for the launch count before the loads of the front are on their way.
template <class L>
MF_DEVICE void start_trace(Context<L> &c, uint32_t launch, const hw::Moment &begin)
{
#ifdef MF_TRACE
  static_assert(MF_TRACE_HELPER + L::kHelpers <= MF_TRACE_TRACKS, "trace: one track per helper");
  const int track = track_of<L>(c.warp);
  mf_trace_cta *record = trace_record(c, launch);
  if(c.lane == 0 && track >= 0)
    c.trace = hw::make_trace(record->track[track].time);
  if(c.lane == 0 && track == MF_TRACE_PRODUCER) {
    record->launch = launch + 1;
    record->sm = hw::sm_index();
    record->finalisers = L::kReduceBuffers;
    record->loaders = L::kHLoaders;
    record->down_ctas = L::kDownCtas;
    record->units = L::kUnits;
  }
  hw::stamp(c.trace, 0, begin);
#else
  (void)c, (void)launch, (void)begin;
#endif
}

// Pair `index` of the CTA's clocks; one warp each.
template <class L>
MF_DEVICE void trace_clocks(const Context<L> &c, uint32_t launch, int index)
{
#ifdef MF_TRACE
  if(c.lane == 0)
    hw::note_pair(hw::make_trace(trace_record(c, launch)->pair[index]), 0);
#else
  (void)c, (void)launch, (void)index;
#endif
}

template <class L>
MF_DEVICE void trace_event(const Context<L> &c, int event) { hw::stamp(c.trace, event); }
template <class L>
MF_DEVICE void trace_value(const Context<L> &c, int value, uint32_t number) { hw::note(c.trace, kTraceValueWord + value, number); }

// The first of several moments.
template <class L>
MF_DEVICE void trace_first(const Context<L> &c, int event, const hw::Tally &before)
{
  if(before.total() == 0)
    trace_event(c, event);
}

// Entry `index` of the track's list; dropped if the list is full.
template <class L>
MF_DEVICE void trace_entry(const Context<L> &c, int index, uint32_t what)
{
#ifdef MF_TRACE
  if(index < MF_TRACE_LIST) {
    hw::stamp(c.trace, kTraceListWord + 2 * index);
    hw::note(c.trace, kTraceListWord + 2 * index + 1, what);
  }
#else
  (void)c, (void)index, (void)what;
#endif
}

} // namespace stream
