/* test_recipe_validate.c - what recipe_validate() lets through and what not. */
#include "recipe.h"
#include "recipe_fixture.h"

#include <check.h>
#include <stddef.h>

START_TEST(fixture_is_valid)
{
  const struct mf_recipe r = fixture_recipe();
  ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_OK);
}
END_TEST

/* One value put at a place of a good recipe, and what must come of it. */
#define PUT(member, value_, status_) {offsetof(struct mf_recipe, member), sizeof(((struct mf_recipe *)0)->member), (value_), (status_), #member " = " #value_}
static const struct {
  size_t offset, size;
  uint64_t value;
  enum mf_status status;
  const char *what;
} mutations[] = {
    PUT(magic, 0, MF_ERR_CORRUPT),
    PUT(version, 0, MF_ERR_CORRUPT),
    PUT(version, MF_RECIPE_VERSION + 1, MF_ERR_NEWER_FORMAT),
    PUT(size, 8, MF_ERR_CORRUPT),
    PUT(flags, 4, MF_ERR_CORRUPT),
    PUT(flags, 3, MF_OK),
    PUT(kernel[0], 0, MF_ERR_CORRUPT),
    PUT(kernel[0], ' ', MF_ERR_CORRUPT),
    PUT(grid[0], 0, MF_ERR_CORRUPT),
    PUT(grid[1], 65536, MF_ERR_CORRUPT),
    PUT(block[0], 0, MF_ERR_CORRUPT),
    PUT(block[1], 3, MF_ERR_CORRUPT),
    PUT(block[0], 1025, MF_ERR_CORRUPT),
    PUT(shared_bytes, 0x80000000u, MF_ERR_CORRUPT),
    PUT(tokens_min, 0, MF_ERR_CORRUPT),
    PUT(tokens_min, 9, MF_ERR_CORRUPT),
    PUT(tokens_max, 0, MF_ERR_CORRUPT),
    PUT(workspace_bytes, 16383, MF_ERR_CORRUPT),
    PUT(workspace_bytes, UINT64_MAX, MF_ERR_CORRUPT),
    PUT(workspace_zero_bytes, 20001, MF_ERR_CORRUPT),
    PUT(block_bytes, 0, MF_ERR_CORRUPT),
    PUT(block_bytes, 383, MF_ERR_CORRUPT),
    PUT(block_bytes, MF_RECIPE_MAX_BLOCK + 1, MF_ERR_CORRUPT),
    PUT(nparams, 0, MF_ERR_CORRUPT),
    PUT(nparams, MF_RECIPE_MAX_PARAMS + 1, MF_ERR_CORRUPT),
    PUT(nfields, MF_RECIPE_MAX_FIELDS + 1, MF_ERR_CORRUPT),
    PUT(nfields, UINT32_MAX, MF_ERR_CORRUPT),
    PUT(nmaps, MF_RECIPE_MAX_MAPS + 1, MF_ERR_CORRUPT),
    PUT(nmaps, 1, MF_ERR_CORRUPT), /* a field uses map 1 */
    PUT(h_offset, 12000, MF_ERR_CORRUPT),
    PUT(h_offset, UINT64_MAX - 3, MF_ERR_CORRUPT),
    PUT(h_buffer_bytes, UINT64_MAX / 2 + 1, MF_ERR_CORRUPT),
    PUT(launch_count_offset, 20000, MF_ERR_CORRUPT),
    PUT(launch_count_offset, 2, MF_ERR_CORRUPT),
    PUT(status_offset, UINT64_MAX, MF_ERR_CORRUPT),
    PUT(params[0].offset, 384, MF_ERR_CORRUPT),
    PUT(params[1].size, 257, MF_ERR_CORRUPT),
    PUT(params[1].size, 0, MF_ERR_CORRUPT),
    PUT(params[1].offset, UINT32_MAX, MF_ERR_CORRUPT),
    PUT(fields[0].source, 10, MF_ERR_CORRUPT),
    PUT(fields[0].source, 60, MF_ERR_CORRUPT),
    PUT(fields[0].source, MF_SRC_IDS, MF_OK),
    PUT(fields[0].size, 4, MF_ERR_CORRUPT),
    PUT(fields[0].size, 0, MF_ERR_CORRUPT),
    PUT(fields[0].size, 12, MF_ERR_CORRUPT),
    PUT(fields[0].offset, 380, MF_ERR_CORRUPT),
    PUT(fields[0].offset, 4, MF_ERR_CORRUPT),
    PUT(fields[0].offset, UINT32_MAX - 7, MF_ERR_CORRUPT),
    PUT(fields[8].value, UINT64_MAX, MF_ERR_CORRUPT),  /* stride multiplier -1 */
    PUT(fields[8].value, 1u << 20, MF_ERR_CORRUPT),
    PUT(fields[15].value, 2, MF_ERR_CORRUPT),          /* tensor map number */
    PUT(fields[15].value, UINT64_MAX, MF_ERR_CORRUPT),
    PUT(fields[15].offset, 160, MF_ERR_CORRUPT),       /* not 64-aligned */
    PUT(fields[15].offset, 320, MF_ERR_CORRUPT),
    PUT(maps[0].base, MF_SRC_X, MF_ERR_CORRUPT),
    PUT(maps[0].rank, 0, MF_ERR_CORRUPT),
    PUT(maps[0].rank, 6, MF_ERR_CORRUPT),
    PUT(maps[0].swizzle, 16, MF_ERR_CORRUPT),
    PUT(maps[0].swizzle, 64, MF_ERR_CORRUPT),          /* box wider than the swizzle */
    PUT(maps[0].promotion, 32, MF_ERR_CORRUPT),
    PUT(maps[0].dim[4], 0, MF_ERR_CORRUPT),
    PUT(maps[0].dim[0], UINT64_MAX, MF_ERR_CORRUPT),
    PUT(maps[0].box[0], 24, MF_ERR_CORRUPT),
    PUT(maps[0].box[1], 0, MF_ERR_CORRUPT),
    PUT(maps[0].box[1], 257, MF_ERR_CORRUPT),
    PUT(maps[0].stride[0].source, MF_SRC_X_STRIDE, MF_ERR_CORRUPT),
    PUT(maps[0].stride[3].value, 0, MF_ERR_CORRUPT),
    PUT(maps[0].stride[3].value, UINT64_MAX, MF_ERR_CORRUPT),
    PUT(maps[1].stride[1].value, UINT64_MAX, MF_OK),   /* beyond the rank: not used */
    PUT(maps[2].rank, 77, MF_OK),                      /* beyond nmaps */
};

