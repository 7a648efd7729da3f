/* tensor.c - tensor maps, swizzled boxes, e4m3 and the products of wgmma, as pure functions.
 *
 * A map's 128 bytes are struct coded_map: a magic number, the fields, a checksum. So bytes that were never a map, or were written over, are told from one.
 *
 * A box lands densely, innermost dimension first; then the swizzle exchanges 16-byte chunks by bits of their shared-memory address:
 *
 *   address bits   9 8 7   6 5 4   3 2 1 0
 *                    |       |       byte in the chunk
 *   128 bytes        +-- xor-+             three bits
 *    64 bytes      8 7 into  5 4           two
 *    32 bytes        7 into    4           one
 *
 * The product is where emulated kernels spend their time, so there is a version for AVX2 besides the plain one. Both give the same bits: a product of two
 * e4m3 numbers has 8 significant bits and is exact, so that a fused multiply-add rounds just where a separate addition does. */
#include "tensor.h"

#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MAP_MAGIC 0x50414d554d45464du /* the bytes "MFEMUMAP" */
#define K_STEP 32
#define ROWS 16
#define BLOCK 8 /* columns at a time */

/* ---- maps ---- */

struct coded_map {
  uint64_t magic, base;
  uint64_t dim[5], stride[4];
  uint32_t rank, swizzle;
  uint32_t box[5];
  uint32_t check;
};
_Static_assert(sizeof(struct coded_map) <= EMU_TENSOR_MAP_BYTES, "a coded map fits");

static bool swizzle_exists(uint32_t swizzle)
{
  return swizzle == 0 || swizzle == 32 || swizzle == 64 || swizzle == 128;
}

const char *emu_tensor_map_fault(const struct emu_tensor_map *map)
{
  if(map->rank < 1 || map->rank > 5)
    return "the rank is not 1..5";
  if((uintptr_t)map->base % 16 != 0)
    return "the base is not aligned to 16 bytes";
  if(!swizzle_exists(map->swizzle))
    return "the swizzle is not 0, 32, 64 or 128 bytes";
  for(uint32_t i = 0; i < map->rank; i++) {
    if(map->dim[i] < 1 || map->dim[i] > UINT64_C(1) << 32)
      return "a dimension is not 1..2^32";
    if(map->box[i] < 1 || map->box[i] > 256)
      return "a side of the box is not 1..256";
  }
  for(uint32_t i = 0; i + 1 < map->rank; i++) {
    if(map->stride[i] % 16 != 0)
      return "a stride is not a multiple of 16 bytes";
    if(map->stride[i] >= UINT64_C(1) << 40)
      return "a stride is not below 2^40 bytes";
  }
  if(map->box[0] % 16 != 0)
    return "the innermost side of the box is not a multiple of 16 bytes";
  if(map->swizzle != 0 && map->box[0] > map->swizzle)
    return "the innermost side of the box is larger than the swizzle";
  return NULL;
}

static uint32_t checksum(const struct coded_map *coded)
{
  uint64_t word[sizeof(*coded) / 8], sum = 0;
  memcpy(word, coded, sizeof(word));
  for(size_t i = 0; i + 1 < sizeof(word) / 8; i++) /* the last one holds the sum itself */
    sum = (sum ^ word[i]) * 0x9e3779b97f4a7c15u;
  return (uint32_t)(sum >> 32) ^ coded->box[4];
}

void emu_tensor_map_encode(const struct emu_tensor_map *map, void *out)
{
  struct coded_map coded = {.magic = MAP_MAGIC, .base = (uintptr_t)map->base, .rank = map->rank, .swizzle = map->swizzle};
  for(uint32_t i = 0; i < map->rank && i < 5; i++) {
    coded.dim[i] = map->dim[i];
    coded.box[i] = map->box[i];
    if(i + 1 < map->rank && i < 4)
      coded.stride[i] = map->stride[i];
  }
  coded.check = checksum(&coded);
  memset(out, 0, EMU_TENSOR_MAP_BYTES);
  memcpy(out, &coded, sizeof(coded));
}

