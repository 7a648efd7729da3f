/* sha256.h - SHA-256 (FIPS 180-4): package sections and store keys are identified by it. */
#ifndef MOEFORGE_RUNTIME_SHA256_H
#define MOEFORGE_RUNTIME_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct sha256 {
  uint32_t state[8];
  uint64_t length;         /* bytes so far */
  unsigned char block[64]; /* not yet processed: length % 64 bytes */
};

void sha256_init(struct sha256 *ctx);
void sha256_add(struct sha256 *ctx, const void *bytes, size_t count);
void sha256_end(struct sha256 *ctx, unsigned char digest[32]);
/* 64 hex digits and a NUL. */
void sha256_hex(const unsigned char digest[32], char hex[65]);

#endif
