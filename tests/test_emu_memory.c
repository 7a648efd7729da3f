/* test_emu_memory.c - where kernels may reach on the emulated machine: bounds, alignment, constants, other threads' stacks and other CTAs' memory; what
 * has been written before it is read. */
#include "emu_core_fixture.h"

/* ---- written before it is read ---- */

static void unwritten(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 1);
  if(thread() != 0)
    return;
  if(flaw == 0) { /* everything that counts as writing */
    store(word(0), 1u);
    emu_store_relaxed(word(1), 1, 0);
    emu_copy_async(word(2), g, 4);
    emu_copy_async_wait();
    store_byte(byte(12), 1);
    emu_mbarrier_arrive_expect(mbarrier(0), 128);
    emu_copy_bulk(byte(128), g, 128, mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    tell(0, load(word(0)) + load(word(1)) + load(word(2)) + load_byte(byte(12)));
    emu_add(word(0), 1);
    for(int i = 32; i < 64; i++)
      tell(0, load(word(i)));
    tell(0, load_byte(byte(131)));
    tell(0, load(&g[100]));
  } else if(flaw == 1) {
    tell(0, load(word(5)));
  } else if(flaw == 2) {
    store_byte(byte(1), 1);
    tell(0, load_byte(byte(2)));
  } else if(flaw == 3) {
    store_byte(byte(1), 1);
    tell(0, load(word(0)));
  } else if(flaw == 4) {
    emu_load_relaxed(word(5), 0);
  } else if(flaw == 5) {
    emu_add(word(5), 1);
  } else if(flaw == 6) {
    emu_or(word(5), 1);
  } else if(flaw == 7) {
    store(word(0), 1u);
    __tsan_read16(word(0));
  } else if(flaw == 8) {
    store(word(0), 1u);
    store(word(2), 1u);
    __tsan_read_range(word(0), 12);
  } else if(flaw == 9) { /* the line behind a copy */
    emu_mbarrier_arrive_expect(mbarrier(0), 128);
    emu_copy_bulk(byte(128), g, 128, mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    tell(0, load(word(64)));
  }
}

static void writer(void **params)
{
  (void)params;
  if(thread() == 0)
    store(word(9), 1u);
}

static void reader(void **params)
{
  (void)params;
  if(thread() == 0)
    tell(0, load(word(9)));
}

START_TEST(shared_memory_is_fresh_in_each_launch)
{
  ck_assert_int_eq(run((struct grid){writer, 1, 1}, 0, 1).kind, EMU_NONE);
  ck_assert_int_eq(run((struct grid){reader, 1, 1}, 0, 1).kind, EMU_UNINITIALISED);
  ck_assert_int_eq(run((struct grid){writer, 1, 1}, 0, 1).kind, EMU_NONE);
}
END_TEST

/* What a launch has written a later one may read and write, in any CTA. */
static void next_launch(void **params)
{
  uint32_t *g = variant_of(params)->global;
  if(thread() == 0 && emu_self->cta == variant_of(params)->flaw) {
    tell(0, load(&g[0]));
    store(&g[0], 1u);
  }
}

START_TEST(launches_are_in_order)
{
  make_global();
  for(int i = 0; i < 8; i++)
    ck_assert_int_eq(run((struct grid){next_launch, 4, 1}, i % 4, (uint64_t)i).kind, EMU_NONE);
  free_global();
}
END_TEST

/* ---- bounds ---- */

static const uint32_t constants[4] = {1, 2, 3, 4};
static struct emu_launch image; /* where they end */
static uint32_t *foreign;

static void bounds(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global, local[4] = {1, 2, 3, 4};
  if(thread() == 0 && flaw != 5)
    foreign = local;
  sync_cta();
  if(thread() != 40)
    return;
  if(flaw == 0) {
    tell(0, load(&constants[2]));
    store(&local[1], load(&local[0]));
    store(word(SHARED_BYTES / 4 - 1), 1u);
    store(&g[GLOBAL_WORDS - 1], 1u);
    __tsan_write8(&g[2]);
    __tsan_write16(&g[4]);
    __tsan_write2((uint8_t *)&g[9] + 2);
    __tsan_write_range((uint8_t *)&g[12] + 1, 3);
    __tsan_read_range(g, 0);
    __tsan_read8(&local[2]);
  } else if(flaw == 1) {
    store(word(SHARED_BYTES / 4), 1u);
  } else if(flaw == 2) {
    tell(0, load(word(-1)));
  } else if(flaw == 3) {
    __tsan_read16(word(SHARED_BYTES / 4 - 2));
  } else if(flaw == 4) {
    store(foreign, 1u);
  } else if(flaw == 6) {
    store(&g[GLOBAL_WORDS], 1u);
  } else if(flaw == 7) {
    tell(0, load(&g[-1]));
  } else if(flaw == 8) {
    __tsan_write_range(&g[GLOBAL_WORDS - 1], 8);
  } else if(flaw == 9) {
    tell(0, load((uint32_t *)(uintptr_t)0x123450));
  } else if(flaw == 10) {
    tell(0, load((uint32_t *)(uintptr_t)variant_of(params)->seen[0]));
  } else if(flaw == 11) {
    __tsan_write4(HOOK_ADDRESS(&constants[1]));
  } else if(flaw == 12) {
    tell(0, load(&variant.seen[1])); /* the host program's own memory */
  } else if(flaw == 13) {
    emu_store_relaxed(&g[GLOBAL_WORDS], 1, 0);
  } else if(flaw == 14) {
    emu_load_relaxed(word(SHARED_BYTES / 4), 0);
  } else if(flaw == 15) {
    emu_load_relaxed((uint32_t *)(void *)((uint8_t *)g + 2), 0);
  } else if(flaw == 16) {
    emu_add((uint32_t *)(void *)byte(6), 1);
  } else if(flaw == 17) {
    __tsan_read4((uint8_t *)g + 2);
  } else if(flaw == 18) {
    __tsan_write4(byte(5));
  } else if(flaw == 19) {
    __tsan_write2(byte(5));
  } else if(flaw == 20) {
    __tsan_read8(&g[3]);
  } else if(flaw == 21) {
    __tsan_read16(byte(4));
  } else if(flaw == 22) {
    emu_load_unordered(byte(SHARED_BYTES - 4), local, 2);
  } else if(flaw == 23) {
    __tsan_read_range((uint8_t *)HOOK_ADDRESS(image.code) + image.code_bytes - 2, 4);
  }
}

/* Of two CTAs the second one to come writes to the first one's shared memory. */
static void other_cta(void **params)
{
  (void)params;
  if(thread() != 0)
    return;
  if(foreign == NULL)
    foreign = word(0);
  else
    store(foreign, 1u);
}

START_TEST(other_ctas_are_out_of_bounds)
{
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    foreign = NULL;
    ck_assert_int_eq(run((struct grid){other_cta, 2, 1}, 0, seed).kind, EMU_BOUNDS);
  }
}
END_TEST

