/* test_emu_wait.c - waiting on the emulated machine: deadlocks and what is said of them, lanes that part, mbarriers. */
#include <unistd.h>

#include "emu_core_fixture.h"

/* ---- nobody can go on ---- */

static void stuck(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  if(thread() == 0)
    store(word(0), 0u);
  make_mbarriers(1, 2);
  if(flaw == 0) { /* late, but it comes */
    if(thread() == 0) {
      for(int i = 0; i < 300; i++)
        emu_pause();
      emu_store_relaxed(word(0), 1, 1);
      emu_mbarrier_arrive(mbarrier(0));
      emu_add(&g[0], 1);
    } else {
      while(emu_load_relaxed(word(0), 1) == 0)
        emu_spin(9);
      while(emu_load_relaxed(&g[0], 0) == 0)
        emu_spin(8);
      if(thread() == 32)
        emu_mbarrier_arrive(mbarrier(0));
      emu_mbarrier_wait(mbarrier(0), 0, 7);
    }
  } else if(flaw == 1 && thread() != 3) {
    emu_sync_warp();
  } else if(flaw == 2 && lane() > 4) {
    emu_shuffle(0, 0);
  } else if(flaw == 3 && warp() == 0) {
    emu_barrier_sync(5, 64);
  } else if(flaw == 4 && warp() == 0) {
    if(lane() == 0)
      emu_mbarrier_arrive(mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 7);
  } else if(flaw == 5 && thread() == 0) {
    emu_mbarrier_arrive_expect(mbarrier(0), 256);
    emu_mbarrier_arrive(mbarrier(0));
    emu_copy_bulk(byte(1024), g, 128, mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 7);
  } else if(flaw == 6 && warp() == 1) {
    while(emu_load_relaxed(word(0), 1) == 0)
      emu_spin(9);
  } else if(flaw == 7 && emu_self->cta == 1) {
    while(emu_load_relaxed(&g[5], 0) == 0)
      emu_spin(9);
  } else if(flaw == 8) { /* two wait for each other in other places */
    if(thread() == 0)
      emu_mbarrier_wait(mbarrier(0), 0, 7);
    emu_sync_warp();
    if(thread() == 32)
      emu_mbarrier_wait(mbarrier(0), 1, 6);
    while(lane() != 0 && emu_load_relaxed(word(0), 1) == 0)
      emu_spin(9);
  } else if(flaw == 9) { /* polls that see nothing, by way of votes */
    while(emu_ballot(lane() == 0 && emu_load_relaxed(word(0), 1) != 0) == 0)
      emu_spin(9);
  } else if(flaw == 10 && thread() == 0) { /* the barrier that never opens is not the one that does */
    emu_mbarrier_arrive(mbarrier(0));
    emu_mbarrier_arrive(mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    emu_mbarrier_wait(mbarrier(0), 1, 2);
  } else if(flaw == 11 && thread() == 0) { /* the same by polling */
    while(!emu_mbarrier_try_wait(mbarrier(0), 0))
      emu_spin(3);
  }
}

/* Who looks at another word each time goes on when one of them is set, be it long ago. */
static void looks_around(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() < 16)
    store(word(thread()), 0u);
  sync_cta();
  if(thread() == 0 && flaw == 0)
    emu_store_relaxed(word(11), 1, 1);
  sync_cta();
  if(thread() == 32)
    for(int i = 0; emu_load_relaxed(word(i % 12), 1) == 0; i++)
      emu_spin(4);
}

enum { wait_line = __LINE__ + 5 };
static void waits_here(void **params)
{
  make_mbarriers(1, 2);
  if(thread() == variant_of(params)->flaw) /* the only one */
    emu_mbarrier_wait(mbarrier(0), 0, 7);
  tell(0, 1); /* so that the wait is a call and no jump */
}

