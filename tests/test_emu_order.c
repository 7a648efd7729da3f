/* test_emu_order.c - what orders accesses on the emulated machine and what does not: barriers, warps, words that hand over, mbarrier phases; what is
 * remembered of words, bytes and ranges. A race must be found under every seed, whichever access comes first. */
#include "emu_core_fixture.h"

/* ---- barriers of the CTA ---- */

static void set_words(int count)
{
  for(int i = thread(); i < count; i += 64)
    if(thread() < 64)
      store(word(i), 1u);
  sync_cta();
}

static void handover(void **params)
{
  set_words(64);
  store(word(thread()), 2u + (uint32_t)thread());
  if(variant_of(params)->flaw != 1)
    sync_cta();
  tell(0, load(word((thread() + 33) % 64)));
}

/* Warp 0 writes, warp 1 reads, in turns. */
static void named_turns(void **params)
{
  const int flaw = variant_of(params)->flaw;
  set_words(64);
  for(uint32_t round = 0; round < (flaw == 1 ? 3 : 4); round++) {
    if(warp() == 0) {
      store(word(lane()), round);
      emu_barrier_arrive(1, 64);
      if(flaw != 1 || round != 2)
        emu_barrier_sync(2, 64);
    } else {
      if(flaw == 2 && round == 1)
        tell(0, load(word(lane() ^ 1)));
      emu_barrier_sync(1, 64);
      must(load(word(lane() ^ 1)) == round || flaw != 0);
      if(flaw != 1 || round != 2)
        emu_barrier_arrive(2, 64);
    }
  }
  if(flaw == 1 && warp() == 0)
    store(word(lane()), 3u);
}

static void bad_barriers(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(flaw == 1 && warp() < 2) {
    emu_barrier_sync(3, warp() == 1 ? 96 : 64);
  } else if(flaw == 2 && warp() == 0) {
    emu_barrier_arrive(3, 96);
    emu_barrier_arrive(3, 96);
  } else if(flaw == 3 && warp() == 0) {
    emu_barrier_arrive(4, 64);
  } else if(flaw == 4) {
    emu_barrier_sync(16, 96);
  } else if(flaw == 5) {
    emu_barrier_sync(-1, 96);
  } else if(flaw == 6) {
    emu_barrier_sync(1, 48);
  } else if(flaw == 7) {
    emu_barrier_sync(1, 0);
  } else if(flaw == 8) {
    emu_barrier_sync(1, 128);
  } else if(flaw == 9) {
    emu_barrier_sync(lane() == 7 ? 2 : 1, 96);
  } else if(flaw == 10) {
    emu_barrier_sync(1, lane() == 7 ? 64 : 96);
  } else if(flaw == 0) {
    for(int i = 0; i < 50; i++) {
      if(warp() == i % 3)
        emu_barrier_arrive(1 + i % 15, 96);
      else
        emu_barrier_sync(1 + i % 15, 96);
      sync_cta();
    }
  }
}

/* ---- within a warp ---- */

static void within_warp(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(lane() == 0)
    store(word(0), 5u);
  if(flaw == 0)
    emu_sync_warp();
  else if(flaw == 1)
    emu_shuffle(0, 0);
  else if(flaw == 2)
    emu_ballot(1);
  else if(flaw == 3)
    emu_reduce_max(1);
  if(flaw == 4) {
    emu_sync_warp();
    if(lane() == 0)
      store(word(0), 6u);
    emu_shuffle(0, 0);
  }
  if(lane() == 1)
    tell(0, load(word(0)));
}

/* Lane 1 of warp 0 uses a word, lane 0 gives it away, warp 1 writes. Even flaws are none. */
static void reader_of_a_warp(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() == 1)
    store(word(0), 5u);
  make_mbarriers(1, 1);
  if(warp() == 0) {
    if(lane() == 1 && flaw != 3 && flaw != 5)
      tell(0, load(word(0)));
    if(lane() == 1 && flaw == 3)
      store(word(0), 6u);
    if(flaw == 0 || flaw == 3 || flaw == 5)
      emu_shuffle(0, 0);
    else if(flaw == 2)
      emu_ballot(1);
    else if(flaw == 4)
      emu_reduce_max(1);
    if(lane() == 1 && flaw == 5)
      tell(0, load(word(0)));
    if(lane() == 0)
      emu_mbarrier_arrive(mbarrier(0));
  } else {
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    if(lane() == 0)
      store(word(0), 7u);
  }
}

