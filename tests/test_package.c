/* test_package.c - package files: what is written is read, equal input makes equal bytes, nothing damaged or hostile is accepted.
 * Exports from a store are tested by test_package_export.c. */
#include "fake_libcuda.h"
#include "folder_fixture.h"
#include "package.h"
#include "package_fixture.h"
#include "sha256.h"

#include <check.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdint.h>
#include <sys/stat.h>

static const char *in_folder(const char *name)
{
  static char path[2][256];
  static int turn;
  turn ^= 1;
  snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder, name);
  return path[turn];
}

static int files_in_folder(void)
{
  DIR *dir = opendir(folder);
  int count = 0;
  while(readdir(dir) != NULL)
    count++;
  closedir(dir);
  return count - 2;
}

static void fixture_set(struct package_set *set)
{
  package_set_init(set);
  package_set_add(set, 1, 2);
  package_set_add(set, 3, 4)->recipe = &set->recipes[0];
  package_set_add(set, 5, 8);
  set->recipes[2].workspace_bytes = 30000;
}

static unsigned char *build(const struct package_set *set, size_t *size)
{
  unsigned char *bytes;
  struct error err;
  ck_assert_msg(package_build(set->items, set->count, false, &bytes, size, &err) == MF_OK, "%s", err.text);
  return bytes;
}

static enum mf_status parse_copy(const unsigned char *bytes, size_t size, struct mf_package **pkg, char *why, size_t why_bytes)
{
  unsigned char *copy = malloc(size + 1);
  memcpy(copy, bytes, size);
  return package_parse(copy, size, pkg, why, why_bytes);
}

/* ---- round trip ---- */
START_TEST(what_is_written_is_read)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  const struct mf_problem problem = fixture_problem();
  struct package_set set;
  struct mf_package *pkg;
  struct error err;
  unsigned char *bytes;
  size_t size;
  fixture_set(&set);
  bytes = build(&set, &size);
  ck_assert_msg(package_write_file(in_folder("a"), bytes, size, &err) == MF_OK, "%s", err.text);
  ck_assert_int_eq(mf_package_open(in_folder("a"), &pkg), MF_OK);
  ck_assert_int_eq(mf_package_entry_at(pkg, 0, &entry), MF_OK);
  ck_assert_str_eq(entry.shape_name, "fixture");
  ck_assert_str_eq(entry.device_name, "NVIDIA H200");
  ck_assert_str_eq(entry.schedule, "stream/fixture");
  ck_assert_int_eq(entry.tokens_min, 1);
  ck_assert_int_eq(entry.tokens_max, 2);
  ck_assert_int_eq(entry.min_driver, 13000);
  ck_assert_double_eq(entry.us, 9.75);
  ck_assert_double_eq(entry.floor_us, 7.25);
  ck_assert_float_eq(entry.routed_scaling, 2.5f);
  ck_assert_mem_eq(&entry.problem, &problem, sizeof(problem));
  ck_assert_int_eq(mf_package_entry_at(pkg, 2, &entry), MF_OK);
  ck_assert_int_eq(entry.tokens_min, 5);
  ck_assert_int_eq(mf_package_entry_at(pkg, 3, &entry), MF_ERR_NOT_FOUND);
  entry.struct_size = 8;
  ck_assert_int_eq(mf_package_entry_at(pkg, 0, &entry), MF_ERR_USAGE);
  ck_assert_uint_eq(pkg->nrecipes, 2);
  ck_assert_uint_eq(pkg->ncubins, 1);
  ck_assert_mem_eq(package_cubin(pkg, 0), FIXTURE_CUBIN, strlen(FIXTURE_CUBIN));
  mf_package_close(pkg);
  free(bytes);
}
END_TEST

