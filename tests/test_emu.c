/* test_emu.c - the emulated machine as such: fibers, the scheduler and its seeds, grids, ends, findings and their text. What it checks of kernels is in
 * test_emu_order.c, test_emu_global.c, test_emu_wait.c, test_emu_memory.c, test_emu_async.c and test_emu_product.c. */
#include <malloc.h>
#include <math.h>
#include <time.h>
#include <unistd.h>

#include "emu_core_fixture.h"
#include "internal.h"

/* ---- fibers ---- */

static double now_ns(void)
{
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

struct two_fibers {
  struct fiber host, other;
  int rounds;
};

static void bounce(void *argument)
{
  struct two_fibers *f = argument;
  for(;;)
    fiber_switch(&f->other, &f->host, 0);
}

START_TEST(a_switch_is_cheap)
{
  static _Alignas(64) unsigned char stack[256 << 10];
  static struct two_fibers f;
  const int rounds = 500000;
  fiber_make(&f.other, stack, sizeof(stack), bounce, &f);
  fiber_switch(&f.host, &f.other, 0);
  const double start = now_ns();
  for(int i = 0; i < rounds; i++)
    fiber_switch(&f.host, &f.other, 0);
  const double each = (now_ns() - start) / (2.0 * rounds);
  printf("fiber switch: %.1f ns\n", each);
#if !defined(__SANITIZE_ADDRESS__)
  ck_assert_double_lt(each, 500);
#endif
}
END_TEST

/* Values that a compiler keeps in registers across calls, integers and floating point, different ones in each thread. */
static void registers(void **params)
{
  const double mine = thread() + 1 + 1000 * emu_self->cta;
  const uint64_t own = (uint64_t)thread() * UINT64_C(0x9E3779B97F4A7C15);
  double a = mine, b = 2 * mine, c = 3 * mine, d = 5 * mine;
  uint64_t i = own, j = own ^ 1, k = own ^ 2, l = own ^ 3, o = own ^ 4;
  (void)params;
  for(int n = 0; n < 40; n++) {
    emu_pause();
    a += mine, i += 1;
    emu_shuffle(0, 0);
    b += mine, j += 2;
    emu_sync_warp();
    c += mine, k += 3;
    sync_cta();
    d += mine, l += 4, o += 5;
  }
  must(a == 41 * mine && b == 42 * mine && c == 43 * mine && d == 45 * mine);
  must(i == own + 40 && j == (own ^ 1) + 80 && k == (own ^ 2) + 120 && l == (own ^ 3) + 160 && o == (own ^ 4) + 200);
}

START_TEST(registers_survive)
{
  expect((struct grid){registers, 2, 2}, 0, EMU_NONE);
}
END_TEST

/* ---- seeds ---- */

#define TRACE 4096
static uint32_t trace[TRACE];
static int traced;

static void note(void)
{
  if(traced < TRACE)
    trace[traced++] = (uint32_t)(emu_self->cta << 16 | emu_self->thread);
}

/* A little of everything, with a note at each step. */
static void busy(void **params)
{
  uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 64);
  for(int i = 0; i < 4; i++) {
    note();
    emu_add(&g[i], 1);
    note();
    emu_store_relaxed(&g[64 + i], 1, 0);
    if(lane() % 5 == i)
      emu_pause();
    note();
    emu_mbarrier_arrive(mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), (uint32_t)i & 1, 1);
    note();
    while(emu_load_relaxed(&g[i], 0) != 128)
      emu_spin(2);
  }
}

static const struct grid busy_grid = {busy, 2, 2};

static struct emu_counters busy_run(uint64_t seed, uint32_t *into)
{
  const struct emu_counters before = emu_counters();
  make_global();
  traced = 0;
  ck_assert_int_eq(run(busy_grid, 0, seed).kind, EMU_NONE);
  const struct emu_counters after = emu_counters();
  ck_assert_int_eq(traced, 2048);
  memcpy(into, trace, sizeof(trace));
  return (struct emu_counters){after.launches - before.launches, after.steps - before.steps,   after.switches - before.switches,
                               after.accesses - before.accesses, after.copies - before.copies, after.products - before.products};
}

