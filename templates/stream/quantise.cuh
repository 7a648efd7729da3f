// quantise.cuh - bf16 to e4m3 with one scale per token and 128 columns; the front's quantisation of x.
//
// Who runs it   XFront: warps 0..11 (the routing warps once they have routed). quantise_chunks: also the h loaders.
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
  if(c.warp >= 4)
    return;
  hw::U32x4 *words = (hw::U32x4 *)&c.sm.cleared;
  for(int i = c.warp * 32 + c.lane; i < (int)(sizeof(typename L::Cleared) / 16); i += 128)
    words[i] = hw::U32x4{0, 0, 0, 0};
}

// Quantisation of x. One step is 256 columns of one token, done by one warp; every CTA starts at another step (all SMs
// reading the same lines at once is slow). Loads run one batch ahead.
template <class L>
struct XFront {
  static constexpr int kTokenSteps = L::kHidden / 256;
  static constexpr int kBatch = L::kHidden > 4096 ? 8 : 4;
  const Context<L> &c;
  int steps, rotation;
  hw::U32x4 next[kBatch];

  MF_DEVICE explicit XFront(const Context<L> &context) : c(context)
  {
    steps = c.warp < L::kQuantiseWarps ? c.p.tokens * kTokenSteps : 0;
    rotation = c.cta * steps / L::kGridCtas;
  }

  MF_DEVICE int rotated(int step) const
  {
    step += rotation;
    return step >= steps ? step - steps : step;
  }

  MF_DEVICE void load(int first)
  {
    MF_UNROLL
    for(int i = 0; i < kBatch; ++i) {
      const int step = first + L::kQuantiseWarps * i;
      next[i] = hw::U32x4{0, 0, 0, 0};
      if(step < steps) {
        const int s = rotated(step), token = s / kTokenSteps, part = s - token * kTokenSteps;
        const uint16_t *row = (const uint16_t *)c.p.x + (size_t)token * c.p.x_pitch;
        next[i] = ((const hw::U32x4 *)row)[part * 32 + c.lane];
      }
    }
  }

  // load(c.warp) has been called.
  MF_DEVICE void quantise()
  {
    MF_LOOP
    for(int first = c.warp; first < steps; first += L::kQuantiseWarps * kBatch) {
      hw::U32x4 chunk[kBatch];
      hw::U32x2 quantised[kBatch];
      float scale[kBatch];
      MF_UNROLL
      for(int i = 0; i < kBatch; ++i)
        chunk[i] = next[i];
      if(first + L::kQuantiseWarps * kBatch < steps)
        load(first + L::kQuantiseWarps * kBatch);
      quantise_chunks<L>(chunk, quantised, scale);
      MF_UNROLL
      for(int i = 0; i < kBatch; ++i) {
        const int step = first + L::kQuantiseWarps * i;
        if(step < steps) {
          const int s = rotated(step), token = s / kTokenSteps, part = s - token * kTokenSteps;
          const int block = part * 2 + (c.lane >> 4), piece = c.lane & 15;
          *atom_piece(c.sm.x[block], token, piece) = quantised[i];
          if(piece == 0)
            c.sm.cleared.x_scale[block][token] = scale[i];
        }
      }
    }
    hw::fence_async_proxy();
  }
};

} // namespace stream
