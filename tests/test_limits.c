/* test_limits.c - the device rules, each at its limit and one past it, with a family made for the purpose. */
#include "limits.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- a family whose recipe is what its knobs say ---- */
enum { SHARED, THREADS, GRID, MIN_SMS, WAITS, FORBIDDEN, BROKEN, NKNOBS };

static enum mf_status fake_constrain(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct verdict *why)
{
  (void)problem;
  (void)dev;
  if(sched->value[FORBIDDEN] == 0)
    return MF_OK;
  why->rule = "forbidden";
  why->have = sched->value[FORBIDDEN];
  return MF_REJECTED;
}

static enum mf_status fake_recipe(const struct mf_problem *problem, const struct schedule *sched, const struct device_info *dev, struct mf_recipe *out,
                                  struct error *err)
{
  (void)problem;
  (void)dev;
  if(sched->value[BROKEN] != 0)
    return error_set(err, MF_ERR_UNSUPPORTED, "no recipe for this");
  memset(out, 0, sizeof(*out));
  out->shared_bytes = (uint32_t)sched->value[SHARED];
  out->block[0] = (uint32_t)sched->value[THREADS];
  out->grid[0] = (uint32_t)sched->value[GRID];
  out->block[1] = out->block[2] = out->grid[1] = out->grid[2] = 1;
  out->min_sms = (uint32_t)sched->value[MIN_SMS];
  out->flags = sched->value[WAITS] ? MF_RECIPE_COOPERATIVE : 0;
  return MF_OK;
}

struct meta {
  int a, b;
  long long c;
};

/* 'expected_a' is problem->experts, to have something to compare. */
static enum mf_status fake_check_meta(const void *meta, size_t bytes, const struct mf_problem *problem, const struct schedule *sched,
                                      const struct device_info *dev, struct verdict *why)
{
  const struct meta *m = meta;
  (void)sched;
  (void)dev;
  ck_assert_uint_eq(bytes, sizeof(*m));
  if(m->a == problem->experts)
    return MF_OK;
  why->have = m->a;
  why->allowed = problem->experts;
  return MF_REJECTED;
}

static const struct family_ops fake = {.name = "fake", .nknobs = NKNOBS, .constrain = fake_constrain, .recipe = fake_recipe};
static const struct family_ops fake_with_meta = {
    .name = "fake", .nknobs = NKNOBS, .constrain = fake_constrain, .recipe = fake_recipe, .check_meta = fake_check_meta};

static struct device_info dev;
static struct schedule sched;
static struct artifact art;
static struct mf_problem problem;
static struct verdict why;

static void set_up(void)
{
  dev = (struct device_info){.cc_major = 9, .sms = 132, .shared_bytes_per_cta = 232448, .registers_per_sm = 65536, .max_threads_per_cta = 1024};
  sched = (struct schedule){.family = &fake, .value = {[SHARED] = 200000, [THREADS] = 480, [GRID] = 132, [MIN_SMS] = 132, [WAITS] = 1}};
  art = (struct artifact){.registers = 72};
  problem = (struct mf_problem){.experts = 7};
  memset(&why, 0xff, sizeof(why)); /* must be cleared by the call */
}

static enum mf_status before(void)
{
  return limits_before_compile(&problem, &sched, &dev, &why);
}

static enum mf_status after(void)
{
  return limits_after_compile(&problem, &sched, &dev, &art, &why);
}

static void expect_ok(enum mf_status rc)
{
  ck_assert_msg(rc == MF_OK, "rejected by %s: %s", why.rule, why.detail);
  ck_assert_ptr_null(why.rule);
  ck_assert_int_eq(why.have, 0);
}

static void expect_rejected(enum mf_status rc, const char *stage, const char *rule, long have, long allowed, long nearest)
{
  ck_assert_int_eq(rc, MF_REJECTED);
  ck_assert_str_eq(why.stage, stage);
  ck_assert_str_eq(why.rule, rule);
  ck_assert_int_eq(why.have, have);
  ck_assert_int_eq(why.allowed, allowed);
  ck_assert_int_eq(why.nearest, nearest);
  ck_assert_uint_gt(strlen(why.detail), 0);
}

START_TEST(accepts_what_fits)
{
  expect_ok(before());
  expect_ok(after());
}
END_TEST

START_TEST(family_rules_come_first)
{
  sched.value[FORBIDDEN] = 3;
  sched.value[SHARED] = 1 << 20;
  ck_assert_int_eq(before(), MF_REJECTED);
  ck_assert_str_eq(why.rule, "forbidden");
  ck_assert_str_eq(why.stage, "space");
}
END_TEST

START_TEST(a_family_without_recipe)
{
  sched.value[BROKEN] = 1;
  expect_rejected(before(), "limits", "recipe", 0, 0, -1);
  ck_assert_str_eq(why.detail, "no recipe for this");
  expect_rejected(after(), "compile", "recipe", 0, 0, -1);
}
END_TEST

START_TEST(arch)
{
  dev.cc_major = 10;
  expect_rejected(before(), "limits", "arch", 100, 90, 90);
  ck_assert_ptr_nonnull(strstr(why.detail, "10.0"));
  dev.cc_major = 8;
  dev.cc_minor = 9;
  expect_rejected(before(), "limits", "arch", 89, 90, 90);
}
END_TEST

