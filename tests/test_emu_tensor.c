/* test_emu_tensor.c - emu/tensor.c: maps, boxes, swizzles, descriptors, e4m3, products. Expectations are tables made by hand or naive formulas. */
#include <check.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

static uint32_t random_state;

static uint32_t random32(void)
{
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8 ^ random_state << 16;
}

static void fill(uint8_t *bytes, size_t count, uint32_t seed)
{
  random_state = seed;
  for(size_t i = 0; i < count; i++)
    bytes[i] = (uint8_t)random32();
}

static float float_of(uint32_t bits)
{
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}

static uint32_t bits_of(float f)
{
  uint32_t bits;
  memcpy(&bits, &f, sizeof(bits));
  return bits;
}

/* For inner loops: libcheck's own macros write to a pipe each time. */
#define EXPECT(condition, ...)    \
  do {                            \
    if(!(condition))              \
      ck_abort_msg(__VA_ARGS__);  \
  } while(0)

/* ---- maps ---- */

#define TENSOR_BYTES (1 << 18)
static _Alignas(1024) uint8_t tensor[TENSOR_BYTES];

/* As tuner/family_stream.c maps w13, for 2 experts, N = 16, K = 256, rows 272 bytes apart: [k-block][expert and 8 rows][gate, up][row][column].
 * Strides 1 and 2 are not in rising order, and steps of the third and the fourth dimension lead to the same rows. */
#define UP_ROWS (2 * 2 * 16)
#define UP_STRIDE UINT64_C(272)
static struct emu_tensor_map up_map(void)
{
  return (struct emu_tensor_map){.base = tensor,
                                 .rank = 5,
                                 .swizzle = 128,
                                 .dim = {128, 8, 2, UP_ROWS / 8, 2},
                                 .stride = {UP_STRIDE, UP_STRIDE * 16, UP_STRIDE * 8, 128},
                                 .box = {128, 8, 2, 1, 2}};
}

static struct emu_tensor_map plain_map(void)
{
  return (struct emu_tensor_map){.base = tensor, .rank = 2, .swizzle = 0, .dim = {64, 10}, .stride = {96}, .box = {32, 4}};
}

START_TEST(good_maps_have_no_fault)
{
  const struct emu_tensor_map up = up_map(), plain = plain_map();
  ck_assert_ptr_null(emu_tensor_map_fault(&up));
  ck_assert_ptr_null(emu_tensor_map_fault(&plain));
  struct emu_tensor_map edge = up_map(); /* everything at its limit */
  edge.dim[3] = UINT64_C(1) << 32;
  edge.stride[3] = (UINT64_C(1) << 40) - 16;
  edge.box[4] = 256;
  ck_assert_ptr_null(emu_tensor_map_fault(&edge));
  edge = (struct emu_tensor_map){.base = tensor, .rank = 1, .swizzle = 0, .dim = {1}, .box = {256}};
  ck_assert_ptr_null(emu_tensor_map_fault(&edge));
  edge.stride[0] = 3; /* of no dimension: rank 1 has no stride */
  edge.dim[1] = 0;
  ck_assert_ptr_null(emu_tensor_map_fault(&edge));
}
END_TEST

enum field { BASE, RANK, SWIZZLE, DIM, STRIDE, BOX };

static const struct fault_case {
  enum field field;
  int index;
  uint64_t value;
  const char *text;
} fault_cases[] = {
    {RANK, 0, 0, "the rank is not 1..5"},
    {RANK, 0, 6, "the rank is not 1..5"},
    {BASE, 0, 8, "the base is not aligned to 16 bytes"},
    {BASE, 0, 1, "the base is not aligned to 16 bytes"},
    {SWIZZLE, 0, 16, "the swizzle is not 0, 32, 64 or 128 bytes"},
    {SWIZZLE, 0, 256, "the swizzle is not 0, 32, 64 or 128 bytes"},
    {DIM, 0, 0, "a dimension is not 1..2^32"},
    {DIM, 4, 0, "a dimension is not 1..2^32"},
    {DIM, 2, (UINT64_C(1) << 32) + 1, "a dimension is not 1..2^32"},
    {STRIDE, 0, 24, "a stride is not a multiple of 16 bytes"},
    {STRIDE, 3, 17, "a stride is not a multiple of 16 bytes"},
    {STRIDE, 1, UINT64_C(1) << 40, "a stride is not below 2^40 bytes"},
    {STRIDE, 3, UINT64_C(1) << 41, "a stride is not below 2^40 bytes"},
    {BOX, 1, 0, "a side of the box is not 1..256"},
    {BOX, 4, 257, "a side of the box is not 1..256"},
    {BOX, 0, 8, "the innermost side of the box is not a multiple of 16 bytes"},
    {BOX, 0, 120, "the innermost side of the box is not a multiple of 16 bytes"},
    {BOX, 0, 144, "the innermost side of the box is larger than the swizzle"},
    {SWIZZLE, 0, 64, "the innermost side of the box is larger than the swizzle"},
};