START_TEST(a_seed_repeats_a_run)
{
  static uint32_t first[TRACE], again[TRACE], other[TRACE];
  int same = 0;
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    const struct emu_counters one = busy_run(seed, first), two = busy_run(seed, again);
    ck_assert_mem_eq(&one, &two, sizeof(one));
    ck_assert_mem_eq(first, again, sizeof(first));
    ck_assert_uint_eq(one.launches, 1);
    busy_run(seed + 1000, other);
    same += memcmp(first, other, sizeof(first)) == 0;
  }
  ck_assert_int_eq(same, 0);
  free_global();
}
END_TEST

START_TEST(random_numbers_are_even)
{
  enum { CELLS = 61, DRAWS = 61000 };
  int count[CELLS] = {0};
  emu_machine.random = (uint64_t)_i;
  for(int i = 0; i < DRAWS; i++)
    count[emu_random(CELLS)]++;
  for(int i = 0; i < CELLS; i++)
    ck_assert_msg(abs(count[i] - 1000) < 170, "%d is drawn %d times of 1000", i, count[i]); /* 5 standard deviations */
}
END_TEST

/* Threads that never have to wait take turns all the same: lanes of a warp, warps, CTAs. Each notes where it is, calls the machine, and so on. */
static void free_runners(void **params)
{
  uint32_t *g = variant_of(params)->global;
  for(int i = 0; i < 8; i++) {
    note();
    emu_add(&g[0], 1);
  }
}

/* Whether some thread of group a comes between two notes of a thread of group b; groups by (trace >> shift). */
static bool interleaved(int shift)
{
  int changes = 0;
  for(int i = 1; i < traced; i++)
    changes += trace[i] >> shift != trace[i - 1] >> shift;
  return changes > (shift == 0 ? 4 * 32 : shift == 5 ? 16 : 8);
}

START_TEST(nobody_runs_alone)
{
  int lanes = 0, warps = 0, ctas = 0;
  for(uint64_t seed = 1; seed <= SEEDS; seed++) {
    make_global();
    traced = 0;
    ck_assert_int_eq(run((struct grid){free_runners, 2, 2}, 0, seed).kind, EMU_NONE);
    lanes += interleaved(0);
    warps += interleaved(5);
    ctas += interleaved(16);
  }
  printf("of %d seeds, lanes were interleaved in %d, warps in %d, CTAs in %d\n", SEEDS, lanes, warps, ctas);
  ck_assert_int_gt(lanes, SEEDS / 3);
  ck_assert_int_gt(warps, SEEDS / 3);
  ck_assert_int_gt(ctas, SEEDS / 3);
  free_global();
}
END_TEST

/* Lanes of a warp do not always come in the same order. */
static void first_come(void **params)
{
  if(emu_add(variant_of(params)->global, 1) == 0)
    tell(0, (uint32_t)lane());
}

START_TEST(any_lane_may_be_first)
{
  uint32_t came = 0;
  for(uint64_t seed = 1; seed <= 400; seed++) {
    make_global();
    ck_assert_int_eq(run((struct grid){first_come, 1, 1}, 0, seed).kind, EMU_NONE);
    came |= 1u << variant.seen[0];
  }
  ck_assert_uint_eq(came, 0xFFFFFFFFu);
  free_global();
}
END_TEST

/* ---- grids and ends ---- */

static void idle(void **params)
{
  (void)params;
}

START_TEST(grids)
{
  static const struct {
    int ctas, threads;
    size_t shared;
    enum emu_finding_kind kind;
  } table[] = {
      {1, 32, 0, EMU_NONE},        {3, 1024, 1024, EMU_NONE},     {132, 384, 232448, EMU_NONE}, {1, 33, 0, EMU_UNSUPPORTED},
      {1, 0, 0, EMU_UNSUPPORTED},  {1, 1056, 0, EMU_UNSUPPORTED}, {0, 32, 0, EMU_UNSUPPORTED},  {-1, 32, 0, EMU_UNSUPPORTED},
      {1, -32, 0, EMU_UNSUPPORTED}, {1, 32, 262145, EMU_UNSUPPORTED},
  };
  for(int i = 0; i < NUMBER(table); i++) {
    struct emu_finding found;
    struct emu_launch launch = launch_of((struct grid){idle, table[i].ctas, 1}, 1);
    const struct emu_counters before = emu_counters();
    launch.threads = table[i].threads;
    launch.shared_bytes = table[i].shared;
    ck_assert(emu_launch(&launch, &found) == (table[i].kind == EMU_NONE));
    ck_assert_int_eq(found.kind, table[i].kind);
    if(table[i].kind != EMU_NONE)
      ck_assert_uint_eq(emu_counters().steps, before.steps);
  }
}
END_TEST

