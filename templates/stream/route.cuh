// route.cuh - from router logits to the list of active experts, ranks and weights.
//
// Who runs it   Each token has 1, 2 or 4 successive consumer warps (Selection::log_warps). All of them: score_experts. The
//               first, its router: select_experts, publish_ranks. The router of token 0, the lister, makes the list.
//               Every CTA routes all tokens for itself: that is faster than waiting for another CTA's answer.
// Reads         logits, bias; or ids and weights; gates of shared experts (global).
// Writes        (of this rank's experts only, by their index among them, but for ids and weights)
//               head: the expert of the CTA's first unit, known before the list is. token_mask[] (more than one token), from which the lister
//               makes experts[], slot_of[] and active. Then rank[], weight[], columns[]. The last CTA also writes ids and weights to the
//               workspace. NaN: a bit of the status word.
//               Where h will be: scores and orders of the token's experts (Layout::Scores), for its router.
// Waits for     sync_cta (the tables are cleared); a router that has helpers for them at kBarrierScored + token; the lister for the other
//               routers at kBarrierRouted. The producer waits at kBarrierHead and kBarrierList; publish_ranks runs behind kBarrierListed.
// Visible by    the named barriers, each behind a sync_warp of the writers.
// No deadlock   helpers only arrive at kBarrierScored, the other routers at kBarrierRouted, the lister at kBarrierHead and kBarrierList, each
//               once; the producer waits for nobody else there.
//
// The list of active experts begins with those that are known first, so that the stream can begin before all tokens are routed: shared experts, then
// token 0's picks of this rank in their order. Behind them come the other tokens', in the order of expert indices. All CTAs agree on it.
#pragma once
#include "stream/route_given.cuh"
#include "stream/route_ordered.cuh"
#include "stream/route_packed.cuh"
#include "stream/trace.cuh"

namespace stream {

template <bool kPacked, bool kGiven, class L>
struct SelectionType {
  using Type = OrderedSelection<L>;
};
template <class L>
struct SelectionType<true, false, L> {
  using Type = PackedSelection<L>;
};
template <class L>
struct SelectionType<false, true, L> {
  using Type = GivenSelection<L>;
};
template <class L>
using Selection = typename SelectionType<L::kPacked, L::kGiven, L>::Type;

// Whether an expert (or column of the logits) is one of this rank's, and its index among them.
template <class L>
MF_DEVICE bool is_local(uint32_t expert) { return L::kAllLocal || expert - L::kExpertBegin < (uint32_t)L::kLocalExperts; }
template <class L>
MF_DEVICE uint32_t local_index(uint32_t expert) { return expert - L::kExpertBegin; }

// Lane kTopK + s of a router has shared expert s, as the lanes below have the picks; rows of the tables and tensors of these experts lie
// behind those of the routed ones. Whether the lane has an expert of this rank, and which:
template <class L>
MF_DEVICE bool is_shared(const Context<L> &c) { return L::kShared > 0 && c.lane >= L::kTopK && c.lane < L::kRanks; }
template <class L>
MF_DEVICE bool has_local(const Context<L> &c, bool picked, uint32_t expert) { return is_shared(c) || (picked && is_local<L>(expert)); }
template <class L>
MF_DEVICE uint32_t local_of(const Context<L> &c, uint32_t expert)
{
  return is_shared(c) ? (uint32_t)(L::kLocalExperts + c.lane - L::kTopK) : local_index<L>(expert);
}

// What a token's shared experts weigh: 1, or the sigmoid of the engine's gate (0 for NaN, which is reported).
template <class L>
struct SharedGate {
  float logit;

  MF_DEVICE void load(const Context<L> &c, int token)
  {
    if constexpr(L::Shape::kSharedGate) {
      const size_t at = (size_t)token * c.p.gate_pitch + (c.lane - L::kTopK);
      logit = 0.0f;
      if(is_shared(c)) {
        if constexpr(L::Shape::kLogitsF32)
          logit = ((const float *)c.p.gate)[at];
        else
          logit = hw::bf16_low(((const uint16_t *)c.p.gate)[at]);
      }
    }
  }

