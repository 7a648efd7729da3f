// quantise.cuh - bf16 to e4m3 with one scale per token and 128 columns; the front's quantisation of x.
//
// Who runs it   XFront: all warps but the producer (those that route once they have done so; the lister, and with one token those that
//               score for it, not at all: the list of experts is urgent, x is not). quantise_blocks: also those that load h.
// Reads         x (global).
// Writes        sm.x, the B operand of the up projection, and sm.cleared.x_scale.
// Waits for     sync_cta between clear_tables and the first store to x_scale.
// Visible by    fence_async_proxy of every writing lane (wgmma reads sm.x through the async proxy), then kBarrierFront.
// No deadlock   waits for no other role.
//
// The formula, to be followed to the bit by any reference: s = max(amax, 1e-10f) / 448.0f, rounded up to a power of two if
// the checkpoint wants that; inv = 1.0f / s; q = e4m3(v * inv), round to nearest even, saturating. All divisions IEEE.
#pragma once
#include "stream/layout.cuh"

namespace stream {

// amax / 448 and its reciprocal, both correctly rounded without a division: multiplying by the rounded 1/448 and one
// correction step gives the IEEE quotient, and one Newton step the IEEE reciprocal, for every bf16 amax and every start
// within one ulp (checked exhaustively).
template <class L>
MF_DEVICE void scale_of(float amax, float &scale, float &inverse)
{
  const float k448th = 1.0f / 448.0f;
  const float a = amax > 1e-10f ? amax : 1e-10f;
  const float q = hw::multiply_rn(a, k448th);
  scale = hw::fma_rn(hw::fma_rn(-448.0f, q, a), k448th, q);
  if constexpr(L::Shape::kActScaleUe8m0) {
    const uint32_t exact = hw::float_bits(scale) < 0x7F800000u ? hw::float_bits(scale) : 0x7F800000u; // (of an infinite amax the quotient is NaN)
    const uint32_t bits = (exact + 0x7FFFFFu) & 0xFF800000u;                                          // up to the next power of two
    scale = hw::bits_float(bits);
    inverse = hw::bits_float((254u << 23) - bits);
  } else {
    const float r = hw::reciprocal_approx(scale);
    inverse = hw::fma_rn(r, hw::fma_rn(-scale, r, 1.0f), r);
  }
}

// The largest magnitude among eight bf16 values in both halves of a word. (A NaN loses against a number, or is the largest of all: whatever scale that makes, its own q is NaN
// and so is all that is multiplied by it.)
MF_DEVICE uint32_t magnitudes(const hw::U32x4 &v)
{
  const uint32_t a = hw::bf16_pair_max(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu);
  const uint32_t b = hw::bf16_pair_max(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu);
  return hw::bf16_pair_max(a, b);
}

// The larger half as a float's bits: magnitudes are in the order of their bits.
MF_DEVICE uint32_t larger_half(uint32_t pair)
{
  const uint32_t low = pair << 16, high = pair & 0xFFFF0000u;
  return low > high ? low : high;
}

// Of kLanes successive lanes, in all of them; kCount at a time.
template <int kLanes, int kCount>
MF_DEVICE void largest_of_lanes(uint32_t (&v)[kCount])
{
  MF_UNROLL
  for(int o = 1; o < kLanes; o <<= 1) {
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const uint32_t other = hw::shuffle_xor(v[i], o);
      v[i] = other > v[i] ? other : v[i];
    }
  }
}

// The same by one redux for every kLanes lanes.
template <int kLanes, int kCount>
MF_DEVICE void largest_by_redux(uint32_t (&v)[kCount])
{
  const int own = hw::lane_index() / kLanes;
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    uint32_t largest = 0;
    MF_UNROLL
    for(int g = 0; g < 32 / kLanes; ++g) {
      const uint32_t found = hw::reduce_max(own == g ? v[i] : 0);
      largest = own == g ? found : largest;
    }
    v[i] = largest;
  }
}

