// route.cuh - from router logits to the list of active experts, ranks and weights.
//
// Who runs it   select_experts, publish_ranks: consumer warp t of 0..7 for token t. list_experts: the producer warp.
//               Every CTA routes all tokens for itself: that is faster than waiting for another CTA's answer.
// Reads         logits, bias (global).
// Writes        one token: experts[], active_first, active (in the order of picks). More: token_mask[], from which the
//               producer makes experts[], slot_of[] and active in the order of expert indices. Then rank[], weight[],
//               columns[]. The last CTA also writes ids and weights to the workspace. NaN: a bit of the status word.
// Waits for     nothing but sync_cta (the tables are cleared). The producer waits at kBarrierRouted, with one token also at
//               kBarrierPicked; publish_ranks runs behind kBarrierListed.
// Visible by    the named barriers, each behind a sync_warp of the writers.
// No deadlock   routers only arrive at kBarrierRouted and kBarrierPicked; the producer waits for nobody else there.
#pragma once
#include "stream/layout.cuh"

#ifndef MF_EXACT_FN
#define MF_EXACT_FN MF_DEVICE
#define MF_EXACT_FMA(a, b, c) hw::fma_rn(a, b, c)
#define MF_EXACT_MUL(a, b) hw::multiply_rn(a, b)
#define MF_EXACT_ADD(a, b) hw::add_rn(a, b)
#define MF_EXACT_RECIPROCAL(a) hw::reciprocal_rn(a)
#endif
#include "stream/exact_math.h"

namespace stream {

template <class L>
MF_DEVICE void report_nan(const Context<L> &c)
{
  if(c.cta == 0)
    hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
}

// --- Selection by 32-bit keys that hold logit and expert -------------------------------------------------------------
// For bf16 logits that select by themselves (softmax). key = order-preserving bits of the logit << 16 | 0xFFFF - expert:
// all keys differ, and the larger key is the larger logit or, at equal logits, the lower expert. Each lane sorts its keys,
// so that one redux per pick over the lanes' heads suffices.
template <class L>
struct PackedSelection {
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr uint32_t kLowestKey = 0x007F0000; // of -inf; NaN lies below
  uint32_t raw[kCount / 2]; // logit pairs of the experts lane * kCount ...
  uint32_t key[kCount];
  uint32_t mine; // lane j: the key of pick j

  MF_DEVICE void load(const Context<L> &c, int token)
  {
    const char *p = (const char *)c.p.logits + ((size_t)token * c.p.logits_pitch + c.lane * kCount) * 2;
    if constexpr(kCount == 8) {
      const hw::U32x4 v = *(const hw::U32x4 *)p;
      raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
    } else if constexpr(kCount == 4) {
      const hw::U32x2 v = *(const hw::U32x2 *)p;
      raw[0] = v.x, raw[1] = v.y;
    } else {
      raw[0] = *(const uint32_t *)p;
    }
  }

  MF_DEVICE void order(int i, int j)
  {
    const uint32_t a = key[i], b = key[j];
    key[i] = a > b ? a : b;
    key[j] = a > b ? b : a;
  }

  MF_DEVICE void prepare(const Context<L> &c)
  {
    uint32_t largest = 0;
    MF_UNROLL
    for(int i = 0; i < kCount / 2; ++i) {
      raw[i] = hw::bf16_pair_add(raw[i], 0); // -0 becomes +0, NaN becomes 0x7FFF
      largest = hw::bf16_pair_max_nan(largest, raw[i]);
    }
    if((largest & 0xFFFF) == 0x7FFF || (largest >> 16) == 0x7FFF) { // move NaN to the lower end
      MF_UNROLL
      for(int i = 0; i < kCount / 2; ++i) {
        if((raw[i] & 0xFFFF) == 0x7FFF)
          raw[i] |= 0xFFFF;
        if((raw[i] >> 16) == 0x7FFF)
          raw[i] |= 0xFFFF0000;
      }
      report_nan(c);
    }
    const uint32_t low = 0xFFFF - c.lane * kCount;
    MF_UNROLL
    for(int i = 0; i < kCount / 2; ++i) { // negative: all bits flipped; positive: the sign bit set
      const uint32_t w = raw[i] ^ (((raw[i] >> 15) & 0x00010001u) * 0x7FFFu + 0x80008000u);
      key[2 * i] = (w << 16) + (low - 2 * i);
      key[2 * i + 1] = (w & 0xFFFF0000u) | (low - 2 * i - 1);
    }
    // sorting networks, largest first
    if constexpr(kCount == 8) {
      order(0, 2), order(1, 3), order(4, 6), order(5, 7);
      order(0, 4), order(1, 5), order(2, 6), order(3, 7);
      order(0, 1), order(2, 3), order(4, 5), order(6, 7);
      order(2, 4), order(3, 5), order(1, 4), order(3, 6);
      order(1, 2), order(3, 4), order(5, 6);
    } else if constexpr(kCount == 4) {
      order(0, 1), order(2, 3), order(0, 2), order(1, 3), order(1, 2);
    } else {
      order(0, 1);
    }
    mine = 0;
  }

