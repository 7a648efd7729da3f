/* test_sha256.c - SHA-256 against the vectors of FIPS 180-4 / NIST, fed whole and in pieces. */
#include "sha256.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

static const struct {
  const char *text;
  int repeat;
  const char *hex;
} vectors[] = {
    {"", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {"abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
    {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu", 1,
     "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
    {"a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
};

START_TEST(known_vectors)
{
  struct sha256 ctx;
  unsigned char digest[32];
  char hex[65];
  sha256_init(&ctx);
  for(int i = 0; i < vectors[_i].repeat; i++)
    sha256_add(&ctx, vectors[_i].text, strlen(vectors[_i].text));
  sha256_end(&ctx, digest);
  sha256_hex(digest, hex);
  ck_assert_str_eq(hex, vectors[_i].hex);
}
END_TEST

/* Every length around the block size, cut at every place, gives what the whole gives. */
START_TEST(pieces_equal_the_whole)
{
  unsigned char text[200], whole[32], cut[32];
  struct sha256 ctx;
  for(size_t i = 0; i < sizeof(text); i++)
    text[i] = (unsigned char)(i * 37 + 11);
  for(size_t length = 0; length <= sizeof(text); length++) {
    sha256_init(&ctx);
    sha256_add(&ctx, text, length);
    sha256_end(&ctx, whole);
    for(size_t at = 0; at <= length; at++) {
      sha256_init(&ctx);
      sha256_add(&ctx, text, at);
      sha256_add(&ctx, text + at, length - at);
      sha256_end(&ctx, cut);
      ck_assert_mem_eq(whole, cut, 32);
    }
  }
}
END_TEST

START_TEST(one_bit_changes_it)
{
  unsigned char text[64] = {0}, a[32], b[32];
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, text, sizeof(text));
  sha256_end(&ctx, a);
  text[63] ^= 1;
  sha256_init(&ctx);
  sha256_add(&ctx, text, sizeof(text));
  sha256_end(&ctx, b);
  ck_assert_mem_ne(a, b, 32);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("sha256");
  TCase *tc = tcase_create("sha256");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_loop_test(tc, known_vectors, 0, (int)(sizeof(vectors) / sizeof(vectors[0])));
  tcase_add_test(tc, pieces_equal_the_whole);
  tcase_add_test(tc, one_bit_changes_it);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
