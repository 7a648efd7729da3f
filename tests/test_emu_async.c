/* test_emu_async.c - copies on the emulated machine: bulk and tensor copies through the async proxy, cp.async. What they bring, who must wait for them
 * and how, and what they may be sent over. */
#include "emu_core_fixture.h"
#include "tensor.h"

static void fill_global(void)
{
  for(uint32_t i = 0; i < GLOBAL_WORDS; i++)
    variant.global[i] = i * 2654435761u;
}

/* ---- bulk copies ---- */

#define AT 1024    /* where the copies go */
#define BYTES 512

static void send(const uint32_t *from, uint64_t *bar)
{
  emu_mbarrier_arrive_expect(bar, BYTES);
  emu_copy_bulk(byte(AT), from, BYTES, bar);
}

static void check_received(const uint32_t *from)
{
  for(int i = 0; i < BYTES / 4; i++) {
    const uint32_t got = load(word(AT / 4 + i));
    must(got == from[i]);
  }
}

static void bulk(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  make_mbarriers(2, 1);
  if(thread() == 0)
    send(g, mbarrier(0));
  sync_cta(); /* it is under way */
  if(flaw == 1 && warp() == 1) { /* waits for another one's barrier */
    if(lane() == 0)
      emu_mbarrier_arrive(mbarrier(1));
    emu_mbarrier_wait(mbarrier(1), 0, 1);
  } else if(flaw == 2) { /* only one lane waits, and nothing hands that on */
    if(lane() == 0)
      emu_mbarrier_wait(mbarrier(0), 0, 1);
    emu_shuffle(0, 0);
  } else if(flaw == 3) {
    if(lane() == 0)
      emu_mbarrier_wait(mbarrier(0), 0, 1);
    emu_sync_warp();
  } else if(flaw == 4) { /* a write, not waiting */
    store(word(AT / 4 + thread()), 1u);
    return;
  } else if(flaw == 5) {
    emu_load_relaxed(word(AT / 4), 0);
  } else if(flaw == 6) {
    while(!emu_mbarrier_try_wait(mbarrier(0), 0))
      emu_spin(1);
  } else {
    emu_mbarrier_wait(mbarrier(0), 0, 1);
  }
  check_received(g);
}

/* Copy after copy to one place, each waited for; readers give the place back by mbarrier 1. */
static void in_turns(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  if(thread() == 0) {
    emu_mbarrier_init(mbarrier(0), 1);
    emu_mbarrier_init(mbarrier(1), 2);
    emu_mbarrier_init_fence();
  }
  sync_cta();
  if(warp() == 0) {
    for(uint32_t i = 0; lane() == 0 && i < 5; i++) {
      if(i > 0)
        emu_mbarrier_wait(mbarrier(1), (i - 1) & 1, 1);
      send(&g[128 * i], mbarrier(0));
    }
    return;
  }
  for(uint32_t i = 0; i < 5; i++) {
    emu_mbarrier_wait(mbarrier(0), i & 1, 2);
    if(flaw == 1 && warp() == 2) {
      if(lane() == 0)
        emu_mbarrier_arrive(mbarrier(1));
      if(i == 0)
        tell(0, load(word(AT / 4)));
      continue;
    }
    if(flaw == 5)
      emu_fence_async_proxy(); /* too early */
    check_received(&g[128 * i]);
    if(flaw != 3 && flaw != 5 && !(flaw == 4 && thread() == 71))
      emu_fence_async_proxy();
    if(flaw != 2)
      emu_sync_warp();
    if(lane() == 0)
      emu_mbarrier_arrive(mbarrier(1));
  }
}

/* Words that may be in no order with who wrote them come out marked. */
static void unordered(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t got[2];
  make_mbarriers(1, 1);
  if(thread() == 0) {
    send(variant_of(params)->global, mbarrier(0));
    store(word(8), 1u);
    store_byte(byte(39), 1);
  }
  if(flaw != 3 && flaw != 4)
    sync_cta();
  if(flaw == 0 || flaw == 1)
    emu_mbarrier_wait(mbarrier(0), 0, 1);
  if(flaw == 3 || flaw == 4) { /* lane 0 has stored them by now */
    emu_shuffle(0, 0);
    emu_load_unordered(word(8), got, 2);
  } else {
    emu_load_unordered(word(AT / 4 + 2), got, 2);
  }
  if(flaw == 0)
    must(got[0] == variant_of(params)->global[2] && got[1] == variant_of(params)->global[3]);
  if(flaw == 2 || flaw == 3 || flaw == 4)
    if(lane() == 5)
      emu_tainted(got[flaw == 4]);
}

