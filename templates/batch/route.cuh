// route.cuh - from router logits to the list of active experts, ranks and weights.
//
// Who runs it   16 routers (consumers and h loaders), each for the tokens router, router + 16: Routing. list_experts: the producer warp.
//               Selection and weights are stream's (route_packed.cuh, route_ordered.cuh, route_scores.cuh, route_given.cuh), to the bit.
// Reads         logits, bias; or ids and weights; gates of shared experts (global).
// Writes        token_mask[], from which the producer makes experts[], tokens[], slot_of[] and active in the order of expert indices.
//               Then slot_at[], slot_by_rank[], weight[], passes[]. The last CTA also writes ids and weights to the workspace.
//               NaN, ids that do not exist: bits of the status word. Where the ring will be: the router's scores (Layout::Scores), one token after the other.
// Waits for     sync_cta (the tables are cleared). The producer waits at kBarrierRouted; publish runs behind kBarrierListed.
// Visible by    the named barriers, each behind a sync_warp of the writers. fence_async_proxy before kBarrierRouted: copies into the ring, by
//               the async proxy, come behind it.
// No deadlock   routers only arrive at kBarrierRouted, whether they have a token or not; the producer waits for nobody else there.
#pragma once
#include "batch/layout.cuh"
#include "stream/route.cuh"

namespace batch {

// A router's tokens.
template <class L>
struct Routing {
  static constexpr int kRounds = L::kRouteRounds;
  static constexpr bool kEarly = L::kExpertsPerLane <= 8 || L::kGiven; // else there are too few registers to load ahead
  stream::Selection<L> selection[kRounds];
  stream::SharedGate<L> gate[kRounds];
  uint32_t expert[kRounds]; // of the lane's pick; 0xFFFF: none. Shared ones: behind the columns of the logits
  float weight[kRounds];

  MF_DEVICE static int token_of(int router, int round) { return router + L::kRouters * round; }

  MF_DEVICE void load(const Context<L> &c, int router)
  {
    if constexpr(!kEarly)
      return;
    MF_UNROLL
    for(int i = 0; i < kRounds; ++i) {
      if(token_of(router, i) < c.p.tokens)
        load_one(c, router, i);
    }
  }

  MF_DEVICE void load_one(const Context<L> &c, int router, int i)
  {
    selection[i].load(c, token_of(router, i), 0);
    gate[i].load(c, token_of(router, i));
  }

  // One token after the other: they share the router's row of scores.
  MF_DEVICE void select(const Context<L> &c, int router)
  {
    MF_UNROLL
    for(int i = 0; i < kRounds; ++i) {
      if(token_of(router, i) < c.p.tokens)
        select_one(c, router, i);
      hw::sync_warp(); // everyone has read the scores, the masks are written
    }
    if constexpr(!L::kPacked && !L::kGiven)
      hw::fence_async_proxy(); // scores lie where the ring will be
    hw::barrier_arrive(L::kBarrierRouted, 32 * (L::kRouters + 1));
  }

  MF_DEVICE void select_one(const Context<L> &c, int router, int i)
  {
    auto &s = selection[i];
    if constexpr(!kEarly)
      load_one(c, router, i);
    s.score_experts(c, router, 0);
    s.prepare(c, router);
    MF_UNROLL
    for(int j = 0; j < L::kTopK; ++j)
      s.pop(c, j);
    s.settle(c, router);
    const bool picked = c.lane < L::kTopK && s.picked();
    const uint32_t e = s.expert();
    if(stream::is_shared(c) || (picked && stream::is_local<L>(e)))
      hw::or_shared(&c.sm.cleared.token_mask[stream::local_of(c, e)], 1u << token_of(router, i));
    if constexpr(L::kGiven)
      weight[i] = s.weight(c);
    else
      weight[i] = stream::weight_of(c, s, router);
    expert[i] = s.picked() ? e : 0xFFFFu;
    if constexpr(L::kShared > 0) {
      if(stream::is_shared(c)) {
        weight[i] = gate[i].weight(c);
        expert[i] = L::kColumns + c.lane - L::kTopK;
      }
    }
    if(c.cta == 0 && s.has_nan(c.lane))
      hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
    if constexpr(L::kGiven) {
      if(c.cta == 0 && s.bad)
        hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_ID);
    }
  }

