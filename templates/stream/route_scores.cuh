// route_scores.cuh - from logits to the scores and the values that select, for the policies that need both.
//
// Who runs it   one token has 1, 2 or 4 warps (log_warps) that share its experts, the first of which is its router.
// Reads         logits, bias (global).
// Writes        scores and orders of the token's experts (Layout::Scores), where h will be.
// Waits for     the router waits for its helpers at kBarrierScored + token; they only arrive there.
// Visible by    that barrier, or sync_warp if there is one warp.
#pragma once
#include "stream/route_keys.cuh"

namespace stream {

// Scores that depend on their own logit only. Scoring is the longer part of routing then, so with few tokens several warps share a
// token's experts (and the shorter code is fetched sooner); the router goes on from shared memory.
template <class L>
struct SeparateScoring {
  using Shape = typename L::Shape;
  static constexpr int kAllPairs = (L::kColumns + 1) / 2; // of successive experts
  static constexpr int kPairs = (kAllPairs + 31) / 32;    // per lane
  static constexpr bool kEven = kAllPairs == 32 * kPairs && (kPairs & (kPairs - 1)) == 0; // all warps and lanes have as many
  hw::F32x2 logit[kPairs], bias[kPairs]; // of the pairs first_pair(..), 32 apart

  // log2 of the warps that score a token's experts.
  MF_DEVICE static int log_warps(int tokens)
  {
    const int most = L::kMaxTokens > MF_STREAM_MAX_TOKENS ? 0 : kPairs >= 4 ? 2 : kPairs >= 2 ? 1 : 0;
    return smaller(tokens <= 2 ? 2 : tokens <= 4 ? 1 : 0, most);
  }
  MF_DEVICE static int pairs_of_warp(const Context<L> &c)
  {
    const int shift = log_warps(c.p.tokens);
    return kEven ? kPairs >> shift : (kPairs + (1 << shift) - 1) >> shift;
  }
  MF_DEVICE static int first_pair(const Context<L> &c, int part) { return part * pairs_of_warp(c) * 32 + c.lane; }

  // Pair `pair` of a row of floats or bf16; what the row does not have is 0.
  template <class T>
  MF_DEVICE static hw::F32x2 load_pair(const T *row, int pair)
  {
    hw::F32x2 v{0.0f, 0.0f};
    if constexpr(L::kColumns % 2 == 0) {
      if(kEven || pair < kAllPairs)
        v = both(row, pair);
    } else {
      if(2 * pair < L::kColumns)
        v.x = one(row[2 * pair]);
      if(2 * pair + 1 < L::kColumns)
        v.y = one(row[2 * pair + 1]);
    }
    return v;
  }
  MF_DEVICE static hw::F32x2 both(const float *row, int pair) { return ((const hw::F32x2 *)row)[pair]; }
  MF_DEVICE static hw::F32x2 both(const uint16_t *row, int pair)
  {
    const uint32_t v = ((const uint32_t *)row)[pair];
    return hw::F32x2{hw::bf16_low(v), hw::bf16_high(v)};
  }
  MF_DEVICE static float one(float v) { return v; }
  MF_DEVICE static float one(uint16_t v) { return hw::bf16_low(v); }

  MF_DEVICE void load(const Context<L> &c, int token, int part)
  {
    const int first = first_pair(c, part);
    const size_t row = (size_t)token * c.p.logits_pitch;
    MF_UNROLL
    for(int i = 0; i < kPairs; ++i) {
      if(i < pairs_of_warp(c)) {
        if constexpr(Shape::kLogitsF32)
          logit[i] = load_pair((const float *)c.p.logits + row, first + 32 * i);
        else
          logit[i] = load_pair((const uint16_t *)c.p.logits + row, first + 32 * i);
        if constexpr(Shape::kBias)
          bias[i] = load_pair(c.p.bias, first + 32 * i);
      }
    }
  }

  MF_DEVICE uint32_t first_word() const { return hw::float_bits(logit[0].x); } // of what load() loads

