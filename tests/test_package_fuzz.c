/* test_package_fuzz.c - the fuzzing entry points of tests/fuzz/ over seeds and a fixed series of mutations: what `make fuzz-package` searches for hours is
 * tried here for seconds, and the entry points themselves cannot rot. */
#include "fuzz/small_elf.h"
#include "package_fixture.h"
#include "package_rewrite.h"

#include <check.h>
#include <stddef.h>
#include <stdlib.h>

#define LLVMFuzzerTestOneInput package_fuzz_one
#include "fuzz/package_fuzz.c"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput recipe_fuzz_one
#include "fuzz/recipe_fuzz.c"
#undef LLVMFuzzerTestOneInput

#define ROUNDS 8000
#define MOST_BYTES 65536

struct input {
  unsigned char bytes[MOST_BYTES];
  size_t size;
};

static uint64_t next_random(uint64_t *state)
{
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state >> 11;
}

/* One change: a byte, a number that is special to many checks, a piece that is gone, doubled, or moved. */
static void mutate(struct input *in, uint64_t *state)
{
  static const uint64_t special[] = {0, 1, 2, 63, 64, 65535, 65536, 65537, INT32_MAX, 1ull << 31, UINT32_MAX, 1ull << 32, 1ull << 40, INT64_MAX, UINT64_MAX};
  const size_t at = (size_t)next_random(state) % in->size, width = (size_t)1 << next_random(state) % 4;
  const uint64_t value = special[next_random(state) % (sizeof(special) / sizeof(special[0]))];
  size_t length = 1 + (size_t)next_random(state) % 64;
  length = length < in->size - at ? length : in->size - at;
  switch(next_random(state) % 8) {
    case 0:
    case 1: in->bytes[at] = (unsigned char)next_random(state); break;
    case 2:
    case 3:
    case 4:
      if(at / width * width + width <= in->size)
        memcpy(in->bytes + at / width * width, &value, width);
      break;
    case 5:
      memmove(in->bytes + at, in->bytes + at + length, in->size - at - length);
      in->size -= length < in->size ? length : 0;
      break;
    case 6:
      if(in->size + length <= MOST_BYTES) {
        memmove(in->bytes + at + length, in->bytes + at, in->size - at);
        in->size += length;
      }
      break;
    default: in->bytes[at] ^= (unsigned char)(1u << next_random(state) % 8); break;
  }
}

static void fuzz(const struct input *seed, int (*one)(const uint8_t *, size_t), uint64_t state)
{
  static struct input in;
  ck_assert_int_eq(one(seed->bytes, seed->size), 0);
  ck_assert_int_eq(one(seed->bytes, 0), 0);
  for(size_t size = 1; size < seed->size; size += 1 + size / 16)
    ck_assert_int_eq(one(seed->bytes, size), 0);
  for(int round = 0; round < ROUNDS; round++) {
    memcpy(in.bytes, seed->bytes, seed->size);
    in.size = seed->size;
    for(int n = round % 4; n >= 0; n--)
      mutate(&in, &state);
    ck_assert_int_eq(one(in.bytes, in.size), 0);
  }
}

/* A package of text kernels, or of ELF images, so that their tables are in reach. */
static void package_seed(struct input *out, bool elf)
{
  static struct package_set set;
  static unsigned char image[512];
  struct error err;
  unsigned char *bytes;
  package_set_init(&set);
  package_set_add(&set, 1, 4);
  package_set_add(&set, 5, 8);
  set.recipes[1].workspace_bytes = 30000;
  for(int i = 0; elf && i < 2; i++) {
    set.items[i].cubin_bytes = small_elf(image);
    set.items[i].cubin = image;
  }
  ck_assert_msg(package_build(set.items, set.count, false, &bytes, &out->size, &err) == MF_OK, "%s", err.text);
  ck_assert_uint_le(out->size, MOST_BYTES);
  if(elf) { /* and the newer version */
    unsigned char *qualified;
    ck_assert_msg(package_with_qualification(bytes, "{\"qualified\": false}", &qualified, &out->size, &err) == MF_OK, "%s", err.text);
    free(bytes);
    bytes = qualified;
  }
  memcpy(out->bytes, bytes, out->size);
  free(bytes);
}

START_TEST(packages)
{
  static struct input seed;
  package_seed(&seed, _i == 1);
  fuzz(&seed, package_fuzz_one, 0x9e3779b97f4a7c15u + (uint64_t)_i);
  ck_assert_int_gt(package_fuzz_counts.opened, ROUNDS / 20);
  ck_assert_int_gt(package_fuzz_counts.created, ROUNDS / 40);
  ck_assert_int_gt(package_fuzz_counts.launched, ROUNDS / 40);
  ck_assert_int_lt(package_fuzz_counts.opened, 2 * ROUNDS);
}
END_TEST