  // Ranks and weights of the tokens' experts, and which h sets each slot is multiplied with.
  MF_DEVICE void publish(const Context<L> &c, int router) const
  {
    MF_UNROLL
    for(int i = 0; i < kRounds; ++i) {
      if(token_of(router, i) < c.p.tokens)
        publish_one(c, token_of(router, i), expert[i], weight[i]);
    }
  }

  MF_DEVICE static void publish_one(const Context<L> &c, int token, uint32_t e, float w)
  {
    auto &sm = c.sm;
    const bool picked = e != 0xFFFFu, local = stream::has_local(c, picked, e);
    const int slot = local ? sm.slot_of[stream::local_of(c, e)] : 0, rank = stream::rank_of(c, local, slot);
    if(c.lane < L::kRanks && local) {
      sm.slot_at[token][rank] = slot;
      sm.slot_by_rank[rank][token] = slot;
      sm.weight[token][rank] = w;
      Passes<L>::add(c, slot, token, rank);
    }
    if(c.cta == L::kGridCtas - 1 && c.lane < L::kRanks) {
      const bool routed = stream::is_shared(c) || (picked && (L::kColumns == L::kExperts || e < (uint32_t)L::kExperts));
      const int at = token * L::kRanks + rank;
      ((int32_t *)c.workspace(MF_BATCH_WS_IDS(L::kGroups, L::kRanks, L::kIntermediate)))[at] = routed ? (int)e : -1;
      ((float *)c.workspace(MF_BATCH_WS_WEIGHTS(L::kGroups, L::kRanks, L::kIntermediate)))[at] = routed ? w : 0.0f;
    }
  }
};

// Before sync_cta, besides clear_tables: no token has a slot yet. Warps 0..3.
template <class L>
MF_DEVICE void clear_slots(const Context<L> &c)
{
  constexpr int kAt = sizeof(c.sm.slot_at) / 4, kByRank = sizeof(c.sm.slot_by_rank) / 4;
  constexpr uint32_t kEmpty = L::kNoSlot * L::kEverySlot;
  const int thread = c.warp * 32 + c.lane;
  if(c.warp >= 4)
    return;
  uint32_t *at = (uint32_t *)c.sm.slot_at, *by_rank = (uint32_t *)c.sm.slot_by_rank;
  if(thread < kAt)
    at[thread] = kEmpty;
  if(thread < kByRank)
    by_rank[thread] = kEmpty;
  if constexpr(L::kManyRanks) { // what more than 128 threads' words there are
    MF_LOOP
    for(int i = 128 + thread; i < larger(kAt, kByRank); i += 128) {
      if(i < kAt)
        at[i] = kEmpty;
      if(i < kByRank)
        by_rank[i] = kEmpty;
    }
  }
}

// The list of active experts, in the order of their indices. Producer warp; returns its length.
template <class L>
MF_DEVICE int list_experts(const Context<L> &c)
{
  constexpr int kCount = L::kTableExperts / 32;
  auto &sm = c.sm;
  int active = 0, slot[kCount];
  uint32_t mask[kCount];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i)
    mask[i] = sm.cleared.token_mask[i * 32 + c.lane];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    const uint32_t chosen = hw::ballot(mask[i] != 0);
    slot[i] = active + hw::count_bits(chosen & ((1u << c.lane) - 1));
    active += hw::count_bits(chosen);
  }
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    sm.slot_of[i * 32 + c.lane] = slot[i]; // (of no meaning for an expert that is not active)
    if(mask[i] != 0) {
      sm.experts[slot[i]] = i * 32 + c.lane;
      sm.tokens[slot[i]] = mask[i];
    }
  }
  if(c.lane == 0)
    sm.active = active;
  hw::sync_warp();
  return active;
}

} // namespace batch
