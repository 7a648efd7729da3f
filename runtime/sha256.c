/* sha256.c - see sha256.h. The functions and constants are named as in FIPS 180-4, section 4 and 6.2. */
#include "sha256.h"

#include <string.h>

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotr(uint32_t x, int n)
{
  return x >> n | x << (32 - n);
}

static void compress(uint32_t state[8], const unsigned char block[64])
{
  uint32_t w[64], v[8];
  for(size_t i = 0; i < 16; i++)
    w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
  for(int i = 16; i < 64; i++) {
    const uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  memcpy(v, state, sizeof(v));
  for(int i = 0; i < 64; i++) {
    const uint32_t e1 = rotr(v[4], 6) ^ rotr(v[4], 11) ^ rotr(v[4], 25);
    const uint32_t ch = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const uint32_t t1 = v[7] + e1 + ch + K[i] + w[i];
    const uint32_t e0 = rotr(v[0], 2) ^ rotr(v[0], 13) ^ rotr(v[0], 22);
    const uint32_t maj = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    memmove(v + 1, v, 7 * sizeof(v[0]));
    v[4] += t1;
    v[0] = t1 + e0 + maj;
  }
  for(int i = 0; i < 8; i++)
    state[i] += v[i];
}

void sha256_init(struct sha256 *ctx)
{
  static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(ctx->state, initial, sizeof(initial));
  ctx->length = 0;
}

void sha256_add(struct sha256 *ctx, const void *bytes, size_t count)
{
  const unsigned char *p = bytes;
  size_t filled = (size_t)(ctx->length % 64);
  if(count == 0)
    return;
  ctx->length += count;
  if(filled > 0) {
    const size_t take = count < 64 - filled ? count : 64 - filled;
    memcpy(ctx->block + filled, p, take);
    p += take;
    count -= take;
    if(filled + take < 64)
      return;
    compress(ctx->state, ctx->block);
  }
  for(; count >= 64; p += 64, count -= 64)
    compress(ctx->state, p);
  memcpy(ctx->block, p, count);
}

void sha256_end(struct sha256 *ctx, unsigned char digest[32])
{
  static const unsigned char padding[64] = {0x80};
  const uint64_t bits = ctx->length * 8;
  const size_t filled = (size_t)(ctx->length % 64);
  unsigned char tail[8];
  for(int i = 0; i < 8; i++)
    tail[i] = (unsigned char)(bits >> (56 - 8 * i));
  sha256_add(ctx, padding, filled < 56 ? 56 - filled : 120 - filled);
  sha256_add(ctx, tail, sizeof(tail));
  for(int i = 0; i < 32; i++)
    digest[i] = (unsigned char)(ctx->state[i / 4] >> (24 - 8 * (i % 4)));
}

void sha256_hex(const unsigned char digest[32], char hex[65])
{
  static const char digits[] = "0123456789abcdef";
  for(size_t i = 0; i < 32; i++) {
    hex[2 * i] = digits[digest[i] >> 4];
    hex[2 * i + 1] = digits[digest[i] & 15];
  }
  hex[64] = '\0';
}
