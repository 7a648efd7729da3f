/* exact_math.h - the arithmetic of routing, the same to the bit on the GPU and in a C11 host file.
 *
 * Which experts a token gets must not depend on where it is computed. So everything that selection and routing weights are
 * made of uses IEEE single-precision operations only, each rounded once, in a fixed order, and none contracted: fused
 * multiply-adds are written as such, and products that feed an addition go through mf_exact_mul().
 *
 * A host file just includes this header. Device code defines MF_EXACT_FN and the MF_EXACT_* operations first.
 *
 *   score      softmax: mf_exact_softmax(l, l_max), l_max over all logits but NaN.
 *              sigmoid: mf_exact_sigmoid(l). sqrt-softplus: mf_exact_sqrt_softplus(l).
 *   selected   softmax: by the logits themselves; with a bias or groups by the probability mf_exact_weight(score, A, 1),
 *              plus the bias. Others: by mf_exact_add(score, bias), by the score without a bias.
 *              The larger wins, then the lower expert index. NaN cannot be selected.
 *   groups     score of a group: mf_exact_add of the two best of its values that select, an expert that cannot be
 *              selected counting as -inf. The topk_group best groups stay, the lower index winning ties.
 *   A          sum over all logits of a softmax: lane l of 32 adds its ceil(E / 32) successive scores from the lowest up
 *              (0 plus the first, plus the second ...; NaN counts as 0), then lanes are added pairwise, neighbours first.
 *   S          sum over the chosen scores: those of picks 0..7 (absent picks 0) as ((0+1)+(2+3))+((4+5)+(6+7)), pick 0 the
 *              best; for more than 8 picks likewise over 16 or 32.
 *   weight     renormalised: mf_exact_weight(score, sum, scaling), sum = S for softmax, else mf_exact_add(S, 1e-20f).
 *              Not renormalised: softmax mf_exact_weight(score, A, scaling), else mf_exact_mul(score, scaling).
 *              "Top-k, then softmax over the chosen" is the renormalised softmax, to the bit. */
#ifndef MF_STREAM_EXACT_MATH_H
#define MF_STREAM_EXACT_MATH_H

#ifndef MF_EXACT_FN
#include <math.h>
#include <stdint.h>
#define MF_EXACT_FN static inline
#define MF_EXACT_FMA(a, b, c) fmaf(a, b, c)
#define MF_EXACT_MUL(a, b) mf_exact_host_mul(a, b)
#define MF_EXACT_ADD(a, b) mf_exact_host_add(a, b)
#define MF_EXACT_RECIPROCAL(a) (1.0f / (a))
/* volatile: neither contracted into a fused multiply-add nor kept in a wider format, whatever the compiler's flags */
static inline float mf_exact_host_mul(float a, float b) { volatile float r = a * b; return r; }
static inline float mf_exact_host_add(float a, float b) { volatile float r = a + b; return r; }
#endif

union mf_exact_word { float f; uint32_t u; };

MF_EXACT_FN float mf_exact_mul(float a, float b) { return MF_EXACT_MUL(a, b); }
MF_EXACT_FN float mf_exact_add(float a, float b) { return MF_EXACT_ADD(a, b); }

/* exp(x) for x <= 0 (-inf included), 0 below -86. Within 1 ulp; exactly 1 at 0.
 * x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial of degree 7 for exp(r); n goes into the exponent. */
MF_EXACT_FN float mf_exact_exp(float x)
{
  const float kRound = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits */
  union mf_exact_word shifted, result;
  float n, r, p;
  shifted.f = MF_EXACT_FMA(x, 1.44269504f, kRound);
  n = MF_EXACT_ADD(shifted.f, -kRound);
  r = MF_EXACT_FMA(n, -0.693145752f, x);
  r = MF_EXACT_FMA(n, -1.42860677e-6f, r);
  p = MF_EXACT_FMA(1.98412701e-4f, r, 1.38888889e-3f);
  p = MF_EXACT_FMA(p, r, 8.33333377e-3f);
  p = MF_EXACT_FMA(p, r, 4.16666679e-2f);
  p = MF_EXACT_FMA(p, r, 1.66666672e-1f);
  p = MF_EXACT_FMA(p, r, 0.5f);
  p = MF_EXACT_FMA(p, r, 1.0f);
  p = MF_EXACT_FMA(p, r, 1.0f);
  result.f = p;
  result.u += shifted.u << 23;
  return x < -86.0f ? 0.0f : result.f;
}