START_TEST(shared_memory)
{
  sched.value[SHARED] = 232448;
  expect_ok(before());
  sched.value[SHARED]++;
  expect_rejected(before(), "limits", "shared_memory", 232449, 232448, 232448);
  ck_assert_ptr_nonnull(strstr(why.detail, "232449, allowed 232448"));
}
END_TEST

START_TEST(threads)
{
  sched.value[THREADS] = 1024;
  expect_ok(before());
  sched.value[THREADS] = 1025;
  expect_rejected(before(), "limits", "threads", 1025, 1024, 1024);
  sched.value[THREADS] = 0;
  expect_rejected(before(), "limits", "threads", 0, 1024, 1);
}
END_TEST

START_TEST(resident)
{
  sched.value[GRID] = 133;
  expect_rejected(before(), "limits", "resident", 133, 132, 132);
  sched.value[WAITS] = 0; /* nobody waits: a larger grid is fine */
  expect_ok(before());
  sched.value[MIN_SMS] = 133;
  expect_rejected(before(), "limits", "resident", 133, 132, 132);
  dev.sms = 133;
  expect_ok(before());
}
END_TEST

START_TEST(registers)
{
  /* 480 threads are 15 warps, given out as 16: 65536 / (16 * 32) = 128 registers per thread. */
  art.registers = 128;
  expect_ok(after());
  art.registers = 129; /* takes 136 */
  expect_rejected(after(), "compile", "registers", 136L * 512, 65536, 128);
  sched.value[THREADS] = 1024;
  art.registers = 64;
  expect_ok(after());
  art.registers = 65;
  expect_rejected(after(), "compile", "registers", 72L * 1024, 65536, 64);
  sched.value[THREADS] = 256;
  art.registers = 255;
  expect_ok(after());
}
END_TEST

START_TEST(spills_and_stack)
{
  art.spill_bytes = 8;
  art.stack_bytes = 16;
  expect_rejected(after(), "compile", "spills", 8, 0, 0);
  art.spill_bytes = 0;
  expect_rejected(after(), "compile", "stack", 16, 0, 0);
}
END_TEST

START_TEST(static_shared)
{
  art.static_shared_bytes = 32448;
  expect_ok(after());
  art.static_shared_bytes++;
  expect_rejected(after(), "compile", "static_shared", 232449, 232448, 32448);
}
END_TEST

START_TEST(wgmma_serialised)
{
  art.wgmma_serialised = true;
  expect_rejected(after(), "compile", "wgmma_serialised", 1, 0, 0);
}
END_TEST

START_TEST(metadata)
{
  FILE *file = fopen("tests/data/cubin_13.0.bin", "rb");
  static unsigned char cubin[8192];
  ck_assert_msg(file != NULL, "tests/data/cubin_13.0.bin is missing: run from the repository root");
  sched.family = &fake_with_meta;
  expect_rejected(after(), "compile", "metadata", 0, 0, -1); /* no cubin at all */
  art.cubin = cubin;
  art.cubin_bytes = fread(cubin, 1, sizeof(cubin), file);
  fclose(file);
  expect_ok(after()); /* mf_meta.a is 7 */
  problem.experts = 8;
  expect_rejected(after(), "compile", "metadata", 7, 8, 0);
  art.cubin_bytes /= 2;
  expect_rejected(after(), "compile", "metadata", 0, 0, -1);
  ck_assert_ptr_nonnull(strstr(why.detail, "damaged"));
}
END_TEST

START_TEST(rules_are_listed)
{
  int count = 0;
  const struct rule *rules = limits_rules(&count);
  ck_assert_int_eq(count, 10);
  for(int i = 0; i < count; i++) {
    ck_assert_uint_gt(strlen(rules[i].help), 0);
    for(int j = 0; j < i; j++)
      ck_assert_str_ne(rules[i].name, rules[j].name);
  }
  ck_assert_str_eq(rules[0].name, "arch");
  ck_assert_str_eq(rules[count - 1].name, "metadata");
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("limits");
  TCase *tc = tcase_create("limits");
  SRunner *runner;
  int failed;
  tcase_add_checked_fixture(tc, set_up, NULL);
  tcase_add_test(tc, accepts_what_fits);
  tcase_add_test(tc, family_rules_come_first);
  tcase_add_test(tc, a_family_without_recipe);
  tcase_add_test(tc, arch);
  tcase_add_test(tc, shared_memory);
  tcase_add_test(tc, threads);
  tcase_add_test(tc, resident);
  tcase_add_test(tc, registers);
  tcase_add_test(tc, spills_and_stack);
  tcase_add_test(tc, static_shared);
  tcase_add_test(tc, wgmma_serialised);
  tcase_add_test(tc, metadata);
  tcase_add_test(tc, rules_are_listed);
  suite_add_tcase(suite, tc);
  runner = srunner_create(suite);
  srunner_run_all(runner, CK_NORMAL);
  failed = srunner_ntests_failed(runner);
  srunner_free(runner);
  return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