static void endless(void **params)
{
  (void)params;
  for(;;)
    emu_pause();
}

START_TEST(no_end)
{
  struct emu_launch launch = launch_of((struct grid){endless, 1, 1}, 1);
  struct emu_finding found;
  launch.max_steps = 10000;
  ck_assert(!emu_launch(&launch, &found));
  ck_assert_int_eq(found.kind, EMU_TIMEOUT);
  ck_assert_uint_ge(emu_counters().steps, 10000);
  ck_assert_uint_lt(emu_counters().steps, 11000);
}
END_TEST

/* Who polls by sleeping sees what others do in the end, whatever the seed's habits. */
static void sleeper(void **params)
{
  uint32_t *g = variant_of(params)->global;
  if(thread() == 0)
    emu_store_relaxed(&g[0], 1, 0);
  else
    while(emu_load_relaxed(&g[0], 0) == 0)
      emu_pause();
}

START_TEST(sleepers_wake)
{
  for(uint64_t seed = 1; seed <= 200; seed++) {
    struct emu_launch launch = launch_of((struct grid){sleeper, 2, 1}, seed);
    struct emu_finding found;
    launch.max_steps = 10000000;
    make_global();
    ck_assert_msg(emu_launch(&launch, &found), "seed %d: %s", (int)seed, found.text);
  }
  free_global();
}
END_TEST

#if !defined(__SANITIZE_ADDRESS__) /* whose stacks are larger, and which sees an overflow by itself */
/* Uses 'kilobytes' of stack, and then waits. */
static uint32_t recurse(int kilobytes)
{
  volatile uint8_t block[1024];
  for(size_t i = 0; i < sizeof(block); i += 64)
    block[i] = (uint8_t)kilobytes;
  if(kilobytes <= 1)
    emu_pause();
  const uint32_t below = kilobytes > 1 ? recurse(kilobytes - 1) : 0;
  return below + block[512]; /* read behind the call, so that this is no loop */
}

static void deep(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(flaw == 0 || thread() == flaw - 1)
    tell(0, recurse(flaw == 0 ? 40 : 100));
}

START_TEST(stacks)
{
  const struct grid grid = {deep, 2, 2};
  expect(grid, 0, EMU_NONE);
  expect(grid, 1, EMU_STACK); /* the first stack of all */
  expect(grid, 2, EMU_STACK);
  expect(grid, 64, EMU_STACK);
  expect(grid, 0, EMU_NONE);
}
END_TEST
#endif

/* ---- many launches ---- */

static void untidy(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  static float d[128][4];
  make_mbarriers(4, 128);
  for(int i = 0; i < 8; i++) {
    emu_copy_async(byte(4096 + thread() * 4), &g[thread()], 4);
    emu_copy_async_arrive(mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), (uint32_t)i & 1, 1);
    tell(0, load_byte(byte(4096)));
  }
  emu_fence_async_proxy();
  sync_cta();
  if(thread() == 0)
    emu_copy_bulk(byte(1024), g, 1024, mbarrier(1));
  emu_store_relaxed(&g[1024 + thread()], 1, 0);
  emu_wgmma_fence();
  emu_wgmma(d[thread()], 8, 1ull << 16 | 64ull << 32 | 1ull << 62 | 512, 1ull << 16 | 64ull << 32 | 1ull << 62 | 1024, 0);
  if(flaw % 4 == 0)
    emu_mbarrier_wait(mbarrier(2), 0, 2); /* for ever */
  else if(flaw % 4 == 1)
    store(byte(1024), 1);
  else if(flaw % 4 == 2)
    emu_barrier_arrive(1, 64);
}

static size_t memory_in_use(void)
{
  return mallinfo2().uordblks; /* 0 with ASan, whose own check for leaks follows */
}