START_TEST(json_sections)
{
  struct package_set set;
  struct mf_package *pkg;
  unsigned char *bytes;
  json_t *manifest, *validation, *provenance, *row;
  size_t size;
  fixture_set(&set);
  set.check.worst[GATE_H] = 0.0008;
  set.check.worst[GATE_END] = NAN;
  set.items[2].check = NULL;
  bytes = build(&set, &size);
  ck_assert_int_eq(package_parse(bytes, size, &pkg, NULL, 0), MF_OK);
  manifest = json_loads(mf_package_manifest(pkg), 0, NULL);
  validation = json_loads(pkg->validation, 0, NULL);
  provenance = json_loads(pkg->provenance, 0, NULL);
  ck_assert_uint_eq(json_array_size(json_object_get(manifest, "entries")), 3);
  row = json_array_get(json_object_get(manifest, "entries"), 0);
  ck_assert_str_eq(json_string_value(json_object_get(row, "status")), "measured");
  ck_assert_int_eq((int)json_integer_value(json_object_get(json_object_get(row, "problem"), "experts")), 16);
  row = json_object_get(json_array_get(json_object_get(validation, "entries"), 0), "gates");
  ck_assert_double_eq_tol(json_real_value(json_object_get(json_object_get(row, "h"), "worst")), 0.0008, 1e-9);
  ck_assert(json_is_null(json_object_get(json_object_get(row, "end_to_end"), "worst")));
  ck_assert_str_eq(json_string_value(json_object_get(json_array_get(json_object_get(validation, "entries"), 2), "check")), "none");
  row = json_array_get(json_object_get(provenance, "entries"), 1);
  ck_assert_int_eq((int)json_integer_value(json_object_get(row, "nvrtc_version")), 13000);
  ck_assert_str_eq(json_string_value(json_object_get(row, "made_at")), "2026-11-29T12:00:00Z");
  json_decref(manifest);
  json_decref(validation);
  json_decref(provenance);
  mf_package_close(pkg);
}
END_TEST

START_TEST(same_items_same_bytes)
{
  struct package_set set;
  struct package_item swapped;
  unsigned char *a, *b;
  size_t a_size, b_size;
  fixture_set(&set);
  a = build(&set, &a_size);
  swapped = set.items[0];
  set.items[0] = set.items[2];
  set.items[2] = swapped;
  b = build(&set, &b_size);
  ck_assert_uint_eq(a_size, b_size);
  ck_assert_mem_eq(a, b, a_size);
  set.items[0].us += 1;
  free(b);
  b = build(&set, &b_size);
  ck_assert(a_size != b_size || memcmp(a, b, a_size) != 0);
  free(a);
  free(b);
}
END_TEST

START_TEST(minimum_driver)
{
  ck_assert_int_eq(package_min_driver(13000), 13000);
  ck_assert_int_eq(package_min_driver(13020), 13000);
  ck_assert_int_eq(package_min_driver(12080), 12000);
}
END_TEST

/* ---- damage ---- */
/* Every byte, one bit each: the whole file is covered by some hash or rule. */
START_TEST(every_flipped_byte_is_noticed)
{
  struct package_set set;
  struct mf_package *pkg;
  unsigned char *bytes;
  char why[200];
  size_t size;
  fixture_set(&set);
  bytes = build(&set, &size);
  ck_assert_int_eq(parse_copy(bytes, size, &pkg, why, sizeof(why)), MF_OK);
  mf_package_close(pkg);
  for(size_t at = 0; at < size; at++) {
    const unsigned char bit = (unsigned char)(1u << (at % 8));
    enum mf_status rc;
    bytes[at] ^= bit;
    rc = parse_copy(bytes, size, &pkg, why, sizeof(why));
    ck_assert_msg(rc == MF_ERR_CORRUPT || (rc == MF_ERR_NEWER_FORMAT && at >= 8 && at < 12), "byte %zu: %s", at, mf_status_name(rc));
    ck_assert_ptr_null(pkg);
    bytes[at] ^= bit;
  }
  free(bytes);
}
END_TEST

START_TEST(every_truncation_is_noticed)
{
  struct package_set set;
  struct mf_package *pkg;
  unsigned char *bytes;
  size_t size;
  fixture_set(&set);
  bytes = build(&set, &size);
  for(size_t length = 0; length < size; length++)
    ck_assert_int_eq(parse_copy(bytes, length, &pkg, NULL, 0), MF_ERR_CORRUPT);
  bytes = realloc(bytes, size + 1);
  bytes[size] = 0;
  ck_assert_int_eq(parse_copy(bytes, size + 1, &pkg, NULL, 0), MF_ERR_CORRUPT);
  free(bytes);
}
END_TEST

static void hash(const void *bytes, size_t count, unsigned char digest[32])
{
  struct sha256 ctx;
  sha256_init(&ctx);
  sha256_add(&ctx, bytes, count);
  sha256_end(&ctx, digest);
}

