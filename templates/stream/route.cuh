// route.cuh - from router logits to the list of active experts, ranks and weights.
//
// Who runs it   Each token has 1, 2 or 4 successive consumer warps (Selection::log_warps). All of them: score_experts. The
//               first, its router: select_experts, publish_ranks. list_experts: the producer warp.
//               Every CTA routes all tokens for itself: that is faster than waiting for another CTA's answer.
// Reads         logits, bias (global).
// Writes        one token: experts[], active_first, active (in the order of picks). More: token_mask[], from which the
//               producer makes experts[], slot_of[] and active in the order of expert indices. Then rank[], weight[],
//               columns[]. The last CTA also writes ids and weights to the workspace. NaN: a bit of the status word.
//               Where h will be: scores and orders of the token's experts (Layout::Scores), for its router.
// Waits for     sync_cta (the tables are cleared); a router that has helpers for them at kBarrierScored + token. The producer
//               waits at kBarrierRouted, with one token also at kBarrierPicked; publish_ranks runs behind kBarrierListed.
// Visible by    the named barriers, each behind a sync_warp of the writers.
// No deadlock   helpers only arrive at kBarrierScored, routers at kBarrierRouted and kBarrierPicked; the producer waits for
//               nobody else there.
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

// `kWords` successive words at an address that is aligned to as many bytes (at most 16).
template <int kWords>
MF_DEVICE void load_words(uint32_t *word, const void *p)
{
  if constexpr(kWords == 1) {
    word[0] = *(const uint32_t *)p;
  } else if constexpr(kWords == 2) {
    const hw::U32x2 v = *(const hw::U32x2 *)p;
    word[0] = v.x, word[1] = v.y;
  } else {
    MF_UNROLL
    for(int i = 0; i < kWords; i += 4) {
      const hw::U32x4 v = ((const hw::U32x4 *)p)[i / 4];
      word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
    }
  }
}

// --- What both ways of selection share: each lane's keys in falling order ----------------------------------------------
// A key is 32 bits: the value's order-preserving bits above, the inverted expert index below. So all keys of selectable
// experts differ, the larger key is the larger value or, at equal values, the lower expert, and one redux per pick over the
// lanes' heads suffices. The redux of the next pick is issued with the pop of this one: `best` is always ahead by one.
template <int kCount, int kTopK>
struct KeyQueue {
  uint32_t key[kCount];
  uint32_t best;        // the largest key left in any lane
  uint32_t gap;         // the smallest difference between successive picks so far, the one to come included
  uint32_t mine;        // lane j: the key of pick j

  MF_DEVICE void order(int i, int j)
  {
    const uint32_t a = key[i], b = key[j];
    key[i] = a > b ? a : b;
    key[j] = a > b ? b : a;
  }

  // Sorting networks, largest first.
  MF_DEVICE void sort()
  {
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
  }

  MF_DEVICE void start()
  {
    best = hw::reduce_max(key[0]);
    gap = 0xFFFFFFFFu;
    mine = 0;
  }

  // Takes the best remaining key as pick j; returns it.
  MF_DEVICE uint32_t pop(int lane, int j)
  {
    const uint32_t taken = best;
    if(lane == j)
      mine = taken;
    const bool own = key[0] == taken;
    MF_UNROLL
    for(int i = 0; i + 1 < kCount; ++i)
      key[i] = own ? key[i + 1] : key[i];
    if(kCount <= kTopK)
      key[kCount - 1] = own ? 0u : key[kCount - 1];
    best = hw::reduce_max(key[0]);
    gap = taken - best < gap ? taken - best : gap;
    return taken;
  }
};

// --- Selection by keys that hold the whole logit ------------------------------------------------------------------------
// For bf16 logits that select by themselves (softmax). key = order-preserving bits of the logit << 16 | 0xFFFF - expert.
template <class L>
struct PackedSelection {
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr uint32_t kLowestKey = 0x007F0000; // of -inf; NaN lies below
  uint32_t raw[kCount / 2]; // logit pairs of the experts lane * kCount ...
  KeyQueue<kCount, L::kTopK> queue;

  MF_DEVICE static int log_warps(int) { return 0; }