  MF_DEVICE float weight(const Context<L> &c) const
  {
    if constexpr(L::Shape::kSharedGate) {
      if(c.cta == 0 && logit != logit)
        hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
      return logit == logit ? mf_exact_sigmoid(logit) : 0.0f;
    } else {
      return 1.0f;
    }
  }
};

// Lister: the list's slot of the lane's expert. Without other ranks' and shared experts all picks are the list, those that found nothing last.
template <class L>
MF_DEVICE int head_slot(const Context<L> &c, bool local)
{
  if constexpr(L::kAllLocal)
    return c.lane;
  const uint32_t picks = hw::ballot(local && !is_shared(c));
  return is_shared(c) ? c.lane - L::kTopK : L::kShared + hw::count_bits(picks & ((1u << c.lane) - 1));
}

// Lister, once: tells the producer the expert of the CTA's first unit.
template <class L>
MF_DEVICE void tell_head(const Context<L> &c, uint32_t expert)
{
  if(c.lane == 0)
    c.sm.head = expert;
  hw::sync_warp();
  hw::barrier_arrive(L::kBarrierHead, 64);
}

// The same when all picks are made, or (kPicks = 0) none: then it is a shared expert, or comes with the list.
template <class L, int kPicks>
MF_DEVICE void find_head(const Context<L> &c, const Selection<L> &selection)
{
  const uint32_t pick = kPicks > 0 ? selection.expert() : 0;
  const bool local = has_local(c, c.lane < kPicks && selection.picked(), pick);
  const int slot = head_slot(c, local); // (exchanges lanes)
  const uint32_t found = hw::ballot(local && slot == c.cta / L::kUnits);
  const uint32_t expert = hw::shuffle(local_of(c, pick), found != 0 ? hw::lowest_bit(found) : 0);
  tell_head(c, found != 0 ? expert : L::kNoExpert);
}

// Lister, more than one token: the experts that token 0 does not have, behind its `first` ones, in the order of their indices.
// Returns the list's length.
template <class L>
MF_DEVICE int list_others(const Context<L> &c, int first)
{
  constexpr int kCount = L::kTableExperts / 32;
  auto &sm = c.sm;
  int active = first, slot[kCount];
  uint32_t mask[kCount];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    mask[i] = sm.cleared.token_mask[i * 32 + c.lane];
    mask[i] = mask[i] & 1 ? 0 : mask[i];
  }
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    const uint32_t chosen = hw::ballot(mask[i] != 0);
    slot[i] = active + hw::count_bits(chosen & ((1u << c.lane) - 1));
    active += hw::count_bits(chosen);
  }
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) { // apart from the ballots: so these are predicated stores instead of branches
    sm.slot_of[i * 32 + c.lane] = slot[i]; // (of no meaning for an expert that is not active)
    if(mask[i] != 0)
      sm.experts[slot[i]] = (i * 32 + c.lane) | mask[i] << 16;
  }
  return active;
}

// Lister, when its own picks are made: the list of active experts.
template <class L>
MF_DEVICE void list_experts(const Context<L> &c, const Selection<L> &selection)
{
  auto &sm = c.sm;
  const uint32_t expert = local_of(c, selection.expert());
  const bool local = has_local(c, c.lane < L::kTopK && selection.picked(), selection.expert());
  const int slot = head_slot(c, local);
  int active = hw::count_bits(hw::ballot(local));
  uint32_t tokens = 1;
  if(c.p.tokens > 1) {
    hw::barrier_sync(L::kBarrierRouted, 32 * c.p.tokens);
    active = list_others(c, active);
    hw::sync_warp(); // slot_of of token 0's experts has been written by other lanes, too
    if(local) {
      tokens = sm.cleared.token_mask[expert];
      sm.slot_of[expert] = slot;
    }
  }
  if(local)
    sm.experts[slot] = expert | tokens << 16;
  if(c.lane == 0)
    sm.active = active;
  hw::sync_warp();
  hw::barrier_arrive(L::kBarrierList, 64);
}

// Picks the token's experts. Lister: tells the producer the one that it begins with as soon as it is certain, and makes the list.
template <class L>
MF_DEVICE void select_experts(const Context<L> &c, Selection<L> &selection, int token)
{
  constexpr int kTopK = L::kTopK;
  const int head_pick = c.cta / L::kUnits; // where picks are the list: the slot of the CTA's first unit
  bool told = L::kShared > 0 || token != 0; // (shared experts have been told before)
  selection.prepare(c, token);
  MF_UNROLL
  for(int j = 0; j < kTopK; ++j) {
    const uint32_t key = selection.pop(c, j);
    if constexpr(L::kAllLocal) {
      if(j <= (L::kGridCtas - 1) / L::kUnits && !told && j == head_pick && selection.is_settled(key)) {
        tell_head(c, Selection<L>::expert_of(key));
        told = true;
      }
    }
  }
  selection.settle(c, token);
  if(!told)
    find_head<L, kTopK>(c, selection);
  if(c.p.tokens > 1) {
    const uint32_t e = selection.expert(), local = local_of(c, e);
    if(has_local(c, c.lane < kTopK && selection.picked(), e))
      hw::or_shared(&c.sm.cleared.token_mask_word[local >> 2], 1u << (token + 8 * (local & 3)));
    hw::sync_warp();
    if(token != 0)
      hw::barrier_arrive(L::kBarrierRouted, 32 * c.p.tokens);
  }
  trace_event(c, MF_CONSUMER_ROUTED);
  if(token == 0)
    list_experts(c, selection);
  if(c.cta == 0 && selection.has_nan(c.lane))
    hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
  if constexpr(L::kGiven) {
    if(c.cta == 0 && selection.bad)
      hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_ID);
  }
}

