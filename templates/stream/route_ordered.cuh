// route_ordered.cuh - selection by 32-bit values: what a score or a score plus a bias selects, with or without groups.
//
// Who runs it   the token's router warp. Its experts have been scored by it and maybe others (route_scores.cuh).
// Reads         scores and orders of the token's experts (Layout::Scores).
// Waits for     the scores, in score_experts. Everything else stays in registers.
//
// A key has room for the upper 24 bits of the value only, 22 for more than 256 experts: key = order-preserving bits without the lowest,
// there the inverted index. If two successive picks, or the last pick and the best expert left, come that close to each other, their
// order may be wrong: then all picks are made once more by the full values.
#pragma once
#include "stream/route_scores.cuh"

namespace stream {

template <class L>
struct OrderedSelection {
  using Shape = typename L::Shape;
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr int kColumns = L::kColumns;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kGroupLanes = 32 / kGroups;
  static constexpr uint32_t kIndexMask = kColumns > 256 ? 0x3FF : 0xFF; // bits of a key that hold the index
  static constexpr uint32_t kLowestOrder = 0x007FFFFF; // of -inf; 0: cannot be selected
  static constexpr uint32_t kLowestKey = kLowestOrder & ~kIndexMask;
  static_assert(kGroups >= 1 && 32 % kGroups == 0, "groups: a power of two up to 32, whole lanes each");
  static_assert(kGroups == 1 || (Shape::kScoring != MF_STREAM_SOFTMAX && kCount % 2 == 0 && kColumns == 32 * kCount), "groups: whole lanes, of pairs");
  static_assert(Shape::kTopGroups >= 1 && Shape::kTopGroups <= kGroups, "top_groups: 1..groups");

  typename ScoringType<Shape::kScoring == MF_STREAM_PROBABILITY, L>::Type scoring;
  static constexpr bool kKeepOrders = kCount <= 8; // else there are too few registers: they are read again
  uint32_t order_of[kKeepOrders ? kCount : 1]; // of the experts lane * kCount ...; 0 for those that there are not
  bool nan;                   // one of them is NaN (set if they are not kept)
  bool stays;                 // the lane's group does
  KeyQueue<kCount, L::kTopK> queue;

  MF_DEVICE static int log_warps(int tokens) { return decltype(scoring)::log_warps(tokens); }
  MF_DEVICE void load(const Context<L> &c, int token, int part) { scoring.load(c, token, part); }
  MF_DEVICE uint32_t first_word() const { return scoring.first_word(); }
  MF_DEVICE void score_experts(const Context<L> &c, int token, int part) { scoring.score(c, token, part); }

  MF_DEVICE void read_orders(const Context<L> &c, int token, uint32_t (&order)[kCount]) const
  {
    load_lane_words<kCount, kColumns>(order, c.sm.scores.order[token], c.lane, 0u);
  }

  MF_DEVICE void prepare(const Context<L> &c, int token)
  {
    if constexpr(kKeepOrders) {
      read_orders(c, token, order_of);
      fill_queue(c, order_of);
    } else {
      uint32_t order[kCount];
      read_orders(c, token, order);
      nan = any_nan(order, c.lane);
      fill_queue(c, order);
    }
  }

  MF_DEVICE void fill_queue(const Context<L> &c, const uint32_t (&order_of)[kCount])
  {
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      queue.key[i] = (order_of[i] & ~kIndexMask) | (kIndexMask - c.lane * kCount - i);
    queue.sort();
    stays = true;
    if constexpr(Shape::kTopGroups < kGroups) {
      stays = group_stays(c, order_of);
      MF_UNROLL
      for(int i = 0; i < kCount; ++i)
        queue.key[i] = stays ? queue.key[i] : 0u;
    }
    queue.start();
  }

