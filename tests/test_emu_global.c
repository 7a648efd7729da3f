/* test_emu_global.c - global memory on the emulated machine: what nothing orders, within a CTA and between CTAs, and relaxed stores, which come late and
 * in any order. */
#include "emu_core_fixture.h"

static void between_ctas(void **params)
{
  const int flaw = variant_of(params)->flaw, cta = emu_self->cta;
  uint32_t *g = variant_of(params)->global;
  if(thread() != 0)
    return;
  if(flaw == 0) {
    emu_add(&g[0], 1);
    emu_store_relaxed(&g[1], 1, 0);
    tell(0, emu_load_relaxed(&g[1], 0));
    store(&g[2 + cta], 1u);
    tell(0, load(&g[64]));
  } else if(flaw == 1) {
    store(&g[0], 1u);
  } else if(flaw == 2) {
    if(cta == 0)
      store(&g[0], 1u);
    else
      tell(0, load(&g[0]));
  } else if(flaw == 3) {
    if(cta == 0)
      store(&g[0], 1u);
    else
      tell(0, emu_load_relaxed(&g[0], 0));
  } else if(flaw == 4) {
    if(cta == 0)
      emu_store_relaxed(&g[0], 1, 0);
    else
      tell(0, load(&g[0]));
  } else if(flaw == 5) {
    if(cta == 0)
      __tsan_write_range(&g[1023], 8);
    else
      tell(0, load(&g[1024]));
  } else if(flaw == 6) {
    if(cta == 0)
      emu_add(&g[0], 1);
    else
      store(&g[0], 1u);
  }
}

static void within_cta(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  store(&g[thread()], 1u);
  if(flaw != 1)
    sync_cta();
  tell(0, load(&g[(thread() + 40) % 96]));
}

/* Warps 0 and 1 read, warp 2 writes and has heard from one of them. */
static void global_readers(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  if(warp() < 2) {
    if(lane() == 0)
      tell(0, load(&g[0]));
    if(warp() + 1 != flaw)
      emu_barrier_arrive(1, flaw == 0 ? 96 : 64);
  } else {
    emu_barrier_sync(1, flaw == 0 ? 96 : 64);
    if(lane() == 0)
      store(&g[0], 1u);
  }
}

/* What a thread has stored for other CTAs is there for those of its own CTA that it has met, and comes before what they store. */
static void stores_within_cta(void **params)
{
  const int flaw = variant_of(params)->flaw, other = (thread() + 40) % 64;
  uint32_t *g = variant_of(params)->global;
  emu_store_relaxed(&g[thread()], 1 + (uint32_t)thread(), 0);
  if(flaw != 1)
    sync_cta();
  const uint32_t seen = thread() % 2 == 0 ? emu_load_relaxed(&g[other], 0) : load(&g[other]);
  must(flaw == 1 || seen == 1 + (uint32_t)other);
  sync_cta();
  if(thread() % 2 == 0)
    emu_store_relaxed(&g[other], 100 + (uint32_t)thread(), 0);
  else
    store(&g[other], 100 + (uint32_t)thread());
  emu_add(&g[1024], 1);
}

START_TEST(stores_of_a_cta_are_in_order)
{
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    make_global();
    ck_assert_int_eq(run((struct grid){stores_within_cta, 1, 2}, 0, seed).kind, EMU_NONE);
    for(uint32_t i = 0; i < 64; i++)
      ck_assert_uint_eq(variant.global[(i + 40) % 64], 100 + i);
  }
  expect((struct grid){stores_within_cta, 1, 2}, 1, EMU_RACE);
  free_global();
}
END_TEST

/* A thread does not lose sight of its own store because another CTA has stored there since, or is about to. */
static void own_store(void **params)
{
  uint32_t *g = variant_of(params)->global;
  if(thread() != 0)
    return;
  emu_store_relaxed(&g[emu_self->cta == 0 ? 0 : 128], 1, 0); /* CTA 1's is of no importance */
  if(emu_self->cta == 0)
    emu_store_relaxed(&g[64], 1, 0);
  else
    while(emu_load_relaxed(&g[64], 0) == 0)
      emu_spin(1);
  if(emu_self->cta == 1) {
    emu_store_relaxed(&g[0], 2, 0);
    emu_store_relaxed(&g[64], 2, 0);
    return;
  }
  while(emu_load_relaxed(&g[64], 0) != 2)
    emu_spin(2);
  must(emu_load_relaxed(&g[0], 0) != 0);
}

