/* datagen.c - weights, scales, bias and x; see datagen.h. The router logits are in datagen_logits.c.
 *
 * x looks like a residual stream: normal values, each token with a magnitude of its own (0.2 .. 1.3), and one column in 512 eight times as large
 * in all tokens. The data kinds of a case only touch x (and datagen_logits.c): weights and scales belong to the layer.
 *   zero_token   token seed % tokens is all zero
 *   huge_scale   x * 2^40: SiLU has become a step, h and y reach 2^80, everything still finite
 *   tiny_scale   x * 2^-24 (even tokens: the quantisation of h sits on its floor of 1e-10, most of h is subnormal) or
 *                x * 2^-40 (odd tokens: that of x, too; h quantises to zero) */
#include "datagen.h"
#include "reference.h"
#include "tools/datagen_core.h"

#include <math.h>
#include <string.h>

uint64_t data_hash(uint64_t seed, uint32_t stream, uint64_t index)
{
  return mf_data_hash(mf_data_key(seed, stream), index);
}

uint64_t data_layer_seed(uint32_t layer)
{
  return data_hash(0x6D6F65666F726765u /* "moeforge" */, 0, layer);
}

uint64_t data_case_seed(const struct test_case *tc)
{
  const uint64_t kind = (uint64_t)tc->tokens << 16 | (uint64_t)tc->routing << 8 | (uint64_t)tc->data;
  return data_hash(kind << 32 | tc->seed, DATA_PICK, 0);
}

void data_weights(uint64_t layer_seed, enum data_stream stream, uint64_t first, size_t count, uint8_t *out)
{
  const uint64_t key = mf_data_key(layer_seed, (unsigned)stream);
  uint64_t index = first / 8;
  for(; count > 0; index++) {
    const uint64_t bytes = mf_data_weights8(mf_data_hash(key, index), mf_data_magnitude);
    const size_t part = count < 8 ? count : 8;
    for(size_t i = 0; i < part; i++)
      out[i] = (uint8_t)(bytes >> 8 * i);
    out += part;
    count -= part;
  }
}

/* The sum over the columns of a matrix has 'variance' if scales are 1: the power of two that brings its root closest to 1. */
static float base_for_variance(double variance)
{
  int n = 0;
  while(n < 60 && ldexp(2.0, 2 * n) < variance)
    n++;
  return ldexpf(1.0f, -n);
}

float data_scale_base(const struct mf_problem *problem, enum data_stream stream)
{
  const double weight = (double)MF_DATA_WEIGHT_RMS * MF_DATA_WEIGHT_RMS;
  if(stream == DATA_S13)
    return base_for_variance(weight * problem->hidden);
  /* Mean square of silu(g) * u for normal g and u: 0.36; of a token's routing weights: about 0.16. */
  return base_for_variance(weight * problem->intermediate * 0.36 * 0.16);
}

void data_scales(uint64_t layer_seed, enum data_stream stream, const struct mf_problem *problem, uint64_t first, size_t count, float *out)
{
  const uint64_t key = mf_data_key(layer_seed, (unsigned)stream);
  const float base = data_scale_base(problem, stream);
  for(size_t i = 0; i < count; i++)
    out[i] = mf_data_scale(mf_data_hash(key, first + i), base);
}

void data_bias(uint64_t layer_seed, int columns, float *out)
{
  const uint64_t key = mf_data_key(layer_seed, DATA_BIAS);
  for(int e = 0; e < columns; e++)
    out[e] = mf_data_bias(mf_data_hash(key, (uint64_t)e));
}

/* One column in 512, the same for all tokens. */
static bool is_outlier(uint64_t key, int column)
{
  return (mf_data_hash(~key, (uint64_t)column) & 511) == 0;
}

static double token_magnitude(uint64_t key, int token, const struct test_case *tc)
{
  const uint64_t h = mf_data_hash(key ^ 1, (uint64_t)token);
  const double magnitude = ldexp(0.8 + (double)(h >> 48) * 0x1p-17, (int)(h % 3) - 2);
  switch(tc->data) {
    case CASE_ZERO_TOKEN: return token == (int)(tc->seed % (uint32_t)tc->tokens) ? 0.0 : magnitude;
    case CASE_HUGE_SCALE: return magnitude * 0x1p40;
    case CASE_TINY_SCALE: return magnitude * (token % 2 == 0 ? 0x1p-24 : 0x1p-40);
    default: return magnitude;
  }
}

void data_x(const struct mf_problem *problem, const struct test_case *tc, uint16_t *out)
{
  const double unit = 1.0 / (75674.0 * 1.41421356237309505); /* two sums of four: standard deviation 1 */
  const uint64_t key = mf_data_key(data_case_seed(tc), DATA_X);
  const uint64_t hidden = (uint64_t)problem->hidden;
  for(int t = 0; t < tc->tokens; t++) {
    const double magnitude = token_magnitude(key, t, tc);
    for(int k = 0; k < problem->hidden; k++) {
      const uint64_t index = 2 * ((uint64_t)t * hidden + (uint64_t)k);
      const int sum = mf_data_normal4(mf_data_hash(key, index)) + mf_data_normal4(mf_data_hash(key, index + 1));
      const double value = sum * unit * magnitude * (is_outlier(key, k) ? 8.0 : 1.0);
      *out++ = bf16_from_float((float)(magnitude == 0.0 ? 0.0 : value));
    }
  }
}