START_TEST(each_fault_is_named)
{
  const struct fault_case *f = &fault_cases[_i];
  struct emu_tensor_map map = up_map();
  switch(f->field) {
  case BASE: map.base += f->value; break;
  case RANK: map.rank = (uint32_t)f->value; break;
  case SWIZZLE: map.swizzle = (uint32_t)f->value; break;
  case DIM: map.dim[f->index] = f->value; break;
  case STRIDE: map.stride[f->index] = f->value; break;
  case BOX: map.box[f->index] = (uint32_t)f->value; break;
  }
  ck_assert_str_eq(emu_tensor_map_fault(&map), f->text);
  uint8_t bytes[EMU_TENSOR_MAP_BYTES];
  struct emu_tensor_map back;
  emu_tensor_map_encode(&map, bytes);
  ck_assert(!emu_tensor_map_decode(bytes, &back));
}
END_TEST

START_TEST(maps_round_trip)
{
  const struct emu_tensor_map maps[] = {up_map(), plain_map()};
  for(size_t i = 0; i < 2; i++) {
    uint8_t bytes[EMU_TENSOR_MAP_BYTES];
    struct emu_tensor_map back;
    memset(bytes, 0xA5, sizeof(bytes));
    emu_tensor_map_encode(&maps[i], bytes);
    ck_assert(emu_tensor_map_decode(bytes, &back));
    ck_assert_ptr_eq(back.base, maps[i].base);
    ck_assert_uint_eq(back.rank, maps[i].rank);
    ck_assert_uint_eq(back.swizzle, maps[i].swizzle);
    ck_assert_mem_eq(back.dim, maps[i].dim, sizeof(back.dim));
    ck_assert_mem_eq(back.stride, maps[i].stride, sizeof(back.stride));
    ck_assert_mem_eq(back.box, maps[i].box, sizeof(back.box));
  }
}
END_TEST

/* What lies in a map must be its own: no other bytes, and no map with a changed byte. The last bytes of the 128 are unused. */
START_TEST(other_bytes_are_no_map)
{
  uint8_t bytes[EMU_TENSOR_MAP_BYTES], zero[EMU_TENSOR_MAP_BYTES] = {0};
  const struct emu_tensor_map map = up_map();
  struct emu_tensor_map back;
  ck_assert(!emu_tensor_map_decode(zero, &back));
  fill(bytes, sizeof(bytes), 7);
  ck_assert(!emu_tensor_map_decode(bytes, &back));
  emu_tensor_map_encode(&map, bytes);
  for(size_t i = 0; i < 120; i++) {
    bytes[i] ^= 0x10;
    ck_assert_msg(!emu_tensor_map_decode(bytes, &back), "byte %zu", i);
    bytes[i] ^= 0x10;
  }
  ck_assert(emu_tensor_map_decode(bytes, &back));
}
END_TEST

/* ---- boxes ---- */

/* The swizzles, written as what the bits of an address do: bit `to` is exchanged if bit `from` is set. */
static uint32_t swizzled_by_bits(uint32_t address, uint32_t swizzle)
{
  static const struct {
    uint32_t least;
    int from, to;
  } rule[] = {{32, 7, 4}, {64, 8, 5}, {128, 9, 6}};
  uint32_t out = address;
  for(size_t i = 0; i < 3; i++)
    if(swizzle >= rule[i].least && (address >> rule[i].from & 1))
      out ^= 1u << rule[i].to;
  return out;
}

/* Chunk (of 16 bytes) at which chunk c of 128-byte row r lies. */
static const uint8_t table128[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                                       {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2}, {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};
static const uint8_t table64[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                                      {0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4}};
static const uint8_t table32[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6},
                                      {0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}};

