/* numeric.c - the number formats of the operator on the CPU, by integer arithmetic on the bits. Declared in reference.h.
 *
 *   e4m3  s eeee mmm   bias 7, subnormals, no infinity, 0x7F / 0xFF = NaN, largest number 448
 *   bf16  the upper half of an IEEE single */
#include "reference.h"

#include <math.h>
#include <string.h>

static uint32_t float_bits(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static float bits_float(uint32_t bits)
{
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

float e4m3_to_float(uint8_t bits)
{
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float sign = bits & 0x80 ? -1.0f : 1.0f;
  if((bits & 0x7F) == 0x7F)
    return copysignf(NAN, sign);
  return sign * (exponent == 0 ? (float)mantissa * 0x1p-9f : ldexpf((float)(8 + mantissa), exponent - 10));
}

/* Rounds the mantissa away that the target does not have; the carry may run into the exponent, which is what it should do. */
static uint32_t round_off(uint32_t bits, int drop)
{
  const uint32_t odd = bits >> drop & 1;
  return (bits + ((1u << (drop - 1)) - 1) + odd) >> drop;
}

uint8_t e4m3_from_float(float value)
{
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
  if(magnitude > 0x7F800000)
    return 0x7F;
  if(magnitude >= 0x43E00000) /* 448 and more, infinity included */
    return sign | 0x7E;
  if(magnitude >= 0x3C800000) /* 2^-6: normal numbers; the bias changes from 127 to 7 */
    return sign | (uint8_t)(round_off(magnitude, 20) - ((127 - 7) << 3));
  /* Subnormal: a multiple of 2^-9. Adding 1.5 * 2^14 leaves exactly those bits, rounded to nearest even. */
  return sign | (uint8_t)(float_bits(bits_float(magnitude) + 24576.0f) & 15);
}

float bf16_to_float(uint16_t bits)
{
  return bits_float((uint32_t)bits << 16);
}

uint16_t bf16_from_float(float value)
{
  const uint32_t bits = float_bits(value);
  if((bits & 0x7FFFFFFF) > 0x7F800000)
    return 0x7FFF;
  return (uint16_t)round_off(bits, 16);
}

float reference_quantise(const float *values, int count, enum mf_act_scale kind, uint8_t *out)
{
  float amax = 0.0f, scale, inverse;
  for(int i = 0; i < count; i++) /* a NaN never becomes the maximum */
    amax = fabsf(values[i]) > amax ? fabsf(values[i]) : amax;
  scale = (amax > 1e-10f ? amax : 1e-10f) / 448.0f;
  if(kind == MF_ACT_SCALE_UE8M0)
    scale = bits_float((float_bits(scale) + 0x7FFFFF) & 0xFF800000);
  inverse = 1.0f / scale;
  for(int i = 0; i < count; i++)
    out[i] = e4m3_from_float(values[i] * inverse);
  return scale;
}