  // Takes the best remaining expert as pick j. False if there is none that may be selected (nor will there be later).
  MF_DEVICE bool pick(const Context<L> &c, int j)
  {
    const uint32_t best = hw::reduce_max(key[0]);
    if(c.lane == j)
      mine = best;
    const bool own = key[0] == best;
    MF_UNROLL
    for(int i = 0; i + 1 < kCount; ++i)
      key[i] = own ? key[i + 1] : key[i];
    if(kCount < L::kTopK)
      key[kCount - 1] = own ? 0u : key[kCount - 1];
    return best >= kLowestKey;
  }

  // Of the lane's own pick.
  MF_DEVICE bool picked() const { return mine >= kLowestKey; }
  MF_DEVICE uint32_t expert() const { return 0xFFFF - (mine & 0xFFFF); }
  MF_DEVICE float logit() const
  {
    const uint32_t bits = mine >> 16;
    return hw::bits_float((bits & 0x8000 ? bits & 0x7FFF : ~bits & 0xFFFF) << 16);
  }

  // Softmax score of the lane's pick, and (not renormalised) the sum over all experts.
  MF_DEVICE float score(const Context<L> &) const
  {
    const float l = logit(), top = hw::shuffle(l, 0);
    const float e = mf_exact_exp(l - top);
    return picked() ? e : 0.0f;
  }
  MF_DEVICE float sum_all(const Context<L> &) const
  {
    const float top = hw::shuffle(logit(), 0);
    float sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = i & 1 ? hw::bf16_high(raw[i / 2]) : hw::bf16_low(raw[i / 2]);
      sum = mf_exact_add(sum, l == l ? mf_exact_exp(l - top) : 0.0f);
    }
    return sum;
  }
};

// --- Selection by full 32-bit values ------------------------------------------------------------------------------
// For sigmoid policies (score + bias, groups) and for f32 logits. Equal values: the lowest lane that holds one, and in it
// the lowest index, that is the lowest expert.
template <class L>
struct OrderedSelection {
  using Shape = typename L::Shape;
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr bool kSigmoid = Shape::kScoring == MF_STREAM_SIGMOID;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kGroupLanes = 32 / kGroups;
  static_assert(kGroups >= 1 && 32 % kGroups == 0, "groups: a power of two up to 32, whole lanes each");
  static_assert(kGroups == 1 || (kSigmoid && kCount >= 2), "groups: sigmoid policies only");
  static_assert(Shape::kTopGroups >= 1 && Shape::kTopGroups <= kGroups, "top_groups: 1..groups");

  float score_of[kCount]; // sigmoid: the unbiased score; softmax: the logit
  float bias[kCount];
  uint32_t key[kCount];
  uint32_t mine; // lane j: the expert of pick j, kNone if there is none
  static constexpr uint32_t kNone = 0xFFFF;

  MF_DEVICE void load(const Context<L> &c, int token)
  {
    const size_t first = (size_t)token * c.p.logits_pitch + c.lane * kCount;
    MF_UNROLL
    for(int i = 0; i < kCount; i += 2) {
      if constexpr(Shape::kLogitsF32) {
        const hw::F32x2 v = *(const hw::F32x2 *)((const float *)c.p.logits + first + i);
        score_of[i] = v.x, score_of[i + 1] = v.y;
      } else {
        const uint32_t v = *(const uint32_t *)((const uint16_t *)c.p.logits + first + i);
        score_of[i] = hw::bf16_low(v), score_of[i + 1] = hw::bf16_high(v);
      }
      if constexpr(Shape::kBias) {
        const hw::F32x2 v = *(const hw::F32x2 *)(c.p.bias + c.lane * kCount + i);
        bias[i] = v.x, bias[i + 1] = v.y;
      }
    }
  }