/* What a copy meets at its destination. */
static void over(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  if(thread() == 0)
    store(word(0), 0u);
  make_mbarriers(2, 1);
  if(thread() == 40) {
    store(word(AT / 4 + 7), 1u);
    if(flaw == 0 || flaw == 3 || flaw == 5 || flaw == 6 || flaw == 7 || flaw == 8 || flaw == 9)
      emu_fence_async_proxy();
    if(flaw == 7)
      store(word(AT / 4 + 7), 2u);
    if(flaw == 9)
      store_byte(byte(AT + 511), 2);
    if(flaw == 3)
      emu_store_relaxed(word(0), 1, 0);
  } else if(thread() == 41) {
    emu_fence_async_proxy(); /* no help */
  }
  if(flaw == 3) {
    while(thread() == 0 && emu_load_relaxed(word(0), 0) == 0)
      emu_spin(1);
  } else {
    sync_cta();
  }
  if(flaw == 5 && thread() == 40) { /* a read that nothing orders */
    tell(0, load(word(AT / 4 + 7)));
    emu_store_relaxed(word(0), 1, 0);
  }
  if(flaw == 5 && thread() == 0)
    while(emu_load_relaxed(word(0), 0) == 0)
      emu_spin(1);
  if(flaw == 10 && thread() == 40) { /* the fence comes too late */
    emu_fence_async_proxy();
    emu_store_relaxed(word(0), 1, 0);
  }
  if(flaw == 10 && thread() == 0)
    while(emu_load_relaxed(word(0), 0) == 0)
      emu_spin(1);
  if(flaw == 6 && thread() == 40) { /* a word beside it, in use */
    store(word(AT / 4 - 1), 1u);
    tell(0, load(word(AT / 4 - 1)));
  }
  if(flaw == 2 && thread() == 0)
    emu_fence_async_proxy(); /* of the issuing thread: no help, either */
  if(thread() == 0) {
    send(g, mbarrier(0));
    if(flaw == 8)
      send(g, mbarrier(1));
  }
  emu_mbarrier_wait(mbarrier(0), 0, 2);
  if(flaw == 8)
    emu_mbarrier_wait(mbarrier(1), 0, 2);
  check_received(g);
}

/* One copy is never waited for. So many others come behind it that its number is used again. */
static void forgotten(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  make_mbarriers(2, 1);
  if(thread() != 0)
    return;
  emu_mbarrier_arrive_expect(mbarrier(1), 128);
  emu_copy_bulk(byte(128), g, 128, mbarrier(1));
  for(uint32_t i = 0; i < 200; i++) {
    send(g, mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), i & 1, 1);
  }
  if(flaw == 0)
    emu_mbarrier_wait(mbarrier(1), 0, 1);
  tell(0, load(word(32)));
}

/* More copies at once than there are numbers for, in two CTAs. */
static void many(void **params)
{
  const int flaw = variant_of(params)->flaw, count = flaw == 0 ? 64 : 65;
  const uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 1);
  if(thread() != 0)
    return;
  emu_mbarrier_arrive_expect(mbarrier(0), (uint32_t)(128 * count));
  for(int i = 0; i < count; i++)
    emu_copy_bulk(byte(128 * i), &g[32 * i], 128, mbarrier(0));
  emu_mbarrier_wait(mbarrier(0), 0, 1);
  for(int i = 0; i < 32 * count; i++)
    must(load(word(i)) == g[i]);
}

static void bad_bulk(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  if(thread() == 0) {
    emu_mbarrier_init(mbarrier(0), 1);
    if(flaw != 1)
      emu_mbarrier_init_fence();
  }
  sync_cta();
  if(flaw == 2 && thread() == 32)
    emu_copy_bulk(byte(AT), g, 128, mbarrier(1));
  if(thread() != 0)
    return;
  if(flaw == 1)
    send(g, mbarrier(0));
  else if(flaw == 3)
    emu_copy_bulk(byte(AT), g + GLOBAL_WORDS - 31, 128, mbarrier(0));
  else if(flaw == 4)
    emu_copy_bulk(byte(AT), g, 100, mbarrier(0));
  else if(flaw == 5)
    emu_copy_bulk(byte(AT), g, 0, mbarrier(0));
  else if(flaw == 6)
    emu_copy_bulk(byte(AT + 64), g, 128, mbarrier(0));
  else if(flaw == 7)
    emu_copy_bulk(byte((int)SHARED_BYTES - 128), g, 256, mbarrier(0));
  else if(flaw == 8)
    emu_copy_bulk(mbarrier(0), g, 128, mbarrier(0));
  else if(flaw == 9)
    emu_copy_bulk(byte(AT), byte(0), 128, mbarrier(0));
  else if(flaw == 10)
    emu_copy_bulk((void *)(uintptr_t)g, g, 128, mbarrier(0));
  else if(flaw == 11) /* ends before it has landed, or leaves bytes that nobody announced */
    emu_copy_bulk(byte(AT), g, 128, mbarrier(0));
  else if(flaw == 12)
    send(g, mbarrier(0));
}