/* 1 KB whose bytes tell where they come from, through each swizzle. */
START_TEST(swizzles_follow_the_tables)
{
  static const struct {
    uint32_t swizzle;
    const uint8_t (*table)[8];
  } cases[] = {{128, table128}, {64, table64}, {32, table32}};
  uint8_t out[1024];
  for(size_t i = 0; i < 1024; i++)
    tensor[i] = (uint8_t)(i / 16);
  for(size_t c = 0; c < 3; c++) {
    const uint32_t width = cases[c].swizzle, rows = 1024 / width;
    const struct emu_tensor_map map = {.base = tensor, .rank = 2, .swizzle = width, .dim = {width, rows}, .stride = {width}, .box = {width, rows}};
    const int32_t at[2] = {0, 0};
    ck_assert_ptr_null(emu_tensor_map_fault(&map));
    emu_tensor_box_copy(&map, at, out, 0);
    for(uint32_t i = 0; i < 64; i++)
      for(uint32_t b = 0; b < 16; b++)
        EXPECT(out[(i / 8 * 8 + cases[c].table[i / 8][i % 8]) * 16 + b] == i, "swizzle %u chunk %u", width, i);
  }
}
END_TEST

static uint8_t element(const struct emu_tensor_map *map, const int32_t *at, const uint32_t *index)
{
  int64_t offset = 0;
  for(uint32_t i = 0; i < map->rank; i++) {
    const int64_t x = (int64_t)at[i] + index[i];
    if(x < 0 || x >= (int64_t)map->dim[i])
      return 0;
    offset += x * (i == 0 ? 1 : (int64_t)map->stride[i - 1]);
  }
  return map->base[offset];
}

#define GUARD 0xEE
/* Copies a box to dst + offset and compares every byte of the neighbourhood with a loop over elements. */
static void check_box(const struct emu_tensor_map *map, const int32_t *at, uint32_t offset)
{
  static uint8_t have[32768], want[32768];
  const size_t bytes = emu_tensor_box_bytes(map);
  uint32_t index[5] = {0};
  size_t expected_bytes = 1;
  for(uint32_t i = 0; i < map->rank; i++)
    expected_bytes *= map->box[i];
  ck_assert_uint_eq(bytes, expected_bytes);
  ck_assert_uint_le(offset + bytes, sizeof(have));
  memset(have, GUARD, sizeof(have));
  memset(want, GUARD, sizeof(want));
  for(size_t n = 0; n < bytes; n++) {
    size_t rest = n;
    for(uint32_t i = 0; i < map->rank; i++) {
      index[i] = (uint32_t)(rest % map->box[i]);
      rest /= map->box[i];
    }
    want[swizzled_by_bits(offset + (uint32_t)n, map->swizzle)] = element(map, at, index);
  }
  emu_tensor_box_copy(map, at, have + offset, offset);
  for(size_t i = 0; i < sizeof(have); i++)
    EXPECT(have[i] == want[i], "byte %zu: %d, not %d (box at %d %d)", i, have[i], want[i], (int)at[0], (int)at[1]);
}

/* Lowest and highest byte that the box reads, by a loop over elements. */
static void check_extent(const struct emu_tensor_map *map, const int32_t *at)
{
  const size_t bytes = emu_tensor_box_bytes(map);
  int64_t low = INT64_MAX, high = -1;
  for(size_t n = 0; n < bytes; n++) {
    size_t rest = n;
    int64_t offset = 0;
    bool in = true;
    for(uint32_t i = 0; i < map->rank; i++) {
      const int64_t x = at[i] + (int64_t)(rest % map->box[i]);
      rest /= map->box[i];
      in = in && x >= 0 && x < (int64_t)map->dim[i];
      offset += x * (i == 0 ? 1 : (int64_t)map->stride[i - 1]);
    }
    if(in) {
      low = offset < low ? offset : low;
      high = offset > high ? offset : high;
    }
  }
  const uint8_t *first = NULL, *end = NULL;
  ck_assert_int_eq(emu_tensor_box_extent(map, at, &first, &end), high >= 0);
  if(high >= 0) {
    ck_assert_int_eq(first - map->base, low);
    ck_assert_int_eq(end - map->base, high + 1);
  }
}

START_TEST(boxes_equal_a_loop_over_elements)
{
  static const int32_t corner[][2] = {{0, 0},   {16, 3},  {32, 6}, {48, 8},  {33, 9},  {63, 0},        {64, 0},       {0, 10},
                                      {-1, 0},  {-31, 1}, {-32, 1}, {0, -3}, {0, -4},  {-16, -2},      {40, -1},      {-5, 8},
                                      {INT_MIN, 0}, {INT_MAX, 0}, {0, INT_MIN}, {0, INT_MAX}};
  fill(tensor, TENSOR_BYTES, 1);
  for(size_t c = 0; c < sizeof(corner) / sizeof(*corner); c++) {
    struct emu_tensor_map map = plain_map();
    check_extent(&map, corner[c]);
    check_box(&map, corner[c], 1024);
    check_box(&map, corner[c], 128);
    map.swizzle = 32;
    check_box(&map, corner[c], 2048);
  }
}
END_TEST