  MF_DEVICE static void score_one(float l, float b, float &score, uint32_t &order)
  {
    if constexpr(Shape::kScoring == MF_STREAM_SIGMOID) // (anything for NaN: without a branch, evaluations overlap)
      score = mf_exact_sigmoid(l);
    else if constexpr(Shape::kScoring == MF_STREAM_SQRT_SOFTPLUS)
      score = mf_exact_sqrt_softplus(l);
    else
      score = l;
    const float value = Shape::kBias ? mf_exact_add(score, b) : score;
    const bool never_minus_zero = Shape::kScoring != MF_STREAM_SOFTMAX; // scores are not, sums of theirs neither
    const uint32_t bits = mf_exact_order_bits(never_minus_zero ? value : mf_exact_add(value, 0.0f));
    order = l == l && value == value ? bits : 0u;
  }

  // Part `part` of the token's experts. Part 0 is the router's and waits for the others.
  MF_DEVICE void score(const Context<L> &c, int token, int part)
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
      if(kEven || first + 32 * i < kAllPairs) { // (a row has room for a whole last pair)
        ((hw::F32x2 *)scores.score[token])[first + 32 * i] = score;
        ((hw::U32x2 *)scores.order[token])[first + 32 * i] = order;
      }
    }
    if(barrier_threads == 32)
      hw::sync_warp();
    else if(part == 0)
      hw::barrier_sync(L::kBarrierScored + token, barrier_threads);
    else
      hw::barrier_arrive(L::kBarrierScored + token, barrier_threads);
  }
};

// Softmax whose probability selects, so that a bias or groups have a scale to go by: the sum over all comes before any value. One warp
// per token; lane l has the experts l * kCount ..., in the order of the sum.
template <class L>
struct ProbabilityScoring {
  using Shape = typename L::Shape;
  static constexpr int kCount = L::kExpertsPerLane;
  uint32_t logit[kCount], bias[kCount]; // bits; NaN and 0 where there is no expert
  float sum;                            // of the scores of all experts

  MF_DEVICE static int log_warps(int) { return 0; }

  MF_DEVICE void load(const Context<L> &c, int token, int)
  {
    const size_t row = (size_t)token * c.p.logits_pitch;
    if constexpr(Shape::kLogitsF32) {
      load_lane_words<kCount, L::kColumns>(logit, (const float *)c.p.logits + row, c.lane, 0xFFFFFFFFu);
    } else {
      uint32_t pair[(kCount + 1) / 2];
      load_lane_bf16<kCount, L::kColumns>(pair, (const uint16_t *)c.p.logits + row, c.lane, 0xFFFFFFFFu);
      MF_UNROLL
      for(int i = 0; i < kCount; ++i)
        logit[i] = i & 1 ? pair[i / 2] & 0xFFFF0000u : pair[i / 2] << 16;
    }
    if constexpr(Shape::kBias)
      load_lane_words<kCount, L::kColumns>(bias, c.p.bias, c.lane, 0u);
  }

  MF_DEVICE uint32_t first_word() const { return logit[0]; }

  MF_DEVICE void score(const Context<L> &c, int token, int)
  {
    uint32_t largest = 0;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const uint32_t order = mf_exact_order(hw::bits_float(logit[i]));
      largest = order > largest ? order : largest;
    }
    largest = hw::reduce_max(largest);
    const float top = hw::bits_float(largest & 0x80000000u ? largest ^ 0x80000000u : ~largest); // (NaN if all are)
    float score[kCount];
    sum = 0.0f;
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = hw::bits_float(logit[i]);
      score[i] = l == l ? mf_exact_softmax(l, top) : 0.0f;
      sum = mf_exact_add(sum, score[i]);
    }
    sum = add_lanes<32>(sum);
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float l = hw::bits_float(logit[i]), probability = mf_exact_weight(score[i], sum, 1.0f);
      const float value = Shape::kBias ? mf_exact_add(probability, hw::bits_float(bias[i])) : probability;
      const int expert = c.lane * kCount + i;
      if(L::kColumns == 32 * kCount || expert < L::kColumns) {
        c.sm.scores.score[token][expert] = score[i];
        c.sm.scores.order[token][expert] = l == l && value == value ? mf_exact_order_bits(value) : 0u; // (never -0)
      }
    }
    hw::sync_warp();
  }
};

template <bool kProbability, class L>
struct ScoringType {
  using Type = SeparateScoring<L>;
};
template <class L>
struct ScoringType<true, L> {
  using Type = ProbabilityScoring<L>;
};

} // namespace stream
