/* sign.c - see sign.h; and the command `moeforge sign`. */
#include "sign.h"
#include "commands.h"
#include "files.h"
#include "package_file.h"
#include "package_write.h"
#include "read_file.h"

#include <linux/limits.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEY_FILE_MAX 65536 /* bytes; a PEM file of an Ed25519 key has 119 */

/* Asked for the password of an encrypted key: there is none, so that no prompt appears in the middle of a build. */
static int no_password(char *out, int space, int writing, void *asked)
{
  (void)out, (void)space, (void)writing;
  *(int *)asked = 1;
  return -1;
}

/* The key of a PEM file. EVP_PKEY_free() it. */
static enum mf_status read_key(const char *path, bool private_key, EVP_PKEY **out, struct error *err)
{
  char *text = NULL;
  size_t count = 0;
  int asked = 0;
  BIO *bio = NULL;
  enum mf_status rc = read_file(path, KEY_FILE_MAX, &text, &count, err);
  *out = NULL;
  if(rc != MF_OK) {
    error_prefix(err, "%s", path);
    return rc == MF_ERR_SPEC ? error_set(err, MF_ERR_USAGE, "%s: expected a PEM file with an Ed25519 key, got a far longer file", path) : rc;
  }
  bio = BIO_new_mem_buf(text, (int)count);
  if(bio != NULL)
    *out = private_key ? PEM_read_bio_PrivateKey(bio, NULL, no_password, &asked) : PEM_read_bio_PUBKEY(bio, NULL, no_password, &asked);
  BIO_free(bio);
  OPENSSL_cleanse(text, count);
  free(text);
  if(*out != NULL && EVP_PKEY_get_base_id(*out) == EVP_PKEY_ED25519)
    return MF_OK;
  EVP_PKEY_free(*out);
  *out = NULL;
  if(asked)
    return error_set(err, MF_ERR_USAGE, "%s: the key is encrypted: decrypt it first (openssl pkey -in %s -out FILE)", path, path);
  if(private_key)
    return error_set(err, MF_ERR_USAGE, "%s: expected a PEM file with an Ed25519 private key (openssl genpkey -algorithm ed25519 -out FILE)", path);
  return error_set(err, MF_ERR_USAGE, "%s: expected a PEM file with an Ed25519 public key (openssl pkey -in PRIVATE -pubout -out FILE)", path);
}

enum mf_status sign_bytes(const unsigned char *bytes, size_t size, const char *key, unsigned char out[SIGNATURE_BYTES], struct error *err)
{
  EVP_PKEY *pkey = NULL;
  EVP_MD_CTX *ctx = EVP_MD_CTX_new();
  size_t length = SIGNATURE_BYTES;
  enum mf_status rc = ctx != NULL ? read_key(key, true, &pkey, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK &&
     (EVP_DigestSignInit(ctx, NULL, NULL, NULL, pkey) != 1 || EVP_DigestSign(ctx, out, &length, bytes, size) != 1 || length != SIGNATURE_BYTES))
    rc = error_set(err, MF_ERR_INTERNAL, "%s: libcrypto could not sign with this key", key);
  EVP_MD_CTX_free(ctx);
  EVP_PKEY_free(pkey);
  return rc;
}

enum mf_status sign_check(const unsigned char *bytes, size_t size, const char *signature, const char *key, struct error *err)
{
  EVP_PKEY *pkey = NULL;
  EVP_MD_CTX *ctx = EVP_MD_CTX_new();
  char *given = NULL;
  size_t length = 0;
  enum mf_status rc = ctx != NULL ? read_key(key, false, &pkey, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  if(rc == MF_OK) {
    rc = read_file(signature, KEY_FILE_MAX, &given, &length, err);
    if(rc == MF_ERR_SPEC)
      rc = error_set(err, MF_ERR_CORRUPT, "%s: expected a signature of %d bytes, got a far longer file", signature, SIGNATURE_BYTES);
    else if(rc != MF_OK)
      error_prefix(err, "%s", signature);
  }
  if(rc == MF_OK && length != SIGNATURE_BYTES)
    rc = error_set(err, MF_ERR_CORRUPT, "%s: expected a signature of %d bytes, got %zu", signature, SIGNATURE_BYTES, length);
  if(rc == MF_OK && EVP_DigestVerifyInit(ctx, NULL, NULL, NULL, pkey) != 1)
    rc = error_set(err, MF_ERR_INTERNAL, "%s: libcrypto could not use this key", key);
  if(rc == MF_OK && EVP_DigestVerify(ctx, (const unsigned char *)given, length, bytes, size) != 1)
    rc = error_set(err, MF_ERR_CORRUPT, "the signature %s does not match: the file was changed after it was signed, or signed with another key than %s",
                   signature, key);
  free(given);
  EVP_MD_CTX_free(ctx);
  EVP_PKEY_free(pkey);
  return rc;
}

/* ---- the command ---- */
/* Signs only what opens: a damaged file must not look trustworthy. */
enum mf_status sign_command(const struct options *opt, const char *package_path, struct error *err)
{
  unsigned char signature[SIGNATURE_BYTES], *bytes = NULL, *copy = NULL;
  struct mf_package *pkg = NULL;
  char why[256] = "", path[PATH_MAX];
  size_t size = 0;
  enum mf_status rc;
  if(opt->key == NULL)
    return error_set(err, MF_ERR_USAGE, "sign: name the private key with --key FILE (openssl genpkey -algorithm ed25519 -out FILE makes one)");
  if(opt->signature != NULL)
    return error_set(err, MF_ERR_USAGE, "sign: --signature is for verify: name the file of the signature with -o");
  if(snprintf(path, sizeof(path), "%s%s", opt->output != NULL ? opt->output : package_path, opt->output != NULL ? "" : ".sig") >= (int)sizeof(path))
    return error_set(err, MF_ERR_USAGE, "sign: the name of the signature would be too long: choose one with -o");
  rc = file_spare_input(path, opt->key, err); /* losing a key or a package is worse than an error */
  if(rc == MF_OK)
    rc = file_spare_input(path, package_path, err);
  if(rc != MF_OK)
    return rc;
  rc = package_read_bytes(package_path, &bytes, &size, why, sizeof(why));
  if(rc == MF_OK) {
    copy = malloc(size + 1);
    rc = copy != NULL ? MF_OK : MF_ERR_NOMEM;
  }
  if(rc == MF_OK) {
    memcpy(copy, bytes, size);
    rc = package_parse(copy, size, &pkg, why, sizeof(why)); /* takes the copy over */
    mf_package_close(pkg);
  }
  if(rc != MF_OK) {
    error_set(err, rc, "%s: %s: %s", package_path, mf_status_string(rc), why);
    goto out;
  }
  rc = sign_bytes(bytes, size, opt->key, signature, err);
  if(rc == MF_OK)
    rc = package_write_file(path, signature, sizeof(signature), err);
  if(rc == MF_OK && !opt->quiet)
    fprintf(stderr, "wrote %s\n", path);
out:
  free(bytes);
  return rc;
}
