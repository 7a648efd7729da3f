/* emu_tensor_fixture.h - for the suites of emu/tensor.c: random bytes, floats as bits, the 128-byte swizzle. */
#ifndef MOEFORGE_TESTS_EMU_TENSOR_FIXTURE_H
#define MOEFORGE_TESTS_EMU_TENSOR_FIXTURE_H

#include <check.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

static uint32_t random_state;

static inline uint32_t random32(void)
{
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8 ^ random_state << 16;
}

static inline void fill(uint8_t *bytes, size_t count, uint32_t seed)
{
  random_state = seed;
  for(size_t i = 0; i < count; i++)
    bytes[i] = (uint8_t)random32();
}

static inline float float_of(uint32_t bits)
{
  float f;
  memcpy(&f, &bits, sizeof(f));
  return f;
}

static inline uint32_t bits_of(float f)
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

/* Chunk (of 16 bytes) at which chunk c of 128-byte row r lies. */
static const uint8_t table128[8][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {3, 2, 1, 0, 7, 6, 5, 4},
                                       {4, 5, 6, 7, 0, 1, 2, 3}, {5, 4, 7, 6, 1, 0, 3, 2}, {6, 7, 4, 5, 2, 3, 0, 1}, {7, 6, 5, 4, 3, 2, 1, 0}};

#endif
