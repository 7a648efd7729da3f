/* test_cubin.c - the cubin reader against cubins of two NVRTC versions (data/cubin.cu), and against damaged ones. Every cubin lies in a block of
 * exactly its size, so that ASan and valgrind see any read past its end. */
#include "compile.h"

#include <check.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct meta {
  int a, b;
  long long c;
};

static const char *const files[] = {"tests/data/cubin_12.4.bin", "tests/data/cubin_13.0.bin"};
#define NFILES 2

static unsigned char *cubin;
static size_t cubin_bytes;
static struct error err;

static void load(int which)
{
  FILE *file = fopen(files[which], "rb");
  ck_assert_msg(file != NULL, "%s is missing: run from the repository root", files[which]);
  ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
  cubin_bytes = (size_t)ftell(file);
  rewind(file);
  cubin = malloc(cubin_bytes);
  ck_assert_ptr_nonnull(cubin);
  ck_assert_uint_eq(fread(cubin, 1, cubin_bytes, file), cubin_bytes);
  fclose(file);
  memset(&err, 0, sizeof(err));
}

static void unload(void)
{
  free(cubin);
  cubin = NULL;
}

/* Offset of the header of the section called 'name'. */
static size_t section_header(const char *name)
{
  Elf64_Ehdr head;
  Elf64_Shdr names, section;
  memcpy(&head, cubin, sizeof(head));
  memcpy(&names, cubin + head.e_shoff + head.e_shstrndx * sizeof(names), sizeof(names));
  for(size_t i = 1; i < head.e_shnum; i++) {
    memcpy(&section, cubin + head.e_shoff + i * sizeof(section), sizeof(section));
    if(strcmp((const char *)cubin + names.sh_offset + section.sh_name, name) == 0)
      return head.e_shoff + i * sizeof(section);
  }
  ck_abort_msg("no section %s", name);
  return 0;
}

static void read_section(const char *name, Elf64_Shdr *out)
{
  memcpy(out, cubin + section_header(name), sizeof(*out));
}

static void write_section(const char *name, const Elf64_Shdr *header)
{
  memcpy(cubin + section_header(name), header, sizeof(*header));
}

START_TEST(reads_resources)
{
  struct artifact art = {.spill_bytes = 5};
  load(_i);
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_OK);
  ck_assert_int_eq(art.registers, 12);
  ck_assert_int_eq(art.stack_bytes, 0);
  ck_assert_int_eq(art.static_shared_bytes, 1200);
  ck_assert_int_eq(art.spill_bytes, 5); /* not in the cubin: left alone */
  unload();
}
END_TEST

START_TEST(lists_kernels)
{
  char name[16], tiny[6];
  load(_i);
  ck_assert_int_eq(cubin_kernel_at(cubin, cubin_bytes, 0, name, sizeof(name), &err), MF_OK);
  ck_assert_str_eq(name, "mf_moe");
  ck_assert_int_eq(cubin_kernel_at(cubin, cubin_bytes, 1, name, sizeof(name), &err), MF_ERR_NOT_FOUND);
  ck_assert_int_eq(cubin_kernel_at(cubin, cubin_bytes, 0, tiny, sizeof(tiny), &err), MF_ERR_CORRUPT);
  unload();
}
END_TEST

START_TEST(reads_symbols)
{
  struct meta meta;
  size_t bytes = 0;
  load(_i);
  ck_assert_int_eq(cubin_symbol_bytes(cubin, cubin_bytes, "mf_meta", &bytes, &err), MF_OK);
  ck_assert_uint_eq(bytes, sizeof(meta));
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_meta", &meta, sizeof(meta), &err), MF_OK);
  ck_assert(meta.a == 7 && meta.b == 8 && meta.c == 9);
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_const", &meta, sizeof(meta), &err), MF_OK);
  ck_assert(meta.a == 17 && meta.b == 18 && meta.c == 19);
  unload();
}
END_TEST

START_TEST(symbols_that_cannot_be_read)
{
  struct meta meta;
  size_t bytes;
  int zero;
  load(_i);
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_nothing", &meta, sizeof(meta), &err), MF_ERR_NOT_FOUND);
  ck_assert_ptr_nonnull(strstr(err.text, "mf_nothing"));
  ck_assert_int_eq(cubin_symbol_bytes(cubin, cubin_bytes, "mf_nothing", &bytes, &err), MF_ERR_NOT_FOUND);
  ck_assert_int_eq(cubin_symbol_bytes(cubin, cubin_bytes, "mf_moe", &bytes, &err), MF_ERR_NOT_FOUND); /* a kernel is no object */
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_meta", &meta, sizeof(meta) - 4, &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "16 bytes, expected 12"));
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_zero", &zero, sizeof(zero), &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "no initial value"));
  unload();
}
END_TEST