  MF_DEVICE void load(const Context<L> &c, int token, int)
  {
    load_words<kCount / 2>(raw, (const uint16_t *)c.p.logits + (size_t)token * c.p.logits_pitch + c.lane * kCount);
  }

  MF_DEVICE void score_experts(const Context<L> &, int, int) {}

  MF_DEVICE void prepare(const Context<L> &c, int)
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
    }
    const uint32_t low = 0xFFFF - c.lane * kCount;
    MF_UNROLL
    for(int i = 0; i < kCount / 2; ++i) { // negative: all bits flipped; positive: the sign bit set
      const uint32_t w = raw[i] ^ (((raw[i] >> 15) & 0x00010001u) * 0x7FFFu + 0x80008000u);
      queue.key[2 * i] = (w << 16) + (low - 2 * i);
      queue.key[2 * i + 1] = (w & 0xFFFF0000u) | (low - 2 * i - 1);
    }
    queue.sort();
    queue.start();
  }

  // Whether a logit of the lane is NaN.
  MF_DEVICE bool has_nan() const
  {
    bool nan = false;
    MF_UNROLL
    for(int i = 0; i < kCount / 2; ++i)
      nan = nan || (raw[i] & 0xFFFF) == 0xFFFF || (raw[i] >> 16) == 0xFFFF;
    return nan;
  }

  // Makes the picks kFrom .. kTo - 1. False if there were not so many experts that may be selected.
  template <int kFrom, int kTo>
  MF_DEVICE bool pick(const Context<L> &c)
  {
    uint32_t last = 0;
    MF_UNROLL
    for(int j = kFrom; j < kTo; ++j)
      last = queue.pop(c.lane, j);
    return last >= kLowestKey;
  }

  // Of the lane's own pick.
  MF_DEVICE bool picked() const { return queue.mine >= kLowestKey; }
  MF_DEVICE uint32_t expert() const { return 0xFFFF - (queue.mine & 0xFFFF); }
  MF_DEVICE float logit() const
  {
    const uint32_t bits = queue.mine >> 16;
    return hw::bits_float((bits & 0x8000 ? bits & 0x7FFF : ~bits & 0xFFFF) << 16);
  }

  // Softmax score of the lane's pick, and (not renormalised) the lane's part of the sum over all experts.
  MF_DEVICE float score(const Context<L> &, int) const
  {
    const float l = logit(), top = hw::shuffle(l, 0);
    const float e = mf_exact_softmax(l, top);
    return picked() ? e : 0.0f;
  }
  MF_DEVICE float sum_all(const Context<L> &, int) const
  {
    const float top = hw::shuffle(logit(), 0);
    float sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = i & 1 ? hw::bf16_high(raw[i / 2]) : hw::bf16_low(raw[i / 2]);
      sum = mf_exact_add(sum, l == l ? mf_exact_softmax(l, top) : 0.0f);
    }
    return sum;
  }
};

// --- Selection by full 32-bit values ------------------------------------------------------------------------------------
// For sigmoid policies (score + bias, groups) and for f32 logits. Scoring is the longer part of it, so with few tokens
// several warps share a token's experts (and the shorter code is fetched sooner); the router goes on from shared memory.
//
// A key has room for the upper 24 bits of the value only: key = order-preserving bits & ~0xFF | 0xFF - expert. If two
// successive picks, or the last pick and the best expert left, come within 256 of each other, their order may be wrong:
// then all picks are made once more by the full values.
template <class L>
struct OrderedSelection {
  using Shape = typename L::Shape;
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr int kPairs = kCount / 2; // per lane, of successive experts
  static constexpr bool kSigmoid = Shape::kScoring == MF_STREAM_SIGMOID;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kGroupLanes = 32 / kGroups;
  static constexpr uint32_t kLowestOrder = 0x007FFFFF; // of -inf; 0: cannot be selected
  static constexpr uint32_t kLowestKey = 0x007FFF00;
  static_assert(kGroups >= 1 && 32 % kGroups == 0, "groups: a power of two up to 32, whole lanes each");
  static_assert(kGroups == 1 || (kSigmoid && kCount >= 2), "groups: sigmoid policies only");
  static_assert(Shape::kTopGroups >= 1 && Shape::kTopGroups <= kGroups, "top_groups: 1..groups");

