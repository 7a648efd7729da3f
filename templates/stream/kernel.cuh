// kernel.cuh - the kernel family `stream`: a fused FP8 mixture-of-experts layer for up to 8 tokens, in one launch.
//
// The grid is persistent and co-resident, one CTA per SM. Its time is that of bringing the active experts' weights from
// HBM into shared memory; everything else is arranged so that this stream never stops.
//
//   producer     | init | head | up units ............................ | down rows ......... |
//   consumers    | route, list, quantise x | up units .......................... | down rows ..... | y |
//   finalisers   | quantise x | s2, clear |   publish h, unit by unit .................... |
//   h loaders    | quantise x | s2, clear |        fetch h, quantise it, expert by expert ........ |
//
//   up     Unit = 8 features of one expert over all of K. CTA c takes units c, c + grid, ...; later ones by ticket. All
//          CTAs so go through the experts together, h gets complete expert by expert, and the hand-off is hidden but for the last.
//   down   CTA c < kDownCtas owns kDownRows rows of y for all active experts.
//   h      goes through L2 as bf16 with in-band flags; every CTA quantises it for itself (handoff.cuh).
//
// Rank groups. In shared memory, h of the r-th expert of token t (its rank, in slot order) is a row of h group r, with few tokens
// several ranks share a group (Context::h_group). So top-k * N / 128 KB hold h for every possible routing.
//
// Sizes that are no multiple of anything handy. K: the last stage of a unit may hold fewer than 8 k-blocks (up.cuh). N: k-blocks of
// w2 are those of the unsharded matrix, as scales and quantisation groups are; the first and the last may be partly other
// ranks', which then counts as zeros (HRow, copy_down_piece). Rows of w2: the last CTA that has some may have fewer (store_rows).
//
// Programmatic dependent launch (kPdl): a launch may begin while the kernel before it in the stream, its predecessor, still runs.
//   wait_for_predecessors  Ahead of it nothing is touched but parameters, tensor maps and shared memory: predecessors may still be writing x, logits
//               and gates, reading what y will overwrite, or, if they are launches of this kernel, using the workspace. All warps but the
//               producer wait; the producer reads global memory behind kBarrierHead, where a router arrives that has waited. As every CTA
//               waits, this launch ends behind its predecessors.
//   launch_dependents  By the producer, when its last copy is on its way. The successor may begin when every CTA has come so far, so all of
//               them are resident, and it cannot take an SM that a CTA here still needs. Every CTA has waited by then: a successor
//               overlaps with this launch only, not with those before it, and what it reads ahead of its own wait hardly slows the stream.
//   No deadlock A kernel of the stream begins when all CTAs of the one before it have begun: ahead of that none has triggered. So only the last of
//               those that run can lack SMs, and it gets them: the others are resident and wait for nothing that comes behind them, neither
//               for it nor for its SMs. With a router that triggers at its start, router and layer in turn: while layer 1 streams, nothing else
//               runs; then router 2 comes, waiting for layer 1; once it is resident as a whole, CTAs of layer 2 come wherever an SM is empty, and
//               wait for router 2; router 3 comes only when all of them have triggered, hence have seen layer 1 and router 2 end.
//               A grid of another stream that waits for itself, too, is another matter: two such grids may each hold SMs that the other
//               one needs. A cooperative launch is for that, but not in one with this one (docs/kernel.md).
//   Agreement   CTAs that find different logits wait for each other for ever. So one load ahead of the wait would be a hang, not only a wrong number.
#pragma once
#include "stream/down.cuh"
#include "stream/down_dense.cuh"
#include "stream/handoff_batches.cuh"
#include "stream/producer.cuh"
#include "stream/quantise.cuh"
#include "stream/route.cuh"
#include "stream/trace.cuh"
#include "stream/up.cuh"