/* The words that a copy reads were written in this launch. */
static void written_source(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 1);
  if(flaw == 0 && thread() == 40)
    store(&g[200], 1u); /* beside it */
  if(flaw == 1 && emu_self->cta == 1 && thread() == 0)
    store(&g[100], 1u);
  if(flaw == 1 && emu_self->cta == 1)
    return;
  if(flaw == 1) /* at least under some seeds the other one comes first */
    for(int i = 0; i < 20; i++)
      emu_pause();
  if(flaw == 2 && thread() == 40)
    store(&g[100], 1u);
  if(flaw != 2)
    sync_cta();
  if(thread() == 0) {
    if(flaw == 2)
      for(int i = 0; i < 20; i++)
        emu_pause();
    send(g, mbarrier(0));
  }
  emu_mbarrier_wait(mbarrier(0), 0, 1);
}

/* ---- tensor copies ---- */

/* A tensor of 40 rows of 200 bytes, 256 apart, in boxes of 64 bytes x 8 rows, 64-byte swizzle. */
static struct emu_tensor_map map_of(const uint32_t *global)
{
  return (struct emu_tensor_map){.base = (const uint8_t *)global, .rank = 2, .swizzle = 64, .dim = {200, 40}, .stride = {256}, .box = {64, 8}};
}

static void tensor(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const int32_t x = flaw == 1 ? 160 : flaw == 2 ? -32 : flaw == 4 ? 400 : 64, y = flaw == 2 ? 36 : flaw == 3 ? 60 : 8;
  const int32_t at[2] = {x, y};
  const uint8_t *g = (const uint8_t *)variant_of(params)->global;
  make_mbarriers(1, 1);
  if(thread() == 0) {
    emu_mbarrier_arrive_expect(mbarrier(0), 64 * 8);
    emu_copy_tensor(byte(AT), variant_of(params)->map, flaw == 10 ? 3 : 2, at, mbarrier(0));
  }
  sync_cta();
  if(flaw != 11)
    emu_mbarrier_wait(mbarrier(0), 0, 1);
  for(int row = 0; row < 8; row++) {
    for(int column = lane(); column < 64; column += 32) {
      const int chunk = column / 16 ^ (row / 2 & 3), gx = x + column, gy = y + row; /* address bits 7 and 8 into 4 and 5 */
      const uint8_t got = load_byte(byte(AT + row * 64 + chunk * 16 + column % 16));
      must(got == (gx < 0 || gx >= 200 || gy < 0 || gy >= 40 ? 0 : g[gy * 256 + gx]));
    }
  }
}

static const struct {
  int flaw;
  enum emu_finding_kind kind;
  const char *text;
} tensors[] = {
    {0, EMU_NONE, NULL},  {1, EMU_NONE, NULL},
    {2, EMU_NONE, NULL},  {3, EMU_NONE, NULL},
    {4, EMU_NONE, NULL},  {10, EMU_UNSUPPORTED, "none of rank 3"},
    {11, EMU_RACE, "completion was not waited for"},
    {12, EMU_UNSUPPORTED, "none of rank 2"},
    {13, EMU_BOUNDS, "tensor copy of"},
    {14, EMU_BOUNDS, "tensor copy of"},
};

START_TEST(tensor_copies)
{
  static _Alignas(64) uint8_t coded[EMU_TENSOR_MAP_BYTES];
  struct emu_tensor_map map = map_of(make_global());
  const int flaw = tensors[_i].flaw;
  fill_global();
  if(flaw == 13)
    map.base = (const uint8_t *)(variant.global + GLOBAL_WORDS) - 1024;
  if(flaw == 14)
    map.base -= 3072;
  emu_tensor_map_encode(&map, coded);
  if(flaw == 12)
    coded[30] ^= 1;
  variant.map = coded;
  const struct emu_finding found = expect((struct grid){tensor, 1, 1}, flaw, tensors[_i].kind);
  if(tensors[_i].text != NULL)
    expect_text(found, tensors[_i].text);
  free_global();
}
END_TEST

