// mma.cuh - e4m3 x e4m3 -> f32 products of one warp: 16 rows by 8 columns over 128 values of k, from shared memory through registers.
//
// The operands lie as for wgmma: K-major, rows of 128 bytes in 1024-byte aligned atoms of 8 rows, 128-byte swizzle (piece p of 16 bytes of row r is at p ^ r).
// Hopper has no e4m3 product outside wgmma, so values become f16, exactly, in registers, and products are those of f16: every term is exact, and
// they are summed in f32. Against wgmma a warp waits for no other warp, results need no fence, a tile is read once for
// all its products, and its memory is free as soon as it has been loaded.
//
// Accumulator layout: in lane l, d[0] and d[1] are row l / 4 and columns 2 (l % 4) and + 1; d[2] and d[3] are row l / 4 + 8 of the same columns.
#pragma once

namespace hw {

// 16 rows as they lie in memory: word 4i + 2h + u is chunk 2i + h (16 bytes) of row l / 4 + 8u, there bytes 4 (l % 4) and on.
struct Rows {
  uint32_t word[16];
};

// 16 rows as f16: of chunk s, values 4 (l % 4) and on of row l / 4 are pairs 4s and 4s + 2, of row l / 4 + 8 pairs 4s + 1 and 4s + 3.
struct WideRows {
  uint32_t pair[32];
};

// 8 columns as they lie in memory: word s is chunk s of column l / 4.
struct Columns {
  uint32_t word[8];
};

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: four matrices of 8 rows of 16 bytes; lanes 8m .. 8m + 7 say where the rows of matrix m are.
MF_DEVICE void load_matrices(uint32_t *to, uint32_t address)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// Where the lane's part of 16 rows is, of which 0..7 are the atom `low` and 8..15 the atom `high`. Made once: the address arithmetic is not repeated.
struct RowsAt {
  uint32_t address;
};
MF_DEVICE RowsAt rows_at(const uint8_t *low, const uint8_t *high)
{
  const uint32_t lane = (uint32_t)lane_index(), r = lane & 7;
  RowsAt at{shared_address(lane & 8 ? high : low) + r * 128 + (((lane >> 4) ^ r) << 4)};
  asm volatile("" : "+r"(at.address));
  return at;
}

// The rows that lie `offset` bytes further on, a multiple of 1024. An ordinary read by all lanes.
MF_DEVICE void load_rows(Rows &rows, const RowsAt &at, uint32_t offset)
{
  const uint32_t address = at.address + offset;
  MF_UNROLL
  for(uint32_t i = 0; i < 4; ++i)
    load_matrices(rows.word + 4 * i, address ^ (i << 5));
}

// Likewise the 8 columns of an atom; then those of another one, some multiple of 1024 bytes further on.
struct ColumnsBase {
  uint32_t address;
};
struct ColumnsAt {
  uint32_t low, high; // of pieces 0..3 and 4..7
};
MF_DEVICE ColumnsBase columns_base(const uint8_t *atom)
{
  const uint32_t lane = (uint32_t)lane_index(), r = lane & 7;
  ColumnsBase base{shared_address(atom) + r * 128 + (((lane >> 3) ^ r) << 4)};
  asm volatile("" : "+r"(base.address));
  return base;
}
MF_DEVICE ColumnsAt columns_at(const ColumnsBase &base, uint32_t offset) { return ColumnsAt{base.address + offset, (base.address + offset) ^ 64}; }

// Columns that the caller throws away may be unwritten or being written by others; no word is torn. (The emulated device marks what comes of
// them, so that a use is found.)
MF_DEVICE void load_columns(Columns &columns, const ColumnsAt &at, uint32_t offset)
{
  load_matrices(columns.word, at.low + offset);
  load_matrices(columns.word + 4, at.high + offset);
}

// cvt.rn.f16x2.e4m3x2 of either half: exact, every e4m3 is an f16.
MF_DEVICE void widen(uint32_t word, uint32_t &low, uint32_t &high)
{
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(word));
}

// All values of the rows, once for all products with them.
MF_DEVICE void widen(WideRows &wide, const Rows &rows)
{
  MF_UNROLL
  for(int s = 0; s < 8; ++s) {
    widen(rows.word[2 * s], wide.pair[4 * s], wide.pair[4 * s + 2]);
    widen(rows.word[2 * s + 1], wide.pair[4 * s + 1], wide.pair[4 * s + 3]);
  }
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: d += a * b
MF_DEVICE void mma_k16(float (&d)[4], const uint32_t *a, uint32_t b0, uint32_t b1)
{
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = rows * columns. Two sums, so that one's latency hides behind the other's.
MF_DEVICE void multiply(float (&d)[4], const WideRows &rows, const Columns &columns)
{
  float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  MF_UNROLL
  for(int s = 0; s < 8; s += 2) {
    uint32_t b[4];
    widen(columns.word[s], b[0], b[1]);
    widen(columns.word[s + 1], b[2], b[3]);
    mma_k16(d, rows.pair + 4 * s, b[0], b[1]);
    mma_k16(odd, rows.pair + 4 * s + 4, b[2], b[3]);
  }
  MF_UNROLL
  for(int i = 0; i < 4; ++i)
    d[i] += odd[i];
}

// Likewise of the same 16 rows in two k-blocks, each with its own columns. A sum for each: there are no registers for two.
MF_DEVICE void multiply_two(float (&d)[2][4], const WideRows (&rows)[2], const Columns (&columns)[2])
{
  MF_UNROLL
  for(int j = 0; j < 2; ++j)
    d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0.0f;
  MF_UNROLL
  for(int s = 0; s < 8; ++s) {
    MF_UNROLL
    for(int j = 0; j < 2; ++j) {
      uint32_t b[2];
      widen(columns[j].word[s], b[0], b[1]);
      mma_k16(d[j], rows[j].pair + 4 * s, b[0], b[1]);
    }
  }
}

} // namespace hw
