// producer.cuh - the weight stream: one warp that never stops.
//
// Who runs it   warp kProducerWarp. Lane 0 issues the tensor copies, all lanes copy a unit's scale rows.
// Reads         w13, s13, w2 (global); head, experts[], active (route.cuh), launch (kernel.cuh); the ticket counter (tickets.cuh).
// Writes        the ring, stage_unit[], up_scale[].
// Waits for     kBarrierHead, and kBarrierList before anything behind the first unit; then free stages (empty[], by the consumers), landed stages (full[], by its own copies: the
//               cap on bytes in flight).
// Visible by    full[] (bytes of the copies; stage_unit[] by lane 0's own arrival) and scales[] (arrivals of cp.async).
// No deadlock   It waits for a consumer's progress only on stages already handed out. It never waits for h: down weights do not depend on it.
//
// Why the cap: everything else that an SM asks of L2 queues behind its outstanding copies. 48-64 KB in flight saturate HBM;
// the ring is deeper only so that landed stages wait for the consumers instead of the stream waiting for them.
#pragma once
#include "stream/route.cuh"
#include "stream/tickets.cuh"
#include "stream/trace.cuh"

namespace stream {

// The producer's position in the ring.
template <class L>
struct RingWriter {
  const Context<L> &c;
  int limit;                    // stages in flight at most
  int stage = 0;                // the next to hand out
  uint32_t empty_parity = 1;
  int handed_out = 0;
  int oldest = 0;               // the oldest one in flight
  uint32_t oldest_parity = 0;
  int in_flight = 0;
  hw::Stopwatch flight_wait, free_wait;

  MF_DEVICE explicit RingWriter(const Context<L> &context) : c(context)
  {
    set_limit(c.p.flight);
    hw::compute_now(limit);
  }
  MF_DEVICE void set_limit(int stages) { limit = smaller(stages, L::kRingStages); }
  MF_DEVICE bool full() const { return in_flight >= limit; }

  // Waits until the stage is free and no more than limit - 1 others are in flight.
  MF_DEVICE void acquire()
  {
    flight_wait.start();
    while(full()) {
      hw::mbarrier_wait(&c.sm.barrier.full[oldest], oldest_parity, c.dog, L::kWaitFlight);
      if(++oldest == L::kRingStages) {
        oldest = 0;
        oldest_parity ^= 1;
      }
      --in_flight;
    }
    flight_wait.stop();
    free_wait.start();
    if(handed_out >= L::kRingStages)
      hw::mbarrier_wait(&c.sm.barrier.empty[stage], empty_parity, c.dog, L::kWaitRingFree);
    free_wait.stop();
    hw::sync_warp(); // no lane may still be waiting for a phase when lane 0 sets off the next one
    ++handed_out;
    ++in_flight;
  }

