// handoff_batches.cuh - h fetched by every warp that is free, several rows at a time, in launches with several rows per slot (hand_off 1).
//
// Who runs it   of CTAs with down rows: the h loaders from the front on; finalisers and consumers as soon as they are through with their units.
// Reads         published[] (loaders), h of the launch's parity (workspace, relaxed loads), experts[], rank[].
// Writes        batches_taken; sm.h, h_scale.
// Waits for     loaders: as those of handoff.cuh, this CTA's own progress; all: the words of h. Consumers at the end for the other workers (kBarrierH).
// Visible by    fence_async_proxy of every writing lane, then kBarrierH: consumers wait there, the others arrive.
// No deadlock   What a worker waits for comes from finalisers of all CTAs, and a finaliser publishes all its units before it loads anything. Finalisers wait for
//               consumers in their up phase only, and no CTA's up phase waits for a consumer that loads h: stages of w2 come behind all up stages.
//
// With many tokens on few experts h comes all at once, at the end of the up phase, and then instructions count: 8 tokens of 8 experts are 64 rows, each of them fetched
// from L2, quantised and written by every CTA. Consumers would only wait by then. So the rows are cut up into batches of up to kBatchRows tokens of a slot, which every
// warp takes as it gets free; the rows of a batch hide each other's latencies.
#pragma once
#include "stream/handoff.cuh"

namespace stream {

// Whether h comes in batches in this launch: the same for all warps of the CTA. With one or two rows per slot the loaders alone are fast enough, and with many slots h of all
// but the last ones is there long before the end of the up phase; then consumers begin with the first slots at once (handoff.cuh).
template <class L>
MF_DEVICE bool in_batches(const Context<L> &c)
{
  return L::kBatches && c.p.tokens * L::kRanks >= 4 * (int)c.sm.active;
}

// What a consumer has to wait for ahead of a slot's products.
template <class L>
struct HBatches {
  bool batches; // h of all slots was complete at kBarrierH; else loader j has the slots j, j + kHLoaders, ...

  MF_DEVICE explicit HBatches(const Context<L> &c) : batches(in_batches(c)) {}
  MF_DEVICE void wait_for(const Context<L> &c, int slot) const
  {
    if(!batches)
      hw::wait_shared_at_least(&c.sm.h_loaded[slot % L::kHLoaders], slot / L::kHLoaders + 1, c.dog, L::kWaitH);
  }
};

// The worker takes batch after batch until there is none left. A loader first waits for the CTA's own progress; the others are through with their units.
template <class L>
MF_DEVICE void load_h_batches(const Context<L> &c, bool loader, bool consumer, uint32_t launch)
{
  constexpr int kBatchRows = HRow<L>::kChunks <= 2 ? 4 : 2; // as many as registers hold
  constexpr int kWorkerThreads = L::kConsumerThreads + L::kHelperThreads;
  auto &sm = c.sm;
  const char *h = c.workspace(MF_STREAM_WS_H) + (size_t)(launch & 1) * L::kHBytes;
  const int log_parts = c.p.tokens <= kBatchRows ? 0 : c.p.tokens <= 2 * kBatchRows ? 1 : 2; // batches per slot
  const int active = sm.active, count = active << log_parts;
  hw::Stopwatch wait, h_wait;
  hw::Tally done;
  MF_LOOP
  for(;;) {
    int batch = 0;
    if(c.lane == 0)
      batch = (int)hw::add_shared(&sm.batches_taken, 1);
    batch = hw::shuffle(batch, 0);
    if(batch >= count)
      break;
    const int slot = batch >> log_parts, part = batch - (slot << log_parts);
    const uint32_t tokens = sm.experts[slot] >> 16 & ((1u << kBatchRows) - 1) << (part * kBatchRows);
    if(tokens == 0)
      continue;
    if(loader) {
      wait.start();
      wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
      wait.stop();
    }
    const int entry = loader ? 3 * (int)done.total() : MF_TRACE_LIST; // (in a trace the others have no record of what they load)
    trace_entry(c, entry, slot);
    load_rows<L, kBatchRows>(c, h, slot, tokens, h_wait, entry + 1);
    trace_entry(c, entry + 2, slot);
    if(loader) {
      trace_first(c, MF_HELPER_FIRST, done);
      trace_event(c, MF_HELPER_LAST);
      done.add();
    }
  }
  if(loader) {
    trace_value(c, MF_HELPER_COUNT, done.total());
    trace_value(c, MF_HELPER_WAIT, wait.total());
    trace_value(c, MF_HELPER_H_WAIT, h_wait.total());
  }
  hw::fence_async_proxy();
  if(consumer)
    hw::barrier_sync(L::kBarrierH, kWorkerThreads);
  else
    hw::barrier_arrive(L::kBarrierH, kWorkerThreads);
}

} // namespace stream