START_TEST(a_deadlock_names_the_place)
{
  const struct grid grid = {waits_here, 2, 2};
  const struct emu_launch launch = launch_of(grid, 1);
  struct emu_finding found = run(grid, 35, 1);
  char place[64], program[1024] = "";
  ck_assert_int_eq(found.kind, EMU_DEADLOCK);
  ck_assert_int_eq(found.warp, 1);
  ck_assert_int_eq(found.lane, 3);
  expect_text(found, "2 lanes in 2 ctas (first: cta 0 warp 1 lane 3)");
  expect_text(found, "parity 0 of the mbarrier at shared+0xfc00, wait 7 (phase 0: 2 of 2 arrivals and 0 bytes missing)");
  ck_assert_int_gt(readlink("/proc/self/exe", program, sizeof(program) - 1), 0);
  emu_finding_locate(&found, &launch, program);
  snprintf(place, sizeof(place), "test_emu_wait.c:%d", wait_line);
  expect_text(found, place);
}
END_TEST

/* Groups beyond those that a text has room for are counted. */
static void many_places(void **params)
{
  (void)params;
  make_mbarriers(32, 1);
  emu_mbarrier_wait(mbarrier(lane()), 0, lane());
}

START_TEST(a_deadlock_in_many_places)
{
  const struct emu_finding found = run((struct grid){many_places, 132, 4}, 0, 1);
  ck_assert_int_eq(found.kind, EMU_DEADLOCK);
  ck_assert_uint_lt(strlen(found.text), sizeof(found.text));
  expect_text(found, "528 lanes in 132 ctas");
}
END_TEST

/* ---- lanes that part ---- */

static void parted(void **params)
{
  static float d[64][4];
  const int flaw = variant_of(params)->flaw;
  const bool one = thread() == 37;
  if(warp() != 1)
    return;
  emu_wgmma_fence();
  if(flaw == 1)
    one ? emu_sync_warp() : (void)emu_shuffle(0, 0);
  else if(flaw == 2)
    one ? (void)emu_ballot(1) : (void)emu_reduce_max(1);
  else if(flaw == 3)
    one ? emu_barrier_sync(1, 32) : emu_barrier_arrive(1, 32);
  else if(flaw == 4)
    one ? emu_wgmma_fence() : emu_wgmma_commit();
  else if(flaw == 5)
    one ? emu_wgmma_wait() : emu_wgmma(d[thread()], 8, 0, 0, 0);
  else if(flaw == 6)
    one ? emu_sync_warp() : emu_barrier_sync(1, 32);
  else if(one) /* the same operation in two places is none */
    tell(0, emu_shuffle((uint32_t)thread(), 5));
  else
    emu_shuffle((uint32_t)thread(), 0);
}

/* ---- mbarriers ---- */

#define STAGES 2
#define ROUNDS 9
#define FULL(stage) mbarrier(stage)
#define EMPTY(stage) mbarrier(STAGES + (stage))

/* Lane 0 of warp 0 fills stages for warps 1 and 2. */
static void ring_producer(int flaw)
{
  for(uint32_t round = 0; round < ROUNDS; round++) {
    const int stage = (int)(round % STAGES);
    const uint32_t parity = round / STAGES & 1;
    if(round >= STAGES && flaw != 2)
      emu_mbarrier_wait(EMPTY(stage), flaw == 5 ? parity : parity ^ 1, 1);
    store(word(stage), 100 + round);
    emu_mbarrier_arrive(FULL(stage));
  }
}

static void ring_consumer(int flaw)
{
  for(uint32_t round = 0; round < ROUNDS; round++) {
    const int stage = (int)(flaw == 6 ? (round + 1) % STAGES : round % STAGES);
    const uint32_t parity = round / STAGES & 1;
    emu_mbarrier_wait(FULL(stage), flaw == 3 ? parity ^ 1 : parity, 2);
    if(flaw == 1) {
      emu_sync_warp();
      if(lane() == 0)
        emu_mbarrier_arrive(EMPTY(stage));
    }
    const uint32_t got = load(word(stage));
    must(flaw != 0 || got == 100 + round);
    if(flaw == 1)
      continue;
    if(flaw != 4)
      emu_sync_warp();
    if(lane() == 0)
      emu_mbarrier_arrive(EMPTY(stage));
  }
}

