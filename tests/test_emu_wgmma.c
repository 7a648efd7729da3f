/* test_emu_wgmma.c - emu/tensor.c: e4m3, descriptors, products. Expectations are tables made by hand or naive formulas. */
#include "emu_tensor_fixture.h"

/* ---- e4m3 ---- */

START_TEST(e4m3_values)
{
  for(int bits = 0; bits < 256; bits++) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float have = emu_e4m3_value((uint8_t)bits);
    if(exponent == 15 && mantissa == 7) {
      ck_assert(isnan(have));
      continue;
    }
    const double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
    ck_assert_msg((double)have == (bits & 0x80 ? -magnitude : magnitude), "%d: %g", bits, (double)have);
    ck_assert_int_eq(signbit(have) != 0, bits >> 7);
  }
  ck_assert(emu_e4m3_value(0x7E) == 448.0f);
  ck_assert(emu_e4m3_value(0x38) == 1.0f);
  ck_assert(emu_e4m3_value(0x01) == 0x1p-9f);
}
END_TEST

/* ---- descriptors ---- */

/* As templates/hw/wgmma.cuh makes them. */
static uint64_t descriptor(uint32_t address)
{
  return (uint64_t)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

START_TEST(descriptors)
{
  struct emu_matrix m = emu_matrix_decode(descriptor(0x2A400));
  ck_assert_uint_eq(m.start, 0x2A400);
  ck_assert_uint_eq(m.leading, 16);
  ck_assert_uint_eq(m.stride, 1024);
  ck_assert_uint_eq(m.swizzle, 128);
  m = emu_matrix_decode(descriptor(0x400) + (96 >> 4)); /* advanced by three k steps */
  ck_assert_uint_eq(m.start, 0x460);
  static const uint32_t swizzle[4] = {0, 128, 64, 32};
  for(uint64_t i = 0; i < 4; i++)
    ck_assert_uint_eq(emu_matrix_decode(i << 62).swizzle, swizzle[i]);
  m = emu_matrix_decode(UINT64_C(0x0000FFFFFFFFFFFF)); /* fields do not run into each other; bits between them are ignored */
  ck_assert_uint_eq(m.start, 0x3FFF0);
  ck_assert_uint_eq(m.leading, 0x3FFF0);
  ck_assert_uint_eq(m.stride, 0x3FFF0);
  ck_assert_uint_eq(m.swizzle, 0);
  m = emu_matrix_decode(UINT64_C(0x003E) << 48 | UINT64_C(0xC000C000C000));
  ck_assert_uint_eq(m.start + m.leading + m.stride, 0);
}
END_TEST

START_TEST(matrix_addresses)
{
  for(uint32_t step = 0; step < 4; step++) {
    const struct emu_matrix m = emu_matrix_decode(descriptor(0x8400) + (32 * step >> 4));
    for(int row = 0; row < 64; row++) {
      for(int column = 0; column < 32; column++) {
        const uint32_t in_row = 32 * step + (uint32_t)column;
        const uint32_t want = 0x8400 + (uint32_t)(row / 8) * 1024 + (uint32_t)(row % 8) * 128 + table128[row % 8][in_row / 16] * 16u + in_row % 16;
        EXPECT(emu_matrix_address(&m, row, column) == want, "step %u row %d column %d", step, row, column);
      }
    }
  }
  struct emu_matrix far = emu_matrix_decode(descriptor(0));
  far.stride = 4096;
  ck_assert_uint_eq(emu_matrix_address(&far, 17, 0), 2 * 4096 + 128 + 16);
}
END_TEST

/* ---- products ---- */

#define WINDOW 65536
static _Alignas(1024) uint8_t window[WINDOW];
#define A_AT 4096
#define B_AT 32768

/* Puts a value where row, k of an operand lies, with the table's swizzle. */
static void put(uint32_t at, int row, int k, uint8_t bits)
{
  window[at + (uint32_t)(row / 8) * 1024 + (uint32_t)(row % 8) * 128 + table128[row % 8][k / 16] * 16u + (uint32_t)(k % 16)] = bits;
}

static uint8_t get(uint32_t at, int row, int k)
{
  return window[at + (uint32_t)(row / 8) * 1024 + (uint32_t)(row % 8) * 128 + table128[row % 8][k / 16] * 16u + (uint32_t)(k % 16)];
}

static void run_product(int first_row, int step, int n, bool accumulate, float *d)
{
  const struct emu_matrix a = emu_matrix_decode(descriptor(A_AT + 32 * (uint32_t)step)), b = emu_matrix_decode(descriptor(B_AT + 32 * (uint32_t)step));
  emu_wgmma_warp(window, &a, first_row, &b, n, accumulate, d);
}

/* Bytes without NaN; `spread` masks the exponents. */
static void fill_window(uint32_t seed, uint8_t mask)
{
  fill(window, WINDOW, seed);
  for(size_t i = 0; i < WINDOW; i++) {
    window[i] &= mask;
    if((window[i] & 0x7F) == 0x7F)
      window[i] ^= 1;
  }
}

static const int product_columns[] = {8, 16, 24, 32, 64, 256};

/* In f64 the products and their sum are exact; f32 rounds 31 sums of at most `sum of magnitudes`. */
START_TEST(products_against_f64)
{
  const int n = product_columns[_i];
  static float d[16 * 256], before[16 * 256];
  fill_window(10 + (uint32_t)_i, 0xFF);
  for(int turn = 0; turn < 16; turn++) {
    const int first_row = 16 * (turn % 4), step = turn / 4;
    const bool accumulate = turn & 1;
    for(int i = 0; i < 16 * n; i++)
      before[i] = d[i] = (float)((int)(random32() % 2001) - 1000) / 16.0f;
    run_product(first_row, step, n, accumulate, d);
    for(int i = 0; i < 16; i++) {
      for(int j = 0; j < n; j++) {
        double sum = accumulate ? (double)before[i * n + j] : 0, magnitude = fabs(sum);
        for(int k = 0; k < 32; k++) {
          const double p = (double)emu_e4m3_value(get(A_AT, first_row + i, 32 * step + k)) * (double)emu_e4m3_value(get(B_AT, j, 32 * step + k));
          sum += p;
          magnitude += fabs(p);
        }
        EXPECT(fabs((double)d[i * n + j] - sum) <= 33 * 0x1p-24 * magnitude, "turn %d row %d column %d: %.9g, not %.9g", turn, i, j,
                      (double)d[i * n + j], sum);
      }
    }
  }
}
END_TEST

/* To the bit, whichever version runs: each addition is rounded to f32, in order of k; the sum is added to d at the end. */
START_TEST(products_are_summed_in_order)
{
  const int n = product_columns[_i];
  static float d[16 * 256], before[16 * 256];
  fill_window(20 + (uint32_t)_i, 0xFF);
  for(int turn = 0; turn < 16; turn++) {
    const int first_row = 16 * (turn % 4), step = turn / 4;
    const bool accumulate = turn & 1;
    for(int i = 0; i < 16 * n; i++)
      before[i] = d[i] = (float)(random32() % 4096) * 0.37f;
    run_product(first_row, step, n, accumulate, d);
    for(int i = 0; i < 16; i++) {
      for(int j = 0; j < n; j++) {
        volatile float sum = 0;
        for(int k = 0; k < 32; k++) {
          const volatile float p = emu_e4m3_value(get(A_AT, first_row + i, 32 * step + k)) * emu_e4m3_value(get(B_AT, j, 32 * step + k));
          sum = sum + p;
        }
        if(accumulate)
          sum = before[i * n + j] + sum;
        EXPECT(bits_of(d[i * n + j]) == bits_of(sum), "turn %d row %d column %d: %.9g, not %.9g", turn, i, j, (double)d[i * n + j], (double)sum);
      }
    }
  }
}
END_TEST

/* Every value of either operand, alone: 1 * v and v * 1 are v. */
START_TEST(products_of_every_value)
{
  for(int bits = 0; bits < 256; bits++) {
    const float v = emu_e4m3_value((uint8_t)bits);
    float d[16 * 8];
    const int row = bits % 16, column = bits % 8, k = bits % 32;
    for(int side = 0; side < 2; side++) {
      memset(window, 0, sizeof(window));
      put(A_AT, row, k, side == 0 ? (uint8_t)bits : 0x38);
      put(B_AT, column, k, side == 0 ? 0x38 : (uint8_t)bits);
      run_product(0, 0, 8, false, d);
      for(int i = 0; i < 16 * 8; i++) {
        const bool here = i == row * 8 + column;
        const bool nan = isnan(v) && (side == 0 ? i / 8 == row : i % 8 == column); /* NaN times 0 */
        EXPECT(nan ? isnan(d[i]) : d[i] == (here ? v : 0.0f), "value %d side %d element %d: %g", bits, side, i, (double)d[i]);
      }
    }
  }
}
END_TEST

/* Rows of the B operand that nobody wrote hold NaN: their columns are NaN, all others are untouched by it. */
START_TEST(nan_stays_in_its_column)
{
  for(int victim = 0; victim < 32; victim++) {
    static float clean[16 * 32], d[16 * 32];
    fill_window(30, 0xBF);
    run_product(16, 1, 32, false, clean);
    for(int k = 0; k < 128; k++)
      put(B_AT, victim, k, k & 1 ? 0xFF : 0x7F);
    run_product(16, 1, 32, false, d);
    for(int i = 0; i < 16 * 32; i++) {
      EXPECT(i % 32 == victim ? isnan(d[i]) : bits_of(d[i]) == bits_of(clean[i]), "column %d: %g in column %d", victim, (double)d[i], i % 32);
    }
  }
}
END_TEST

START_TEST(what_is_not_accumulated_is_ignored)
{
  static float from_zero[16 * 32], from_nan[16 * 32], added[16 * 32];
  fill_window(31, 0xFF);
  for(int i = 0; i < 16 * 32; i++) {
    from_nan[i] = float_of(i & 1 ? 0x7FFFFFFF : 0x7F800000);
    added[i] = i % 3 == 0 ? NAN : 1.0f;
  }
  run_product(0, 2, 32, false, from_zero);
  run_product(0, 2, 32, false, from_nan);
  run_product(0, 2, 32, true, added);
  ck_assert_mem_eq(from_zero, from_nan, sizeof(from_zero));
  for(int i = 0; i < 16 * 32; i++) {
    if(i % 3 == 0)
      ck_assert(isnan(added[i]));
    else
      ck_assert_uint_eq(bits_of(added[i]), bits_of(1.0f + from_zero[i]));
  }
}
END_TEST

/* wgmma.cuh: in lane l, d[4j + 0] and d[4j + 1] are row l / 4 and columns 8j + 2(l % 4) and + 1; d[4j + 2] and d[4j + 3] are row l / 4 + 8. */
START_TEST(accumulator_places)
{
  for(int lane = 0; lane < 32; lane++) {
    for(int j = 0; j < 32; j++) {
      for(int part = 0; part < 4; part++) {
        const int row = lane / 4 + (part >= 2 ? 8 : 0), column = 8 * j + 2 * (lane % 4) + (part & 1);
        int at_lane = -1, at_index = -1;
        emu_wgmma_place(row, column, &at_lane, &at_index);
        EXPECT(at_lane == lane && at_index == 4 * j + part, "row %d column %d: lane %d index %d", row, column, at_lane, at_index);
      }
    }
  }
}
END_TEST

int main(void)
{
  const int columns = (int)(sizeof(product_columns) / sizeof(*product_columns));
  Suite *suite = suite_create("emu_wgmma");
  TCase *products = tcase_create("products");
  tcase_add_test(products, e4m3_values);
  tcase_add_test(products, descriptors);
  tcase_add_test(products, matrix_addresses);
  tcase_add_loop_test(products, products_against_f64, 0, columns);
  tcase_add_loop_test(products, products_are_summed_in_order, 0, columns);
  tcase_add_test(products, products_of_every_value);
  tcase_add_test(products, nan_stays_in_its_column);
  tcase_add_test(products, what_is_not_accumulated_is_ignored);
  tcase_add_test(products, accumulator_places);
  suite_add_tcase(suite, products);
  SRunner *runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  const int failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
