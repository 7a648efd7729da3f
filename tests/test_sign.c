/* test_sign.c - signatures of packages: the vectors of RFC 8032, changed bytes, wrong keys, and the commands `sign` and `verify --key`. */
#include "commands.h"
#include "fake_libcuda.h"
#include "package_fixture.h"
#include "sign.h"

#include <check.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char folder[128];

static void start(void)
{
  const char *tmp = getenv("TMPDIR");
  snprintf(folder, sizeof(folder), "%s/mf-sign-XXXXXX", tmp != NULL ? tmp : "/tmp");
  ck_assert_ptr_nonnull(mkdtemp(folder));
}

static void end(void)
{
  char command[256];
  snprintf(command, sizeof(command), "rm -r '%s'", folder);
  ck_assert_int_eq(system(command), 0);
}

static const char *in_folder(const char *name)
{
  static char path[8][256];
  static int turn;
  turn = (turn + 1) % 8;
  snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name);
  return path[turn];
}

static void write_bytes(const char *name, const void *bytes, size_t count)
{
  FILE *f = fopen(in_folder(name), "wb");
  ck_assert_ptr_nonnull(f);
  ck_assert_uint_eq(fwrite(bytes, 1, count, f), count);
  fclose(f);
}

static void from_hex(const char *hex, unsigned char *out)
{
  for(size_t i = 0; hex[2 * i] != '\0'; i++) {
    unsigned byte;
    ck_assert_int_eq(sscanf(hex + 2 * i, "%2x", &byte), 1);
    out[i] = (unsigned char)byte;
  }
}

/* Writes NAME.key and NAME.pub of the private key with these 32 bytes. */
static void write_keys(const char *name, const unsigned char secret[32])
{
  EVP_PKEY *pkey = EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, NULL, secret, 32);
  char file[64];
  FILE *f;
  ck_assert_ptr_nonnull(pkey);
  snprintf(file, sizeof(file), "%s.key", name);
  f = fopen(in_folder(file), "w");
  ck_assert_int_eq(PEM_write_PrivateKey(f, pkey, NULL, NULL, 0, NULL, NULL), 1);
  fclose(f);
  snprintf(file, sizeof(file), "%s.pub", name);
  f = fopen(in_folder(file), "w");
  ck_assert_int_eq(PEM_write_PUBKEY(f, pkey), 1);
  fclose(f);
  EVP_PKEY_free(pkey);
}

/* RFC 8032, section 7.1, tests 1 to 3. */
static const struct {
  const char *secret, *message, *signature;
} vectors[] = {
    {"9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60", "",
     "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"},
    {"4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb", "72",
     "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"},
    {"c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7", "af82",
     "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"},
};

START_TEST(known_answers)
{
  unsigned char secret[32], message[2], expected[SIGNATURE_BYTES], made[SIGNATURE_BYTES];
  const size_t size = strlen(vectors[_i].message) / 2;
  struct error err;
  from_hex(vectors[_i].secret, secret);
  from_hex(vectors[_i].message, message);
  from_hex(vectors[_i].signature, expected);
  write_keys("rfc", secret);
  ck_assert_msg(sign_bytes(message, size, in_folder("rfc.key"), made, &err) == MF_OK, "%s", err.text);
  ck_assert_mem_eq(made, expected, sizeof(made));
  write_bytes("sig", made, sizeof(made));
  ck_assert_msg(sign_check(message, size, in_folder("sig"), in_folder("rfc.pub"), &err) == MF_OK, "%s", err.text);
  for(size_t i = 0; i < sizeof(made); i++) { /* every byte of it counts */
    made[i] ^= 1;
    write_bytes("sig", made, sizeof(made));
    ck_assert_int_eq(sign_check(message, size, in_folder("sig"), in_folder("rfc.pub"), &err), MF_ERR_CORRUPT);
    made[i] ^= 1;
  }
}
END_TEST

static void write_package(const char *name)
{
  struct package_set set;
  struct error err;
  unsigned char *bytes;
  size_t size;
  package_set_init(&set);
  package_set_add(&set, 1, 8);
  ck_assert_int_eq(package_build(set.items, set.count, false, &bytes, &size, &err), MF_OK);
  ck_assert_int_eq(package_write_file(in_folder(name), bytes, size, &err), MF_OK);
  free(bytes);
}

static enum mf_status sign(const char *package, const char *key, const char *output, struct error *err)
{
  struct options opt;
  memset(&opt, 0, sizeof(opt));
  opt.key = key;
  opt.output = output;
  opt.quiet = true;
  return sign_command(&opt, package, err);
}

static enum mf_status verify(const char *package, const char *key, const char *signature, struct error *err)
{
  struct options opt;
  memset(&opt, 0, sizeof(opt));
  opt.key = key;
  opt.signature = signature;
  opt.device = "none";
  opt.json = true;
  return verify_command(&opt, package, err);
}