  MF_DEVICE void advance()
  {
    if(++stage == L::kRingStages) {
      stage = 0;
      empty_parity ^= 1;
    }
  }
};

// Barriers and small tables; before sync_cta.
template <class L>
MF_DEVICE void init_barriers(const Context<L> &c)
{
  auto &sm = c.sm;
  if(c.lane == 0) {
    MF_UNROLL
    for(int i = 0; i < L::kReduceBuffers; ++i) {
      hw::mbarrier_init(&sm.barrier.reduce_full[i], 8);
      hw::mbarrier_init(&sm.barrier.reduce_empty[i], 1);
    }
    MF_UNROLL
    for(int i = 0; i < L::kScaleSlots; ++i)
      hw::mbarrier_init(&sm.barrier.scales[i], 32);
    MF_UNROLL
    for(int i = 0; i < L::kRingStages; ++i) {
      hw::mbarrier_init(&sm.barrier.full[i], 1);
      hw::mbarrier_init(&sm.barrier.empty[i], 8);
    }
    hw::mbarrier_init(&sm.barrier.down_scales, L::kHelperThreads);
    hw::mbarrier_init_fence();
  }
  if(c.lane < L::kReduceBuffers)
    sm.published[c.lane] = 0;
  if(c.lane < L::kHLoaders)
    sm.h_loaded[c.lane] = 0;
  if(c.lane == 0)
    sm.batches_taken = 0;
}

// The scale rows of a unit's gate and up features, on a barrier of their own: their latency must not count in the cap.
template <class L>
MF_DEVICE void copy_scale_rows(const Context<L> &c, int turn, int expert, int feature_block)
{
  constexpr int kUpRow = L::kHBlocks * L::kKBlocks; // from a gate row to the up row
  const int slot = turn % L::kScaleSlots;
  const float *rows = c.p.s13 + ((size_t)expert * 2 * L::kHBlocks + feature_block) * L::kKBlocks;
  if constexpr(L::kKBlocks % 4 == 0) {
    constexpr int kPieces = L::kKBlocks / 4; // of 16 bytes, per row
    if(c.lane < 2 * kPieces) {
      const int from = c.lane < kPieces ? c.lane * 4 : (c.lane - kPieces) * 4 + kUpRow;
      hw::copy_async_16(&c.sm.up_scale[slot][0][0] + c.lane * 4, rows + from);
    }
  } else { // rows are aligned to single floats
    MF_UNROLL
    for(int first = 0; first < 2 * L::kKBlocks; first += 32) {
      const int i = first + c.lane;
      if(i < 2 * L::kKBlocks)
        hw::copy_async_4(&c.sm.up_scale[slot][0][0] + i, rows + (i < L::kKBlocks ? i : i - L::kKBlocks + kUpRow));
    }
  }
  hw::copy_async_arrive(&c.sm.barrier.scales[slot]);
}

// The k-blocks of a piece of w2 that begins at `first_block`, as they are copied: behind the last one boxes are filled with zeros.
template <class L>
MF_DEVICE int down_blocks(int first_block)
{
  return L::kEvenPieces || L::kWholeHBlocks ? L::kDownKBlocks : smaller(L::kDownKBlocks, L::kHBlocks - first_block);
}

// The CTA's rows of w2, from `row` on, in some k-blocks.
// Whole k-blocks come as one box. Where the rank's features begin or end within a block, each block is a box of its
// own, cut off at the row's ends: what lies outside is zero and is not read.
template <class L>
MF_DEVICE void copy_down_tile(uint8_t *tile, const hw::TensorMap &down_map, int row, int first_block, int blocks, hw::Mbarrier *full, uint64_t policy)
{
  if constexpr(L::kWholeHBlocks) {
    hw::copy_tensor_3d(tile, &down_map, 0, row, first_block, full, policy);
  } else {
    MF_LOOP
    for(int b = 0; b < blocks; ++b)
      hw::copy_tensor_3d(tile + b * L::kDownKBlockBytes, &down_map, (first_block + b) * 128 - L::kOffset, row, 0, full, policy);
  }
}

// A piece of w2 for the stage: the CTA's rows of the slots `slot` ..., some k-blocks of each. Lane 0.
template <class L>
MF_DEVICE void copy_down_piece(const Context<L> &c, int stage, const hw::TensorMap &down_map, int slot, int piece, int active, uint64_t policy)
{
  auto &sm = c.sm;
  hw::Mbarrier *full = &sm.barrier.full[stage];
  const int first_block = piece * L::kDownKBlocks, blocks = down_blocks<L>(first_block);
  hw::mbarrier_arrive_expect(full, smaller(L::kDownSlots, active - slot) * (blocks * L::kDownKBlockBytes));
  MF_UNROLL
  for(int j = 0; j < L::kDownSlots; ++j) {
    if(slot + j < active) {
      const int row = (sm.experts[slot + j] & 0xFFFF) * L::kHidden + c.cta * L::kDownRows;
      copy_down_tile<L>(sm.ring[stage] + j * L::kDownCopyBytes, down_map, row, first_block, blocks, full, policy);
    }
  }
}

// Waits for the whole list; returns its length.
template <class L>
MF_DEVICE int await_list(const Context<L> &c)
{
  hw::barrier_sync(L::kBarrierList, 64);
  trace_event(c, MF_PRODUCER_LISTED);
  return c.sm.active;
}

// The producer's turn in the up projection: turn n is unit cta + n * grid for the static rounds, a ticket from then on.
// What does not depend on the list of experts is worked out ahead, while there is time.
template <class L>
struct UpTurn {
  const Context<L> &c;
  const int static_rounds;
  int turn = 0;
  int unit, slot, feature_block; // the unit's slot, and which of the slot's kUnits it is
  int k;                         // the first chunk of k
  Tickets<L> tickets;
  hw::Stopwatch ticket_wait;

