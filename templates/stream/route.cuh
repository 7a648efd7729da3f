// route.cuh - from router logits to the list of active experts, ranks and weights.
//
// Who runs it   Each token has 1, 2 or 4 successive consumer warps (Selection::log_warps). All of them: score_experts. The
//               first, its router: select_experts, publish_ranks. list_experts: the producer warp.
//               Every CTA routes all tokens for itself: that is faster than waiting for another CTA's answer.
// Reads         logits, bias; or ids and weights; gates of shared experts (global).
// Writes        (of this rank's experts only, by their index among them, but for ids and weights)
//               one token: experts[], active_first, active (shared experts, then the picks in their order). More: token_mask[], from which the
//               producer makes experts[], slot_of[] and active in the order of expert indices. Then rank[], weight[],
//               columns[]. The last CTA also writes ids and weights to the workspace. NaN: a bit of the status word.
//               Where h will be: scores and orders of the token's experts (Layout::Scores), for its router.
// Waits for     sync_cta (the tables are cleared); a router that has helpers for them at kBarrierScored + token. The producer
//               waits at kBarrierRouted, with one token also at kBarrierPicked; publish_ranks runs behind kBarrierListed.
// Visible by    the named barriers, each behind a sync_warp of the writers.
// No deadlock   helpers only arrive at kBarrierScored, routers at kBarrierRouted and kBarrierPicked, each once; the producer waits for
//               nobody else there. With one token and shared experts, kBarrierRouted comes before anything is scored (list_shared); from
//               then on the producer reads the list's head while the router writes behind it, until kBarrierPicked.
#pragma once
#include "stream/route_given.cuh"
#include "stream/route_ordered.cuh"
#include "stream/route_packed.cuh"

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

// One token: shared experts are the head of the list, and known before anything is routed. The producer starts with them.
template <class L>
MF_DEVICE void list_shared(const Context<L> &c)
{
  if(is_shared(c))
    c.sm.experts[c.lane - L::kTopK] = (L::kLocalExperts + c.lane - L::kTopK) | 0x10000;
  if(c.lane == 0)
    c.sm.active_first = L::kShared;
  hw::sync_warp();
  hw::barrier_arrive(L::kBarrierRouted, 64);
}

// One token: the picks are the list. Appends the picks kFrom .. kTo - 1; `all` says whether there were so many.
// Returns the list's length so far. If picks may be others' experts or find nothing anywhere, these are all picks at once.
template <class L, int kFrom, int kTo>
MF_DEVICE int append_picks(const Context<L> &c, const Selection<L> &selection, bool all)
{
  if constexpr(L::kAllLocal) {
    if(c.lane >= kFrom && c.lane < kTo && selection.picked())
      c.sm.experts[c.lane] = selection.expert() | 0x10000;
    return all ? kTo : hw::count_bits(hw::ballot(c.lane < kTo && selection.picked()));
  } else {
    static_assert(kFrom == 0 && kTo == L::kTopK, "a list without the others' experts is made in one go");
    const bool local = c.lane < kTo && selection.picked() && is_local<L>(selection.expert());
    const uint32_t lanes = hw::ballot(local);
    if(local)
      c.sm.experts[L::kShared + hw::count_bits(lanes & ((1u << c.lane) - 1))] = local_index<L>(selection.expert()) | 0x10000;
    return L::kShared + hw::count_bits(lanes);
  }
}

// Picks the token's experts and tells the producer.
// One token: the producer is woken as soon as those are known that the first units need.
template <class L>
MF_DEVICE void select_experts(const Context<L> &c, Selection<L> &selection, int token)
{
  constexpr int kTopK = L::kTopK;
  constexpr int kNeeded = (L::kGridCtas - 1) / L::kUnits + 1; // slots that the grid's first units belong to
  constexpr int kFirst = L::kAllLocal && kNeeded < kTopK ? kNeeded : kTopK;
  auto &sm = c.sm;
  selection.prepare(c, token);
  bool all = selection.template pick<0, kFirst>(c, token);
  if(c.p.tokens == 1) {
    const int count = append_picks<L, 0, kFirst>(c, selection, all);
    if(c.lane == 0) {
      if(L::kShared == 0)
        sm.active_first = count;
      if(kFirst == kTopK)
        sm.active = count;
    }
    hw::sync_warp();
    if(L::kShared == 0) // else the producer has been woken (list_shared)
      hw::barrier_arrive(L::kBarrierRouted, 64);
  }
  if constexpr(kFirst < kTopK)
    all = selection.template pick<kFirst, kTopK>(c, token);
  if(c.p.tokens == 1) {
    if constexpr(kFirst < kTopK) {
      const int count = append_picks<L, kFirst, kTopK>(c, selection, all);
      if(c.lane == 0)
        sm.active = count;
      hw::sync_warp();
    }
    hw::barrier_arrive(L::kBarrierPicked, 64);
  } else {
    const uint32_t e = selection.expert(), local = local_of(c, e);
    if(has_local(c, c.lane < kTopK && selection.picked(), e))
      hw::or_shared(&sm.cleared.token_mask_word[local >> 2], 1u << (token + 8 * (local & 3)));
    hw::sync_warp();
    hw::barrier_arrive(L::kBarrierRouted, 32 * (c.p.tokens + 1));
  }
  if(c.cta == 0 && selection.has_nan(c.lane))
    hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
  if constexpr(L::kGiven) {
    if(c.cta == 0 && selection.bad)
      hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_ID);
  }
}

// The producer's part with more than one token: the list of active experts, in the order of their indices.
// Returns its length.
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
  for(int i = 0; i < kCount; ++i) { // apart from the ballots: so these are predicated stores instead of branches
    sm.slot_of[i * 32 + c.lane] = slot[i]; // (of no meaning for an expert that is not active)
    if(mask[i] != 0)
      sm.experts[slot[i]] = (i * 32 + c.lane) | mask[i] << 16;
  }
  if(c.lane == 0)
    sm.active = active;
  hw::sync_warp();
  return active;
}

// Rank of the lane's pick among the token's. This rank's experts come first: with one token shared ones, then picks in their order, with
// more by their indices, shared ones last. Behind them the others' and zero experts and what found nothing (the latter last, but for given ids).
template <class L>
MF_DEVICE int rank_of(const Context<L> &c, bool picked, bool local, uint32_t expert)
{
  int rank = c.lane, before = 0;
  if constexpr(L::kAllLocal) {
    if(c.p.tokens > 1) {
      MF_UNROLL
      for(int j = 0; j < L::kTopK; ++j)
        before += hw::shuffle(expert, j) < expert;
      rank = picked ? before : rank;
    }
  } else {
    uint32_t place = !local ? 0x10000u + c.lane : c.p.tokens == 1 ? (uint32_t)c.lane : expert;
    if constexpr(L::kShared > 0) {
      if(c.p.tokens == 1 && local)
        place = is_shared(c) ? (uint32_t)(c.lane - L::kTopK) : (uint32_t)(L::kShared + c.lane);
    }
    MF_UNROLL
    for(int j = 0; j < L::kRanks; ++j)
      before += hw::shuffle(place, j) < place;
    rank = before;
  }
  return rank;
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
  const int rank = rank_of(c, picked, local, expert);
  float weight;
  if constexpr(L::kGiven)
    weight = selection.weight(c);
  else
    weight = weight_of(c, selection, token);
  if constexpr(L::kShared > 0)
    weight = shared ? gate.weight(c) : weight;
  if(c.lane < L::kRanks && local) {
    const int slot = c.p.tokens == 1 ? (L::kAllLocal ? c.lane : rank) : sm.slot_of[local_of(c, expert)];
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
