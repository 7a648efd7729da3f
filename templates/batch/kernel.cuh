// kernel.cuh - the kernel family `batch`: a fused FP8 mixture-of-experts layer for 9 to 32 tokens, in one launch.
//
// The structure is that of `stream` (stream/kernel.cuh): a persistent, co-resident grid whose time is that of bringing the active experts'
// weights from HBM into shared memory. What is different:
//
//   producer     | init | list | up units ............................ | down rows ......... |      (one lane)
//   scheduler    |             | tickets, scale rows of every unit ... |
//   consumers    | route, quantise x | up units ................................ | down rows ..... | y |
//   finalisers   | quantise x | s2, clear |   publish h, item by item ........ | as the loaders ... |
//   h loaders    | route, quantise x | s2, clear |     fetch h, quantise it, item by item ..... |
//
//   groups    Tokens come in groups of 8. A weight stage that is in shared memory is multiplied once per group (up) or h set (down) that the
//             expert's tokens are in: the weights are read once, whatever the number of tokens.
//   stages    of 8 KB, owned by the warpgroups in turn, so that each has time for several passes.
//   products  Warp by warp, through registers (hw/mma.cuh): no warp waits for another one, and a stage is free once it has been read.
//   scheduler What is not waiting and issuing is taken off the producer.
//   overlay   h of all ranks is N bytes per rank and token. With kOverlay the sets of the higher ranks lie where x was (of more than eight
//             ranks, also where the partial sums were), and are loaded when the CTA's up phase is over.
#pragma once
#include "batch/down.cuh"
#include "batch/handoff.cuh"
#include "batch/producer.cuh"
#include "batch/route.cuh"
#include "batch/scheduler.cuh"
#include "batch/up.cuh"
#include "stream/quantise.cuh"