bool emu_tensor_map_decode(const void *bytes, struct emu_tensor_map *out)
{
  struct coded_map coded;
  memcpy(&coded, bytes, sizeof(coded));
  if(coded.magic != MAP_MAGIC || coded.check != checksum(&coded))
    return false;
  *out = (struct emu_tensor_map){.base = (const uint8_t *)(uintptr_t)coded.base, .rank = coded.rank, .swizzle = coded.swizzle};
  memcpy(out->dim, coded.dim, sizeof(out->dim));
  memcpy(out->stride, coded.stride, sizeof(out->stride));
  memcpy(out->box, coded.box, sizeof(out->box));
  return emu_tensor_map_fault(out) == NULL;
}

/* ---- boxes ---- */

size_t emu_tensor_box_bytes(const struct emu_tensor_map *map)
{
  size_t bytes = 1;
  for(uint32_t i = 0; i < map->rank; i++)
    bytes *= map->box[i];
  return bytes;
}

/* Bytes between successive elements of dimension i. */
static int64_t stride_of(const struct emu_tensor_map *map, uint32_t i)
{
  return i == 0 ? 1 : (int64_t)map->stride[i - 1];
}

/* The part [*from, *to) of the box's side i that lies inside the tensor, counted from the box's edge. False: none. */
static bool inside(const struct emu_tensor_map *map, uint32_t i, int32_t coordinate, int64_t *from, int64_t *to)
{
  const int64_t left = (int64_t)map->dim[i] - coordinate;
  *from = coordinate < 0 ? -(int64_t)coordinate : 0;
  *to = left < (int64_t)map->box[i] ? left : (int64_t)map->box[i];
  return *from < *to;
}

bool emu_tensor_box_extent(const struct emu_tensor_map *map, const int32_t *coordinates, const uint8_t **low, const uint8_t **high)
{
  int64_t first = 0, last = 0;
  for(uint32_t i = 0; i < map->rank; i++) {
    int64_t from, to;
    if(!inside(map, i, coordinates[i], &from, &to))
      return false;
    first += (coordinates[i] + from) * stride_of(map, i);
    last += (coordinates[i] + to - 1) * stride_of(map, i);
  }
  *low = map->base + first;
  *high = map->base + last + 1;
  return true;
}

static uint32_t swizzled(uint32_t address, uint32_t swizzle)
{
  return swizzle == 0 ? address : address ^ ((address >> 3) & (swizzle - 16));
}

/* A row of the box (its innermost side) on its way to shared memory. 'address' is that of its first byte. */
static void store_row(uint8_t *dst, uint32_t offset, uint32_t address, const uint8_t *row, uint32_t bytes, uint32_t swizzle)
{
  for(uint32_t at = 0; at < bytes; at += 16)
    memcpy(dst + ((ptrdiff_t)swizzled(address + at, swizzle) - (ptrdiff_t)offset), row + at, 16);
}

/* The rows of a box, in the order in which they land. */
struct rows {
  uint32_t index[5];   /* in the box */
  int64_t from[5], to[5];
};

static void next_row(const struct emu_tensor_map *map, struct rows *r)
{
  for(uint32_t i = 1; i < map->rank; i++) {
    if(++r->index[i] < map->box[i])
      return;
    r->index[i] = 0;
  }
}

static bool row_inside(const struct emu_tensor_map *map, const struct rows *r)
{
  for(uint32_t i = 1; i < map->rank; i++)
    if((int64_t)r->index[i] < r->from[i] || (int64_t)r->index[i] >= r->to[i])
      return false;
  return true;
}