#define EXPECT(call, status, words)                                                                            \
  {                                                                                                            \
    const enum mf_status rc = (call);                                                                          \
    ck_assert_msg(rc == (status), "%s: %s: %s", #call, mf_status_name(rc), err.text);                          \
    ck_assert_msg(strstr(err.text, words) != NULL && strchr(err.text, '\n') == NULL, "%s: %s", #call, err.text); \
  }

START_TEST(packages)
{
  static const unsigned char secret[32] = {1}, other[32] = {2};
  struct error err;
  char command[1024];
  FILE *f;
  write_keys("a", secret);
  write_keys("b", other);
  write_package("p");
  ck_assert_msg(sign(in_folder("p"), in_folder("a.key"), NULL, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(access(in_folder("p.sig"), R_OK), 0);
  EXPECT(verify(in_folder("p"), in_folder("a.pub"), NULL, &err), MF_ERR_NO_DEVICE, "hashes and structure are sound") /* as without a key */
  EXPECT(verify(in_folder("p"), in_folder("b.pub"), NULL, &err), MF_ERR_CORRUPT, "does not match")
  EXPECT(verify(in_folder("p"), NULL, in_folder("p.sig"), &err), MF_ERR_USAGE, "--key FILE")
  ck_assert_int_eq(sign(in_folder("p"), in_folder("b.key"), in_folder("other"), &err), MF_OK);
  EXPECT(verify(in_folder("p"), in_folder("b.pub"), in_folder("other"), &err), MF_ERR_NO_DEVICE, "sound")
  EXPECT(verify(in_folder("p"), in_folder("a.pub"), in_folder("missing"), &err), MF_ERR_IO, "missing")
  EXPECT(verify(in_folder("p"), in_folder("a.pub"), in_folder("a.pub"), &err), MF_ERR_CORRUPT, "expected a signature of 64 bytes")
  if(system("command -v openssl >/dev/null 2>&1") == 0) { /* others make and check the same */
    snprintf(command, sizeof(command), "cd '%s' && openssl pkeyutl -verify -pubin -inkey a.pub -rawin -in p -sigfile p.sig >log 2>&1", folder);
    ck_assert_msg(system(command) == 0, "%s", command);
  }
  f = fopen(in_folder("p"), "r+b"); /* one bit; the hashes would notice, the signature does before */
  fseek(f, 700, SEEK_SET);
  fputc(0x55, f);
  fclose(f);
  EXPECT(verify(in_folder("p"), in_folder("a.pub"), NULL, &err), MF_ERR_CORRUPT, "does not match")
  EXPECT(sign(in_folder("p"), in_folder("a.key"), NULL, &err), MF_ERR_CORRUPT, "SHA-256 differs") /* nothing damaged is signed */
}
END_TEST

START_TEST(keys_that_are_none)
{
  static const unsigned char secret[32] = {1};
  unsigned char out[SIGNATURE_BYTES];
  static char zeros[70000];
  struct error err;
  EVP_PKEY *curve, *pkey;
  FILE *f;
  write_keys("a", secret);
  write_package("p");
  EXPECT(sign(in_folder("p"), NULL, NULL, &err), MF_ERR_USAGE, "--key FILE")
  EXPECT(sign_bytes(out, 0, in_folder("missing"), out, &err), MF_ERR_IO, "missing")
  EXPECT(sign(in_folder("p"), in_folder("a.key"), in_folder("a.key"), &err), MF_ERR_USAGE, "which is read here") /* the key is kept */
  EXPECT(sign(in_folder("p"), in_folder("a.key"), in_folder("p"), &err), MF_ERR_USAGE, "which is read here")
  EXPECT(sign(in_folder("p"), in_folder("a.key"), NULL, &err), MF_OK, "")
  EXPECT(sign_bytes(out, 0, folder, out, &err), MF_ERR_IO, folder)
  EXPECT(sign_bytes(out, 0, in_folder("a.pub"), out, &err), MF_ERR_USAGE, "Ed25519 private key")
  EXPECT(sign_check(out, 0, in_folder("a.pub"), in_folder("a.key"), &err), MF_ERR_USAGE, "Ed25519 public key")
  write_bytes("empty", "", 0);
  EXPECT(sign_bytes(out, 0, in_folder("empty"), out, &err), MF_ERR_USAGE, "Ed25519 private key")
  write_bytes("zeros", zeros, sizeof(zeros));
  EXPECT(sign_bytes(out, 0, in_folder("zeros"), out, &err), MF_ERR_USAGE, "far longer")
  curve = EVP_PKEY_Q_keygen(NULL, NULL, "EC", "P-256");
  f = fopen(in_folder("ec.key"), "w");
  ck_assert_int_eq(PEM_write_PrivateKey(f, curve, NULL, NULL, 0, NULL, NULL), 1);
  fclose(f);
  EVP_PKEY_free(curve);
  EXPECT(sign_bytes(out, 0, in_folder("ec.key"), out, &err), MF_ERR_USAGE, "Ed25519 private key")
  pkey = EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, NULL, secret, 32);
  f = fopen(in_folder("locked.key"), "w");
  ck_assert_int_eq(PEM_write_PrivateKey(f, pkey, EVP_aes_256_cbc(), (const unsigned char *)"word", 4, NULL, NULL), 1);
  fclose(f);
  EVP_PKEY_free(pkey);
  EXPECT(sign_bytes(out, 0, in_folder("locked.key"), out, &err), MF_ERR_USAGE, "encrypted")
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("sign");
  TCase *tc = tcase_create("sign");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, start, end);
  tcase_add_loop_test(tc, known_answers, 0, (int)(sizeof(vectors) / sizeof(vectors[0])));
  tcase_add_test(tc, packages);
  tcase_add_test(tc, keys_that_are_none);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
