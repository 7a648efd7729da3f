// route_packed.cuh - selection by keys that hold the whole logit, for bf16 logits that select by themselves (softmax).
//
// Who runs it   one warp per token, its router (route.cuh).
// Reads         logits (global). Everything else stays in registers.
#pragma once
#include "stream/route_keys.cuh"

namespace stream {

// --- Selection by keys that hold the whole logit ------------------------------------------------------------------------
// For bf16 logits that select by themselves (softmax). key = order-preserving bits of the logit << 16 | 0xFFFF - expert.
template <class L>
struct PackedSelection {
  static constexpr int kCount = L::kExpertsPerLane;
  static constexpr uint32_t kLowestKey = 0x007F0000; // of -inf; NaN lies below
  static constexpr int kPairs = (kCount + 1) / 2;
  uint32_t raw[kPairs]; // logit pairs of the experts lane * kCount ...; what the row does not have is NaN, 0xFFFF
  KeyQueue<kCount, L::kTopK> queue;

  MF_DEVICE static int log_warps(int) { return 0; }

  MF_DEVICE void load(const Context<L> &c, int token, int)
  {
    load_lane_bf16<kCount, L::kColumns>(raw, (const uint16_t *)c.p.logits + (size_t)token * c.p.logits_pitch, c.lane, 0xFFFFFFFFu);
  }

  MF_DEVICE uint32_t first_word() const { return raw[0]; } // of what load() loads
  MF_DEVICE void score_experts(const Context<L> &, int, int) {}

  MF_DEVICE void prepare(const Context<L> &c, int)
  {
    uint32_t largest = 0;
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      raw[i] = hw::bf16_pair_add(raw[i], 0); // -0 becomes +0, NaN becomes 0x7FFF
      largest = hw::bf16_pair_max_nan(largest, raw[i]);
    }
    if((largest & 0xFFFF) == 0x7FFF || (largest >> 16) == 0x7FFF) { // move NaN to the lower end
      MF_UNROLL
      for(int i = 0; i < kPairs; ++i) {
        if((raw[i] & 0xFFFF) == 0x7FFF)
          raw[i] |= 0xFFFF;
        if((raw[i] >> 16) == 0x7FFF)
          raw[i] |= 0xFFFF0000;
      }
    }
    const uint32_t low = 0xFFFF - c.lane * kCount;
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) { // negative: all bits flipped; positive: the sign bit set
      const uint32_t w = raw[i] ^ (((raw[i] >> 15) & 0x00010001u) * 0x7FFFu + 0x80008000u);
      queue.key[2 * i] = (w << 16) + (low - 2 * i);
      if(2 * i + 1 < kCount)
        queue.key[2 * i + 1] = (w & 0xFFFF0000u) | (low - 2 * i - 1);
    }
    queue.sort();
    queue.start();
  }

  // Whether a logit of the lane is NaN.
  MF_DEVICE bool has_nan(int lane) const
  {
    bool nan = false;
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      if constexpr(L::kColumns == 32 * kCount && kCount % 2 == 0) {
        nan = nan || (raw[i] & 0xFFFF) == 0xFFFF || (raw[i] >> 16) == 0xFFFF;
      } else {
        const int first = lane * kCount + 2 * i;
        nan = nan || (first < L::kColumns && (raw[i] & 0xFFFF) == 0xFFFF) ||
              (2 * i + 1 < kCount && first + 1 < L::kColumns && (raw[i] >> 16) == 0xFFFF);
      }
    }
    return nan;
  }

  // Makes pick j, the next one. Returns its key: is_settled() says whether it is an expert that settle() will not change, expert_of() which.
  MF_DEVICE uint32_t pop(const Context<L> &c, int j) { return queue.pop(c.lane, j); }
  MF_DEVICE bool is_settled(uint32_t key) const { return key >= kLowestKey; }
  MF_DEVICE static uint32_t expert_of(uint32_t key) { return 0xFFFF - (key & 0xFFFF); }
  MF_DEVICE void settle(const Context<L> &, int) {} // behind the last pick

  // Of the lane's own pick.
  MF_DEVICE bool picked() const { return queue.mine >= kLowestKey; }
  MF_DEVICE uint32_t expert() const { return expert_of(queue.mine); }
  MF_DEVICE float logit() const
  {
    const uint32_t bits = queue.mine >> 16;
    return hw::bits_float((bits & 0x8000 ? bits & 0x7FFF : ~bits & 0xFFFF) << 16);
  }

  // Softmax score of the lane's pick, and (not renormalised) the sum over all experts.
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
    return add_lanes<32>(sum);
  }
};

} // namespace stream
