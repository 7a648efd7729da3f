// quantise.cuh - bf16 to e4m3 with one scale per token and 128 columns; the front's quantisation of x.
//
// Who runs it   XFront: all warps but the producer (those that route once they have done so; the lister, and with one token those that
//               score for it, not at all: the list of experts is urgent, x is not). quantise_chunks: also the h loaders.
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
    const uint32_t bits = (hw::float_bits(scale) + 0x7FFFFFu) & 0xFF800000u; // up to the next power of two
    scale = hw::bits_float(bits);
    inverse = hw::bits_float((254u << 23) - bits);
  } else {
    const float r = hw::reciprocal_approx(scale);
    inverse = hw::fma_rn(r, hw::fma_rn(-scale, r, 1.0f), r);
  }
}

// Quantises kCount independent chunks: chunk i of a lane is 8 successive bf16 values, 16 successive lanes (a half warp) hold
// the 128 values of one scale. A NaN never becomes the maximum.
template <class L, int kCount>
MF_DEVICE void quantise_chunks(const hw::U32x4 (&chunk)[kCount], hw::U32x2 (&quantised)[kCount], float (&scale)[kCount])
{
  float amax[kCount];
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    const uint32_t a = hw::bf16_pair_max(chunk[i].x & 0x7FFF7FFFu, chunk[i].y & 0x7FFF7FFFu);
    const uint32_t b = hw::bf16_pair_max(chunk[i].z & 0x7FFF7FFFu, chunk[i].w & 0x7FFF7FFFu);
    const uint32_t m = hw::bf16_pair_max(a, b);
    const float low = hw::bf16_low(m), high = hw::bf16_high(m);
    amax[i] = low > high ? low : high;
  }
  MF_UNROLL
  for(int o = 1; o < 16; o <<= 1) {
    MF_UNROLL
    for(int i = 0; i < kCount; ++i) {
      const float other = hw::shuffle_xor(amax[i], o);
      amax[i] = other > amax[i] ? other : amax[i];
    }
  }
  MF_UNROLL
  for(int i = 0; i < kCount; ++i) {
    float inv;
    scale_of<L>(amax[i], scale[i], inv);
    const hw::U32x4 v = chunk[i];
    quantised[i].x = hw::to_e4m3_pair(hw::bf16_low(v.x) * inv, hw::bf16_high(v.x) * inv) |
                     hw::to_e4m3_pair(hw::bf16_low(v.y) * inv, hw::bf16_high(v.y) * inv) << 16;
    quantised[i].y = hw::to_e4m3_pair(hw::bf16_low(v.z) * inv, hw::bf16_high(v.z) * inv) |
                     hw::to_e4m3_pair(hw::bf16_low(v.w) * inv, hw::bf16_high(v.w) * inv) << 16;
  }
}

// Where the 8-byte piece `piece` (0..15) of row `row` of a 128-byte swizzled atom lies.
MF_DEVICE hw::U32x2 *atom_piece(uint8_t *atom, int row, int piece)
{
  return (hw::U32x2 *)(atom + row * 128 + (((piece >> 1) ^ row) << 4) + ((piece & 1) << 3));
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

// Quantisation of x. One step is 256 columns of one token, done by one warp; every CTA starts at another step (all SMs
// reading the same lines at once is slow). Loads run one batch ahead.
template <class L>
struct XFront {
  static constexpr int kTokenSteps = (L::kHidden + 255) / 256;
  static constexpr bool kWholeSteps = L::kHidden % 256 == 0; // else the upper half warp has nothing to do in a token's last step
  static constexpr int kBatch = L::kHidden > 4096 && L::kMaxTokens <= MF_STREAM_MAX_TOKENS ? 8 : 4; // steps that are loaded together
  static constexpr int kTogether = 4;                      // steps whose latencies overlap in quantise_chunks
  const Context<L> &c;
  uint32_t worker, workers, steps, rotation; // this warp has the steps worker, worker + workers, ...
  hw::U32x4 next[kBatch];

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

  // Where the step's columns are: token and part of its row.
  MF_DEVICE void locate(uint32_t step, uint32_t &token, uint32_t &part) const
  {
    step += rotation;
    step = step >= steps ? step - steps : step;
    token = step / kTokenSteps;
    part = step - token * kTokenSteps;
  }

  MF_DEVICE void load(uint32_t first)
  {
    MF_UNROLL
    for(int i = 0; i < kBatch; ++i) {
      const uint32_t step = first + workers * i;
      uint32_t token, part;
      locate(step, token, part);
      const hw::U32x4 *source = (const hw::U32x4 *)((const uint16_t *)c.p.x + (token * c.p.x_pitch + part * 256 + c.lane * 8));
      next[i] = hw::U32x4{0, 0, 0, 0};
      if(step < steps && (kWholeSteps || part * 256 + c.lane * 8 < L::kHidden))
        next[i] = *source;
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
      hw::U32x4 chunk[kBatch];
      MF_UNROLL
      for(int i = 0; i < kBatch; ++i)
        chunk[i] = next[i];
      if(first + workers * kBatch < steps)
        load(first + workers * kBatch);
      MF_UNROLL
      for(int i = 0; i < kBatch; i += kTogether) {
        if(i == 0 || first + workers * i < steps)
          quantise_steps(first + workers * i, chunk + i);
      }
    }
    hw::fence_async_proxy();
  }

  MF_DEVICE void quantise_steps(uint32_t first, const hw::U32x4 *loaded)
  {
    hw::U32x4 chunk[kTogether];
    hw::U32x2 quantised[kTogether];
    float scale[kTogether];
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i)
      chunk[i] = loaded[i];
    quantise_chunks<L>(chunk, quantised, scale);
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      const uint32_t step = first + workers * i;
      uint32_t token, part;
      locate(step, token, part);
      if(step < steps && (kWholeSteps || part * 256 + c.lane * 8 < L::kHidden)) {
        const uint32_t block = part * 2 + (c.lane >> 4), piece = c.lane & 15;
        *atom_piece(L::x_atom(c.sm, block, token), L::x_row(token), piece) = quantised[i];
        if(piece == 0)
          c.sm.cleared.x_scale[block][token] = scale[i];
      }
    }
  }
};

} // namespace stream