/* ---- words that hand over ---- */

static void await_word(int index, uint32_t value, int acquire)
{
  while(emu_load_relaxed(word(index), acquire) != value)
    emu_spin(1);
}

static void flag(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() == 0) {
    store(word(0), 1u);
    store(word(1), 0u);
  }
  sync_cta();
  if(thread() == 0) {
    store(word(0), 7u);
    if(flaw == 3)
      store(word(1), 1u);
    else
      emu_store_relaxed(word(1), 1, flaw != 1);
  } else if(thread() == 32) {
    await_word(1, 1, flaw != 2);
    tell(0, load(word(0)));
  }
}

/* Thread 32 carries the flag on. */
static void release_sequence(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() == 0) {
    store(word(0), 1u);
    store(word(1), 0u);
    if(flaw == 4)
      store_byte(byte(5), 0);
  }
  sync_cta();
  if(thread() == 0) {
    store(word(0), 7u);
    emu_store_relaxed(word(1), 1, 1);
  } else if(thread() == 32) {
    await_word(1, 1, flaw == 2);
    if(flaw == 0)
      emu_add(word(1), 1);
    else if(flaw == 3)
      emu_or(word(1), 2);
    else if(flaw == 1 || flaw == 4)
      emu_store_relaxed(word(1), 2, 0);
    else
      store(word(1), 2u);
  } else if(thread() == 64) {
    await_word(1, flaw == 3 ? 3 : 2, 0); /* an acquire of what came before would do, too */
    emu_load_relaxed(word(1), 1);
    tell(0, load(word(0)));
  }
}

/* ---- what is behind a release, or of another one ---- */

static void tell_all(void)
{
  emu_store_relaxed(word(3), 1, 0);
}

static void be_told(void)
{
  while(emu_load_relaxed(word(3), 0) == 0)
    emu_spin(1);
}

/* Warp 0 gives something away and then writes; warp 1 knows only that it has. Flaw 0 .. 3: by what; + 8: the write comes first. */
static void behind_a_release(void **params)
{
  const int way = variant_of(params)->flaw & 7;
  const bool good = (variant_of(params)->flaw & 8) != 0;
  if(thread() < 8)
    store(word(thread()), 0u);
  make_mbarriers(1, way == 0 ? 1 : 32);
  if(warp() == 0) {
    if(good && lane() == 0)
      store(word(0), 1u);
    if(way == 0 && lane() == 0)
      emu_mbarrier_arrive(mbarrier(0));
    else if(way == 1 && lane() == 0)
      emu_store_relaxed(word(1), 1, 1);
    else if(way == 2)
      emu_barrier_arrive(1, 64);
    else if(way == 3)
      emu_mbarrier_arrive_expect(mbarrier(0), 0);
    if(!good && lane() == 0)
      store(word(0), 1u);
    if(lane() == 0)
      tell_all();
  } else {
    be_told();
    if(way == 0 || way == 3)
      emu_mbarrier_wait(mbarrier(0), 0, 1);
    else if(way == 1)
      emu_load_relaxed(word(1), 1);
    else
      emu_barrier_sync(1, 64);
    tell(0, load(word(0)));
  }
}

/* Warps 2 and 3 use a barrier that warps 0 and 1 have used before. That tells warp 3 nothing of warp 0. */
static void used_before(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() < 8)
    store(word(thread()), 0u);
  sync_cta();
  if(warp() == 0) {
    if(lane() == 0)
      store(word(0), 1u);
    emu_barrier_arrive(1, 64);
  } else if(warp() == 1) {
    emu_barrier_sync(1, 64);
    if(lane() == 0)
      tell_all();
  } else {
    be_told();
    if(warp() == 2)
      emu_barrier_arrive(1, 64);
    else
      emu_barrier_sync(1, 64);
    if(warp() == 3 && flaw == 1)
      tell(0, load(word(0)));
  }
}

/* Phase 0 is complete; warp 1 has arrived in phase 1, which is not. Warp 2 waits for phase 0 and so has heard of warp 0 only. */
static void phase_under_way(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() < 8)
    store(word(thread()), 0u);
  make_mbarriers(1, 2);
  if(thread() == 0) {
    store(word(0), 1u);
    emu_mbarrier_arrive(mbarrier(0));
    emu_mbarrier_arrive(mbarrier(0));
  } else if(thread() == 32) {
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    store(word(1), 1u);
    emu_mbarrier_arrive(mbarrier(0));
    tell_all();
  } else if(thread() == 64) {
    be_told();
    if(flaw != 2)
      emu_mbarrier_wait(mbarrier(0), 0, 1);
    else
      must(emu_mbarrier_try_wait(mbarrier(0), 0));
    tell(0, load(word(flaw == 0 ? 0 : 1)));
  }
}