namespace batch {

// The producer warp.
template <class L>
MF_DEVICE void produce(const Context<L> &c, const hw::TensorMap &up_map, const hw::TensorMap &down_map)
{
  hw::fewer_registers<L::kOtherRegisters>();
  if(c.lane == 1)
    hw::prefetch_map(&up_map);
  if(c.lane == 2)
    hw::prefetch_map(&down_map);
  batch::init_barriers(c);
  hw::sync_cta();
  hw::barrier_sync(L::kBarrierRouted, 32 * (L::kRouters + 1));
  const int active = batch::list_experts(c);
  hw::barrier_arrive(L::kBarrierListed, L::kThreads);
  if(hw::is_elected())
    batch::stream_weights(c, up_map, down_map, active);
}

// The scheduler warp.
template <class L>
MF_DEVICE void schedule(const Context<L> &c)
{
  hw::fewer_registers<L::kOtherRegisters>();
  const uint32_t launch = ((const uint32_t *)c.workspace(MF_STREAM_WS_LAUNCHES))[c.cta];
  hw::sync_cta();
  hw::barrier_sync(L::kBarrierListed, L::kThreads);
  schedule_units(c, launch);
}

// A consumer warp behind the front.
template <class L>
MF_DEVICE void consume(const Context<L> &c)
{
  RingReader<L> ring((hw::warp_index() - L::kConsumerWarp) >> 2);
  batch::up_units(c, hw::warp_index() - L::kConsumerWarp, ring);
  if(c.cta >= L::kDownCtas)
    return;
  float sum[L::kGroups][4];
  MF_UNROLL
  for(int g = 0; g < L::kGroups; ++g)
    sum[g][0] = sum[g][1] = sum[g][2] = sum[g][3] = 0.0f;
  const int consumer = hw::warp_index() - L::kConsumerWarp; // (asked again: registers)
  batch::down_rows(c, consumer, ring.stage & ~1, sum);
  batch::store_rows(c, consumer, sum);
}

template <class L>
MF_DEVICE void run(const mf_stream_params &p, const hw::TensorMap &up_map, const hw::TensorMap &down_map)
{
  const Context<L> c{*(typename L::Shared *)hw::dynamic_shared(), p,
                     hw::make_watchdog((uint32_t *)((char *)p.workspace + MF_STREAM_WS_WATCHDOG)),
                     hw::lane_index(), hw::warp_index(), hw::cta_index()};
  if(c.warp == L::kProducerWarp) {
    batch::produce(c, up_map, down_map);
    return;
  }
  if(c.warp == L::kSchedulerWarp) {
    schedule(c);
    return;
  }

  // The front: route the tokens and quantise x.
  const int router = L::router_of(c.warp);
  Routing<L> routing;
  if(router >= 0)
    routing.load(c, router); // ahead of all other loads: the weights wait for it
  const uint32_t launch = ((const uint32_t *)c.workspace(MF_STREAM_WS_LAUNCHES))[c.cta];
  stream::XFront<L> front(c);
  if constexpr(Routing<L>::kEarly)
    front.start();
  stream::clear_tables(c);
  clear_slots(c);
  hw::sync_cta();
  if(router >= 0)
    routing.select(c, router);
  if constexpr(!Routing<L>::kEarly)
    front.start();
  front.quantise();
  hw::barrier_sync(L::kBarrierListed, L::kThreads);
  if(router >= 0)
    routing.publish(c, router);

  const int consumer = hw::warp_index() - L::kConsumerWarp; // 0..7 for consumers. (Asked again: registers)
  if(consumer >= 0 && consumer < 8) {
    hw::more_registers<L::kConsumerRegisters>();
    hw::barrier_sync(L::kBarrierFront, L::kThreads - 64);
    batch::consume(c);
    return;
  }
  hw::fewer_registers<L::kOtherRegisters>();
  const int helper = L::helper_of(c.warp);
  stream::prepare_down(c, helper, launch);
  hw::barrier_sync(L::kBarrierFront, L::kThreads - 64);
  if(helper < L::kReduceBuffers)
    finalise_items(c, helper, launch);
  if(c.cta < L::kDownCtas)
    batch::load_h(c, helper >= L::kReduceBuffers, launch);
}

// What `mf_meta` holds.
template <class L>
MF_ANYWHERE constexpr mf_batch_meta make_meta()
{
  using Shape = typename L::Shape;
  mf_batch_meta m{};
  m.magic = MF_BATCH_MAGIC;
  m.version = MF_BATCH_VERSION;
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
  m.zero_experts = Shape::kZeroExperts;
  m.expert_begin = Shape::kExpertBegin;
  m.expert_count = Shape::kExpertCount;
  m.intermediate_offset = L::kOffset;
  m.token_groups = L::kGroups;
  m.overlay = L::kOverlay;
  m.low_ranks = L::kLowRanks;
  m.grid_ctas = L::kGridCtas;
  m.threads = L::kThreads;
  m.shared_bytes = L::kSharedBytes;
  m.down_ctas = L::kDownCtas;
  m.down_rows = L::kDownRows;
  m.ring_stages = L::kRingStages;
  m.stage_bytes = L::kStageBytes;
  m.turn_slots = L::kScaleSlots;
  m.ticket_lookahead = L::kLookahead;
  m.down_kblocks = L::kDownKBlocks;
#ifdef MF_WATCHDOG
  m.watchdog = 1;
#endif
  m.workspace_bytes = L::kWorkspaceBytes;
  m.h_offset = MF_BATCH_WS_H;
  m.ids_offset = MF_BATCH_WS_IDS(L::kGroups, L::kRanks, L::kIntermediate);
  m.weights_offset = MF_BATCH_WS_WEIGHTS(L::kGroups, L::kRanks, L::kIntermediate);
  m.status_offset = MF_STREAM_WS_STATUS;
  m.launches_offset = MF_STREAM_WS_LAUNCHES;
  m.shared_experts = L::kShared;
  m.shared_gate = Shape::kSharedGate;
  m.weight_on_input = Shape::kWeightOnInput;
  m.swiglu_limit = Shape::kSwigluLimit;
  m.swiglu_alpha = Shape::kSwigluAlpha;
  return m;
}

} // namespace batch
