/* test_emu_tensor.c - emu/tensor.c: maps, boxes, swizzles. Expectations are tables made by hand or naive formulas. Products: test_emu_wgmma.c. */
#include "emu_tensor_fixture.h"

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

/* Chunk (of 16 bytes) at which chunk c of 128-byte row r lies; table128 is in the fixture. */
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

int main(void)
{
  Suite *suite = suite_create("emu_tensor");
  TCase *maps = tcase_create("maps"), *boxes = tcase_create("boxes");
  tcase_add_test(maps, good_maps_have_no_fault);
  tcase_add_loop_test(maps, each_fault_is_named, 0, (int)(sizeof(fault_cases) / sizeof(*fault_cases)));
  tcase_add_test(maps, maps_round_trip);
  tcase_add_test(maps, other_bytes_are_no_map);
  tcase_add_test(boxes, swizzles_follow_the_tables);
  tcase_add_test(boxes, boxes_equal_a_loop_over_elements);
  tcase_add_test(boxes, up_map_boxes);
  tcase_add_test(boxes, up_map_meaning);
  tcase_add_test(boxes, random_boxes);
  suite_add_tcase(suite, maps);
  suite_add_tcase(suite, boxes);
  SRunner *runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  const int failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