/* Where the row's element at innermost coordinate 0 lies, from the map's base. */
static int64_t row_offset(const struct emu_tensor_map *map, const int32_t *coordinates, const struct rows *r)
{
  int64_t offset = 0;
  for(uint32_t i = 1; i < map->rank; i++)
    offset += (coordinates[i] + (int64_t)r->index[i]) * stride_of(map, i);
  return offset;
}

void emu_tensor_box_copy(const struct emu_tensor_map *map, const int32_t *coordinates, uint8_t *dst, uint32_t offset)
{
  struct rows r = {0};
  uint8_t part[256];
  const uint32_t width = map->box[0];
  const size_t bytes = emu_tensor_box_bytes(map);
  bool any = true;
  for(uint32_t i = 0; i < map->rank; i++)
    any = inside(map, i, coordinates[i], &r.from[i], &r.to[i]) && any;
  const bool whole = any && r.from[0] == 0 && r.to[0] == (int64_t)width;
  memset(part, 0, sizeof(part));
  for(size_t at = 0; at < bytes; at += width, next_row(map, &r)) {
    const uint8_t *row = part;
    if(!any || !row_inside(map, &r)) {
      memset(part, 0, width);
    } else {
      const uint8_t *source = map->base + (row_offset(map, coordinates, &r) + coordinates[0] + r.from[0]);
      if(whole)
        row = source;
      else
        memcpy(part + r.from[0], source, (size_t)(r.to[0] - r.from[0]));
    }
    store_row(dst, offset, offset + (uint32_t)at, row, width, map->swizzle);
  }
}

/* ---- e4m3 ---- */

/* S EEEE MMM: (-1)^S * 2^(E - 7) * (1 + M / 8); E = 0: 2^-6 * M / 8; E = 15, M = 7: NaN. */
#define E4M3_NORMAL(e, scale)                                                                                                                  \
  1.000f * (scale), 1.125f * (scale), 1.250f * (scale), 1.375f * (scale), 1.500f * (scale), 1.625f * (scale), 1.750f * (scale),                 \
      (e) == 15 ? NAN : 1.875f * (scale)
#define E4M3_HALF(sign)                                                                                                                          \
  sign 0.0f, sign 0x1p-9f, sign 0x2p-9f, sign 0x3p-9f, sign 0x4p-9f, sign 0x5p-9f, sign 0x6p-9f, sign 0x7p-9f, E4M3_NORMAL(1, sign 0x1p-6f),       \
      E4M3_NORMAL(2, sign 0x1p-5f), E4M3_NORMAL(3, sign 0x1p-4f), E4M3_NORMAL(4, sign 0x1p-3f), E4M3_NORMAL(5, sign 0x1p-2f),                      \
      E4M3_NORMAL(6, sign 0x1p-1f), E4M3_NORMAL(7, sign 0x1p0f), E4M3_NORMAL(8, sign 0x1p1f), E4M3_NORMAL(9, sign 0x1p2f),                         \
      E4M3_NORMAL(10, sign 0x1p3f), E4M3_NORMAL(11, sign 0x1p4f), E4M3_NORMAL(12, sign 0x1p5f), E4M3_NORMAL(13, sign 0x1p6f),                      \
      E4M3_NORMAL(14, sign 0x1p7f), E4M3_NORMAL(15, sign 0x1p8f)
static const float e4m3[256] = {E4M3_HALF(+), E4M3_HALF(-)};

float emu_e4m3_value(uint8_t bits)
{
  return e4m3[bits];
}

/* ---- operands ---- */

/* bits 0..13 start / 16, 16..29 leading / 16, 32..45 stride / 16, 62..63 swizzle */
struct emu_matrix emu_matrix_decode(uint64_t descriptor)
{
  static const uint32_t swizzle[4] = {0, 128, 64, 32};
  return (struct emu_matrix){.start = (uint32_t)(descriptor & 0x3FFF) << 4,
                             .leading = (uint32_t)(descriptor >> 16 & 0x3FFF) << 4,
                             .stride = (uint32_t)(descriptor >> 32 & 0x3FFF) << 4,
                             .swizzle = swizzle[descriptor >> 62]};
}