START_TEST(recipes)
{
  static struct input seed;
  const struct mf_recipe recipe = fixture_recipe();
  const struct call_bytes call = {.hidden = 511, .intermediate = 127, .experts = 15, .zero_experts = 7, .tokens = 3, .w13 = 1 << 16, .w2 = 1 << 17, .s13 = 1 << 18,
                                  .s2 = 1 << 19, .bias = 1 << 20, .x = 1 << 21, .logits = 1 << 22, .out = 1ull << 32, .workspace = 1 << 24, .scaling = 1};
  memcpy(seed.bytes, &recipe, sizeof(recipe));
  memcpy(seed.bytes + sizeof(recipe), &call, sizeof(call));
  seed.size = sizeof(recipe) + sizeof(call);
  fuzz(&seed, recipe_fuzz_one, 0xbf58476d1ce4e5b9u);
  ck_assert_int_gt(recipe_fuzz_counts.valid, ROUNDS / 10);
  ck_assert_int_gt(recipe_fuzz_counts.bound, ROUNDS / 20);
  ck_assert_int_gt(recipe_fuzz_counts.launched, ROUNDS / 40);
  ck_assert_int_lt(recipe_fuzz_counts.valid, ROUNDS);
}
END_TEST

/* ---- images that the driver would read beyond ---- */
START_TEST(images)
{
  unsigned char image[512], changed[512];
  const size_t size = small_elf(image);
  const Elf64_Ehdr *head = (const void *)image;
  ck_assert_int_ne(package_cubin_good(image, size), 0);
  for(size_t length = 4; length < size; length++)
    ck_assert_msg(!package_cubin_good(image, length), "%zu bytes", length);
#define TRY(type, where, member, number)                                    \
  {                                                                         \
    type *part = (type *)(void *)(changed + (where));                       \
    memcpy(changed, image, size);                                           \
    part->member = (number);                                                \
    ck_assert_msg(!package_cubin_good(changed, size), #type "." #member);   \
  }
  TRY(Elf64_Ehdr, 0, e_shoff, size)
  TRY(Elf64_Ehdr, 0, e_shoff, UINT64_MAX)
  TRY(Elf64_Ehdr, 0, e_shnum, 60000)
  TRY(Elf64_Ehdr, 0, e_shnum, 0)
  TRY(Elf64_Ehdr, 0, e_shentsize, 32)
  TRY(Elf64_Ehdr, 0, e_shstrndx, 3)
  TRY(Elf64_Ehdr, 0, e_phoff, size - 8)
  TRY(Elf64_Ehdr, 0, e_phnum, 65535)
  TRY(Elf64_Ehdr, 0, e_phentsize, 8)
  TRY(Elf64_Ehdr, 0, e_ident[EI_CLASS], ELFCLASS32)
  TRY(Elf64_Ehdr, 0, e_ident[EI_DATA], ELFDATA2MSB)
  TRY(Elf64_Shdr, head->e_shoff + sizeof(Elf64_Shdr), sh_offset, size - 4)
  TRY(Elf64_Shdr, head->e_shoff + sizeof(Elf64_Shdr), sh_size, UINT64_MAX - 63)
  TRY(Elf64_Shdr, head->e_shoff + sizeof(Elf64_Shdr), sh_size, 5) /* names without an end */
  TRY(Elf64_Shdr, head->e_shoff + sizeof(Elf64_Shdr), sh_name, 500)
  TRY(Elf64_Shdr, head->e_shoff + sizeof(Elf64_Shdr), sh_type, SHT_NOBITS)
  TRY(Elf64_Phdr, head->e_phoff, p_filesz, size)
  TRY(Elf64_Phdr, head->e_phoff, p_offset, UINT64_MAX)
#undef TRY
  ck_assert_int_ne(package_cubin_good((const unsigned char *)".version 8.0\n", 13), 0);
  ck_assert_int_eq(package_cubin_good((const unsigned char *)".version\0 8.0", 13), 0);
  ck_assert_int_eq(package_cubin_good((const unsigned char *)"\x50\xed\x55\xba", 4), 0); /* a fat binary has sizes of its own */
}
END_TEST

/* ---- a kernel that takes other parameters than the recipe passes ---- */
static void set16(unsigned char *at, unsigned value)
{
  const uint16_t bits = (uint16_t)value;
  memcpy(at, &bits, sizeof(bits));
}

static void set32(unsigned char *at, uint32_t value)
{
  memcpy(at, &value, sizeof(value));
}

START_TEST(parameters)
{
  const struct mf_recipe good = fixture_recipe();
  unsigned char image[512], changed[512], *info = changed + SMALL_ELF_INFO;
  Elf64_Shdr *section = (void *)(changed + SMALL_ELF_SECTIONS + 2 * sizeof(Elf64_Shdr));
  const size_t size = small_elf(image);
  struct mf_recipe recipe;
#define TRY(change, expected)                                                      \
  memcpy(changed, image, size);                                                    \
  recipe = good;                                                                   \
  change;                                                                          \
  ck_assert_msg(package_cubin_good(changed, size), #change);                       \
  ck_assert_msg(!package_cubin_takes(changed, size, &recipe) == !(expected), #change);
  TRY((void)0, 1)
  TRY(set32(info + 12, 100u << 18), 0)           /* larger by a word */
  TRY(set32(info + 12, 92u << 18), 0)
  TRY(set32(info + 16 + 12, 16383u << 18), 0)    /* as large as a record can say */
  TRY(set16(info + 8, 3), 0)                     /* a fourth */
  TRY(set16(info + 8, 65535), 0)
  TRY(set16(info + 8, 1), 0)
  TRY(set16(info + 16 + 8, 2), 0)                /* the third twice, the second never */
  TRY(set16(info + 32 + 10, 241), 0)             /* ends behind the space for all */
  TRY(set16(info + 48 + 2, 367), 0)
  TRY(set16(info + 2, 8), 0)                     /* a record that is too short */
  TRY(set16(info + 32 + 2, 500), 0)              /* ... or reaches out of the section */
  TRY(info[0] = 0, 0)
  TRY(info[0] = 5, 0)
  TRY(info[0] = 3, 0)
  TRY(section->sh_size = 50, 0)                  /* ends inside a record */
  TRY(section->sh_type = SHT_NOBITS, 0)
  TRY(recipe.params[2].size = 64, 0)
  TRY(recipe.nparams = 2, 0)
  TRY(recipe.nparams = 4; recipe.params[3] = recipe.params[2], 0)
  TRY(snprintf(recipe.kernel, sizeof(recipe.kernel), "mf_mo"), 1) /* another's: it is for the driver to say that there is none */
  TRY(info[1] = info[17] = info[33] = 0x18, 1)                    /* nothing said */
  TRY(section->sh_name = 1, 1)
#undef TRY
  ck_assert_int_ne(package_cubin_takes((const unsigned char *)".version 8.0\n", 13, &good), 0);
}
END_TEST

/* The pair is refused when the file is opened, with the place in words, and by the writer. */
START_TEST(pairs_that_do_not_fit)
{
  static struct input seed;
  static struct package_set set;
  static unsigned char image[512];
  unsigned char *bytes, *found = NULL;
  struct mf_package *pkg;
  struct error err;
  char why[200];
  size_t size;
  package_seed(&seed, true);
  small_elf(image);
  for(size_t i = 0; found == NULL && i + 64 < seed.size; i++)
    if(memcmp(seed.bytes + i, image, 64) == 0)
      found = seed.bytes + i;
  ck_assert_ptr_nonnull(found);
  set32(found + SMALL_ELF_INFO + 12, 1000u << 18);
  bytes = malloc(seed.size);
  memcpy(bytes, seed.bytes, seed.size);
  reseal(bytes, seed.size);
  ck_assert_int_eq(package_parse(bytes, seed.size, &pkg, why, sizeof(why)), MF_ERR_CORRUPT);
  ck_assert_str_eq(why, "entry 0: the kernel in cubin 0 takes other parameters than recipe 0 passes");
  package_set_init(&set);
  package_set_add(&set, 1, 4);
  set.items[0].cubin_bytes = small_elf(image);
  set.items[0].cubin = image;
  ck_assert_int_eq(package_build(set.items, 1, false, &bytes, &size, &err), MF_OK);
  free(bytes);
  set32(image + SMALL_ELF_INFO + 12, 1000u << 18);
  ck_assert_int_eq(package_build(set.items, 1, false, &bytes, &size, &err), MF_ERR_STORE);
  ck_assert_msg(strstr(err.text, "not the recipe's: tune again") != NULL, "%s", err.text);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("package_fuzz");
  TCase *tc = tcase_create("package_fuzz");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_loop_test(tc, packages, 0, 2);
  tcase_add_test(tc, recipes);
  tcase_add_test(tc, images);
  tcase_add_test(tc, parameters);
  tcase_add_test(tc, pairs_that_do_not_fit);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