/* ---- cp.async ---- */

static void cp_async(void **params)
{
  const int flaw = variant_of(params)->flaw, other = thread() ^ 1;
  uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 64);
  emu_copy_async(word(4 * thread()), &g[4 * thread()], 16);
  if(flaw == 2)
    emu_copy_async(word(4 * thread() + 2), &g[1024], 4);
  if(flaw == 3)
    store(word(4 * thread()), 1u);
  if(flaw != 1)
    emu_copy_async_wait();
  must(load(word(4 * thread() + 3)) == g[4 * thread() + 3]);
  if(flaw == 4)
    emu_shuffle(0, 0);
  else
    emu_sync_warp();
  must(load(word(4 * other)) == g[4 * other]);
  emu_sync_warp();
  emu_copy_async(word(4 * thread()), &g[1024 + 4 * thread()], 16); /* over what was read */
  if(flaw != 6)
    emu_copy_async_wait();
  else
    tell(0, load(word(4 * thread())));
  emu_copy_async(word(1024 + thread()), &g[thread()], 4);
  emu_copy_async(word(2048 + 2 * thread()), &g[2 * thread()], 8);
  emu_copy_async_wait();
  must(load(word(4 * thread())) == g[1024 + 4 * thread()]);
  must(load(word(1024 + thread())) == g[thread()] && load(word(2048 + 2 * thread() + 1)) == g[2 * thread() + 1]);
}

/* Warp 0 copies, warp 1 waits for the mbarrier. */
static void cp_async_arrives(void **params)
{
  const int flaw = variant_of(params)->flaw;
  const uint32_t *g = variant_of(params)->global;
  make_mbarriers(1, 32);
  for(uint32_t round = 0; round < 3; round++) {
    const uint32_t *from = &g[64 * round];
    if(warp() == 0) {
      if(flaw != 2 || round != 2)
        emu_copy_async(word(lane()), &from[lane()], 4);
      if(flaw == 1)
        emu_mbarrier_arrive(mbarrier(0));
      else
        emu_copy_async_arrive(mbarrier(0));
      if(flaw == 2 && round == 2)
        emu_copy_async(word(lane()), &from[lane()], 4);
      if(flaw == 3)
        emu_barrier_arrive(1, 64);
    } else {
      if(flaw == 3)
        emu_barrier_sync(1, 64);
      else
        emu_mbarrier_wait(mbarrier(0), round & 1, 1);
      const uint32_t got = load(word(lane() ^ 1));
      must(flaw != 0 || got == from[lane() ^ 1]);
    }
    if(flaw != 4)
      sync_cta();
  }
  if(flaw == 2 && warp() == 0)
    emu_copy_async_wait();
}

static void bad_cp_async(void **params)
{
  const int flaw = variant_of(params)->flaw;
  uint32_t *g = variant_of(params)->global;
  make_mbarriers(2, 1);
  if(thread() != 0)
    return;
  if(flaw == 0) { /* a thread's own stores are there for its copies */
    emu_store_relaxed(&g[3], 77, 0);
    store(&g[2], 66u);
    emu_copy_async(word(0), &g[0], 16);
    emu_copy_async_wait();
    must(load(word(2)) == 66 && load(word(3)) == 77);
  } else if(flaw == 1) {
    emu_copy_async(word(1), g, 8);
  } else if(flaw == 2) {
    emu_copy_async(word(0), g + 1, 16);
  } else if(flaw == 3) {
    emu_copy_async(word(0), g + GLOBAL_WORDS - 1, 4);
    emu_copy_async(word(4), g + GLOBAL_WORDS, 4);
  } else if(flaw == 4) {
    emu_copy_async(word(SHARED_BYTES / 4), g, 4);
  } else if(flaw == 5) {
    emu_copy_async(mbarrier(0), g, 8);
  } else if(flaw == 6) {
    emu_copy_async(word(0), g, 4);
  } else if(flaw == 7) {
    emu_copy_async_arrive(mbarrier(3));
  } else if(flaw == 8) { /* onto what a bulk copy is bringing */
    send(g, mbarrier(0));
    emu_copy_async(byte(AT), g, 4);
  } else if(flaw == 9) { /* a bulk copy onto what cp.async has brought */
    emu_copy_async(byte(AT), g, 4);
    emu_copy_async_wait();
    emu_fence_async_proxy();
    send(g, mbarrier(0));
  } else if(flaw == 10) {
    emu_copy_async_arrive(mbarrier(0));
    emu_mbarrier_wait(mbarrier(0), 0, 1);
    emu_mbarrier_arrive_expect(mbarrier(0), 128);
    emu_copy_async_arrive(mbarrier(0)); /* one more than this phase takes */
    emu_copy_bulk(byte(AT), g, 128, mbarrier(1));
    emu_mbarrier_wait(mbarrier(1), 0, 1);
  }
}