START_TEST(a_store_is_not_lost)
{
  for(uint64_t seed = 1; seed <= 200; seed++) {
    make_global();
    ck_assert_int_eq(run((struct grid){own_store, 2, 1}, 0, seed).kind, EMU_NONE);
  }
  free_global();
}
END_TEST

/* Two relaxed stores by one CTA, seen by another. */
static void two_stores(void **params)
{
  uint32_t *g = variant_of(params)->global, one, other;
  if(thread() != 0)
    return;
  if(emu_self->cta == 0) {
    emu_store_relaxed(&g[0], 1, 0);
    emu_store_relaxed(&g[64], 1, 0);
    if(variant_of(params)->flaw == 1) {
      tell(1, load(&g[64]));
      tell(2, emu_load_relaxed(&g[0], 0));
    }
    return;
  }
  for(;;) {
    one = emu_load_relaxed(&g[0], 0);
    other = emu_load_relaxed(&g[64], 0);
    if(one != 0 || other != 0)
      break;
    emu_spin(1);
  }
  tell(0, one << 1 | other);
}

START_TEST(relaxed_stores_come_in_any_order)
{
  const struct grid grid = {two_stores, 2, 1};
  int times[4] = {0};
  for(uint64_t seed = 1; seed <= 200; seed++) {
    make_global();
    ck_assert_int_eq(run(grid, 0, seed).kind, EMU_NONE);
    ck_assert_uint_eq(variant.global[0], 1);
    ck_assert_uint_eq(variant.global[64], 1);
    times[variant.seen[0]]++;
  }
  ck_assert_int_gt(times[1], 0);
  ck_assert_int_gt(times[2], 0);
  ck_assert_int_gt(times[3], 0);
  free_global();
}
END_TEST

START_TEST(a_thread_sees_its_own_stores)
{
  const struct grid grid = {two_stores, 2, 1};
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    make_global();
    ck_assert_int_eq(run(grid, 1, seed).kind, EMU_NONE);
    ck_assert_uint_eq(variant.seen[1], 1);
    ck_assert_uint_eq(variant.seen[2], 1);
    memset(variant.seen, 0, sizeof(variant.seen));
  }
  free_global();
}
END_TEST

static const struct flawed cases[] = {
    GOOD("what CTAs may do", between_ctas, 2, 1, 0),
    BAD("two CTAs write", between_ctas, 2, 1, 1, EMU_RACE, "global buffer"),
    BAD("a CTA writes, another reads", between_ctas, 2, 1, 2, EMU_RACE, "global buffer"),
    SOMETIMES("write and scoped load", between_ctas, 2, 1, 3, EMU_RACE, EMU_NONE),
    BAD("scoped store and read", between_ctas, 2, 1, 4, EMU_RACE, "global buffer"),
    BAD("a range and a word", between_ctas, 2, 1, 5, EMU_RACE, "global buffer"),
    BAD("addition and write", between_ctas, 2, 1, 6, EMU_RACE, "global buffer"),
    GOOD("global words and a barrier", within_cta, 1, 3, 0),
    BAD("global words without a barrier", within_cta, 1, 3, 1, EMU_RACE, "global buffer"),
    GOOD("global readers", global_readers, 1, 3, 0),
    BAD("global readers, not warp 0", global_readers, 1, 3, 1, EMU_RACE, "global buffer"),
    BAD("global readers, not warp 1", global_readers, 1, 3, 2, EMU_RACE, "global buffer"),
};

START_TEST(global)
{
  expect_flawed(&cases[_i]);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_global");
  TCase *table = tcase_create("races"), *stores = tcase_create("stores");
  tcase_add_loop_test(table, global, 0, NUMBER(cases));
  tcase_add_test(stores, relaxed_stores_come_in_any_order);
  tcase_add_test(stores, a_thread_sees_its_own_stores);
  tcase_add_test(stores, stores_of_a_cta_are_in_order);
  tcase_add_test(stores, a_store_is_not_lost);
  suite_add_tcase(suite, table);
  suite_add_tcase(suite, stores);
  return run_suite(suite);
}