static inline uint32_t address_of(const struct emu_matrix *m, int row, int column)
{
  const uint32_t r = (uint32_t)row;
  return swizzled(m->start + r / 8 * m->stride + r % 8 * 128 + (uint32_t)column, 128);
}

uint32_t emu_matrix_address(const struct emu_matrix *m, int row, int column)
{
  return address_of(m, row, column);
}

/* ---- products ---- */

/* One product's operands on their way from bytes to sums: the warp's rows of a, and 8 columns of b at a time. */
struct operands {
  _Alignas(32) float a[ROWS][K_STEP];
  _Alignas(32) float b[K_STEP][BLOCK];
};

/* Any processor. */
static void decode_rows(const uint8_t *shared, const struct emu_matrix *m, int first_row, struct operands *o)
{
  for(int row = 0; row < ROWS; row++) {
    for(int k = 0; k < K_STEP; k++)
      o->a[row][k] = e4m3[shared[address_of(m, first_row + row, k)]];
  }
}

static void decode_columns(const uint8_t *shared, const struct emu_matrix *m, int first_column, struct operands *o)
{
  for(int j = 0; j < BLOCK; j++) {
    for(int k = 0; k < K_STEP; k++)
      o->b[k][j] = e4m3[shared[address_of(m, first_column + j, k)]];
  }
}

static void multiply(const struct operands *o, int n, bool accumulate, float *d)
{
  for(int row = 0; row < ROWS; row++) {
    float sum[BLOCK] = {0};
    for(int k = 0; k < K_STEP; k++)
      for(int j = 0; j < BLOCK; j++)
        sum[j] += o->a[row][k] * o->b[k][j];
    for(int j = 0; j < BLOCK; j++)
      d[row * n + j] = accumulate ? d[row * n + j] + sum[j] : sum[j];
  }
}

static void product_anywhere(const uint8_t *shared, const struct emu_matrix *a, int first_row, const struct emu_matrix *b, int n, bool accumulate,
                             float *d)
{
  struct operands o;
  decode_rows(shared, a, first_row, &o);
  for(int column = 0; column < n; column += BLOCK) {
    decode_columns(shared, b, column, &o);
    multiply(&o, n, accumulate, d + column);
  }
}

/* The same with AVX2 and FMA. (EMU_PORTABLE leaves it out, to test the version above.) */
#if defined(__x86_64__) && !defined(EMU_PORTABLE)
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE static inline __attribute__((target("avx2,fma"), always_inline))

/* The values of 8 e4m3 in 32 bits each, without the table: a gather takes longer. */
AVX2_INLINE __m256 decode8(__m256i bits)
{
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7F));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x80)), 24);
  const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23)));
  const __m256 subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7F)), _mm256_set1_epi32(0x7FC00000));
  const __m256 value = _mm256_blendv_ps(normal, subnormal, _mm256_castsi256_ps(is_subnormal));
  return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_or_si256(sign, nan)));
}

AVX2_INLINE void decode_rows_avx2(const uint8_t *shared, const struct emu_matrix *m, int first_row, struct operands *o)
{
  for(int row = 0; row < ROWS; row++) {
    for(int chunk = 0; chunk < K_STEP; chunk += 16) {
      const uint8_t *bytes = shared + address_of(m, first_row + row, chunk);
      for(int i = 0; i < 16; i += 8)
        _mm256_store_ps(&o->a[row][chunk + i], decode8(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(bytes + i)))));
    }
  }
}