MF_DEVICE hw::U32x2 quantise_eight(const hw::U32x4 &v, float inverse)
{
  return hw::U32x2{hw::to_e4m3_pair(hw::bf16_low(v.x) * inverse, hw::bf16_high(v.x) * inverse) |
                       hw::to_e4m3_pair(hw::bf16_low(v.y) * inverse, hw::bf16_high(v.y) * inverse) << 16,
                   hw::to_e4m3_pair(hw::bf16_low(v.z) * inverse, hw::bf16_high(v.z) * inverse) |
                       hw::to_e4m3_pair(hw::bf16_low(v.w) * inverse, hw::bf16_high(v.w) * inverse) << 16};
}

// Quantises kCount blocks of 128 values, each spread over 16 / kPieces successive lanes: a lane has kPieces pieces of 8 successive values, piece lane and, if there are two, piece
// lane + 8. Two pieces per lane take fewer instructions (what a block costs apart from its values is shared by half as many lanes), one has the result sooner. kRedux: the lanes meet
// in redux, which is less work where there are many blocks; a chain of shuffles is faster for a single one.
template <class L, int kPieces, bool kRedux, int kCount>
MF_DEVICE void quantise_blocks(const hw::U32x4 (&piece)[kCount * kPieces], hw::U32x2 (&quantised)[kCount * kPieces], float (&scale)[kCount])
{
  static_assert(kPieces == 1 || kPieces == 2, "pieces: a block of 16 on 16 or 8 lanes");
  uint32_t amax[kCount];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    uint32_t pair = magnitudes(piece[i * kPieces]);
    if constexpr(kPieces == 2)
      pair = hw::bf16_pair_max(pair, magnitudes(piece[i * kPieces + 1]));
    amax[i] = larger_half(pair);
  }
  if constexpr(kRedux)
    largest_by_redux<16 / kPieces>(amax);
  else
    largest_of_lanes<16 / kPieces>(amax);
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    float inverse;
    scale_of<L>(hw::bits_float(amax[i]), scale[i], inverse);
    MF_UNROLL
    for(int p = 0; p < kPieces; ++p)
      quantised[i * kPieces + p] = quantise_eight(piece[i * kPieces + p], inverse);
  }
}

// Where the 8-byte piece `piece` (0..15) of row `row` of a 128-byte swizzled atom lies.
MF_DEVICE uint32_t atom_offset(uint32_t row, uint32_t piece) { return row * 128 + (((piece >> 1) ^ row) << 4) + ((piece & 1) << 3); }

// Writes a lane's pieces of a block: piece `piece` and, if there are two, piece + 8, which is in the other half of the row, whatever its swizzle.
template <int kPieces>
MF_DEVICE void store_pieces(uint8_t *atom, uint32_t row, uint32_t piece, const hw::U32x2 *quantised)
{
  const uint32_t at = atom_offset(row, piece);
  *(hw::U32x2 *)(atom + at) = quantised[0];
  if constexpr(kPieces == 2)
    *(hw::U32x2 *)(atom + (at ^ 64)) = quantised[1];
}

// The front's tables start as zero. Warps 0..3, before sync_cta.
template <class L>
MF_DEVICE void clear_tables(const Context<L> &c)
{
  constexpr int kWords = sizeof(typename L::Cleared) / 16;
  if(c.warp >= 4)
    return;
  hw::U32x4 *words = (hw::U32x4 *)&c.sm.cleared;
  MF_UNROLL
  for(int first = 0; first < kWords; first += 128) {
    const int i = first + c.warp * 32 + c.lane;
    if(i < kWords)
      words[i] = hw::U32x4{0, 0, 0, 0};
  }
}

// Quantisation of x: with many tokens the longest part of the front, for its instructions, so two pieces per lane. One step is 512 columns of one token, done by one warp;
// every CTA starts at another step (all SMs reading the same lines at once is slow). Loads run one batch ahead.
template <class L>
struct XFront {
  static constexpr int kPieces = 2, kLanes = 16 / kPieces; // of a lane; per block
  static constexpr int kStepBlocks = 2 * kPieces;
  static constexpr int kTokenSteps = (L::kKBlocks + kStepBlocks - 1) / kStepBlocks;
  static constexpr bool kWholeSteps = L::kKBlocks % kStepBlocks == 0; // else a token's last step has fewer blocks
  static constexpr int kBatch = L::kHidden > 4096 && L::kMaxTokens <= MF_STREAM_MAX_TOKENS ? 8 / kPieces : 4 / kPieces; // steps that are loaded together
  static constexpr int kTogether = 4 / kPieces;                     // steps whose latencies overlap
  const Context<L> &c;
  uint32_t worker, workers, steps, rotation; // this warp has the steps worker, worker + workers, ...
  hw::U32x4 next[kPieces * kBatch];