// Rank of the lane's expert among the token's: this rank's experts come first, in the order of their slots. Behind them the others' and zero
// experts and what found nothing, in the order of their lanes.
template <class L>
MF_DEVICE int rank_of(const Context<L> &c, bool local, int slot)
{
  const uint32_t place = local ? (uint32_t)slot : 0x10000u + c.lane;
  int before = 0;
  MF_UNROLL
  for(int j = 0; j < L::kRanks; ++j)
    before += hw::shuffle(place, j) < place;
  return before;
}

// The routing weight of the lane's pick, 0 if it found nothing. (Given ones: GivenSelection.)
template <class L>
MF_DEVICE float weight_of(const Context<L> &c, const Selection<L> &selection, int token)
{
  using Shape = typename L::Shape;
  constexpr bool kSoftmax = Shape::kScoring == MF_STREAM_SOFTMAX || Shape::kScoring == MF_STREAM_PROBABILITY;
  const float own_score = selection.score(c, token); // exchanges between lanes: all of them take part
  const float score = c.lane < L::kTopK ? own_score : 0.0f;
  if constexpr(Shape::kRenormalise || kSoftmax) {
    float sum;
    if constexpr(Shape::kRenormalise)
      sum = add_lanes<(L::kTopK > 16 ? 32 : L::kTopK > 8 ? 16 : 8)>(score);
    else
      sum = selection.sum_all(c, token);
    if constexpr(!kSoftmax)
      sum = mf_exact_add(sum, 1e-20f);
    return mf_exact_weight(score, sum, c.p.scaling);
  } else {
    return mf_exact_mul(score, c.p.scaling);
  }
}

// Ranks and weights of the token's experts, and which columns of h belong to each slot.
template <class L>
MF_DEVICE void publish_ranks(const Context<L> &c, const Selection<L> &selection, const SharedGate<L> &gate, int token)
{
  auto &sm = c.sm;
  const bool shared = is_shared(c), picked = selection.picked();
  const uint32_t expert = shared ? (uint32_t)(L::kColumns + c.lane - L::kTopK) : picked ? selection.expert() : 0xFFFFu;
  const bool local = has_local(c, picked, expert);
  int slot = c.lane, rank = c.lane; // of one token, without other ranks' and shared experts
  if(c.p.tokens > 1)
    slot = local ? sm.slot_of[local_of(c, expert)] : 0;
  else if constexpr(!L::kAllLocal)
    slot = head_slot(c, local);
  if(c.p.tokens > 1 || !L::kAllLocal)
    rank = rank_of(c, local, slot);
  float weight;
  if constexpr(L::kGiven)
    weight = selection.weight(c);
  else
    weight = weight_of(c, selection, token);
  if constexpr(L::kShared > 0)
    weight = shared ? gate.weight(c) : weight;
  if(c.lane < L::kRanks && local) {
    const int group = c.h_group(rank), column = c.h_column(rank, token);
    sm.cleared.rank[slot][token] = rank;
    sm.weight[token][rank] = weight;
    hw::or_shared(&sm.cleared.columns[slot].word[group >> 2], 1u << (column + 8 * (group & 3)));
  }
  if(c.cta == L::kGridCtas - 1 && c.lane < L::kRanks) {
    const bool routed = shared || (picked && (L::kColumns == L::kExperts || expert < (uint32_t)L::kExperts));
    ((int32_t *)c.workspace(MF_STREAM_WS_IDS(L::kRanks)))[token * L::kRanks + rank] = routed ? (int)expert : -1;
    ((float *)c.workspace(MF_STREAM_WS_WEIGHTS(L::kRanks)))[token * L::kRanks + rank] = routed ? weight : 0.0f;
  }
}

} // namespace stream