/* Transposes: word i of row j becomes word j of row i. */
AVX2_INLINE void transpose8(__m256i w[8])
{
  __m256i t[8];
#pragma GCC unroll 4
  for(int i = 0; i < 8; i += 2) { /* pairs of rows: words 0 1 of either, words 2 3 */
    t[i] = _mm256_unpacklo_epi32(w[i], w[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(w[i], w[i + 1]);
  }
#pragma GCC unroll 2
  for(int i = 0; i < 8; i += 4) { /* fours of rows, one word of each */
    w[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    w[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    w[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    w[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for(int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(w[i], w[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(w[i], w[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for(int i = 0; i < 8; i++)
    w[i] = t[i];
}

/* The 32 bytes of each of the 8 columns are 8 words. Transposed, a vector holds four successive bytes of every column, and byte i of its words is
 * row i of o->b. */
AVX2_INLINE void decode_columns_avx2(const uint8_t *shared, const struct emu_matrix *m, int first_column, struct operands *o)
{
  const __m256i byte = _mm256_set1_epi32(0xFF);
  __m256i w[8];
#pragma GCC unroll 8
  for(int j = 0; j < BLOCK; j++)
    w[j] = _mm256_loadu2_m128i((const void *)(shared + address_of(m, first_column + j, 16)),
                               (const void *)(shared + address_of(m, first_column + j, 0)));
  transpose8(w);
#pragma GCC unroll 8
  for(size_t i = 0; i < 8; i++) {
    _mm256_store_ps(o->b[4 * i], decode8(_mm256_and_si256(w[i], byte)));
    _mm256_store_ps(o->b[4 * i + 1], decode8(_mm256_and_si256(_mm256_srli_epi32(w[i], 8), byte)));
    _mm256_store_ps(o->b[4 * i + 2], decode8(_mm256_and_si256(_mm256_srli_epi32(w[i], 16), byte)));
    _mm256_store_ps(o->b[4 * i + 3], decode8(_mm256_srli_epi32(w[i], 24)));
  }
}

/* Eight rows at a time: so many sums hide the latency of the additions. */
AVX2_INLINE void multiply_avx2(const struct operands *o, int n, bool accumulate, float *d)
{
  for(int first = 0; first < ROWS; first += 8) {
    __m256 sum[8];
#pragma GCC unroll 8
    for(int i = 0; i < 8; i++)
      sum[i] = _mm256_setzero_ps();
    for(int k = 0; k < K_STEP; k++) {
      const __m256 b = _mm256_load_ps(o->b[k]);
#pragma GCC unroll 8
      for(int i = 0; i < 8; i++)
        sum[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(&o->a[first + i][k]), b, sum[i]);
    }
#pragma GCC unroll 8
    for(int i = 0; i < 8; i++) {
      float *to = d + (ptrdiff_t)(first + i) * n;
      _mm256_storeu_ps(to, accumulate ? _mm256_add_ps(_mm256_loadu_ps(to), sum[i]) : sum[i]);
    }
  }
}

AVX2 static void product_avx2(const uint8_t *shared, const struct emu_matrix *a, int first_row, const struct emu_matrix *b, int n, bool accumulate,
                              float *d)
{
  struct operands o;
  decode_rows_avx2(shared, a, first_row, &o);
  for(int column = 0; column < n; column += BLOCK) {
    decode_columns_avx2(shared, b, column, &o);
    multiply_avx2(&o, n, accumulate, d + column);
  }
}

#endif

void emu_wgmma_warp(const uint8_t *shared, const struct emu_matrix *a, int first_row, const struct emu_matrix *b, int n, bool accumulate, float *d)
{
#ifdef AVX2
  if(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    product_avx2(shared, a, first_row, b, n, accumulate, d);
    return;
  }
#endif
  product_anywhere(shared, a, first_row, b, n, accumulate, d);
}

/* Lane l has rows l / 4 and l / 4 + 8, of every 8 columns the pair 2 (l % 4): {first row, second row} of it in turn. */
void emu_wgmma_place(int row, int column, int *lane, int *index)
{
  *lane = row % 8 * 4 + column % 8 / 2;
  *index = column / 8 * 4 + row / 8 * 2 + column % 2;
}
