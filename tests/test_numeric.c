/* test_numeric.c - e4m3, bf16 and the quantisation of a group, against definitions that share no code with numeric.c. */
#include "reference.h"

#include <check.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static float from_bits(uint32_t bits)
{
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* The code whose value is nearest, the even code of two; by search over all codes. Finite values only. */
static uint8_t nearest_e4m3(double value)
{
  int best = 0;
  for(int code = 1; code < 0x7F; code++) {
    const double error = fabs((double)e4m3_to_float((uint8_t)code) - fabs(value)), least = fabs((double)e4m3_to_float((uint8_t)best) - fabs(value));
    if(error < least || (error == least && code % 2 == 0))
      best = code;
  }
  return (uint8_t)(best | (signbit(value) ? 0x80 : 0));
}

START_TEST(e4m3_values_follow_the_format)
{
  ck_assert(e4m3_to_float(0x00) == 0.0f && !signbit(e4m3_to_float(0x00)));
  ck_assert(e4m3_to_float(0x80) == 0.0f && signbit(e4m3_to_float(0x80)));
  ck_assert(e4m3_to_float(0x01) == 0x1p-9f);
  ck_assert(e4m3_to_float(0x07) == 7 * 0x1p-9f);
  ck_assert(e4m3_to_float(0x08) == 0x1p-6f);
  ck_assert(e4m3_to_float(0x38) == 1.0f);
  ck_assert(e4m3_to_float(0xBC) == -1.5f);
  ck_assert(e4m3_to_float(0x7E) == 448.0f);
  ck_assert(isnan(e4m3_to_float(0x7F)) && isnan(e4m3_to_float(0xFF)));
  for(int code = 1; code < 0x7F; code++)
    ck_assert(e4m3_to_float((uint8_t)code) > e4m3_to_float((uint8_t)(code - 1)));
}
END_TEST

START_TEST(e4m3_codes_survive_the_round_trip)
{
  for(int code = 0; code < 256; code++)
    if((code & 0x7F) != 0x7F)
      ck_assert_int_eq(e4m3_from_float(e4m3_to_float((uint8_t)code)), code);
}
END_TEST

/* Every midpoint, its two neighbours in single precision, and the quarter points. */
START_TEST(e4m3_rounds_to_nearest_even)
{
  for(int code = 0; code < 0x7E; code++) {
    const float low = e4m3_to_float((uint8_t)code), high = e4m3_to_float((uint8_t)(code + 1)), middle = (low + high) / 2;
    const float probes[] = {low, middle, nextafterf(middle, 0), nextafterf(middle, 1e9f), low + (high - low) / 4, low + 3 * (high - low) / 4};
    for(size_t i = 0; i < sizeof(probes) / sizeof(probes[0]); i++) {
      ck_assert_int_eq(e4m3_from_float(probes[i]), nearest_e4m3((double)probes[i]));
      ck_assert_int_eq(e4m3_from_float(-probes[i]), nearest_e4m3(-(double)probes[i]));
    }
  }
}
END_TEST

START_TEST(e4m3_agrees_with_search_on_many_values)
{
  uint32_t state = 12345;
  for(int i = 0; i < 20000; i++) {
    state = state * 1664525u + 1013904223u;
    const float value = from_bits((state & 0x80000000u) | (0x39000000u + (state >> 3) % 0x0B800000u)); /* 2^-13 .. 2^10 */
    ck_assert_int_eq(e4m3_from_float(value), nearest_e4m3((double)value));
  }
}
END_TEST

START_TEST(e4m3_saturates_and_keeps_nan)
{
  ck_assert_int_eq(e4m3_from_float(464.0f), 0x7E);
  ck_assert_int_eq(e4m3_from_float(1e30f), 0x7E);
  ck_assert_int_eq(e4m3_from_float(INFINITY), 0x7E);
  ck_assert_int_eq(e4m3_from_float(-INFINITY), 0xFE);
  ck_assert_int_eq(e4m3_from_float(NAN) & 0x7F, 0x7F);
  ck_assert_int_eq(e4m3_from_float(0x1p-10f), 0x00); /* tie between 0 and the least subnormal: even */
  ck_assert_int_eq(e4m3_from_float(nextafterf(0x1p-10f, 1)), 0x01);
  ck_assert_int_eq(e4m3_from_float(1e-40f), 0x00);
  ck_assert_int_eq(e4m3_from_float(-0.0f), 0x80);
}
END_TEST

START_TEST(bf16_round_trip_and_rounding)
{
  for(uint32_t bits = 0; bits < 0x10000; bits++)
    if((bits & 0x7F80) != 0x7F80 || (bits & 0x7F) == 0)
      ck_assert_uint_eq(bf16_from_float(bf16_to_float((uint16_t)bits)), bits);
  ck_assert_uint_eq(bf16_from_float(from_bits(0x3F808000)), 0x3F80); /* tie, even below */
  ck_assert_uint_eq(bf16_from_float(from_bits(0x3F818000)), 0x3F82); /* tie, even above */
  ck_assert_uint_eq(bf16_from_float(from_bits(0x3F808001)), 0x3F81);
  ck_assert_uint_eq(bf16_from_float(from_bits(0x3F807FFF)), 0x3F80);
  ck_assert_uint_eq(bf16_from_float(from_bits(0x7F7FFFFF)), 0x7F80); /* overflows to infinity */
  ck_assert_uint_eq(bf16_from_float(NAN), 0x7FFF);
  ck_assert_uint_eq(bf16_from_float(from_bits(0xFFFFFFFF)), 0x7FFF);
}
END_TEST

/* s = max(amax, 1e-10) / 448, q = e4m3(v * (1 / s)), all in single precision. */
START_TEST(quantise_follows_the_formula)
{
  float values[128];
  uint8_t bytes[128];
  for(int kind = MF_ACT_SCALE_F32; kind <= MF_ACT_SCALE_UE8M0; kind++) {
    for(int round = 0; round < 50; round++) {
      float amax = 0, want, scale;
      for(int i = 0; i < 128; i++) {
        values[i] = bf16_to_float(bf16_from_float(ldexpf((float)((i * 7919 + round * 104729) % 2001 - 1000) / 300.0f, round - 25)));
        amax = fmaxf(amax, fabsf(values[i]));
      }
      want = fmaxf(amax, 1e-10f) / 448.0f;
      if(kind == MF_ACT_SCALE_UE8M0)
        want = exp2f(ceilf(log2f(want)));
      scale = reference_quantise(values, 128, (enum mf_act_scale)kind, bytes);
      ck_assert(scale == want);
      for(int i = 0; i < 128; i++)
        ck_assert_int_eq(bytes[i], nearest_e4m3(fmin(fmax((double)(values[i] * (1.0f / want)), -448.0), 448.0)));
    }
  }
}
END_TEST

START_TEST(quantise_degenerate_groups)
{
  float values[128] = {0};
  uint8_t bytes[128];
  ck_assert(reference_quantise(values, 128, MF_ACT_SCALE_F32, bytes) == 1e-10f / 448.0f);
  for(int i = 0; i < 128; i++)
    ck_assert_int_eq(bytes[i], 0);
  values[5] = 1e-12f; /* below the floor: not blown up to full range */
  ck_assert(reference_quantise(values, 128, MF_ACT_SCALE_F32, bytes) == 1e-10f / 448.0f);
  ck_assert(fabsf(e4m3_to_float(bytes[5]) - 4.48f) < 0.26f);
  values[5] = -3.0e38f;
  ck_assert(isfinite(reference_quantise(values, 1 + 5, MF_ACT_SCALE_F32, bytes)));
  ck_assert_int_eq(bytes[5], 0xFE);
}
END_TEST

/* Powers of two stay what they are. */
START_TEST(ue8m0_keeps_powers_of_two)
{
  uint8_t bytes[1];
  for(int e = -20; e < 20; e++) {
    const float value = ldexpf(448.0f, e), above = nextafterf(value, 1e30f);
    ck_assert(reference_quantise(&value, 1, MF_ACT_SCALE_UE8M0, bytes) == ldexpf(1.0f, e));
    ck_assert_int_eq(bytes[0], 0x7E);
    ck_assert(reference_quantise(&above, 1, MF_ACT_SCALE_UE8M0, bytes) == ldexpf(1.0f, above / 448.0f > ldexpf(1.0f, e) ? e + 1 : e));
  }
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("numeric");
  TCase *tc = tcase_create("formats");
  SRunner *runner;
  int failed;
  tcase_add_test(tc, e4m3_values_follow_the_format);
  tcase_add_test(tc, e4m3_codes_survive_the_round_trip);
  tcase_add_test(tc, e4m3_rounds_to_nearest_even);
  tcase_add_test(tc, e4m3_agrees_with_search_on_many_values);
  tcase_add_test(tc, e4m3_saturates_and_keeps_nan);
  tcase_add_test(tc, bf16_round_trip_and_rounding);
  tcase_add_test(tc, quantise_follows_the_formula);
  tcase_add_test(tc, quantise_degenerate_groups);
  tcase_add_test(tc, ue8m0_keeps_powers_of_two);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
