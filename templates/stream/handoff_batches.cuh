// handoff_batches.cuh - h fetched by more warps, several rows at a time, in launches with many rows per slot (hand_off 1).
//
// Who runs it   the h loaders; where the rest of w2 fits into the ring, also the consumers, between their two projections.
// Reads         published[] (loaders), h of the launch's parity (workspace, relaxed loads), experts[], rank[].
// Writes        sm.h, h_scale; h_loaded[worker].
// Waits for     as the loaders of handoff.cuh: this CTA's own progress (a consumer is through with its units anyway), then the words of h.
// Visible by    fence_async_proxy of every lane, sync_warp, release store to h_loaded[worker].
// No deadlock   What a worker waits for comes from finalisers of all CTAs. They wait for consumers in their up phase only, and no CTA's up
//               phase waits for a consumer that loads h: the stages of w2 that it leaves in the ring meanwhile all fit, and they
//               come behind all up stages.
//
// With many tokens on few experts h comes all at once, and then a loader's instructions should count: two rows at a time, one after the other, are 16
// rounds of fetching and quantising for 64 rows. Here a warp takes up to four rows of a slot together, so that one row's latencies are hidden
// behind the other rows, and the consumers, which would only wait by then, take their share.
//
// A *batch* is half a slot, four tokens (with four tokens or fewer: the slot). Batch b belongs to worker b % workers, and h_loaded[worker]
// counts the batches that the worker has done, those without tokens included.
#pragma once
#include "stream/handoff.cuh"

namespace stream {

// Whether h comes in batches in this launch, and whether the consumers load some of them: the same for all warps of the CTA. With few rows per slot
// the loaders alone, a slot at a time, are faster (handoff.cuh): h of all slots but the last is there by then anyway.
template <class L>
MF_DEVICE bool in_batches(const Context<L> &c) { return L::kBatches && c.p.tokens * L::kRanks >= 4 * (int)c.sm.active; }
template <class L>
MF_DEVICE bool consumers_help(const Context<L> &c)
{
  return in_batches(c) && ((int)c.sm.active + L::kDownSlots - 1) / L::kDownSlots * L::kDownPieces <= L::kRingStages;
}

template <class L>
struct HBatches {
  bool batches;    // else a slot is one, and loader j has the slots j, j + kHLoaders, ...
  int log_halves;  // batches per slot
  bool help;

  MF_DEVICE explicit HBatches(const Context<L> &c) : batches(in_batches(c)), log_halves(batches && c.p.tokens > 4 ? 1 : 0), help(consumers_help(c)) {}
  MF_DEVICE int workers() const { return help ? L::kHWorkers : L::kHLoaders; }
  MF_DEVICE int worker_of(int batch) const { return help ? batch % L::kHWorkers : batch % L::kHLoaders; }
  MF_DEVICE int round_of(int batch) const { return help ? batch / L::kHWorkers : batch / L::kHLoaders; }