static void ring(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() < STAGES)
    store(word(thread()), 0u);
  if(thread() == 0) {
    for(int i = 0; i < STAGES; i++) {
      emu_mbarrier_init(FULL(i), 1);
      emu_mbarrier_init(EMPTY(i), flaw == 7 ? 1 : 2);
    }
    emu_mbarrier_init_fence();
  }
  sync_cta();
  if(thread() == 0)
    ring_producer(flaw);
  else if(warp() != 0)
    ring_consumer(flaw);
}

/* Who sleeps through two phases does not see that they have passed. */
static void phases(void **params)
{
  const int flaw = variant_of(params)->flaw;
  make_mbarriers(2, 1);
  if(thread() == 0) {
    emu_mbarrier_arrive(mbarrier(0));
    if(flaw == 0)
      emu_mbarrier_wait(mbarrier(1), 0, 1);
    emu_mbarrier_arrive(mbarrier(0));
  } else if(thread() == 32) {
    emu_mbarrier_wait(mbarrier(0), 0, 2);
    emu_mbarrier_arrive(mbarrier(1));
    emu_mbarrier_wait(mbarrier(0), 1, 3);
  }
}

static void misused(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  if(thread() == 0)
    store(word(0), 0u);
  sync_cta();
  if(flaw == 10) { /* a flag that orders nothing */
    if(thread() == 0) {
      emu_mbarrier_init(mbarrier(0), 1);
      emu_mbarrier_init_fence();
      emu_store_relaxed(word(0), 1, 0);
    } else if(thread() == 32) {
      while(emu_load_relaxed(word(0), 0) == 0)
        emu_spin(1);
      emu_mbarrier_arrive(mbarrier(0));
    }
    return;
  }
  if(flaw == 11) { /* a word that somebody uses */
    if(thread() == 32) {
      store((uint32_t *)(void *)mbarrier(0) + 1, 1u);
      emu_store_relaxed(word(0), 1, 0);
    } else if(thread() == 0) {
      while(emu_load_relaxed(word(0), 0) == 0)
        emu_spin(1);
      emu_mbarrier_init(mbarrier(0), 1);
    }
    return;
  }
  make_mbarriers(2, 2);
  if(thread() != 0)
    return;
  if(flaw == 0) {
    must(!emu_mbarrier_try_wait(mbarrier(0), 0));
    must(emu_mbarrier_try_wait(mbarrier(0), 1)); /* the phase before the first counts as complete */
    emu_mbarrier_wait(mbarrier(0), 1, 1);
    emu_mbarrier_arrive(mbarrier(0));
    must(!emu_mbarrier_try_wait(mbarrier(0), 0));
    emu_copy_bulk(byte(1024), g, 128, mbarrier(0)); /* before it is announced */
    emu_pause();
    must(!emu_mbarrier_try_wait(mbarrier(0), 0));
    emu_mbarrier_arrive_expect(mbarrier(0), 256);
    emu_copy_bulk(byte(2048), g, 128, mbarrier(0)); /* and behind it */
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    must(emu_mbarrier_try_wait(mbarrier(0), 0));
    must(!emu_mbarrier_try_wait(mbarrier(0), 1));
    must(load(byte(1024)) == 0);
    must(load(byte(2048 + 124)) == 0);
  } else if(flaw == 1) {
    emu_mbarrier_arrive(mbarrier(2));
  } else if(flaw == 2) {
    emu_mbarrier_init(mbarrier(1), 2);
  } else if(flaw == 3) {
    tell(0, load((uint32_t *)(void *)mbarrier(1)));
  } else if(flaw == 4) {
    store_byte((uint8_t *)mbarrier(1) + 5, 1);
  } else if(flaw == 5) {
    emu_mbarrier_init(mbarrier(2), 0);
  } else if(flaw == 6) {
    emu_mbarrier_init(mbarrier(2), 1u << 20);
  } else if(flaw == 7) {
    emu_mbarrier_wait(mbarrier(1), 2, 1);
  } else if(flaw == 8) {
    emu_mbarrier_arrive_expect(mbarrier(1), 1u << 20);
  } else if(flaw == 9) {
    emu_mbarrier_arrive_expect(mbarrier(1), 128);
    emu_mbarrier_arrive(mbarrier(1));
    emu_mbarrier_arrive(mbarrier(1));
  } else if(flaw == 12) {
    emu_mbarrier_init((uint64_t *)(void *)byte(4), 1);
  } else if(flaw == 13) {
    emu_mbarrier_init((uint64_t *)(void *)variant_of(params)->global, 1);
  } else if(flaw == 14) {
    emu_mbarrier_arrive((uint64_t *)(void *)byte((int)SHARED_BYTES));
  } else if(flaw == 15) {
    emu_mbarrier_arrive_expect(mbarrier(1), 128);
  } else if(flaw == 16) {
    emu_mbarrier_wait(mbarrier(2), 0, 1);
  } else if(flaw == 17) {
    emu_mbarrier_try_wait(mbarrier(2), 0);
  } else if(flaw == 18) {
    emu_load_relaxed((uint32_t *)(void *)mbarrier(1), 0);
  }
}