  MF_DEVICE explicit XFront(const Context<L> &context) : c(context)
  {
    // The warp's index again, but not known to be uniform: the address arithmetic below is faster in vector registers.
    const uint32_t warp = (uint32_t)hw::thread_index() >> 5;
    const uint32_t spare = L::kMaxTokens > MF_STREAM_MAX_TOKENS ? 0 : c.p.tokens == 1 ? 4 : 1; // consumer warps: those that route one token, or the lister
    worker = warp - (warp > L::kProducerWarp) - (warp > L::kConsumerWarp ? spare : 0);
    workers = L::kFrontWarps - spare;
    steps = warp - L::kConsumerWarp < spare ? 0 : c.p.tokens * kTokenSteps;
    rotation = c.cta * steps / L::kGridCtas;
  }

  // Where the lane's part of the step is: token and k-block.
  MF_DEVICE void locate(uint32_t step, uint32_t &token, uint32_t &block) const
  {
    step += rotation;
    step = step >= steps ? step - steps : step;
    token = step / kTokenSteps;
    block = (step - token * kTokenSteps) * kStepBlocks + c.lane / kLanes;
  }

  MF_DEVICE void load(uint32_t first)
  {
    MF_UNROLL
    for(int i = 0; i < kBatch; ++i) {
      const uint32_t step = first + workers * i;
      uint32_t token, block;
      locate(step, token, block);
      const hw::U32x4 *source = (const hw::U32x4 *)((const uint16_t *)c.p.x + (token * c.p.x_pitch + block * 128 + c.lane % kLanes * 8));
      MF_UNROLL
      for(int p = 0; p < kPieces; ++p) {
        next[i * kPieces + p] = hw::U32x4{0, 0, 0, 0};
        if(step < steps && (kWholeSteps || block < L::kKBlocks))
          next[i * kPieces + p] = source[8 * p];
      }
    }
  }

  // Issues the loads of the first batch.
  MF_DEVICE void start()
  {
    if(steps > 0)
      load(worker);
  }

  MF_DEVICE void quantise()
  {
    MF_LOOP
    for(uint32_t first = worker; first < steps; first += workers * kBatch) {
      hw::U32x4 piece[kPieces * kBatch];
      MF_UNROLL
      for(int i = 0; i < kPieces * kBatch; ++i)
        piece[i] = next[i];
      if(first + workers * kBatch < steps)
        load(first + workers * kBatch);
      MF_UNROLL
      for(int i = 0; i < kBatch; i += kTogether) {
        if(i == 0 || first + workers * i < steps)
          quantise_steps(first + workers * i, piece + kPieces * i);
      }
    }
    hw::fence_async_proxy();
  }

  MF_DEVICE void quantise_steps(uint32_t first, const hw::U32x4 *loaded)
  {
    hw::U32x4 piece[kPieces * kTogether];
    hw::U32x2 quantised[kPieces * kTogether];
    float scale[kTogether];
    MF_UNROLL
    for(int i = 0; i < kPieces * kTogether; ++i)
      piece[i] = loaded[i];
    quantise_blocks<L, kPieces, true>(piece, quantised, scale);
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      const uint32_t step = first + workers * i;
      uint32_t token, block;
      locate(step, token, block);
      if(step < steps && (kWholeSteps || block < L::kKBlocks)) {
        store_pieces<kPieces>(L::x_atom(c.sm, block, token), L::x_row(token), c.lane % kLanes, quantised + kPieces * i);
        if(c.lane % kLanes == 0)
          c.sm.cleared.x_scale[block][token] = scale[i];
      }
    }
  }
};

} // namespace stream