  MF_DEVICE explicit UpTurn(const Context<L> &context) : c(context), static_rounds(context.static_rounds())
  {
    locate(c.cta);
    hw::compute_now(slot), hw::compute_now(feature_block), hw::compute_now(k);
  }

  MF_DEVICE void locate(int u)
  {
    unit = u;
    slot = u / L::kUnits;
    feature_block = u - slot * L::kUnits;
    k = c.p.rotate_k ? u % L::kUnitStages : 0;
  }

  // The turn's copies have been issued, and the list is there.
  MF_DEVICE void advance()
  {
    int u = c.cta + L::kGridCtas * ++turn;
    if(turn + L::kLookahead > static_rounds) {
      ticket_wait.start();
      const uint32_t ticket = tickets.next(c, turn - 1, (uint32_t *)c.workspace(MF_STREAM_WS_TICKETS + (c.sm.launch & 1) * MF_STREAM_WS_TICKET_STRIDE));
      if(turn >= static_rounds)
        u = L::kGridCtas * static_rounds + (int)ticket;
      ticket_wait.stop();
    }
    locate(u);
  }

  MF_DEVICE bool exists(int active) const { return (uint32_t)unit < (uint32_t)(active * L::kUnits); }
};

// Chunk k of the turn's unit for the stage. Lane 0.
template <class L>
MF_DEVICE void copy_up_chunk(const Context<L> &c, int stage, const hw::TensorMap &up_map, const UpTurn<L> &turn, uint32_t expert, int k, uint64_t policy, const hw::Tally &up_stages)
{
  auto &sm = c.sm;
  hw::Mbarrier *full = &sm.barrier.full[stage];
  sm.stage_unit[stage] = turn.unit;
  hw::mbarrier_arrive_expect(full, L::kStageBytes);
  trace_first(c, MF_PRODUCER_FIRST_COPY, up_stages); // stamped ahead of the copy: nobody can have seen it earlier
  trace_event(c, MF_PRODUCER_LAST_UP);
  trace_event(c, MF_PRODUCER_LAST_COPY);
  hw::copy_tensor_5d(sm.ring[stage], &up_map, 0, 0, 0, expert * (2 * L::kUnits) + turn.feature_block, k * L::kStageKBlocks, full, policy);
}

// What only the producer's own trace knows at its end: the experts, and what it waited for.
template <class L>
MF_DEVICE void trace_stream(const Context<L> &c, const RingWriter<L> &ring, const UpTurn<L> &turn, int active, const hw::Tally &up_stages)
{
#ifdef MF_TRACE
  trace_value(c, MF_PRODUCER_ACTIVE, active);
  trace_value(c, MF_PRODUCER_UP_STAGES, up_stages.total());
  trace_value(c, MF_PRODUCER_DOWN_STAGES, c.cta < L::kDownCtas && active > 0 ? ring.handed_out - up_stages.total() : 0);
  trace_value(c, MF_PRODUCER_FLIGHT_WAIT, ring.flight_wait.total());
  trace_value(c, MF_PRODUCER_RING_WAIT, ring.free_wait.total());
  trace_value(c, MF_PRODUCER_TICKET_WAIT, turn.ticket_wait.total());
  MF_LOOP
  for(int slot = 0; c.cta == 0 && slot < active; ++slot) { // (shared experts are numbered as in the workspace)
    const int local = c.sm.experts[slot] & 0xFFFF;
    trace_entry(c, slot, local < L::kLocalExperts ? L::kExpertBegin + local : L::kColumns + local - L::kLocalExperts);
  }
#else
  (void)c, (void)ring, (void)turn, (void)active, (void)up_stages;
#endif
}

// The whole of the producer's work behind sync_cta.
template <class L>
MF_DEVICE void stream_weights(const Context<L> &c, const hw::TensorMap &up_map, const hw::TensorMap &down_map)
{
  auto &sm = c.sm;
  const uint64_t policy = c.p.evict_first ? hw::policy_evict_first() : hw::policy_evict_normal();
  RingWriter<L> ring(c);
  UpTurn<L> turn(c);

  hw::Tally up_stages;
  hw::barrier_sync(L::kBarrierHead, 64);
  trace_event(c, MF_PRODUCER_ROUTED);

  // The first copy goes out before anything else is worked out: the whole stream waits for it.
  uint32_t expert = sm.head;
  bool issued = expert != L::kNoExpert, listed = !issued;
  if(issued && c.lane == 0)
    copy_up_chunk(c, 0, up_map, turn, expert, turn.k, policy, up_stages);
  int active = issued ? turn.slot + 1 : await_list(c);

  // Up. The list is waited for behind the first unit, which the head was enough for.
  MF_LOOP
  while(turn.exists(active)) {
    if(listed)
      expert = sm.experts[turn.slot] & 0xFFFF;
    MF_LOOP
    for(int chunk = 0, k = turn.k; chunk < L::kUnitStages; ++chunk) {
      ring.acquire();
      if(c.lane == 0 && !issued)
        copy_up_chunk(c, ring.stage, up_map, turn, expert, k, policy, up_stages);
      issued = false;
      up_stages.add();
      if(chunk == 0)
        copy_scale_rows(c, turn.turn, expert, (L::kOffset / L::kUnitFeatures + turn.feature_block) / (128 / L::kUnitFeatures));
      hw::sync_warp();
      ring.advance();
      if(++k == L::kUnitStages)
        k = 0;
    }
    if(!listed) {
      active = await_list(c);
      listed = true;
    }
    turn.advance();
  }

  if(c.cta >= L::kDownCtas || active == 0) { // no rows to come: an empty stage ends the up phase
    ring.acquire();
    if(c.lane == 0) {
      sm.stage_unit[ring.stage] = L::kEndOfUnits;
      hw::mbarrier_arrive(&sm.barrier.full[ring.stage]);
    }
    trace_stream(c, ring, turn, active, up_stages);
    return;
  }

  // Down: the CTA's rows of every active expert. The first stages are held back a little: other CTAs still need up weights.
  MF_LOOP
  for(int slot = 0; slot < active; slot += L::kDownSlots) {
    MF_LOOP
    for(int piece = 0; piece < L::kDownPieces; ++piece) {
      ring.set_limit(slot * L::kDownPieces + piece * L::kDownSlots < 4 * L::kDownSlots ? c.p.first_down_flight : c.p.flight);
      ring.acquire();
      if(c.lane == 0) {
        sm.stage_unit[ring.stage] = L::kEndOfUnits;
        if(slot == 0 && piece == 0)
          trace_event(c, MF_PRODUCER_FIRST_DOWN);
        trace_event(c, MF_PRODUCER_LAST_COPY);
        copy_down_piece(c, ring.stage, down_map, slot, piece, active, policy);
      }
      hw::sync_warp();
      ring.advance();
    }
  }
  trace_stream(c, ring, turn, active, up_stages);
}

} // namespace stream