static const struct flawed cases[] = {
    GOOD("late", stuck, 2, 2, 0),
    BAD("a lane that has ended", stuck, 1, 2, 1, EMU_DEADLOCK, "lanes fffffff7 have come, 00000008 have ended"),
    BAD("some lanes", stuck, 1, 2, 2, EMU_DEADLOCK, "the other lanes of their warp"),
    BAD("too few at a barrier", stuck, 1, 2, 3, EMU_DEADLOCK, "wait for barrier 5 (32 of 64 threads have arrived)"),
    BAD("an arrival is missing", stuck, 1, 2, 4, EMU_DEADLOCK, "wait 7 (phase 0: 1 of 2 arrivals and 0 bytes missing)"),
    BAD("bytes are missing", stuck, 1, 2, 5, EMU_DEADLOCK, "wait 7 (phase 0: 0 of 2 arrivals and 128 bytes missing)"),
    BAD("a word that nobody writes", stuck, 1, 2, 6, EMU_DEADLOCK, "32 lanes in 1 cta (first: cta 0 warp 1 lane 0)"),
    BAD("another CTA's word", stuck, 3, 2, 7, EMU_DEADLOCK, "64 lanes in 1 cta (first: cta 1 warp 0 lane 0)"),
    BAD("waiters of all kinds", stuck, 1, 2, 8, EMU_DEADLOCK, "a word to change, wait 9"),
    BAD("votes about a word that nobody writes", stuck, 1, 2, 9, EMU_DEADLOCK, "wait 9"),
    BAD("a second phase", stuck, 1, 2, 10, EMU_DEADLOCK, "parity 1 of the mbarrier at shared+0xfc00, wait 2 (phase 1"),
    BAD("polling an mbarrier", stuck, 1, 2, 11, EMU_DEADLOCK, "wait 3"),
    GOOD("looking around", looks_around, 1, 2, 0),
    BAD("looking around in vain", looks_around, 1, 2, 1, EMU_DEADLOCK, "wait 4"),
    GOOD("a shuffle in two places", parted, 1, 2, 0),
    BAD("sync_warp and shuffle", parted, 1, 2, 1, EMU_DIVERGENCE, "sync_warp"),
    BAD("vote and reduce_max", parted, 1, 2, 2, EMU_DIVERGENCE, "reduce_max"),
    BAD("sync and arrive", parted, 1, 2, 3, EMU_DIVERGENCE, "barrier_arrive"),
    BAD("fence and commit", parted, 1, 4, 4, EMU_DIVERGENCE, "wgmma_commit"),
    BAD("product and wait", parted, 1, 4, 5, EMU_DIVERGENCE, "a product"),
    BAD("sync_warp and barrier", parted, 1, 2, 6, EMU_DIVERGENCE, "sync_warp"),
    GOOD("a ring", ring, 2, 3, 0),
    BAD("a stage given back before it is read", ring, 1, 3, 1, EMU_RACE, "nothing orders them"),
    SOMETIMES("a producer that does not wait", ring, 1, 3, 2, EMU_RACE, EMU_DEADLOCK),
    SOMETIMES("consumers with the wrong parity", ring, 1, 3, 3, EMU_RACE, EMU_DEADLOCK),
    BAD("no sync_warp before the arrival", ring, 1, 3, 4, EMU_RACE, "nothing orders them"),
    SOMETIMES("a producer with the wrong parity", ring, 1, 3, 5, EMU_RACE, EMU_DEADLOCK),
    SOMETIMES("the wrong slot", ring, 1, 3, 6, EMU_DEADLOCK, EMU_RACE),
    SOMETIMES("one arrival for two consumers", ring, 1, 3, 7, EMU_RACE, EMU_DEADLOCK),
    GOOD("phase by phase", phases, 1, 2, 0),
    SOMETIMES("a phase missed", phases, 1, 2, 1, EMU_DEADLOCK, EMU_NONE),
    GOOD("what mbarriers allow", misused, 1, 2, 0),
    BAD("never initialised: arrive", misused, 1, 2, 1, EMU_BARRIER, "was never initialised"),
    BAD("initialised twice", misused, 1, 2, 2, EMU_BARRIER, "a second time"),
    BAD("an ordinary read", misused, 1, 2, 3, EMU_BARRIER, "ordinary read of the mbarrier"),
    BAD("an ordinary write", misused, 1, 2, 4, EMU_BARRIER, "ordinary write of the mbarrier"),
    BAD("no arrivals", misused, 1, 2, 5, EMU_BARRIER, "0 arrivals"),
    BAD("too many arrivals", misused, 1, 2, 6, EMU_BARRIER, "1048576 arrivals"),
    BAD("parity 2", misused, 1, 2, 7, EMU_BARRIER, "parity 2"),
    BAD("too many bytes", misused, 1, 2, 8, EMU_BARRIER, "1048576 bytes under way"),
    BAD("one arrival more", misused, 1, 2, 9, EMU_BARRIER, "one arrival more than its 2 per phase"),
    BAD("used without order", misused, 1, 2, 10, EMU_RACE, "behind its initialisation"),
    BAD("made of a word in use", misused, 1, 2, 11, EMU_RACE, "nothing orders them"),
    BAD("not aligned", misused, 1, 2, 12, EMU_BOUNDS, "not aligned to 8 bytes"),
    BAD("in global memory", misused, 1, 2, 13, EMU_BOUNDS, "outside the CTA's"),
    BAD("behind shared memory", misused, 1, 2, 14, EMU_BOUNDS, "outside the CTA's"),
    BAD("bytes that never come", misused, 1, 2, 15, EMU_UNFINISHED, "128 bytes missing on the mbarrier at shared+0xfc08"),
    BAD("never initialised: wait", misused, 1, 2, 16, EMU_BARRIER, "was never initialised"),
    BAD("never initialised: poll", misused, 1, 2, 17, EMU_BARRIER, "was never initialised"),
    BAD("a scoped read", misused, 1, 2, 18, EMU_BARRIER, "the mbarrier at shared"),
};

START_TEST(waits)
{
  expect_flawed(&cases[_i]);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_wait");
  TCase *table = tcase_create("waits"), *texts = tcase_create("texts");
  tcase_add_loop_test(table, waits, 0, NUMBER(cases));
  tcase_add_test(texts, a_deadlock_names_the_place);
  tcase_add_test(texts, a_deadlock_in_many_places);
  suite_add_tcase(suite, table);
  suite_add_tcase(suite, texts);
  return run_suite(suite);
}