/* Makes every hash right again, as somebody would who forges a file. Section places that lie outside are left alone. */
static void reseal(unsigned char *bytes, size_t size)
{
  struct package_header *head = (void *)bytes;
  struct package_section *table = (void *)(bytes + sizeof(*head));
  const size_t covered = sizeof(*head) + PACKAGE_SECTIONS * sizeof(*table);
  for(uint32_t i = 0; i < PACKAGE_SECTIONS; i++)
    if(table[i].offset <= size && table[i].bytes <= size - table[i].offset)
      hash(bytes + table[i].offset, (size_t)table[i].bytes, table[i].hash);
  memset(head->hash, 0, sizeof(head->hash));
  hash(bytes, covered, head->hash);
}

static uint64_t next_random(uint64_t *state)
{
  *state ^= *state << 13;
  *state ^= *state >> 7;
  *state ^= *state << 17;
  return *state >> 11;
}

/* Forged files with good hashes: refused, or safe to use down to the launch. */
START_TEST(forged_files_are_safe)
{
  const struct mf_problem problem = fixture_problem();
  uint64_t state = 0x9e3779b97f4a7c15u;
  struct package_set set;
  unsigned char *good, *bytes;
  size_t size;
  int opened = 0, refused = 0;
  fixture_set(&set);
  good = build(&set, &size);
  bytes = malloc(size);
  fakecuda_use("sms=200", NULL);
  for(int round = 0; round < 6000; round++) {
    const struct package_section *table = (const void *)(good + sizeof(struct package_header));
    const struct package_section *target = &table[next_random(&state) % PACKAGE_SECTIONS];
    struct mf_package *pkg;
    struct mf_op *op;
    memcpy(bytes, good, size);
    for(int n = round % 3; n >= 0; n--) {
      const size_t first = round % 4 == 0 ? 12 : (size_t)target->offset, length = round % 4 == 0 ? 468 : (size_t)target->bytes;
      const size_t at = first + next_random(&state) % length;
      bytes[at] = (unsigned char)next_random(&state);
    }
    reseal(bytes, size);
    if(parse_copy(bytes, size, &pkg, NULL, 0) != MF_OK) {
      refused++;
      continue;
    }
    opened++;
    if(mf_op_create(pkg, &problem, 0, 8, &op) == MF_OK)
      mf_op_destroy(op);
    mf_package_close(pkg);
  }
  ck_assert_int_gt(opened, 500);
  ck_assert_int_gt(refused, 500);
  free(good);
  free(bytes);
}
END_TEST