  MF_DEVICE void prepare(const Context<L> &c)
  {
    float value[kCount];
    bool nan = false;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = score_of[i];
      if constexpr(kSigmoid)
        score_of[i] = l == l ? mf_exact_sigmoid(l) : l;
      value[i] = Shape::kBias ? mf_exact_add(score_of[i], bias[i]) : score_of[i];
      key[i] = mf_exact_order(value[i]);
      nan = nan || key[i] == 0;
    }
    if(nan)
      report_nan(c);
    if constexpr(Shape::kTopGroups < kGroups) {
      if(!group_stays(c, value)) {
        MF_UNROLL
        for(int i = 0; i < kCount; ++i)
          key[i] = 0;
      }
    }
    mine = kNone;
  }

  // Whether the lane's group is among the best kTopGroups by the sum of its two best values.
  MF_DEVICE bool group_stays(const Context<L> &c, const float (&value)[kCount]) const
  {
    const float kLowest = hw::bits_float(0xFF800000u); // -inf
    float first = kLowest, second = kLowest;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float v = value[i] == value[i] ? value[i] : kLowest;
      second = v > first ? first : v > second ? v : second;
      first = v > first ? v : first;
    }
    MF_UNROLL
    for(int o = 1; o < kGroupLanes; o <<= 1) {
      const float a = hw::shuffle_xor(first, o), b = hw::shuffle_xor(second, o);
      const float loser = a > first ? first : a;
      first = a > first ? a : first;
      second = b > second ? b : second;
      second = loser > second ? loser : second;
    }
    const uint32_t own = mf_exact_order(mf_exact_add(first, second));
    const int group = c.lane / kGroupLanes;
    int better = 0;
    MF_UNROLL
    for(int g = 0; g < kGroups; ++g) {
      const uint32_t other = hw::shuffle(own, g * kGroupLanes);
      better += other > own || (other == own && g < group);
    }
    return better < Shape::kTopGroups;
  }

  MF_DEVICE bool pick(const Context<L> &c, int j)
  {
    uint32_t head = key[0];
    MF_UNROLL
    for(int i = 1; i < kCount; ++i)
      head = key[i] > head ? key[i] : head;
    const uint32_t best = hw::reduce_max(head);
    const int owner = hw::lowest_bit(hw::ballot(head == best));
    int index = 0;
    MF_UNROLL
    for(int i = kCount - 1; i > 0; --i)
      index = key[i] == best ? i : index;
    index = key[0] == best ? 0 : index;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      key[i] = c.lane == owner && i == index ? 0u : key[i];
    const uint32_t expert = owner * kCount + hw::shuffle(index, owner);
    if(c.lane == j && best != 0)
      mine = expert;
    return best != 0;
  }

  MF_DEVICE bool picked() const { return mine != kNone; }
  MF_DEVICE uint32_t expert() const { return mine; }
  MF_DEVICE float value_of_pick() const
  {
    float v = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float s = hw::shuffle(score_of[i], (mine / kCount) & 31);
      v = (int)(mine % kCount) == i ? s : v;
    }
    return v;
  }

  MF_DEVICE float score(const Context<L> &) const
  {
    const float v = value_of_pick();
    if constexpr(kSigmoid)
      return picked() ? v : 0.0f;
    const float top = hw::shuffle(v, 0);
    const float e = mf_exact_exp(v - top);
    return picked() ? e : 0.0f;
  }
  MF_DEVICE float sum_all(const Context<L> &) const // softmax only
  {
    const float top = hw::shuffle(value_of_pick(), 0);
    float sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      sum = mf_exact_add(sum, score_of[i] == score_of[i] ? mf_exact_exp(score_of[i] - top) : 0.0f);
    return sum;
  }
};

template <bool kPacked, class L>
struct SelectionType {
  using Type = OrderedSelection<L>;
};
template <class L>
struct SelectionType<true, L> {
  using Type = PackedSelection<L>;
};
template <class L>
using Selection = typename SelectionType<L::Shape::kScoring == MF_STREAM_SOFTMAX && !L::Shape::kLogitsF32, L>::Type;