  // Whether a value of the lane is NaN.
  MF_DEVICE bool has_nan(int lane) const
  {
    if constexpr(kKeepOrders)
      return any_nan(order_of, lane);
    else
      return nan;
  }
  MF_DEVICE static bool any_nan(const uint32_t (&order_of)[kCount], int lane)
  {
    bool nan = false;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i)
      nan = nan || (order_of[i] == 0 && (kColumns == 32 * kCount || lane * kCount + i < kColumns));
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
  // The two best of the sets 0 .. kSets - 1, in best[0].
  template <int kSets>
  MF_DEVICE static void fold(Pair *best)
  {
    if constexpr(kSets > 1) {
      constexpr int kHalf = (kSets + 1) / 2;
      MF_UNROLL
      for(int i = 0; i + kHalf < kSets; ++i)
        best[i].merge(best[i + kHalf].first, best[i + kHalf].second);
      fold<kHalf>(best);
    }
  }
  MF_DEVICE static float value_of(uint32_t order) { return hw::bits_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

  // Whether the lane's group is among the best kTopGroups by the sum of its two best values. What cannot be selected
  // counts as -inf. The lanes of a group share the comparisons with the other groups.
  MF_DEVICE bool group_stays(const Context<L> &c, const uint32_t (&order_of)[kCount]) const
  {
    constexpr int kPairs = kCount / 2;
    Pair best[kPairs];
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      const uint32_t a = order_of[2 * i], b = order_of[2 * i + 1];
      best[i] = Pair{a > b ? a : b, a > b ? b : a};
    }
    fold<kPairs>(best);
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

  // Makes pick j, the next one. Returns its key: is_settled() says whether it is an expert that settle() will not change, expert_of() which.
  MF_DEVICE uint32_t pop(const Context<L> &c, int j) { return queue.pop(c.lane, j); }
  MF_DEVICE bool is_settled(uint32_t key) const { return queue.gap > kIndexMask && key >= kLowestKey; } // (the gap to the next one included)
  MF_DEVICE static uint32_t expert_of(uint32_t key) { return kIndexMask - (key & kIndexMask); }

  // Behind the last pick: makes them all once more, if some came too close to each other.
  MF_DEVICE void settle(const Context<L> &c, int token)
  {
    if(queue.gap <= kIndexMask)
      pick_by_full_values(c, token);
  }

  // All picks. Equal values: the lowest lane that holds one, and in it the lowest index, that is the lowest expert.
  // Unrolled although it is rarely run: with a loop here, the compiler no longer trusts the warp to be converged afterwards,
  // and keeps matrix descriptors out of uniform registers in the whole of the kernel.
  MF_DEVICE void pick_by_full_values(const Context<L> &c, int token)
  {
    if constexpr(kKeepOrders)
      pick_by_kept_values(c);
    else
      pick_by_stored_values(c, token);
  }
  MF_DEVICE void pick_by_kept_values(const Context<L> &c)
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
        queue.mine = (best & ~kIndexMask) | (kIndexMask - taken);
    }
  }

  // The same, reading the values again for every pick.
  MF_DEVICE void pick_by_stored_values(const Context<L> &c, int token)
  {
    uint32_t gone = 0; // bit i: expert lane * kCount + i has been taken
    MF_UNROLL
    for(int j = 0; j < L::kTopK; ++j) {
      uint32_t order[kCount], head = 0;
      int index = 0;
      hw::sync_warp(); // (or the compiler keeps the values in registers after all)
      read_orders(c, token, order);
      MF_UNROLL
      for(int i = 0; i < kCount; ++i) {
        const bool better = order[i] > head && !(gone >> i & 1);
        head = better ? order[i] : head;
        index = better ? i : index;
      }
      head = stays ? head : 0u;
      const uint32_t best = hw::reduce_max(head);
      const int owner = hw::lowest_bit(hw::ballot(head == best));
      const uint32_t taken = owner * kCount + hw::shuffle(index, owner);
      if(c.lane == owner)
        gone |= 1u << index;
      if(c.lane == j)
        queue.mine = (best & ~kIndexMask) | (kIndexMask - taken);
    }
  }

  // Of the lane's own pick.
  MF_DEVICE bool picked() const { return queue.mine >= kLowestKey; }
  MF_DEVICE uint32_t expert() const // (in range for no pick, too)
  {
    const uint32_t index = expert_of(queue.mine);
    if constexpr((kColumns & (kColumns - 1)) == 0)
      return index & (kColumns - 1);
    else
      return index < (uint32_t)kColumns ? index : 0u;
  }

  MF_DEVICE float score(const Context<L> &c, int token) const
  {
    const float v = c.sm.scores.score[token][expert()];
    if constexpr(Shape::kScoring != MF_STREAM_SOFTMAX)
      return picked() ? v : 0.0f;
    const float e = mf_exact_softmax(v, hw::shuffle(v, 0));
    return picked() ? e : 0.0f;
  }
  MF_DEVICE float sum_all(const Context<L> &c, int token) const // softmax only
  {
    if constexpr(Shape::kScoring == MF_STREAM_PROBABILITY)
      return scoring.sum;
    const float top = hw::shuffle(c.sm.scores.score[token][expert()], 0);
    uint32_t bits[kCount];
    load_lane_words<kCount, kColumns>(bits, c.sm.scores.score[token], c.lane, 0xFFFFFFFFu);
    float sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = hw::bits_float(bits[i]);
      sum = mf_exact_add(sum, l == l ? mf_exact_softmax(l, top) : 0.0f);
    }
    return add_lanes<32>(sum);
  }
};

} // namespace stream