/* exp(l - l_max), for l <= l_max. With nothing but -inf there is no distribution: all scores are 0. */
MF_EXACT_FN float mf_exact_softmax(float l, float l_max)
{
  const float kLowest = -3.40282347e38f;
  return l_max < kLowest ? 0.0f : mf_exact_exp(l - l_max);
}

/* 1 / (1 + exp(-l)). Any l but NaN. */
MF_EXACT_FN float mf_exact_sigmoid(float l)
{
  const float e = mf_exact_exp(l < 0.0f ? l : -l);
  const float r = MF_EXACT_RECIPROCAL(MF_EXACT_ADD(1.0f, e));
  return l < 0.0f ? MF_EXACT_MUL(e, r) : r;
}

/* The square root, rounded to nearest, of 0 and of what is not below the smallest normal number; from operations that both sides have.
 * An estimate of 1 / sqrt(a) from a's bits, three Newton steps, and a last step on the root itself (checked for every mantissa). */
MF_EXACT_FN float mf_exact_sqrt(float a)
{
  const int small = a < 1e-18f; /* (the last step's residual would be subnormal) */
  const float b = small ? MF_EXACT_MUL(a, 18446744073709551616.0f) : a; /* times 2^64 */
  union mf_exact_word y;
  float s, t;
  int i;
  y.f = b;
  y.u = 0x5F375A86u - (y.u >> 1);
  for(i = 0; i < 3; ++i) {
    t = MF_EXACT_FMA(-MF_EXACT_MUL(b, y.f), y.f, 1.0f);
    y.f = MF_EXACT_FMA(MF_EXACT_MUL(0.5f, y.f), t, y.f);
  }
  s = MF_EXACT_MUL(b, y.f);
  s = MF_EXACT_FMA(MF_EXACT_MUL(0.5f, y.f), MF_EXACT_FMA(-s, s, b), s);
  return small ? MF_EXACT_MUL(s, 2.32830644e-10f) : s; /* times 2^-32 */
}

/* sqrt(log(1 + exp(l))) = sqrt(max(l, 0) + log1p(e)), e = exp(-|l|); log1p(e) = 2 atanh(e / (2 + e)) as a series whose ninth
 * term is below 2^-29. Any l but NaN. */
MF_EXACT_FN float mf_exact_sqrt_softplus(float l)
{
  const float e = mf_exact_exp(l < 0.0f ? l : -l);
  const float s = MF_EXACT_MUL(e, MF_EXACT_RECIPROCAL(MF_EXACT_ADD(2.0f, e)));
  const float z = MF_EXACT_MUL(s, s);
  float p = 1.0f / 15.0f;
  p = MF_EXACT_FMA(p, z, 1.0f / 13.0f);
  p = MF_EXACT_FMA(p, z, 1.0f / 11.0f);
  p = MF_EXACT_FMA(p, z, 1.0f / 9.0f);
  p = MF_EXACT_FMA(p, z, 1.0f / 7.0f);
  p = MF_EXACT_FMA(p, z, 1.0f / 5.0f);
  p = MF_EXACT_FMA(p, z, 1.0f / 3.0f);
  p = MF_EXACT_FMA(p, z, 1.0f);
  return mf_exact_sqrt(MF_EXACT_ADD(l > 0.0f ? l : 0.0f, MF_EXACT_MUL(2.0f * s, p)));
}

/* score / sum * scaling; 0 for a score of 0, even if the sum is 0 as well */
MF_EXACT_FN float mf_exact_weight(float score, float sum, float scaling)
{
  return score == 0.0f ? 0.0f : MF_EXACT_MUL(MF_EXACT_MUL(score, MF_EXACT_RECIPROCAL(sum)), scaling);
}

/* Orders floats other than NaN and -0 as unsigned integers: -inf is 0x007FFFFF. */
MF_EXACT_FN uint32_t mf_exact_order_bits(float f)
{
  union mf_exact_word w;
  w.f = f;
  return w.u ^ ((w.u >> 31) * 0x7FFFFFFFu | 0x80000000u);
}

/* The same for all floats: everything that can be selected is at or above 0x007FFFFF, NaN is 0, -0 equals +0. */
MF_EXACT_FN uint32_t mf_exact_order(float f)
{
  const uint32_t order = mf_exact_order_bits(MF_EXACT_ADD(f, 0.0f)); /* -0 becomes +0 */
  return f == f ? order : 0u;
}

#endif