static int mappings(void)
{
  FILE *f = fopen("/proc/self/maps", "r");
  int lines = 0;
  ck_assert_ptr_nonnull(f);
  for(int c = fgetc(f); c != EOF; c = fgetc(f))
    lines += c == '\n';
  fclose(f);
  return lines;
}

START_TEST(findings_leave_nothing_behind)
{
  size_t bytes = 0;
  int maps = 0, findings = 0;
  make_global();
  for(int i = 0; i < 1000; i++) {
    if(i == 100) {
      bytes = memory_in_use();
      maps = mappings();
    }
    findings += run((struct grid){untidy, 2, 4}, i, (uint64_t)i).kind != EMU_NONE;
  }
  ck_assert_int_eq(findings, 1000);
  ck_assert_uint_le(memory_in_use(), bytes + 65536); /* lists that are kept may have grown */
#if defined(__SANITIZE_ADDRESS__)
  maps = mappings(); /* it maps what it remembers of freed memory */
#endif
  ck_assert_int_le(mappings(), maps + 4);
  free_global();
}
END_TEST

/* ---- findings as text ---- */

START_TEST(findings_have_names)
{
  for(int i = 0; i < EMU_FINDING_KINDS; i++) {
    const char *name = emu_finding_name((enum emu_finding_kind)i);
    ck_assert_ptr_nonnull(name);
    for(int j = 0; j < i; j++)
      ck_assert_str_ne(name, emu_finding_name((enum emu_finding_kind)j));
  }
  ck_assert_str_eq(emu_finding_name(EMU_FINDING_KINDS), "unknown");
}
END_TEST

enum { RACE_LINE = __LINE__ + 4 }; /* of the first store */
static void race(void **params)
{
  if(thread() == 0)
    store(word(3), 1u);
  (void)params;
  if(thread() == 32)
    store(word(3), 2u);
}

START_TEST(lines_are_found)
{
  const struct grid grid = {race, 1, 2};
  struct emu_finding found = run(grid, 0, 1), other;
  const struct emu_launch launch = launch_of(grid, 1);
  char one[64], two[64], program[1024] = "";
  ck_assert_int_gt(readlink("/proc/self/exe", program, sizeof(program) - 1), 0);
  ck_assert_int_eq(found.kind, EMU_RACE);
  ck_assert_ptr_nonnull(found.pc);
  ck_assert_ptr_nonnull(found.other_pc);
  ck_assert_int_eq(found.cta, 0);
  expect_text(found, "shared+0xc");
  other = found;
  emu_finding_locate(&other, &launch, "/nonexistent/object.so");
  ck_assert_str_eq(other.text, found.text);
  emu_finding_locate(&found, &launch, program);
  snprintf(one, sizeof(one), "test_emu.c:%d", RACE_LINE);
  snprintf(two, sizeof(two), "test_emu.c:%d", RACE_LINE + 3);
  expect_text(found, one);
  expect_text(found, two);
  ck_assert_ptr_null(strstr(found.text, "<+0x"));
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu");
  TCase *fibers = tcase_create("fibers"), *seeds = tcase_create("seeds"), *ends = tcase_create("ends"), *texts = tcase_create("texts");
  tcase_add_test(fibers, a_switch_is_cheap);
  tcase_add_test(fibers, registers_survive);
  tcase_add_test(seeds, a_seed_repeats_a_run);
  tcase_add_loop_test(seeds, random_numbers_are_even, 0, 4);
  tcase_add_test(seeds, nobody_runs_alone);
  tcase_add_test(seeds, any_lane_may_be_first);
  tcase_add_test(ends, grids);
  tcase_add_test(ends, no_end);
  tcase_add_test(ends, sleepers_wake);
#if !defined(__SANITIZE_ADDRESS__)
  tcase_add_test(ends, stacks);
#endif
  tcase_add_test(ends, findings_leave_nothing_behind);
  tcase_add_test(texts, findings_have_names);
  tcase_add_test(texts, lines_are_found);
  suite_add_tcase(suite, fibers);
  suite_add_tcase(suite, seeds);
  suite_add_tcase(suite, ends);
  suite_add_tcase(suite, texts);
  return run_suite(suite);
}