namespace stream {

// The producer warp.
template <class L>
MF_DEVICE void produce(Context<L> &c, const hw::Moment &begin, const hw::TensorMap &up_map, const hw::TensorMap &down_map)
{
#ifdef MF_TRACE
  if constexpr(L::Schedule::kPdl)
    hw::wait_for_predecessors();
  const uint32_t launch = ((const uint32_t *)c.workspace(MF_STREAM_WS_LAUNCHES))[c.cta];
#else
  const uint32_t launch = 0;
#endif
  if(c.lane == 1)
    hw::prefetch_map(&up_map);
  if(c.lane == 2)
    hw::prefetch_map(&down_map);
  init_barriers(c);
  hw::sync_cta();
  start_trace(c, launch, begin);
  trace_event(c, MF_PRODUCER_READY);
  stream_weights(c, up_map, down_map);
  if constexpr(L::Schedule::kPdl)
    hw::launch_dependents();
  trace_event(c, MF_PRODUCER_EXIT);
}

// A consumer warp behind the front.
template <class L>
MF_DEVICE void consume(const Context<L> &c, int consumer)
{
  RingReader<L> ring;
  up_units(c, consumer, ring);
  if(c.cta >= L::kDownCtas)
    return;
  typename L::DownSums sum = {0.0f, 0.0f, 0.0f, 0.0f};
  down_rows(c, consumer, ring, sum);
  store_rows(c, consumer, sum);
  trace_event(c, MF_CONSUMER_STORED);
}

// All warps but the producer, behind kBarrierListed, where all of them may load h: they meet in one copy of load_h_batches (the instruction cache is cold, and they run at
// the same time). `routes`: the warp is a token's router.
template <class L>
MF_DEVICE void work_with_help(const Context<L> &c, int consumer, bool is_consumer, bool routes, const Selection<L> &selection, const SharedGate<L> &gate, int token,
                              uint32_t launch)
{
  const int helper = L::helper_of(c.warp);
  const bool batches = in_batches(c);
  RingReader<L> ring;
  bool loader = false;
  if(is_consumer) {
    if(routes)
      publish_ranks(c, selection, gate, token);
    hw::barrier_sync(L::kBarrierFront, L::kThreads - 32);
    trace_event(c, MF_CONSUMER_FRONT);
    up_units(c, consumer, ring);
  } else {
    if(helper < L::kHelpers)
      prepare_down(c, helper, launch);
    trace_event(c, MF_HELPER_PREPARED);
    hw::barrier_sync(L::kBarrierFront, L::kThreads - 32);
    trace_event(c, MF_HELPER_FRONT);
    if(helper == L::kHelpers - 1)
      trace_clocks(c, launch, 0);
    if(helper < L::kReduceBuffers)
      finalise_units(c, helper, launch);
    else
      loader = helper < L::kHelpers;
  }
  if(c.cta < L::kDownCtas) {
    if(batches && (is_consumer || helper < L::kHelpers))
      load_h_batches(c, loader, is_consumer, launch);
    else if(!batches && loader)
      load_h(c, helper - L::kReduceBuffers, launch);
  }
  if(!is_consumer) {
    trace_event(c, MF_HELPER_EXIT);
    return;
  }
  if(c.cta < L::kDownCtas) {
    typename L::DownSums sum = {0.0f, 0.0f, 0.0f, 0.0f};
    down_rows(c, consumer, ring, sum);
    store_rows(c, consumer, sum);
    trace_event(c, MF_CONSUMER_STORED);
  }
  trace_event(c, MF_CONSUMER_EXIT);
  if(consumer == 0)
    trace_clocks(c, launch, 1);
}

template <class L>
MF_DEVICE void run(const mf_stream_params &p, const hw::TensorMap &up_map, const hw::TensorMap &down_map)
{
  const hw::Moment begin = hw::now();
  Context<L> c{*(typename L::Shared *)hw::dynamic_shared(), p,
               hw::make_watchdog((uint32_t *)((char *)p.workspace + MF_STREAM_WS_WATCHDOG)),
               hw::lane_index(), hw::warp_index(), hw::cta_index()};
  if(c.warp == L::kProducerWarp) {
    produce(c, begin, up_map, down_map);
    return;
  }

  // The front: route the tokens and quantise x.
  if constexpr(L::Schedule::kPdl) {
    clear_tables(c);
    hw::sync_cta();
    hw::wait_for_predecessors();
  }
  const int consumer = c.warp - L::kConsumerWarp; // 0..7 for consumers
  const bool is_consumer = consumer >= 0 && consumer < 8;
  const int log_scorers = Selection<L>::log_warps(c.p.tokens); // warps per token
  const int token = consumer >> log_scorers, part = consumer & ((1 << log_scorers) - 1);
  const bool scores = is_consumer && token < c.p.tokens, routes = scores && part == 0;
  Selection<L> selection;
  if(scores)
    selection.load(c, token, part); // ahead of all other loads: the weights wait for it
  SharedGate<L> gate;
  if(routes)
    gate.load(c, token);
  const uint32_t launch = ((const uint32_t *)c.workspace(MF_STREAM_WS_LAUNCHES))[c.cta];
  XFront<L> front(c);
  if(c.p.tokens > 1)
    front.start();
  if constexpr(!L::Schedule::kPdl) {
    clear_tables(c);
    hw::sync_cta();
  }
  if(c.p.tokens == 1) // there is time for x, and without its loads the logits come sooner
    front.start();
  start_trace(c, launch, begin);
  if(scores)
    hw::stamp_arrival(c.trace, MF_CONSUMER_LOGITS, selection.first_word());
  if constexpr(L::kShared > 0) {
    if(routes && token == 0)
      find_head<L, 0>(c, selection);
  }
  if(routes && token == 0 && c.lane == 0)
    c.sm.launch = launch; // for the producer, behind kBarrierList
  if(scores)
    selection.score_experts(c, token, part);
  if(routes)
    select_experts(c, selection, token);
  front.quantise();
  trace_event(c, is_consumer ? (int)MF_CONSUMER_X : (int)MF_HELPER_X);
  hw::barrier_sync(L::kBarrierListed, L::kThreads - 32);

  if constexpr(L::kBatches) {
    work_with_help(c, consumer, is_consumer, routes, selection, gate, token, launch);
    return;
  }
  if(is_consumer) {
    if(routes)
      publish_ranks(c, selection, gate, token);
    hw::barrier_sync(L::kBarrierFront, L::kThreads - 32);
    trace_event(c, MF_CONSUMER_FRONT);
    consume(c, consumer);
    trace_event(c, MF_CONSUMER_EXIT);
    if(consumer == 0)
      trace_clocks(c, launch, 1);
    return;
  }
  const int helper = L::helper_of(c.warp);
  if(helper < L::kHelpers)
    prepare_down(c, helper, launch);
  trace_event(c, MF_HELPER_PREPARED);
  hw::barrier_sync(L::kBarrierFront, L::kThreads - 32);
  trace_event(c, MF_HELPER_FRONT);
  if(helper == L::kHelpers - 1) // a loader: there is nothing for it to do yet
    trace_clocks(c, launch, 0);
  if(helper < L::kReduceBuffers)
    finalise_units(c, helper, launch);
  else if(helper < L::kHelpers && c.cta < L::kDownCtas)
    load_h(c, helper - L::kReduceBuffers, launch);
  trace_event(c, MF_HELPER_EXIT);
}

// What `mf_meta` holds.
template <class L>
MF_ANYWHERE constexpr mf_stream_meta make_meta()
{
  using Shape = typename L::Shape;
  mf_stream_meta m{};
  m.magic = MF_STREAM_MAGIC;
  m.version = MF_STREAM_VERSION;
  m.params_bytes = sizeof(mf_stream_params);
  m.experts = L::kExperts;
  m.topk = L::kTopK;
  m.intermediate = L::kIntermediate;
  m.hidden = L::kHidden;
  m.scoring = Shape::kScoring;
  m.bias = Shape::kBias;
  m.groups = Shape::kGroups;
  m.top_groups = Shape::kTopGroups;
  m.renormalise = Shape::kRenormalise;
  m.logits_f32 = Shape::kLogitsF32;
  m.act_scale_ue8m0 = Shape::kActScaleUe8m0;
  m.grid_ctas = L::kGridCtas;
  m.threads = L::kThreads;
  m.shared_bytes = L::kSharedBytes;
  m.down_ctas = L::kDownCtas;
  m.down_rows = L::kDownRows;
  m.ring_stages = L::kRingStages;
  m.stage_bytes = L::kStageBytes;
  m.reduce_buffers = L::kReduceBuffers;
  m.h_loaders = L::kHLoaders;
  m.ticket_lookahead = L::Schedule::kTicketLookahead;
  m.scale_slots = L::kScaleSlots;
  m.down_kblocks = L::kDownKBlocks;
  m.pdl = L::Schedule::kPdl;
#ifdef MF_WATCHDOG
  m.watchdog = 1;
#endif
  m.workspace_bytes = L::kWorkspaceBytes;
  m.h_offset = MF_STREAM_WS_H;
  m.ids_offset = MF_STREAM_WS_IDS(L::kRanks);
  m.weights_offset = MF_STREAM_WS_WEIGHTS(L::kRanks);
  m.status_offset = MF_STREAM_WS_STATUS;
  m.launches_offset = MF_STREAM_WS_LAUNCHES;
  m.zero_experts = Shape::kZeroExperts;
  m.expert_begin = Shape::kExpertBegin;
  m.expert_count = Shape::kExpertCount;
  m.intermediate_offset = L::kOffset;
  m.hand_off = L::Schedule::kHandOff;
  m.unit_features = L::kUnitFeatures;
  m.shared_experts = L::kShared;
  m.shared_gate = Shape::kSharedGate;
  m.weight_on_input = Shape::kWeightOnInput;
  m.swiglu_limit = Shape::kSwigluLimit;
  m.swiglu_alpha = Shape::kSwigluAlpha;
  return m;
}

} // namespace stream