/* ---- words, bytes, ranges ---- */

struct piece {
  int at, bytes;
  bool write;
};

static void touch(struct piece p)
{
  if(p.bytes == 1 && p.write)
    __tsan_write1(byte(p.at));
  else if(p.bytes == 1)
    __tsan_read1(byte(p.at));
  else if(p.bytes == 4 && p.at % 4 == 0 && p.write)
    __tsan_write4(byte(p.at));
  else if(p.bytes == 4 && p.at % 4 == 0)
    __tsan_read4(byte(p.at));
  else if(p.bytes == 16 && p.at % 16 == 0 && p.write)
    __tsan_write16(byte(p.at));
  else if(p.write)
    __tsan_write_range(byte(p.at), (unsigned long)p.bytes);
  else
    __tsan_read_range(byte(p.at), (unsigned long)p.bytes);
}

/* What threads 0 and 32 do without any order. */
static const struct pair {
  struct piece one, other;
  bool race;
} pairs[] = {
    {{0, 1, true}, {1, 1, true}, false},      {{0, 1, true}, {0, 1, true}, true},       {{0, 1, true}, {0, 1, false}, true},
    {{0, 1, false}, {0, 1, false}, false},    {{0, 4, true}, {3, 1, true}, true},       {{0, 4, true}, {3, 1, false}, true},
    {{0, 4, false}, {3, 1, true}, true},      {{0, 4, true}, {4, 4, true}, false},      {{0, 2, true}, {2, 2, true}, false},
    {{0, 2, false}, {1, 1, true}, true},      {{3, 2, true}, {4, 1, true}, true},       {{3, 2, true}, {5, 1, true}, false},
    {{3, 2, true}, {2, 1, true}, false},      {{0, 16, true}, {12, 4, false}, true},    {{0, 16, true}, {15, 1, false}, true},
    {{0, 16, true}, {16, 4, true}, false},    {{126, 4, true}, {129, 1, false}, true},  {{126, 4, true}, {126, 1, true}, true},
    {{126, 4, true}, {125, 1, true}, false},  {{126, 4, true}, {130, 1, true}, false},  {{6, 300, true}, {305, 1, false}, true},
    {{6, 300, true}, {306, 1, true}, false},  {{6, 300, true}, {5, 1, true}, false},    {{6, 300, false}, {128, 4, true}, true},
    {{6, 300, true}, {256, 4, false}, true},  {{6, 300, false}, {7, 290, false}, false}, {{0, 4, true}, {0, 300, false}, true},
    {{127, 1, true}, {128, 1, true}, false},
};

static void pair_of_pieces(void **params)
{
  const struct pair *p = &pairs[variant_of(params)->flaw];
  if(thread() < 64)
    for(int i = thread(); i < 512; i += 64)
      store(word(i), 0u);
  sync_cta();
  if(thread() == 0)
    touch(p->one);
  if(thread() == 32)
    touch(p->other);
}

/* Warps 0, 1 and 2 use a word, then warp 3, which has heard from two of them. Flaw: 1 + the warp that it has not heard from, + 4: bytes; + 8: word and
 * bytes; + 16: before that all had used it in order. */
static void many_readers(void **params)
{
  const int flaw = variant_of(params)->flaw, left_out = (flaw & 3) - 1;
  if(thread() == 0)
    store(word(0), 0u);
  sync_cta();
  if(flaw & 16) {
    tell(0, load(word(0)));
    tell(0, load_byte(byte(3)));
    sync_cta();
  }
  if(warp() < 3) {
    if(lane() == 0 && ((flaw & 4) || ((flaw & 8) && warp() == 1)))
      tell(0, load_byte(byte(2)));
    else if(lane() == 0)
      tell(0, load(word(0)));
    if(warp() == left_out)
      emu_barrier_sync(2, 32);
    else
      emu_barrier_arrive(1, left_out >= 0 ? 96 : 128);
  } else {
    emu_barrier_sync(1, left_out >= 0 ? 96 : 128);
    if(lane() == 0 && (flaw & 4))
      store_byte(byte(2), 1);
    else if(lane() == 0)
      store(word(0), 1u);
  }
}