START_TEST(mutated_values)
{
  struct mf_recipe r = fixture_recipe();
  memcpy((char *)&r + mutations[_i].offset, &mutations[_i].value, mutations[_i].size);
  ck_assert_msg(recipe_validate(&r, sizeof(r)) == mutations[_i].status, "%s: %s", mutations[_i].what, mf_status_name(recipe_validate(&r, sizeof(r))));
}
END_TEST

/* What came with version 2 is not of version 1. */
START_TEST(sources_have_versions)
{
  struct mf_recipe r = fixture_recipe();
  r.version = 1;
  ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_OK);
  r.fields[0].source = MF_SRC_IDS;
  ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_ERR_CORRUPT);
}
END_TEST

START_TEST(unterminated_name)
{
  struct mf_recipe r = fixture_recipe();
  memset(r.kernel, 'a', sizeof(r.kernel));
  ck_assert_int_eq(recipe_validate(&r, sizeof(r)), MF_ERR_CORRUPT);
}
END_TEST

START_TEST(wrong_length)
{
  const struct mf_recipe r = fixture_recipe();
  ck_assert_int_eq(recipe_validate(&r, 0), MF_ERR_CORRUPT);
  ck_assert_int_eq(recipe_validate(&r, 12), MF_ERR_CORRUPT);
  ck_assert_int_eq(recipe_validate(&r, sizeof(r) - 1), MF_ERR_CORRUPT);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("recipe_validate");
  TCase *validate = tcase_create("validate");
  SRunner *runner = srunner_create(suite);
  int failed;
  tcase_add_test(validate, fixture_is_valid);
  tcase_add_loop_test(validate, mutated_values, 0, (int)(sizeof(mutations) / sizeof(mutations[0])));
  tcase_add_test(validate, sources_have_versions);
  tcase_add_test(validate, unterminated_name);
  tcase_add_test(validate, wrong_length);
  suite_add_tcase(suite, validate);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