/* One forged value at a time, with good hashes. */
START_TEST(forged_values)
{
  struct package_set set;
  struct mf_package *pkg;
  unsigned char *good, *bytes;
  char why[200];
  size_t size;
  fixture_set(&set);
  good = build(&set, &size);
  bytes = malloc(size);
#define FORGE(change, expected)                                                                                                       \
  {                                                                                                                                   \
    struct package_header *head = (void *)bytes;                                                                                      \
    struct package_section *table = (void *)(bytes + sizeof(*head));                                                                  \
    struct package_entry *entry = (void *)(bytes + ((const struct package_section *)(const void *)(good + sizeof(*head)))[1].offset); \
    memcpy(bytes, good, size);                                                                                                        \
    (void)table, (void)entry;                                                                                                         \
    change;                                                                                                                           \
    reseal(bytes, size);                                                                                                              \
    ck_assert_msg(parse_copy(bytes, size, &pkg, why, sizeof(why)) == (expected), "%s", #change);                                      \
    if(pkg != NULL)                                                                                                                   \
      mf_package_close(pkg);                                                                                                          \
  }
  FORGE((void)0, MF_OK)
  FORGE(head->version = 3, MF_ERR_NEWER_FORMAT)
  FORGE(head->version = 2, MF_ERR_CORRUPT) /* which has a section more */
  FORGE(head->version = 0, MF_ERR_CORRUPT)
  FORGE(head->sections = 5, MF_ERR_CORRUPT)
  FORGE(table[0].offset += 64, MF_ERR_CORRUPT)
  FORGE(table[1].count = 4, MF_ERR_CORRUPT)
  FORGE(table[1].count = 2, MF_ERR_CORRUPT)
  FORGE(table[1].record_bytes = 0, MF_ERR_CORRUPT)
  FORGE(table[2].bytes = UINT64_MAX, MF_ERR_CORRUPT)
  FORGE(table[3].count = UINT32_MAX, MF_ERR_CORRUPT)
  FORGE(table[5].bytes -= 1, MF_ERR_CORRUPT)
  FORGE(entry->recipe = 2, MF_ERR_CORRUPT)
  FORGE(entry->cubin = UINT32_MAX, MF_ERR_CORRUPT)
  FORGE(entry->tokens_min = 0, MF_ERR_CORRUPT)
  FORGE(entry->tokens_max = 9, MF_ERR_CORRUPT)
  FORGE(entry->flags = 8, MF_ERR_CORRUPT)
  FORGE(entry->problem.hidden = -1, MF_ERR_CORRUPT)
  FORGE(entry->problem.swiglu_limit = NAN, MF_ERR_CORRUPT)
  FORGE(memset(entry->device_name, 'x', sizeof(entry->device_name)), MF_ERR_CORRUPT)
  FORGE(entry->shape_name[0] = '\x1b', MF_ERR_CORRUPT)
  FORGE(entry->schedule[0] = '\xff', MF_ERR_CORRUPT)
  FORGE(entry->us = 1.0, MF_OK)
  FORGE(((struct package_cubin *)(void *)(bytes + table[3].offset))->bytes += 1, MF_ERR_CORRUPT)
  FORGE(((struct package_cubin *)(void *)(bytes + table[3].offset))->offset = UINT64_MAX - 63, MF_ERR_CORRUPT)
  FORGE(((struct mf_recipe *)(void *)(bytes + table[2].offset))->version = 9, MF_ERR_NEWER_FORMAT)
  FORGE(((struct mf_recipe *)(void *)(bytes + table[2].offset))->nfields = 49, MF_ERR_CORRUPT)
  FORGE(bytes[table[0].offset + 5] = 0, MF_ERR_CORRUPT)
#undef FORGE
  free(good);
  free(bytes);
}
END_TEST

START_TEST(reasons_name_the_place)
{
  struct package_set set;
  struct mf_package *pkg;
  unsigned char *bytes;
  char why[200];
  size_t size;
  fixture_set(&set);
  bytes = build(&set, &size);
  bytes[((struct package_section *)(void *)(bytes + sizeof(struct package_header)))[2].offset] ^= 1;
  ck_assert_int_eq(parse_copy(bytes, size, &pkg, why, sizeof(why)), MF_ERR_CORRUPT);
  ck_assert_str_eq(why, "section recipes: SHA-256 differs");
  ck_assert_int_eq(parse_copy(bytes, size - 1, &pkg, why, sizeof(why)), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(why, "truncated"));
  ck_assert_int_eq(parse_copy((const unsigned char *)"\x7f""ELF", 4, &pkg, why, sizeof(why)), MF_ERR_CORRUPT);
  ck_assert_ptr_nonnull(strstr(why, "not a moeforge package"));
  free(bytes);
}
END_TEST

START_TEST(files_that_are_none)
{
  struct mf_package *pkg = (void *)1;
  ck_assert_int_eq(mf_package_open(in_folder("missing"), &pkg), MF_ERR_IO);
  ck_assert_ptr_null(pkg);
  ck_assert_int_eq(mf_package_open(folder, &pkg), MF_ERR_IO);
  close(open(in_folder("empty"), O_CREAT | O_WRONLY, 0644));
  ck_assert_int_eq(mf_package_open(in_folder("empty"), &pkg), MF_ERR_CORRUPT);
  ck_assert_int_eq(mf_package_open(NULL, &pkg), MF_ERR_USAGE);
  ck_assert_int_eq(mf_package_open("x", NULL), MF_ERR_USAGE);
}
END_TEST

/* ---- what the writer refuses ---- */
START_TEST(writer_refuses)
{
  struct package_set set;
  struct error err;
  unsigned char *bytes;
  char name[200];
  size_t size;
  memset(name, 'n', sizeof(name) - 1);
  name[sizeof(name) - 1] = '\0';
#define TRY(change, expected, words)                                                                                                \
  {                                                                                                                                 \
    fixture_set(&set);                                                                                                              \
    change;                                                                                                                         \
    ck_assert_msg(package_build(set.items, set.count, false, &bytes, &size, &err) == (expected), "%s", #change);                    \
    ck_assert_ptr_null(bytes);                                                                                                      \
    ck_assert_msg(strstr(err.text, words) != NULL && strchr(err.text, '\n') == NULL, "%s", err.text);                                \
  }
  TRY(set.items[1].predicted = true, MF_REJECTED, "fixture on NVIDIA H200, tokens 3-4: the winner is only predicted")
  TRY(set.check.passed = false, MF_REJECTED, "failed its check")
  TRY(set.items[1].tokens_min = 2, MF_ERR_STORE, "both have a winner for 2 tokens")
  TRY(set.items[2].tokens_max = 9, MF_ERR_STORE, "tokens 5-9, but the kernel takes 1-8")
  TRY(set.recipes[0].magic = 0, MF_ERR_STORE, "recipe or cubin is damaged")
  TRY(set.items[0].cubin_bytes = 0, MF_ERR_STORE, "recipe or cubin is damaged")
  TRY(set.items[0].schedule = name, MF_ERR_STORE, "longer than the 159 characters")
  TRY(set.items[0].shape_name = name, MF_ERR_STORE, "longer than the 79 characters")
  TRY(set.items[0].shape_name = "caf\xc3\xa9", MF_ERR_STORE, "expected printable ASCII")
#undef TRY
}
END_TEST

START_TEST(predicted_when_allowed)
{
  struct mf_package_entry entry = {.struct_size = sizeof(entry)};
  struct package_set set;
  struct mf_package *pkg;
  struct error err;
  unsigned char *bytes;
  size_t size;
  fixture_set(&set);
  for(size_t i = 0; i < set.count; i++)
    set.items[i].predicted = true;
  ck_assert_int_eq(package_build(set.items, set.count, true, &bytes, &size, &err), MF_OK);
  ck_assert_int_eq(package_parse(bytes, size, &pkg, NULL, 0), MF_OK);
  ck_assert_int_eq(mf_package_entry_at(pkg, 0, &entry), MF_OK);
  ck_assert_double_eq(entry.us, 0);
  ck_assert_ptr_nonnull(strstr(mf_package_manifest(pkg), "\"status\": \"predicted\""));
  ck_assert_uint_eq(pkg->entries[0].flags, PACKAGE_PREDICTED);
  mf_package_close(pkg);
}
END_TEST

START_TEST(writing_is_all_or_nothing)
{
  struct error err;
  struct stat st;
  ck_assert_int_eq(package_write_file("/nonexistent/x", (const unsigned char *)"ab", 2, &err), MF_ERR_IO);
  ck_assert_ptr_nonnull(strstr(err.text, "/nonexistent/x"));
  mkdir(in_folder("taken"), 0755); /* rename onto a folder fails */
  ck_assert_int_eq(package_write_file(in_folder("taken"), (const unsigned char *)"ab", 2, &err), MF_ERR_IO);
  ck_assert_int_eq(files_in_folder(), 1);
  ck_assert_int_eq(package_write_file(in_folder("p"), (const unsigned char *)"ab", 2, &err), MF_OK);
  ck_assert_int_eq(package_write_file(in_folder("p"), (const unsigned char *)"xyz", 3, &err), MF_OK);
  ck_assert_int_eq(stat(in_folder("p"), &st), 0);
  ck_assert_int_eq((int)st.st_size, 3);
  ck_assert_int_eq(files_in_folder(), 2);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("package");
  TCase *tc = tcase_create("package");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_checked_fixture(tc, make_folder, remove_folder);
  tcase_add_test(tc, what_is_written_is_read);
  tcase_add_test(tc, json_sections);
  tcase_add_test(tc, same_items_same_bytes);
  tcase_add_test(tc, minimum_driver);
  tcase_add_test(tc, every_flipped_byte_is_noticed);
  tcase_add_test(tc, every_truncation_is_noticed);
  tcase_add_test(tc, forged_files_are_safe);
  tcase_add_test(tc, forged_values);
  tcase_add_test(tc, reasons_name_the_place);
  tcase_add_test(tc, files_that_are_none);
  tcase_add_test(tc, writer_refuses);
  tcase_add_test(tc, predicted_when_allowed);
  tcase_add_test(tc, writing_is_all_or_nothing);
  tcase_set_timeout(tc, 120);
  suite_add_tcase(suite, tc);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