/* Warps 0 and 1 read a word. Warp 2 has heard of that and writes one of its bytes; warp 3 has not and writes another. In between two lanes read another
 * word. */
static void readers_of_bytes(void **params)
{
  (void)params;
  if(thread() < 4)
    store(word(thread()), 0u);
  sync_cta();
  if(warp() < 2) {
    if(lane() == 0)
      tell(0, load(word(0)));
    emu_barrier_arrive(1, 96);
  } else if(warp() == 2) {
    emu_barrier_sync(1, 96);
    if(lane() == 0)
      store_byte(byte(0), 1);
    emu_shuffle(0, 0);
    if(lane() < 2)
      tell(0, load(word(2)));
    emu_shuffle(0, 0);
    if(lane() == 0)
      emu_store_relaxed(word(3), 1, 0);
  } else if(lane() == 0) {
    while(emu_load_relaxed(word(3), 0) == 0)
      emu_spin(1);
    store_byte(byte(1), 1);
  }
}

/* Scoped accesses against ordinary ones by others. */
static void scoped_and_not(void **params)
{
  const int flaw = variant_of(params)->flaw;
  if(thread() == 0)
    store(word(0), 0u);
  sync_cta();
  if(thread() == 0) {
    if(flaw == 0 || flaw == 2)
      emu_add(word(0), 1);
    else if(flaw == 1)
      tell(0, load(word(0)));
    else
      store(word(0), 1u);
  } else if(thread() == 32) {
    if(flaw == 0)
      emu_or(word(0), 6);
    else if(flaw == 1)
      emu_store_relaxed(word(0), 1, 0);
    else if(flaw == 2)
      tell(0, load(word(0)));
    else
      tell(0, emu_load_relaxed(word(0), 1));
  }
}

/* ---- */