// Picks the token's experts and tells the producer.
// One token: the picks are the list. The producer is woken as soon as those are known that the first units need.
template <class L>
MF_DEVICE void select_experts(const Context<L> &c, Selection<L> &selection, int token)
{
  constexpr int kNeeded = (L::kGridCtas - 1) / L::kUnits + 1; // slots that the grid's first units belong to
  constexpr int kFirst = kNeeded < L::kTopK ? kNeeded : L::kTopK;
  auto &sm = c.sm;
  selection.prepare(c);
  MF_UNROLL
  for(int j = 0; j < L::kTopK; ++j) {
    const bool found = selection.pick(c, j);
    if(c.p.tokens == 1 && (j == kFirst - 1 || j == L::kTopK - 1)) {
      if(c.lane <= j && (j < kFirst || c.lane >= kFirst) && selection.picked())
        sm.experts[c.lane] = selection.expert() | 0x10000;
      int count = L::kTopK;
      if(!found)
        count = hw::count_bits(hw::ballot(selection.picked()));
      if(c.lane == 0 && j == kFirst - 1)
        sm.active_first = count;
      if(c.lane == 0 && j == L::kTopK - 1)
        sm.active = count;
      hw::sync_warp();
      if(j == kFirst - 1)
        hw::barrier_arrive(L::kBarrierRouted, 64);
      if(j == L::kTopK - 1)
        hw::barrier_arrive(L::kBarrierPicked, 64);
    }
  }
  if(c.p.tokens > 1) {
    const uint32_t e = selection.expert();
    if(c.lane < L::kTopK && selection.picked())
      hw::or_shared(&sm.cleared.token_mask_word[e >> 2], 1u << (token + 8 * (e & 3)));
    hw::sync_warp();
    hw::barrier_arrive(L::kBarrierRouted, 32 * (c.p.tokens + 1));
  }
}

// The producer's part with more than one token: the list of active experts, in the order of their indices.
// Returns its length.
template <class L>
MF_DEVICE int list_experts(const Context<L> &c)
{
  constexpr int kCount = L::kExperts / 32;
  auto &sm = c.sm;
  int active = 0;
  uint32_t mask[kCount];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i)
    mask[i] = sm.cleared.token_mask[i * 32 + c.lane];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    const uint32_t chosen = hw::ballot(mask[i] != 0);
    const int slot = active + hw::count_bits(chosen & ((1u << c.lane) - 1));
    if(mask[i] != 0) {
      sm.slot_of[i * 32 + c.lane] = slot;
      sm.experts[slot] = (i * 32 + c.lane) | mask[i] << 16;
    }
    active += hw::count_bits(chosen);
  }
  if(c.lane == 0)
    sm.active = active;
  hw::sync_warp();
  return active;
}

// Ranks and weights of the token's experts, and which columns of h belong to each slot.
template <class L>
MF_DEVICE void publish_ranks(const Context<L> &c, const Selection<L> &selection, int token)
{
  using Shape = typename L::Shape;
  auto &sm = c.sm;
  const bool picked = selection.picked();
  const uint32_t expert = picked ? selection.expert() : 0xFFFFu;
  int rank = c.lane; // one token: the order of picks. Picks that found nothing come last in either order.
  if(c.p.tokens > 1) {
    int before = 0;
    MF_UNROLL
    for(int j = 0; j < L::kTopK; ++j)
      before += hw::shuffle(expert, j) < expert;
    rank = picked ? before : rank;
  }

  const float own_score = selection.score(c); // exchanges between lanes: all of them take part
  const float score = c.lane < L::kTopK ? own_score : 0.0f;
  float weight;
  if constexpr(Shape::kRenormalise || Shape::kScoring == MF_STREAM_SOFTMAX) {
    float sum = score;
    if constexpr(!Shape::kRenormalise)
      sum = selection.sum_all(c);
    MF_UNROLL
    for(int o = 1; o < (Shape::kRenormalise ? 8 : 32); o <<= 1)
      sum = mf_exact_add(sum, hw::shuffle_xor(sum, o));
    if constexpr(Shape::kScoring == MF_STREAM_SIGMOID)
      sum = mf_exact_add(sum, 1e-20f);
    weight = mf_exact_weight(score, sum, c.p.scaling);
  } else {
    weight = mf_exact_mul(score, c.p.scaling);
  }

  if(c.lane < L::kTopK && picked) {
    const int slot = c.p.tokens == 1 ? c.lane : sm.slot_of[expert];
    const int group = c.h_group(rank), column = c.h_column(rank, token);
    sm.cleared.rank[slot][token] = rank;
    sm.weight[token][rank] = weight;
    hw::or_shared(&sm.cleared.columns[slot].word[group >> 2], 1u << (column + 8 * (group & 3)));
  }
  if(c.cta == L::kGridCtas - 1 && c.lane < L::kTopK) {
    ((int32_t *)c.workspace(MF_STREAM_WS_IDS))[token * L::kTopK + rank] = picked ? (int)expert : -1;
    ((float *)c.workspace(MF_STREAM_WS_WEIGHTS))[token * L::kTopK + rank] = picked ? weight : 0.0f;
  }
}

} // namespace stream