  hw::F32x2 logit[kPairs], bias[kPairs]; // scoring: of the pairs first_pair(..), 32 apart
  uint32_t order_of[kCount];  // router: of the experts lane * kCount ...
  bool stays;                 // the lane's group does
  KeyQueue<kCount, L::kTopK> queue;

  // log2 of the warps that score a token's experts.
  MF_DEVICE static int log_warps(int tokens)
  {
    const int most = kPairs >= 4 ? 2 : kPairs >= 2 ? 1 : 0;
    return smaller(tokens <= 2 ? 2 : tokens <= 4 ? 1 : 0, most);
  }
  MF_DEVICE static int pairs_of_warp(const Context<L> &c) { return kPairs >> log_warps(c.p.tokens); }
  MF_DEVICE static int first_pair(const Context<L> &c, int part) { return part * pairs_of_warp(c) * 32 + c.lane; }

  MF_DEVICE void load(const Context<L> &c, int token, int part)
  {
    const int first = first_pair(c, part);
    const size_t row = (size_t)token * c.p.logits_pitch;
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      if(i < pairs_of_warp(c)) {
        if constexpr(Shape::kLogitsF32) {
          logit[i] = ((const hw::F32x2 *)((const float *)c.p.logits + row))[first + 32 * i];
        } else {
          const uint32_t v = ((const uint32_t *)((const uint16_t *)c.p.logits + row))[first + 32 * i];
          logit[i] = hw::F32x2{hw::bf16_low(v), hw::bf16_high(v)};
        }
        if constexpr(Shape::kBias)
          bias[i] = ((const hw::F32x2 *)c.p.bias)[first + 32 * i];
      }
    }
  }

  MF_DEVICE static void score_one(float l, float b, float &score, uint32_t &order)
  {
    score = kSigmoid ? mf_exact_sigmoid(l) : l; // (anything for NaN: without a branch, evaluations overlap)
    const float value = Shape::kBias ? mf_exact_add(score, b) : score;
    const uint32_t bits = mf_exact_order_bits(kSigmoid ? value : mf_exact_add(value, 0.0f)); // (a sigmoid's is never -0)
    order = l == l && value == value ? bits : 0u;
  }

  // Part `part` of the token's experts. Part 0 is the router's and waits for the others.
  MF_DEVICE void score_experts(const Context<L> &c, int token, int part)
  {
    auto &scores = c.sm.scores;
    const int count = pairs_of_warp(c), barrier_threads = 32 << log_warps(c.p.tokens);
    const int first = first_pair(c, part);
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      if(i >= count)
        break;
      hw::F32x2 score;
      hw::U32x2 order;
      score_one(logit[i].x, bias[i].x, score.x, order.x);
      score_one(logit[i].y, bias[i].y, score.y, order.y);
      ((hw::F32x2 *)scores.score[token])[first + 32 * i] = score;
      ((hw::U32x2 *)scores.order[token])[first + 32 * i] = order;
    }
    if(barrier_threads == 32)
      hw::sync_warp();
    else if(part == 0)
      hw::barrier_sync(L::kBarrierScored + token, barrier_threads);
    else
      hw::barrier_arrive(L::kBarrierScored + token, barrier_threads);
  }

  MF_DEVICE void read_orders(const Context<L> &c, int token, uint32_t (&order)[kCount]) const
  {
    load_words<kCount>(order, &c.sm.scores.order[token][c.lane * kCount]);
  }

  MF_DEVICE void prepare(const Context<L> &c, int token)
  {
    read_orders(c, token, order_of);
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      queue.key[i] = (order_of[i] & 0xFFFFFF00u) | (0xFFu - c.lane * kCount - i);
    queue.sort();
    stays = true;
    if constexpr(Shape::kTopGroups < kGroups) {
      stays = group_stays(c);
      MF_UNROLL
      for(int i = 0; i < kCount; ++i)
        queue.key[i] = stays ? queue.key[i] : 0u;
    }
    queue.start();
  }

  // Whether a value of the lane is NaN.
  MF_DEVICE bool has_nan() const
  {
    bool nan = false;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      nan = nan || order_of[i] == 0;
    return nan;
  }

  // The two best of a set, as order_of.
  struct Pair {
    uint32_t first, second;
    MF_DEVICE void merge(uint32_t a, uint32_t b) // a >= b: the two best of another set
    {
      const uint32_t loser = a > first ? first : a;
      first = a > first ? a : first;
      second = b > second ? b : second;
      second = loser > second ? loser : second;
    }
  };
  MF_DEVICE static float value_of(uint32_t order) { return hw::bits_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

  // Whether the lane's group is among the best kTopGroups by the sum of its two best values. What cannot be selected
  // counts as -inf. The lanes of a group share the comparisons with the other groups.
  MF_DEVICE bool group_stays(const Context<L> &c) const
  {
    Pair best[kCount / 2];
    MF_UNROLL
    for(int i = 0; i < kCount / 2; ++i) {
      const uint32_t a = order_of[2 * i], b = order_of[2 * i + 1];
      best[i] = Pair{a > b ? a : b, a > b ? b : a};
    }
    MF_UNROLL
    for(int n = kCount / 4; n >= 1; n >>= 1) {
      MF_UNROLL
      for(int i = 0; i < n; ++i)
        best[i].merge(best[i + n].first, best[i + n].second);
    }
    MF_UNROLL
    for(int o = 1; o < kGroupLanes; o <<= 1)
      best[0].merge(hw::shuffle(best[0].first, c.lane ^ o), hw::shuffle(best[0].second, c.lane ^ o));
    const uint32_t first = best[0].first > kLowestOrder ? best[0].first : kLowestOrder;
    const uint32_t second = best[0].second > kLowestOrder ? best[0].second : kLowestOrder;
    const uint32_t own = mf_exact_order(mf_exact_add(value_of(first), value_of(second)));

    constexpr int kEach = (kGroups + kGroupLanes - 1) / kGroupLanes;
    const int group = c.lane / kGroupLanes, lane_in_group = c.lane % kGroupLanes;
    int better = 0;
    MF_UNROLL
    for(int i = 0; i < kEach; ++i) {
      const int other = lane_in_group * kEach + i;
      const uint32_t sum = hw::shuffle(own, other * kGroupLanes & 31);
      const uint32_t lanes = hw::ballot(other < kGroups && sum + (other < group) > own);
      better += hw::count_bits(lanes >> (group * kGroupLanes) & ((1u << kGroupLanes) - 1));
    }
    return better < Shape::kTopGroups;
  }

  // Makes the picks kFrom .. kTo - 1 (by full values also the others). False if there were not so many experts that may
  // be selected.
  template <int kFrom, int kTo>
  MF_DEVICE bool pick(const Context<L> &c)
  {
    uint32_t last = 0;
    MF_UNROLL
    for(int j = kFrom; j < kTo; ++j)
      last = queue.pop(c.lane, j);
    if(queue.gap < 256) {
      pick_by_full_values(c);
      last = hw::shuffle(queue.mine, kTo - 1);
    }
    return last >= kLowestKey;
  }

  // All picks. Equal values: the lowest lane that holds one, and in it the lowest index, that is the lowest expert.
  // Unrolled although it is rarely run: with a loop here, the compiler no longer trusts the warp to be converged afterwards,
  // and keeps matrix descriptors out of uniform registers in the whole of the kernel.
  MF_DEVICE void pick_by_full_values(const Context<L> &c)
  {
    uint32_t left[kCount];
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      left[i] = stays ? order_of[i] : 0u;
    MF_UNROLL
    for(int j = 0; j < L::kTopK; ++j) {
      uint32_t head = left[0];
      MF_UNROLL
      for(int i = 1; i < kCount; ++i)
        head = left[i] > head ? left[i] : head;
      const uint32_t best = hw::reduce_max(head);
      const int owner = hw::lowest_bit(hw::ballot(head == best));
      bool own = c.lane == owner;
      int index = 0;
      MF_UNROLL
      for(int i = 0; i < kCount; ++i) {
        const bool take = own && left[i] == best;
        left[i] = take ? 0u : left[i];
        index = take ? i : index;
        own = own && !take;
      }
      const uint32_t taken = owner * kCount + hw::shuffle(index, owner);
      if(c.lane == j)
        queue.mine = (best & 0xFFFFFF00u) | (0xFFu - taken);
    }
  }

  // Of the lane's own pick.
  MF_DEVICE bool picked() const { return queue.mine >= kLowestKey; }
  MF_DEVICE uint32_t expert() const { return (0xFF - (queue.mine & 0xFF)) & (L::kExperts - 1); } // (in range for no pick, too)

  MF_DEVICE float score(const Context<L> &c, int token) const
  {
    const float v = c.sm.scores.score[token][expert()];
    if constexpr(kSigmoid)
      return picked() ? v : 0.0f;
    const float e = mf_exact_softmax(v, hw::shuffle(v, 0));
    return picked() ? e : 0.0f;
  }
  MF_DEVICE float sum_all(const Context<L> &c, int token) const // softmax only
  {
    const float top = hw::shuffle(c.sm.scores.score[token][expert()], 0);
    const float *logits = &c.sm.scores.score[token][c.lane * kCount];
    float sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      sum = mf_exact_add(sum, logits[i] == logits[i] ? mf_exact_softmax(logits[i], top) : 0.0f);
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

// One token: the picks are the list. Appends the picks kFrom .. kTo - 1; `all` says whether there were so many.
// Returns the list's length so far.
template <class L, int kFrom, int kTo>
MF_DEVICE int append_picks(const Context<L> &c, const Selection<L> &selection, bool all)
{
  if(c.lane >= kFrom && c.lane < kTo && selection.picked())
    c.sm.experts[c.lane] = selection.expert() | 0x10000;
  return all ? kTo : hw::count_bits(hw::ballot(c.lane < kTo && selection.picked()));
}

// Picks the token's experts and tells the producer.
// One token: the producer is woken as soon as those are known that the first units need.
template <class L>
MF_DEVICE void select_experts(const Context<L> &c, Selection<L> &selection, int token)
{
  constexpr int kTopK = L::kTopK;
  constexpr int kNeeded = (L::kGridCtas - 1) / L::kUnits + 1; // slots that the grid's first units belong to
  constexpr int kFirst = kNeeded < kTopK ? kNeeded : kTopK;
  auto &sm = c.sm;
  selection.prepare(c, token);
  bool all = selection.template pick<0, kFirst>(c);
  if(c.p.tokens == 1) {
    const int count = append_picks<L, 0, kFirst>(c, selection, all);
    if(c.lane == 0)
      sm.active_first = count;
    hw::sync_warp();
    hw::barrier_arrive(L::kBarrierRouted, 64);
  }
  if constexpr(kFirst < kTopK)
    all = selection.template pick<kFirst, kTopK>(c);
  if(c.p.tokens == 1) {
    const int count = append_picks<L, kFirst, kTopK>(c, selection, all);
    if(c.lane == 0)
      sm.active = count;
    hw::sync_warp();
    hw::barrier_arrive(L::kBarrierPicked, 64);
  } else {
    const uint32_t e = selection.expert();
    if(c.lane < kTopK && selection.picked())
      hw::or_shared(&sm.cleared.token_mask_word[e >> 2], 1u << (token + 8 * (e & 3)));
    hw::sync_warp();
    hw::barrier_arrive(L::kBarrierRouted, 32 * (c.p.tokens + 1));
  }
  if(c.cta == 0 && selection.has_nan())
    hw::or_global((uint32_t *)c.workspace(MF_STREAM_WS_STATUS), MF_STREAM_STATUS_NAN);
}

// The producer's part with more than one token: the list of active experts, in the order of their indices.
// Returns its length.
template <class L>
MF_DEVICE int list_experts(const Context<L> &c)
{
  constexpr int kCount = L::kExperts / 32;
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

  const float own_score = selection.score(c, token); // exchanges between lanes: all of them take part
  const float score = c.lane < L::kTopK ? own_score : 0.0f;
  float weight;
  if constexpr(Shape::kRenormalise || Shape::kScoring == MF_STREAM_SOFTMAX) {
    float sum = score;
    if constexpr(!Shape::kRenormalise)
      sum = selection.sum_all(c, token);
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