/* The map of w13: every box of it, some over the edge, at several places of the ring. */
START_TEST(up_map_boxes)
{
  const struct emu_tensor_map map = up_map();
  fill(tensor, TENSOR_BYTES, 2);
  for(int32_t block = -1; block <= UP_ROWS / 8; block++) {
    for(int32_t k = -1; k <= 2; k++) {
      const int32_t at[5] = {0, 0, 0, block, k};
      check_extent(&map, at);
      check_box(&map, at, 4096);
    }
  }
  const int32_t ragged[5] = {-48, 5, 1, 2, 1};
  check_extent(&map, ragged);
  check_box(&map, ragged, 0);
  check_box(&map, ragged, 384); /* not at an atom's beginning: the swizzle goes by the address */
}
END_TEST

/* Where a gate row and an up row of the map land, in words of the weights: expert 1, feature 8 + 3, k-block 1, column 37. */
START_TEST(up_map_meaning)
{
  const struct emu_tensor_map map = up_map();
  uint8_t out[4096];
  fill(tensor, TENSOR_BYTES, 3);
  const int32_t at[5] = {0, 0, 0, 1 * (2 * 16) / 8 + 1, 0};
  emu_tensor_box_copy(&map, at, out, 0);
  const size_t gate = (size_t)(1 * 32 + 8 + 3) * UP_STRIDE + 128 + 37, up = (size_t)(1 * 32 + 16 + 8 + 3) * UP_STRIDE + 128 + 37;
  ck_assert_uint_eq(out[2048 + 3 * 128 + (((37 / 16) ^ 3) * 16) + 37 % 16], tensor[gate]);
  ck_assert_uint_eq(out[2048 + 1024 + 3 * 128 + (((37 / 16) ^ 3) * 16) + 37 % 16], tensor[up]);
}
END_TEST

START_TEST(random_boxes)
{
  fill(tensor, TENSOR_BYTES, 4);
  for(int turn = 0; turn < 300; turn++) {
    static const uint32_t swizzles[4] = {0, 32, 64, 128};
    struct emu_tensor_map map = {.base = tensor + (size_t)16 * (random32() % 64), .rank = 1 + random32() % 5, .swizzle = swizzles[random32() % 4]};
    int32_t at[5] = {0};
    map.box[0] = map.swizzle != 0 ? map.swizzle : 16 * (1 + random32() % 16);
    for(uint32_t i = 0; i < map.rank; i++) {
      map.dim[i] = 1 + random32() % (i == 0 ? 300 : 6);
      if(i > 0) {
        map.box[i] = 1 + random32() % 4;
        map.stride[i - 1] = UINT64_C(16) * (random32() % 100);
      }
      at[i] = (int32_t)(random32() % (i == 0 ? 400 : 9)) - (i == 0 ? 50 : 3);
    }
    ck_assert_ptr_null(emu_tensor_map_fault(&map));
    if(emu_tensor_box_bytes(&map) <= 16384) {
      check_extent(&map, at);
      check_box(&map, at, 128 * (random32() % 32));
    }
  }
}
END_TEST

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

static const int product_columns[] = {8, 16, 32, 64, 256};

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
  Suite *suite = suite_create("emu_tensor");
  TCase *maps = tcase_create("maps"), *boxes = tcase_create("boxes"), *products = tcase_create("products");
  tcase_add_test(maps, good_maps_have_no_fault);
  tcase_add_loop_test(maps, each_fault_is_named, 0, (int)(sizeof(fault_cases) / sizeof(*fault_cases)));
  tcase_add_test(maps, maps_round_trip);
  tcase_add_test(maps, other_bytes_are_no_map);
  tcase_add_test(boxes, swizzles_follow_the_tables);
  tcase_add_test(boxes, boxes_equal_a_loop_over_elements);
  tcase_add_test(boxes, up_map_boxes);
  tcase_add_test(boxes, up_map_meaning);
  tcase_add_test(boxes, random_boxes);
  tcase_add_test(products, e4m3_values);
  tcase_add_test(products, descriptors);
  tcase_add_test(products, matrix_addresses);
  tcase_add_loop_test(products, products_against_f64, 0, columns);
  tcase_add_loop_test(products, products_are_summed_in_order, 0, columns);
  tcase_add_test(products, products_of_every_value);
  tcase_add_test(products, nan_stays_in_its_column);
  tcase_add_test(products, what_is_not_accumulated_is_ignored);
  tcase_add_test(products, accumulator_places);
  suite_add_tcase(suite, maps);
  suite_add_tcase(suite, boxes);
  suite_add_tcase(suite, products);
  SRunner *runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  const int failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