/* ---- buffers ---- */

START_TEST(buffers_come_and_go)
{
  static uint64_t memory[EMU_MAX_BUFFERS + 1][2];
  uint32_t *g = make_global();
  const struct grid grid = {next_launch, 1, 1};
  ck_assert_int_eq(run(grid, 0, 1).kind, EMU_NONE);
  for(int i = 1; i < EMU_MAX_BUFFERS; i++)
    ck_assert(emu_memory_add(memory[i], sizeof(memory[i])));
  ck_assert(!emu_memory_add(memory[0], sizeof(memory[0])));
  ck_assert_int_eq(run(grid, 0, 1).kind, EMU_NONE);
  emu_memory_remove(g);
  ck_assert_int_eq(run(grid, 0, 1).kind, EMU_BOUNDS);
  ck_assert(emu_memory_add(g, 4));
  ck_assert_int_eq(run(grid, 0, 1).kind, EMU_NONE);
  for(int i = 1; i < EMU_MAX_BUFFERS; i++)
    emu_memory_remove(memory[i]);
  emu_memory_remove(&memory[0]); /* was never added */
  free_global();
}
END_TEST

static const struct flawed cases[] = {
    GOOD("what counts as written", unwritten, 1, 1, 0),
    BAD("a word", unwritten, 1, 1, 1, EMU_UNINITIALISED, "read of shared+0x14"),
    BAD("a byte", unwritten, 1, 1, 2, EMU_UNINITIALISED, "read of shared+0x2 "),
    BAD("a word of which a byte was written", unwritten, 1, 1, 3, EMU_UNINITIALISED, "read of shared+0x0 "),
    BAD("a scoped load", unwritten, 1, 1, 4, EMU_UNINITIALISED, "read of shared+0x14"),
    BAD("an addition", unwritten, 1, 1, 5, EMU_UNINITIALISED, "update of shared+0x14"),
    BAD("an or", unwritten, 1, 1, 6, EMU_UNINITIALISED, "update of shared+0x14"),
    BAD("sixteen bytes", unwritten, 1, 1, 7, EMU_UNINITIALISED, "read of shared+0x4 "),
    BAD("a range", unwritten, 1, 1, 8, EMU_UNINITIALISED, "read of shared+0x4 "),
    BAD("behind a copy", unwritten, 1, 1, 9, EMU_UNINITIALISED, "read of shared+0x100 "),
    GOOD("within bounds", bounds, 1, 2, 0),
    BAD("behind shared memory", bounds, 1, 2, 1, EMU_BOUNDS, "write of 4 bytes"),
    BAD("before shared memory", bounds, 1, 2, 2, EMU_BOUNDS, "read of 4 bytes"),
    BAD("half of it in shared memory", bounds, 1, 2, 3, EMU_BOUNDS, "outside the CTA's 65536 bytes"),
    BAD("another thread's stack", bounds, 1, 2, 4, EMU_BOUNDS, "nor the thread's stack"),
    BAD("behind a global buffer", bounds, 1, 2, 6, EMU_BOUNDS, "write of 4 bytes"),
    BAD("before a global buffer", bounds, 1, 2, 7, EMU_BOUNDS, "read of 4 bytes"),
    BAD("half of it in a global buffer", bounds, 1, 2, 8, EMU_BOUNDS, "write of 8 bytes"),
    BAD("a wild pointer", bounds, 1, 2, 9, EMU_BOUNDS, "read of 4 bytes"),
    BAD("no pointer", bounds, 1, 2, 10, EMU_BOUNDS, "read of 4 bytes"),
    BAD("a write to a constant", bounds, 1, 2, 11, EMU_BOUNDS, "write of 4 bytes"),
    BAD("the host's memory", bounds, 1, 2, 12, EMU_BOUNDS, "read of 4 bytes"),
    BAD("a scoped store behind a global buffer", bounds, 1, 2, 13, EMU_BOUNDS, "write of 4 bytes"),
    BAD("a scoped load behind shared memory", bounds, 1, 2, 14, EMU_BOUNDS, "read of 4 bytes"),
    BAD("a scoped load that is not aligned", bounds, 1, 2, 15, EMU_BOUNDS, "not aligned to 4 bytes"),
    BAD("an addition that is not aligned", bounds, 1, 2, 16, EMU_BOUNDS, "not aligned to 4 bytes"),
    BAD("a global word that is not aligned", bounds, 1, 2, 17, EMU_BOUNDS, "not aligned to 4 bytes"),
    BAD("a shared word that is not aligned", bounds, 1, 2, 18, EMU_BOUNDS, "not aligned to 4 bytes"),
    BAD("two bytes that are not aligned", bounds, 1, 2, 19, EMU_BOUNDS, "not aligned to 2 bytes"),
    BAD("eight bytes that are not aligned", bounds, 1, 2, 20, EMU_BOUNDS, "not aligned to 8 bytes"),
    BAD("sixteen bytes that are not aligned", bounds, 1, 2, 21, EMU_BOUNDS, "not aligned to 8 bytes"),
    BAD("half of it in the image", bounds, 1, 2, 23, EMU_BOUNDS, "read of 4 bytes"),
    BAD("an unordered load behind shared memory", bounds, 1, 2, 22, EMU_BOUNDS, "read of 8 bytes"),
};

START_TEST(memory)
{
  image = launch_of((struct grid){bounds, 1, 1}, 1);
  expect_flawed(&cases[_i]);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_memory");
  TCase *reach = tcase_create("reach"), *launches = tcase_create("launches");
  tcase_add_loop_test(reach, memory, 0, NUMBER(cases));
  tcase_add_test(reach, other_ctas_are_out_of_bounds);
  tcase_add_test(launches, shared_memory_is_fresh_in_each_launch);
  tcase_add_test(launches, launches_are_in_order);
  tcase_add_test(launches, buffers_come_and_go);
  suite_add_tcase(suite, reach);
  suite_add_tcase(suite, launches);
  return run_suite(suite);
}