START_TEST(hash_covers_code_and_constants)
{
  static const char *const hashed[] = {".text.mf_moe", ".nv.constant3", ".nv.global.init"};
  char before[KEY_LEN], after[KEY_LEN];
  load(_i);
  ck_assert_int_eq(cubin_code_hash(cubin, cubin_bytes, before, &err), MF_OK);
  ck_assert_uint_eq(strlen(before), KEY_LEN - 1);
  for(size_t i = 0; i < sizeof(hashed) / sizeof(hashed[0]); i++) {
    Elf64_Shdr section;
    read_section(hashed[i], &section);
    cubin[section.sh_offset] ^= 1;
    ck_assert_int_eq(cubin_code_hash(cubin, cubin_bytes, after, &err), MF_OK);
    ck_assert_msg(strcmp(before, after) != 0, "%s is not hashed", hashed[i]);
    cubin[section.sh_offset] ^= 1;
  }
  {
    Elf64_Shdr info;
    read_section(".nv.info", &info);
    cubin[info.sh_offset] ^= 1;
    ck_assert_int_eq(cubin_code_hash(cubin, cubin_bytes, after, &err), MF_OK);
    ck_assert_str_eq(before, after);
  }
  unload();
}
END_TEST

/* Calls everything; what it returns does not matter, that it returns does. */
static void exercise(const unsigned char *bytes, size_t count)
{
  struct artifact art = {0};
  struct meta meta;
  char name[64], key[KEY_LEN];
  size_t size;
  long frame;
  (void)cubin_read_resources(bytes, count, "mf_moe", &art, NULL);
  (void)cubin_kernel_at(bytes, count, 0, name, sizeof(name), NULL);
  (void)cubin_frame_bytes(bytes, count, "mf_moe", &frame, NULL);
  (void)cubin_symbol_bytes(bytes, count, "mf_meta", &size, NULL);
  (void)cubin_read_symbol(bytes, count, "mf_meta", &meta, sizeof(meta), NULL);
  (void)cubin_code_hash(bytes, count, key, NULL);
}

START_TEST(every_truncation_is_refused)
{
  struct artifact art;
  load(_i);
  for(size_t length = 0; length < cubin_bytes; length += length < 512 ? 1 : 13) {
    unsigned char *cut = malloc(length > 0 ? length : 1);
    ck_assert_ptr_nonnull(cut);
    memcpy(cut, cubin, length);
    exercise(cut, length);
    if(length < sizeof(Elf64_Ehdr))
      ck_assert_int_eq(cubin_read_resources(cut, length, "mf_moe", &art, &err), MF_ERR_CORRUPT);
    free(cut);
  }
  ck_assert_int_eq(cubin_read_resources(NULL, 0, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  unload();
}
END_TEST

START_TEST(any_damaged_byte_is_survived)
{
  static const unsigned char values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
  load(_i);
  for(size_t at = 0; at < cubin_bytes; at++) {
    const unsigned char old = cubin[at];
    for(size_t v = 0; v < sizeof(values); v++) {
      cubin[at] = values[v];
      exercise(cubin, cubin_bytes);
    }
    cubin[at] = old;
  }
  unload();
}
END_TEST

START_TEST(named_damage_is_corrupt)
{
  struct artifact art;
  struct meta meta;
  Elf64_Shdr section, old;
  load(_i);
  read_section(".nv.info", &old);
  section = old;
  section.sh_offset = UINT64_MAX - 8; /* offset + size overflows */
  write_section(".nv.info", &section);
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, ".nv.info"));
  section = old;
  section.sh_size -= 2; /* ends inside a record */
  write_section(".nv.info", &section);
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  write_section(".nv.info", &old);

  cubin[old.sh_offset + 8] = 0; /* register count of the first record */
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  cubin[old.sh_offset + 8] = 12;

  read_section(".nv.shared.mf_moe", &old);
  section = old;
  section.sh_size = 1000; /* less than the system's share */
  write_section(".nv.shared.mf_moe", &section);
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  write_section(".nv.shared.mf_moe", &old);

  read_section(".nv.global.init", &old);
  section = old;
  section.sh_size = 8; /* the symbol reaches past its section */
  write_section(".nv.global.init", &section);
  ck_assert_int_eq(cubin_read_symbol(cubin, cubin_bytes, "mf_meta", &meta, sizeof(meta), &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "outside its section"));
  write_section(".nv.global.init", &old);

  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "no_such_kernel", &art, &err), MF_ERR_CORRUPT);
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_OK); /* all damage is undone */
  unload();
}
END_TEST

START_TEST(other_elf_files_are_refused)
{
  struct artifact art;
  load(_i);
  cubin[EI_CLASS] = ELFCLASS32;
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  cubin[EI_CLASS] = ELFCLASS64;
  cubin[offsetof(Elf64_Ehdr, e_machine)] = EM_X86_64;
  ck_assert_int_eq(cubin_read_resources(cubin, cubin_bytes, "mf_moe", &art, &err), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(err.text, "CUDA"));
  unload();
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("cubin");
  TCase *tc = tcase_create("cubin");
  SRunner *runner;
  int failed;
  tcase_set_timeout(tc, 120);
  tcase_add_loop_test(tc, reads_resources, 0, NFILES);
  tcase_add_loop_test(tc, lists_kernels, 0, NFILES);
  tcase_add_loop_test(tc, reads_symbols, 0, NFILES);
  tcase_add_loop_test(tc, symbols_that_cannot_be_read, 0, NFILES);
  tcase_add_loop_test(tc, hash_covers_code_and_constants, 0, NFILES);
  tcase_add_loop_test(tc, every_truncation_is_refused, 0, NFILES);
  tcase_add_loop_test(tc, any_damaged_byte_is_survived, 0, NFILES);
  tcase_add_loop_test(tc, named_damage_is_corrupt, 0, NFILES);
  tcase_add_loop_test(tc, other_elf_files_are_refused, 0, NFILES);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
