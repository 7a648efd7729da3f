// convert.cuh - number formats and arithmetic whose rounding matters.
#pragma once

namespace hw {

MF_DEVICE uint32_t float_bits(float f) { return __float_as_uint(f); }
MF_DEVICE float bits_float(uint32_t u) { return __uint_as_float(u); }

// rcp.approx.ftz.f32: off by one ulp at most.
MF_DEVICE float reciprocal_approx(float v)
{
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// --- Exactly rounded (to nearest even, no flush to zero), never contracted with their neighbours ---

MF_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }                  // add.rn.f32
MF_DEVICE float multiply_rn(float a, float b) { return __fmul_rn(a, b); }             // mul.rn.f32
MF_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }      // fma.rn.f32

// 1 / v rounded to nearest, for positive normal v whose reciprocal is normal. Branch-free, unlike div.rn: two Newton steps
// with fma correct a start that is off by up to one ulp for every mantissa but all ones, whose result is known.
MF_DEVICE float reciprocal_rn(float v)
{
  float r = reciprocal_approx(v);
  r = __fmaf_rn(r, __fmaf_rn(-v, r, 1.0f), r);
  r = __fmaf_rn(r, __fmaf_rn(-v, r, 1.0f), r);
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x7FFFFFu) == 0x7FFFFFu ? __uint_as_float((0x7E800000u - (bits & 0x7F800000u)) | 1u) : r;
}

// --- Approximate ---

MF_DEVICE float fast_exp(float v) { return __expf(v); }                              // ex2.approx of v * log2(e)
MF_DEVICE float fast_divide(float a, float b) { return __fdividef(a, b); }           // div.approx: 0 for |b| > 2^126

// --- bf16, in the low or high half of a word ---

MF_DEVICE float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
MF_DEVICE float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// cvt.rn.bf16x2.f32: round to nearest even; NaN becomes 0x7FFF (so no result is 0xFFFF).
MF_DEVICE uint32_t to_bf16_pair(float low, float high)
{
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// cvt.rn.bf16.f32
MF_DEVICE uint16_t to_bf16(float v)
{
  uint16_t r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

// add.rn.bf16x2: rounds each half to nearest even; any NaN becomes 0x7FFF, and -0 + +0 is +0.
MF_DEVICE uint32_t bf16_pair_add(uint32_t a, uint32_t b)
{
  uint32_t r;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// max.NaN.bf16x2: the larger value of either half, NaN if one of the two is.
MF_DEVICE uint32_t bf16_pair_max_nan(uint32_t a, uint32_t b)
{
  uint32_t r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// max.bf16x2: the larger value of either half; a NaN loses against a number.
MF_DEVICE uint32_t bf16_pair_max(uint32_t a, uint32_t b)
{
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// --- e4m3 ---

// cvt.rn.satfinite.e4m3x2.f32: round to nearest even, clamped to +-448; the first value in the low byte.
MF_DEVICE uint32_t to_e4m3_pair(float low, float high)
{
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

} // namespace hw