  // Consumers: waits until all rows of the slot are there.
  MF_DEVICE void wait_for(const Context<L> &c, int slot) const
  {
    if(!batches) {
      hw::wait_shared_at_least(&c.sm.h_loaded[slot % L::kHLoaders], slot / L::kHLoaders + 1, c.dog, L::kWaitH);
      return;
    }
    MF_LOOP
    for(int batch = slot << log_halves; batch < (slot + 1) << log_halves; ++batch)
      hw::wait_shared_at_least(&c.sm.h_loaded[worker_of(batch)], round_of(batch) + 1, c.dog, L::kWaitH);
  }
};

// Up to kRows rows of a slot: fetched, quantised and written together. Takes their tokens out of `tokens`, of which there is one at least.
template <class L, int kRows>
MF_DEVICE void load_rows(const Context<L> &c, const char *h, int slot, uint32_t &tokens, hw::Stopwatch &wait)
{
  constexpr int kChunks = HRow<L>::kChunks;
  HRow<L> row[kRows];
  bool wanted[kRows]; // there is such a row, and it is not all there yet
  int count = 0;
  MF_UNROLL
  for(int i = 0; i < kRows; ++i) {
    wanted[i] = tokens != 0;
    count += wanted[i];
    row[i].choose(c, h, slot, wanted[i] ? hw::lowest_bit(tokens) : 0);
    tokens &= tokens - 1;
    MF_UNROLL
    for(int j = 0; j < kChunks; ++j)
      row[i].chunk[j] = hw::U32x4{0, 0, 0, 0};
  }
  hw::Spin spin;
  wait.start();
  for(;;) {
    MF_UNROLL
    for(int i = 0; i < kRows; ++i) {
      if(wanted[i])
        row[i].fetch(c);
    }
    bool missing = false;
    MF_UNROLL
    for(int i = 0; i < kRows; ++i) {
      if(wanted[i])
        wanted[i] = !row[i].complete();
      missing = missing || wanted[i];
    }
    if(!missing || !spin.again(c.dog, L::kWaitHData))
      break;
  }
  wait.stop();
  hw::U32x4 chunk[kRows * kChunks];
  hw::U32x2 quantised[kRows * kChunks];
  float scale[kRows * kChunks];
  MF_UNROLL
  for(int i = 0; i < kRows * kChunks; ++i)
    chunk[i] = inverted(row[i / kChunks].chunk[i % kChunks]);
  quantise_chunks<L>(chunk, quantised, scale);
  MF_UNROLL
  for(int i = 0; i < kRows; ++i) {
    if(i < count)
      HRow<L>::place(c, row[i].target(c), quantised + i * kChunks, scale + i * kChunks);
  }
}

// Worker `w`: its batches, in turn. A loader first waits for the CTA's own progress; a consumer that helps is through with its units.
template <class L>
MF_DEVICE void load_h_batches(const Context<L> &c, int w, uint32_t launch)
{
  constexpr int kRows = HRow<L>::kChunks <= 2 ? 4 : 2; // as many as registers hold
  auto &sm = c.sm;
  const char *h = c.workspace(MF_STREAM_WS_H) + (size_t)(launch & 1) * L::kHBytes;
  const HBatches<L> batches(c);
  const int active = sm.active, count = active << batches.log_halves;
  const bool loader = w < L::kHLoaders; // (in a trace, consumers that help have no record of what they load)
  uint32_t done = 0;
  hw::Stopwatch wait, h_wait;
  hw::Tally traced;
  MF_LOOP
  for(int batch = w; batch < count; batch += batches.workers()) {
    const int slot = batch >> batches.log_halves;
    uint32_t tokens = sm.experts[slot] >> 16;
    if(batches.log_halves != 0)
      tokens &= batch & 1 ? 0xF0u : 0x0Fu;
    if(tokens != 0 && loader) {
      wait.start();
      wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
      wait.stop();
    }
    const int entry = loader ? 3 * (int)traced.total() : MF_TRACE_LIST;
    trace_entry(c, entry, slot);
    MF_LOOP
    while(tokens != 0) {
      if((tokens & (tokens - 1)) == 0)
        load_rows<L, 1>(c, h, slot, tokens, h_wait);
      else
        load_rows<L, kRows>(c, h, slot, tokens, h_wait);
    }
    trace_entry(c, entry + 1, slot); // written, too: the two are not told apart here
    hw::fence_async_proxy();
    hw::sync_warp();
    if(c.lane == 0)
      hw::store_shared_release(&sm.h_loaded[w], ++done);
    if(loader) {
      trace_first(c, MF_HELPER_FIRST, traced);
      trace_event(c, MF_HELPER_LAST);
      trace_entry(c, entry + 2, slot);
      traced.add();
    }
  }
  if(loader) {
    trace_value(c, MF_HELPER_COUNT, traced.total());
    trace_value(c, MF_HELPER_WAIT, wait.total());
    trace_value(c, MF_HELPER_H_WAIT, h_wait.total());
  }
}

} // namespace stream