static const struct flawed cases[] = {
    GOOD("a bulk copy", bulk, 2, 2, 0),
    BAD("bulk, not waited for", bulk, 1, 2, 1, EMU_RACE, "completion was not waited for"),
    BAD("bulk, waited for by another lane", bulk, 1, 2, 2, EMU_RACE, "completion was not waited for"),
    GOOD("bulk, handed on by sync_warp", bulk, 1, 2, 3),
    BAD("bulk, written over", bulk, 1, 1, 4, EMU_RACE, "completion was not waited for"),
    BAD("bulk, read by scoped loads", bulk, 1, 1, 5, EMU_RACE, "completion was not waited for"),
    GOOD("bulk, polled for", bulk, 1, 2, 6),
    GOOD("bulk, unordered load behind the wait", unordered, 1, 1, 0),
    BAD("bulk, unordered load", unordered, 1, 1, 2, EMU_RACE, "read of shared+0x408 at"),
    BAD("unordered load of a word", unordered, 1, 1, 3, EMU_RACE, "read of shared+0x20 at"),
    BAD("unordered load of a byte", unordered, 1, 1, 4, EMU_RACE, "read of shared+0x27 at"),
    GOOD("bulk copies in turns", in_turns, 1, 3, 0),
    SOMETIMES("bulk, given back before it is read", in_turns, 1, 3, 1, EMU_EARLY_OVERWRITE, EMU_RACE),
    BAD("bulk, given back without sync_warp", in_turns, 1, 3, 2, EMU_EARLY_OVERWRITE, "nothing orders them"),
    BAD("bulk, given back without a fence", in_turns, 1, 3, 3, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the reading thread"),
    BAD("bulk, given back without one lane's fence", in_turns, 1, 3, 4, EMU_NO_PROXY_FENCE, "a read by warp 2 lane 7"),
    BAD("bulk, given back, fenced ahead of the read", in_turns, 1, 3, 5, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the reading thread"),
    GOOD("over fenced stores", over, 1, 2, 0),
    BAD("over stores without a fence", over, 1, 2, 1, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    BAD("over stores, fenced by the issuer", over, 1, 2, 2, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    BAD("over stores without order", over, 1, 2, 3, EMU_RACE, "nothing orders them"),
    BAD("over a word that is read", over, 1, 2, 5, EMU_EARLY_OVERWRITE, "a read by warp 1 lane 8"),
    BAD("over stores behind the fence", over, 1, 2, 7, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    BAD("over a copy", over, 1, 2, 8, EMU_EARLY_OVERWRITE, "the earlier copy's completion was not waited for"),
    BAD("over a byte behind the fence", over, 1, 2, 9, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    BAD("over stores, fenced when the issuer has been told", over, 1, 2, 10, EMU_NO_PROXY_FENCE, "no fence_async_proxy of the storing thread"),
    GOOD("beside a word that is read", over, 1, 2, 6),
    GOOD("a number used again", forgotten, 1, 1, 0),
    BAD("a number used again, not waited for", forgotten, 1, 1, 1, EMU_RACE, "completion was not waited for"),
    GOOD("64 copies", many, 2, 1, 0),
    SOMETIMES("65 copies", many, 2, 1, 1, EMU_UNSUPPORTED, EMU_NONE),
    BAD("no mbarrier_init_fence", bad_bulk, 1, 2, 1, EMU_BARRIER, "no mbarrier_init_fence"),
    BAD("no mbarrier", bad_bulk, 1, 2, 2, EMU_BARRIER, "was never initialised"),
    BAD("source behind the buffer", bad_bulk, 1, 2, 3, EMU_BOUNDS, "bulk copy of 128 bytes"),
    BAD("100 bytes", bad_bulk, 1, 2, 4, EMU_UNSUPPORTED, "bulk copy of 100 bytes"),
    BAD("no bytes", bad_bulk, 1, 2, 5, EMU_UNSUPPORTED, "bulk copy of 0 bytes"),
    BAD("destination not aligned", bad_bulk, 1, 2, 6, EMU_BOUNDS, "not aligned to 128 bytes"),
    BAD("destination behind shared memory", bad_bulk, 1, 2, 7, EMU_BOUNDS, "outside the CTA's"),
    BAD("over an mbarrier", bad_bulk, 1, 2, 8, EMU_BARRIER, "copy to the mbarrier"),
    BAD("source in shared memory", bad_bulk, 1, 2, 9, EMU_BOUNDS, "bulk copy of 128 bytes"),
    BAD("destination in global memory", bad_bulk, 1, 2, 10, EMU_BOUNDS, "outside the CTA's"),
    BAD("nobody announced it", bad_bulk, 1, 2, 11, EMU_UNFINISHED, NULL),
    SOMETIMES("nobody waited for it", bad_bulk, 1, 2, 12, EMU_UNFINISHED, EMU_NONE),
    GOOD("a source beside stores", written_source, 1, 2, 0),
    SOMETIMES("a source that another CTA writes", written_source, 2, 2, 1, EMU_RACE, EMU_NONE),
    SOMETIMES("a source that another thread writes", written_source, 1, 2, 2, EMU_RACE, EMU_NONE),
    GOOD("cp.async", cp_async, 2, 2, 0),
    BAD("cp.async, not waited for", cp_async, 1, 2, 1, EMU_RACE, "cp.async of warp"),
    BAD("cp.async twice to one word", cp_async, 1, 2, 2, EMU_RACE, "cp.async of warp"),
    BAD("a store onto cp.async", cp_async, 1, 2, 3, EMU_RACE, "cp.async of warp"),
    BAD("cp.async of another lane, shuffle", cp_async, 1, 2, 4, EMU_RACE, "cp.async of warp"),
    BAD("a second cp.async, not waited for", cp_async, 1, 2, 6, EMU_RACE, "cp.async of warp"),
    GOOD("cp.async and an mbarrier", cp_async_arrives, 2, 2, 0),
    BAD("cp.async and an ordinary arrival", cp_async_arrives, 1, 2, 1, EMU_RACE, "cp.async of warp 0"),
    BAD("cp.async behind the arrival", cp_async_arrives, 1, 2, 2, EMU_RACE, NULL),
    BAD("cp.async of another warp, not waited for", cp_async_arrives, 1, 2, 3, EMU_RACE, NULL),
    SOMETIMES("cp.async over what is read", cp_async_arrives, 1, 2, 4, EMU_RACE, EMU_DEADLOCK),
    GOOD("cp.async of own stores", bad_cp_async, 1, 1, 0),
    BAD("cp.async, destination not aligned", bad_cp_async, 1, 1, 1, EMU_BOUNDS, "not aligned to 8 bytes"),
    BAD("cp.async, source not aligned", bad_cp_async, 1, 1, 2, EMU_BOUNDS, "not aligned to 16 bytes"),
    BAD("cp.async, source behind the buffer", bad_cp_async, 1, 1, 3, EMU_BOUNDS, "read of 4 bytes"),
    BAD("cp.async behind shared memory", bad_cp_async, 1, 1, 4, EMU_BOUNDS, "outside the CTA's"),
    BAD("cp.async onto an mbarrier", bad_cp_async, 1, 1, 5, EMU_BARRIER, "mbarrier"),
    SOMETIMES("cp.async, never waited for", bad_cp_async, 1, 1, 6, EMU_UNFINISHED, EMU_NONE),
    BAD("cp.async arrives at no mbarrier", bad_cp_async, 1, 1, 7, EMU_BARRIER, "was never initialised"),
    BAD("cp.async onto a bulk copy", bad_cp_async, 1, 1, 8, EMU_RACE, "completion was not waited for"),
    BAD("a bulk copy onto cp.async", bad_cp_async, 1, 1, 9, EMU_UNSUPPORTED, "which cp.async wrote"),
    SOMETIMES("one arrival of cp.async more", bad_cp_async, 1, 1, 10, EMU_BARRIER, EMU_UNFINISHED),
};

START_TEST(copies)
{
  expect_flawed(&cases[_i]);
}
END_TEST

int main(void)
{
  Suite *suite = suite_create("emu_async");
  TCase *table = tcase_create("copies");
  tcase_add_loop_test(table, copies, 0, NUMBER(cases));
  tcase_add_loop_test(table, tensor_copies, 0, NUMBER(tensors));
  suite_add_tcase(suite, table);
  return run_suite(suite);
}