static const struct flawed cases[] = {
    GOOD("a barrier", handover, 1, 2, 0),
    BAD("no barrier", handover, 1, 2, 1, EMU_RACE, "nothing orders them"),
    GOOD("turns", named_turns, 1, 2, 0),
    BAD("turns, one way only", named_turns, 1, 2, 1, EMU_RACE, "nothing orders them"),
    BAD("turns, read too early", named_turns, 1, 2, 2, EMU_RACE, "nothing orders them"),
    GOOD("barriers again and again", bad_barriers, 1, 3, 0),
    BAD("counts that differ", bad_barriers, 1, 3, 1, EMU_BARRIER, "are expected"),
    BAD("a warp comes twice", bad_barriers, 1, 3, 2, EMU_BARRIER, "a second time"),
    BAD("nobody else came", bad_barriers, 1, 3, 3, EMU_UNFINISHED, "32 of 64 threads at barrier 4"),
    BAD("barrier 16", bad_barriers, 1, 3, 4, EMU_BARRIER, "barriers 0 to 15"),
    BAD("barrier -1", bad_barriers, 1, 3, 5, EMU_BARRIER, "barriers 0 to 15"),
    BAD("48 threads", bad_barriers, 1, 3, 6, EMU_BARRIER, "whole warps"),
    BAD("no threads", bad_barriers, 1, 3, 7, EMU_BARRIER, "whole warps"),
    BAD("more than the CTA", bad_barriers, 1, 3, 8, EMU_BARRIER, "96 threads"),
    BAD("lanes at two barriers", bad_barriers, 1, 3, 9, EMU_DIVERGENCE, "different barriers or counts"),
    BAD("lanes with two counts", bad_barriers, 1, 3, 10, EMU_DIVERGENCE, "different barriers or counts"),
    GOOD("sync_warp", within_warp, 1, 1, 0),
    BAD("a shuffle orders no write", within_warp, 1, 1, 1, EMU_RACE, "nothing orders them"),
    BAD("a vote orders no write", within_warp, 1, 1, 2, EMU_RACE, "nothing orders them"),
    BAD("reduce_max orders no write", within_warp, 1, 1, 3, EMU_RACE, "nothing orders them"),
    BAD("sync_warp, write, shuffle", within_warp, 1, 1, 4, EMU_RACE, "nothing orders them"),
    GOOD("read, shuffle, release", reader_of_a_warp, 1, 2, 0),
    GOOD("read, vote, release", reader_of_a_warp, 1, 2, 2),
    GOOD("read, reduce_max, release", reader_of_a_warp, 1, 2, 4),
    BAD("read, no shuffle, release", reader_of_a_warp, 1, 2, 1, EMU_RACE, "nothing orders them"),
    BAD("write, shuffle, release", reader_of_a_warp, 1, 2, 3, EMU_RACE, "nothing orders them"),
    BAD("shuffle, read, release", reader_of_a_warp, 1, 2, 5, EMU_RACE, "nothing orders them"),
    GOOD("release and acquire", flag, 1, 2, 0),
    BAD("relaxed store", flag, 1, 2, 1, EMU_RACE, "nothing orders them"),
    BAD("relaxed load", flag, 1, 2, 2, EMU_RACE, "nothing orders them"),
    BAD("ordinary flag", flag, 1, 2, 3, EMU_RACE, "nothing orders them"),
    GOOD("an addition carries a release on", release_sequence, 1, 3, 0),
    GOOD("an or carries a release on", release_sequence, 1, 3, 3),
    BAD("a store ends a release", release_sequence, 1, 3, 1, EMU_RACE, "nothing orders them"),
    BAD("a store ends a release, of a word used in bytes before", release_sequence, 1, 3, 4, EMU_RACE, "nothing orders them"),
    BAD("an ordinary store of a flag", release_sequence, 1, 3, 2, EMU_RACE, "nothing orders them"),
    BAD("write behind an arrival", behind_a_release, 1, 2, 0, EMU_RACE, "nothing orders them"),
    BAD("write behind a release store", behind_a_release, 1, 2, 1, EMU_RACE, "nothing orders them"),
    BAD("write behind barrier_arrive", behind_a_release, 1, 2, 2, EMU_RACE, "nothing orders them"),
    BAD("write behind arrivals of all lanes", behind_a_release, 1, 2, 3, EMU_RACE, "nothing orders them"),
    GOOD("write, arrival", behind_a_release, 1, 2, 8),
    GOOD("write, release store", behind_a_release, 1, 2, 9),
    GOOD("write, barrier_arrive", behind_a_release, 1, 2, 10),
    GOOD("write, arrivals of all lanes", behind_a_release, 1, 2, 11),
    GOOD("a barrier used before", used_before, 1, 4, 0),
    BAD("a barrier that others used before", used_before, 1, 4, 1, EMU_RACE, "nothing orders them"),
    GOOD("a complete phase", phase_under_way, 1, 3, 0),
    BAD("a phase under way", phase_under_way, 1, 3, 1, EMU_RACE, "nothing orders them"),
    BAD("a phase under way, polling", phase_under_way, 1, 3, 2, EMU_RACE, "nothing orders them"),
    BAD("bytes of a word that several read", readers_of_bytes, 1, 4, 0, EMU_RACE, "an earlier read by warp 0 lane 0"),
    GOOD("scoped updates", scoped_and_not, 1, 2, 0),
    BAD("read and scoped store", scoped_and_not, 1, 2, 1, EMU_RACE, "nothing orders them"),
    BAD("scoped update and read", scoped_and_not, 1, 2, 2, EMU_RACE, "nothing orders them"),
    SOMETIMES("store and scoped load", scoped_and_not, 1, 2, 3, EMU_RACE, EMU_NONE),
};

START_TEST(order)
{
  expect_flawed(&cases[_i]);
}
END_TEST

START_TEST(pieces)
{
  const struct grid grid = {pair_of_pieces, 1, 2};
  subject = "pair of pieces";
  expect(grid, _i, pairs[_i].race ? EMU_RACE : EMU_NONE);
}
END_TEST

START_TEST(readers)
{
  const struct grid grid = {many_readers, 1, 4};
  const struct emu_finding found = expect(grid, _i, (_i & 3) != 0 ? EMU_RACE : EMU_NONE);
  char who[32];
  snprintf(who, sizeof(who), "warp %d lane 0 at", (_i & 3) - 1);
  if((_i & 3) != 0 && !(found.warp == (_i & 3) - 1))
    expect_text(found, who);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_order");
  TCase *ordered = tcase_create("order"), *shadow = tcase_create("shadow");
  tcase_add_loop_test(ordered, order, 0, NUMBER(cases));
  tcase_add_loop_test(shadow, pieces, 0, NUMBER(pairs));
  tcase_add_loop_test(shadow, readers, 0, 32);
  suite_add_tcase(suite, ordered);
  suite_add_tcase(suite, shadow);
  return run_suite(suite);
}
