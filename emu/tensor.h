/* tensor.h - tensor maps, swizzled tiles and e4m3 products, as arithmetic without any machine state.
 *
 * A tensor map is 128 opaque bytes, as with the driver; this emulator's own coding is in tensor.c. */
#ifndef MOEFORGE_EMU_TENSOR_H
#define MOEFORGE_EMU_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_TENSOR_MAP_BYTES 128

/* A map of bytes (UINT8 elements), innermost dimension first; stride[i] is that of dimension i + 1, in bytes. */
struct emu_tensor_map {
  const uint8_t *base;
  uint32_t rank;        /* 1..5 */
  uint32_t swizzle;     /* bytes: 0, 32, 64, 128 */
  uint64_t dim[5], stride[4];
  uint32_t box[5];
};

/* NULL if the map is one that the hardware takes, else what is wrong with it: base 16-byte aligned; strides multiples of 16, below 2^40; dims 1..2^32;
 * box 1..256; innermost box a multiple of 16 bytes and, with swizzle, no larger than it. */
const char *emu_tensor_map_fault(const struct emu_tensor_map *map);
/* Packs into / unpacks from the 128 bytes. Unpacking false: these bytes are no map of this emulator. */
void emu_tensor_map_encode(const struct emu_tensor_map *map, void *out);
bool emu_tensor_map_decode(const void *bytes, struct emu_tensor_map *out);

size_t emu_tensor_box_bytes(const struct emu_tensor_map *map);
/* Lowest and highest + 1 byte of global memory that the box at these coordinates reads; false if it reads none (wholly outside: zero fill). */
bool emu_tensor_box_extent(const struct emu_tensor_map *map, const int32_t *coordinates, const uint8_t **low, const uint8_t **high);
/* Copies the box to dst with the map's swizzle, zeros for what lies outside. The swizzle permutes 16-byte chunks by bits of the shared-memory address:
 * 'offset' is dst's offset from a 1024-byte aligned shared address. */
void emu_tensor_box_copy(const struct emu_tensor_map *map, const int32_t *coordinates, uint8_t *dst, uint32_t offset);

/* ---- e4m3 and wgmma operands ---- */
float emu_e4m3_value(uint8_t bits); /* 0x7F and 0xFF are NaN */

/* A wgmma shared-memory descriptor, decoded. */
struct emu_matrix {
  uint32_t start;         /* shared-window address of the first byte, 18 bits */
  uint32_t leading, stride; /* bytes between core matrices; stride: between groups of 8 rows */
  uint32_t swizzle;       /* bytes: 0, 32, 64, 128 */
};
struct emu_matrix emu_matrix_decode(uint64_t descriptor);
/* Shared-window address of byte 'column' (0..31, one k step of 32) of row 'row' of a K-major operand with 128-byte swizzle, whose rows of 128 bytes lie
 * in groups of 8, 'stride' apart. The descriptor's start may be advanced within a row by k steps. */
uint32_t emu_matrix_address(const struct emu_matrix *m, int row, int column);

/* One warp's part of m64 n k32: d[i][j] (+)= sum over k of a[i][k] * b[j][k], for the warp's 16 rows and n columns (n a multiple of 8, at most 256).
 * 'shared' is the byte at shared-window address 0 of the operands' addresses. d is row-major [16][n], f32. Products are exact, the sum of the 32 products is
 * taken in f32, in order of k, then added to d. */
void emu_wgmma_warp(const uint8_t *shared, const struct emu_matrix *a, int first_row, const struct emu_matrix *b, int n, bool accumulate, float *d);
/* Which lane and which of its accumulators hold element (row 0..15, column) of the warp's part. */
void emu_wgmma_place(int row, int column, int *lane, int *index);

#endif
