/* sign.h - detached Ed25519 signatures of packages: made by `moeforge sign`, checked by `moeforge verify --key`. libcrypto (OpenSSL) does the cryptography.
 *
 * A signature is 64 bytes over the whole file, as RFC 8032 has it, and keys are PEM files, so that `openssl pkeyutl -rawin` makes and checks the same. */
#ifndef MOEFORGE_TUNER_SIGN_H
#define MOEFORGE_TUNER_SIGN_H

#include "error.h"
#include <stddef.h>

#define SIGNATURE_BYTES 64

/* Signs 'size' bytes with the private key in file 'key'. MF_ERR_IO: no readable key file; MF_ERR_USAGE: no Ed25519 private
 * key in it, or an encrypted one. */
enum mf_status sign_bytes(const unsigned char *bytes, size_t size, const char *key, unsigned char out[SIGNATURE_BYTES], struct error *err);
/* Checks the signature in file 'signature' with the public key in file 'key'. MF_ERR_CORRUPT: it does not match; MF_ERR_IO, MF_ERR_USAGE as above. */
enum mf_status sign_check(const unsigned char *bytes, size_t size, const char *signature, const char *key, struct error *err);

#endif
