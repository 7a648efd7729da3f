/* access.c - where an address of the running thread lies, and what happens to it: ordinary accesses through the compiler's hooks, scoped ones
 * through emu_hw.h.
 *
 * Kernels are compiled with -fsanitize=thread, but without its runtime: the __tsan_* functions below are called before each load and store that may
 * touch more than a local variable. An address lies in the CTA's shared memory, in the thread's own stack, in a declared global buffer or in the kernel's
 * constants (reads only); anything else is out of bounds.
 *
 * Global memory is remembered in granules of two bytes (struct granule), for the words that somebody wrote or read in this launch: the last write,
 * and two readers, of two CTAs if there were such. Nothing orders CTAs, so any write that meets another CTA's access is a race unless both are scoped.
 *
 * A relaxed store to global memory becomes visible later, at a random moment, in no order with other stores; but before its thread, or one that comes behind it,
 * accesses the same word. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES 4096u
#define GRANULE_BYTES 2u
#define CHUNK_GRANULES (CHUNK_BYTES / GRANULE_BYTES)

struct granule {
  uint32_t launch;                 /* of everything else here */
  uint32_t write_thread, write_tick, write_pc; /* tick 0: none */
  uint32_t read_thread[2], read_tick[2], read_pc;
  bool atomic;                     /* the last write was a scoped one ... */
  bool pending;                    /* ... and may not be visible yet */
};

struct buffer {
  uint8_t *base;
  size_t bytes;
  struct granule **chunks;
};

static struct buffer buffers[EMU_MAX_BUFFERS];
static int nbuffers;
static struct buffer *last_buffer; /* most accesses go where the one before went */

/* ---- global buffers ---- */

bool emu_memory_add(void *base, size_t bytes)
{
  struct buffer *b = &buffers[nbuffers];
  if(nbuffers == EMU_MAX_BUFFERS)
    return false;
  b->chunks = calloc(bytes / CHUNK_BYTES + 1, sizeof(struct granule *));
  if(b->chunks == NULL)
    return false;
  b->base = base;
  b->bytes = bytes;
  nbuffers++;
  return true;
}

void emu_memory_remove(void *base)
{
  for(int i = 0; i < nbuffers; i++) {
    struct buffer *b = &buffers[i];
    if(b->base != base)
      continue;
    for(size_t c = 0; c <= b->bytes / CHUNK_BYTES; c++)
      free(b->chunks[c]);
    free(b->chunks);
    *b = buffers[--nbuffers];
    last_buffer = NULL;
    return;
  }
}

static bool holds(const struct buffer *b, const void *p, size_t bytes)
{
  const size_t offset = (size_t)((uintptr_t)p - (uintptr_t)b->base);
  return (uintptr_t)p >= (uintptr_t)b->base && offset <= b->bytes && bytes <= b->bytes - offset;
}

static struct buffer *find_buffer(const void *p, size_t bytes)
{
  if(last_buffer != NULL && holds(last_buffer, p, bytes))
    return last_buffer;
  for(int i = 0; i < nbuffers; i++)
    if(holds(&buffers[i], p, bytes))
      return last_buffer = &buffers[i];
  return NULL;
}

/* Those ahead may write whatever a kernel reads, and use what it writes. */
static void check_ahead(struct thread *t, const char *what, const void *pc)
{
  if(t->seen->ticks[t->cta->ahead] == 0)
    emu_fail(EMU_RACE, t, pc, "%s of global memory at %s: the kernels ahead of this dependent launch may still run, no wait_for_predecessors orders their end before it", what,
             emu_pc_text(emu_pc(pc)).s);
}

void emu_wait_for_predecessors(void)
{
  struct thread *t = running();
  clock_acquire(t, t->cta->started);
  emu_maybe_preempt(t);
}

void check_global(struct thread *t, const void *p, size_t bytes, const char *what, const void *pc)
{
  check_ahead(t, what, pc);
  if(find_buffer(p, bytes) == NULL)
    emu_fail(EMU_BOUNDS, t, pc, "%s of %zu bytes at %s: they do not lie in one global buffer", what, bytes, emu_pc_text(emu_pc(pc)).s);
}

static struct granule *granule_at(struct buffer *b, size_t offset)
{
  struct granule **chunk = &b->chunks[offset / CHUNK_BYTES], *g;
  if(*chunk == NULL)
    *chunk = emu_need(calloc(CHUNK_GRANULES, sizeof(**chunk)));
  g = &(*chunk)[offset % CHUNK_BYTES / GRANULE_BYTES];
  if(g->launch != emu_machine.launch_number) {
    memset(g, 0, sizeof(*g));
    g->launch = emu_machine.launch_number;
  }
  return g;
}

/* Threads of the grid are numbered through. */
static uint32_t grid_thread(const struct thread *t)
{
  return (uint32_t)(t->self.cta * t->cta->nthreads + t->self.thread);
}

static bool in_order(const struct thread *t, uint32_t earlier, uint32_t tick)
{
  const uint32_t threads = (uint32_t)t->cta->nthreads;
  return tick == 0 || (earlier / threads == (uint32_t)t->self.cta && clock_seen(t, earlier % threads) >= tick);
}

static void global_race(struct thread *t, const struct buffer *b, size_t offset, int flags, const void *pc, const char *earlier, uint32_t thread, uint32_t other_pc)
{
  const int threads = t->cta->nthreads;
  emu_machine.finding->other_pc = other_pc != 0 ? (const char *)emu_machine.launch->code + other_pc : NULL;
  emu_fail(EMU_RACE, t, pc, "%s of a global buffer of %zu bytes, at byte 0x%zx, at %s, and the earlier %s by cta %d warp %d lane %d at %s: nothing orders them", flags & ACCESS_WRITE ? "write" : "read",
           b->bytes, offset, emu_pc_text(emu_pc(pc)).s, earlier, (int)thread / threads, (int)thread % threads / LANES, (int)thread % LANES, emu_pc_text(other_pc).s);
}

/* Where a read is noted: in place of one that it comes behind, else so that the two are of two CTAs if there were such. */
static int reader_slot(const struct thread *t, const struct granule *g)
{
  const uint32_t threads = (uint32_t)t->cta->nthreads, first = g->read_thread[0] / threads, second = g->read_thread[1] / threads;
  for(int i = 0; i < 2; i++)
    if(in_order(t, g->read_thread[i], g->read_tick[i]))
      return i;
  return first != second && first == (uint32_t)t->self.cta ? 0 : 1;
}

static void access_granule(struct thread *t, const struct buffer *b, struct granule *g, size_t offset, int flags, const void *pc)
{
  const bool atomic = (flags & ACCESS_ATOMIC) != 0;
  const uint32_t self = grid_thread(t), tick = t->tick;
  if(!(atomic && g->atomic) && !in_order(t, g->write_thread, g->write_tick))
    global_race(t, b, offset, flags, pc, "write", g->write_thread, g->write_pc);
  if(flags & ACCESS_WRITE) {
    for(int i = 0; i < 2; i++)
      if(!in_order(t, g->read_thread[i], g->read_tick[i]))
        global_race(t, b, offset, flags, pc, "read", g->read_thread[i], g->read_pc);
    g->write_thread = self;
    g->write_tick = tick;
    g->write_pc = emu_pc(pc);
    g->atomic = atomic;
    g->pending = false;
  } else if(!atomic) {
    const int slot = reader_slot(t, g);
    g->read_thread[slot] = self;
    g->read_tick[slot] = tick;
    g->read_pc = emu_pc(pc);
  }
}

static struct buffer *buffer_of(const struct thread *t, const void *p, size_t bytes, int flags, const void *pc)
{
  struct buffer *b = find_buffer(p, bytes);
  if(b != NULL)
    return b;
  emu_fail(EMU_BOUNDS, t, pc, "%s of %zu bytes at %s: neither shared memory nor a global buffer nor the thread's stack",
           flags & ACCESS_WRITE ? "write" : "read", bytes, emu_pc_text(emu_pc(pc)).s);
}

void access_global(struct thread *t, const void *p, size_t bytes, int flags, const void *pc)
{
  struct buffer *b = buffer_of(t, p, bytes, flags, pc);
  const size_t first = (size_t)((uintptr_t)p - (uintptr_t)b->base), end = first + bytes;
  check_ahead(t, flags & ACCESS_WRITE ? "write" : "read", pc);
  for(size_t offset = first / GRANULE_BYTES * GRANULE_BYTES; offset < end; offset += GRANULE_BYTES) {
    struct granule *g = granule_at(b, offset);
    if(g->pending && in_order(t, g->write_thread, g->write_tick)) {
      g->pending = false;
      flush_stores(&t->cta->threads[g->write_thread % (uint32_t)t->cta->nthreads], b->base + offset, GRANULE_BYTES);
    }
    access_granule(t, b, g, offset, flags, pc);
  }
}

void check_global_writes(struct thread *t, const void *p, size_t bytes, const void *pc)
{
  struct buffer *b = find_buffer(p, bytes);
  const size_t first = (size_t)((uintptr_t)p - (uintptr_t)b->base), end = first + bytes;
  for(size_t offset = first / GRANULE_BYTES * GRANULE_BYTES; offset < end; offset += GRANULE_BYTES) {
    const struct granule *chunk = b->chunks[offset / CHUNK_BYTES], *g;
    if(chunk == NULL) { /* nobody has been here */
      offset = (offset / CHUNK_BYTES + 1) * CHUNK_BYTES - GRANULE_BYTES;
      continue;
    }
    g = &chunk[offset % CHUNK_BYTES / GRANULE_BYTES];
    if(g->launch == emu_machine.launch_number && !in_order(t, g->write_thread, g->write_tick))
      global_race(t, b, offset, 0, pc, "write", g->write_thread, g->write_pc);
  }
}

/* ---- shared memory ---- */

bool is_shared(const struct thread *t, const void *p)
{
  return (uintptr_t)p - (uintptr_t)t->self.shared < t->cta->shared_bytes;
}

uint32_t shared_offset(struct thread *t, const void *p, size_t bytes, size_t alignment, const char *what, const void *pc)
{
  const uintptr_t offset = (uintptr_t)p - (uintptr_t)t->self.shared;
  if(offset >= t->cta->shared_bytes || bytes > t->cta->shared_bytes - offset)
    emu_fail(EMU_BOUNDS, t, pc, "%s of %zu bytes at %s: outside the CTA's %zu bytes of shared memory", what, bytes, emu_pc_text(emu_pc(pc)).s, t->cta->shared_bytes);
  if(offset % alignment != 0)
    emu_fail(EMU_BOUNDS, t, pc, "%s at %s: shared+0x%zx is not aligned to %zu bytes", what, emu_pc_text(emu_pc(pc)).s, (size_t)offset, alignment);
  return (uint32_t)offset;
}

static void access_shared(struct thread *t, const void *p, size_t bytes, int flags, const void *pc)
{
  const uint32_t offset = shared_offset(t, p, bytes, 1, flags & ACCESS_WRITE ? "write" : "read", pc);
  shadow_shared(t, (uint32_t)t->self.thread, t->tick, offset, (uint32_t)bytes, flags, pc);
}

/* ---- the compiler's hooks ---- */

static bool is_constant(const void *p, size_t bytes)
{
  const struct emu_launch *launch = emu_machine.launch;
  const uintptr_t offset = (uintptr_t)p - (uintptr_t)launch->code;
  return offset < launch->code_bytes && bytes <= launch->code_bytes - offset;
}

static void ordinary(const void *p, size_t bytes, size_t alignment, int flags, const void *pc)
{
  struct thread *t = running();
  uintptr_t stack;
  if(t == NULL)
    return; /* the host program's own code */
  emu_machine.counters.accesses++;
  stack = (uintptr_t)p - (uintptr_t)t->fiber.stack;
  if(stack < emu_machine.stack_bytes) {
    product_pending_check(t, p, bytes, pc);
  } else if((uintptr_t)p % alignment != 0) {
    emu_fail(EMU_BOUNDS, t, pc, "%s of %zu bytes at %s: the address is not aligned to %zu bytes", flags & ACCESS_WRITE ? "write" : "read", bytes,
             emu_pc_text(emu_pc(pc)).s, alignment);
  } else if(is_shared(t, p)) {
    access_shared(t, p, bytes, flags, pc);
    emu_machine.changes += (flags & ACCESS_WRITE) != 0;
  } else if((flags & ACCESS_WRITE) || !is_constant(p, bytes)) {
    if(t->stores_pending > 0)
      flush_stores(t, p, bytes);
    access_global(t, p, bytes, flags, pc);
    emu_machine.changes += (flags & ACCESS_WRITE) != 0;
  }
}

/* (Sixteen bytes may also be two eights that the compiler put together.) */
#define HOOK(name, bytes, alignment, flags)                            \
  void name(void *p);                                                  \
  void name(void *p)                                                   \
  {                                                                    \
    ordinary(p, bytes, alignment, flags, __builtin_return_address(0)); \
  }
HOOK(__tsan_read1, 1, 1, 0)
HOOK(__tsan_read2, 2, 2, 0)
HOOK(__tsan_read4, 4, 4, 0)
HOOK(__tsan_read8, 8, 8, 0)
HOOK(__tsan_read16, 16, 8, 0)
HOOK(__tsan_write1, 1, 1, ACCESS_WRITE)
HOOK(__tsan_write2, 2, 2, ACCESS_WRITE)
HOOK(__tsan_write4, 4, 4, ACCESS_WRITE)
HOOK(__tsan_write8, 8, 8, ACCESS_WRITE)
HOOK(__tsan_write16, 16, 8, ACCESS_WRITE)
HOOK(__tsan_unaligned_read2, 2, 1, 0)
HOOK(__tsan_unaligned_read4, 4, 1, 0)
HOOK(__tsan_unaligned_read8, 8, 1, 0)
HOOK(__tsan_unaligned_read16, 16, 1, 0)
HOOK(__tsan_unaligned_write2, 2, 1, ACCESS_WRITE)
HOOK(__tsan_unaligned_write4, 4, 1, ACCESS_WRITE)
HOOK(__tsan_unaligned_write8, 8, 1, ACCESS_WRITE)
HOOK(__tsan_unaligned_write16, 16, 1, ACCESS_WRITE)

void __tsan_read_range(void *p, unsigned long bytes);
void __tsan_read_range(void *p, unsigned long bytes)
{
  if(bytes > 0)
    ordinary(p, bytes, 1, 0, __builtin_return_address(0));
}

void __tsan_write_range(void *p, unsigned long bytes);
void __tsan_write_range(void *p, unsigned long bytes)
{
  if(bytes > 0)
    ordinary(p, bytes, 1, ACCESS_WRITE, __builtin_return_address(0));
}

void __tsan_func_entry(void *pc);
void __tsan_func_entry(void *pc)
{
  (void)pc;
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}

void __tsan_init(void);
void __tsan_init(void)
{
}

/* ---- scoped accesses ---- */

void deliver_store(int index)
{
  struct store *s = &emu_machine.stores[index];
  *s->address = s->value;
  s->thread->stores_pending--;
  *s = emu_machine.stores[--emu_machine.nstores];
}

void flush_stores(struct thread *t, const void *p, size_t bytes)
{
  const uintptr_t from = (uintptr_t)p, to = from + bytes;
  for(int i = emu_machine.nstores - 1; i >= 0 && t->stores_pending > 0; i--) {
    const struct store *s = &emu_machine.stores[i];
    if(s->thread == t && (uintptr_t)s->address < to && (uintptr_t)s->address + sizeof(uint32_t) > from)
      deliver_store(i);
  }
}

static void store_later(struct thread *t, uint32_t *p, uint32_t value)
{
  struct machine *m = &emu_machine;
  struct buffer *b = find_buffer(p, sizeof(*p)); /* it has passed access_global() */
  if(m->nstores == m->max_stores) {
    const int max = m->max_stores == 0 ? 1024 : 2 * m->max_stores;
    m->stores = emu_need(realloc(m->stores, (size_t)max * sizeof(*m->stores)));
    m->max_stores = max;
  }
  m->stores[m->nstores++] = (struct store){t, p, value};
  t->stores_pending++;
  for(size_t i = 0; i < sizeof(*p); i += GRANULE_BYTES)
    granule_at(b, (size_t)((uint8_t *)p - b->base) + i)->pending = true;
}

/* Checks a scoped access to a word; true if it is in shared memory. */
static bool scoped(struct thread *t, const uint32_t *p, int flags, const void *pc)
{
  t->pc = pc;
  if((uintptr_t)p % sizeof(*p) != 0)
    emu_fail(EMU_BOUNDS, t, pc, "scoped access at %s: the address is not aligned to 4 bytes", emu_pc_text(emu_pc(pc)).s);
  if(is_shared(t, p)) {
    access_shared(t, p, sizeof(*p), flags | ACCESS_ATOMIC, pc);
    return true;
  }
  flush_stores(t, p, sizeof(*p));
  access_global(t, p, sizeof(*p), flags | ACCESS_ATOMIC, pc);
  return false;
}

static uint32_t word_offset(const struct thread *t, const uint32_t *p)
{
  return (uint32_t)((uintptr_t)p - (uintptr_t)t->self.shared);
}

uint32_t emu_load_relaxed(const uint32_t *p, int acquire)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  const bool shared = scoped(t, p, 0, pc);
  const uint32_t value = *p;
  if(acquire && !shared)
    emu_fail(EMU_UNSUPPORTED, t, pc, "acquire load of global memory at %s", emu_pc_text(emu_pc(pc)).s);
  if(acquire) {
    const struct clock *clock = shadow_release_clock(t->cta, word_offset(t, p), false);
    if(clock != NULL)
      clock_acquire(t, clock);
  }
  return value;
}

void emu_store_relaxed(uint32_t *p, uint32_t value, int release)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  if(scoped(t, p, ACCESS_WRITE, pc)) {
    *p = value;
    shadow_drop_release(t->cta, word_offset(t, p)); /* a store ends the release sequence before it */
    if(release)
      clock_release(t, shadow_release_clock(t->cta, word_offset(t, p), true));
  } else if(release) {
    emu_fail(EMU_UNSUPPORTED, t, pc, "release store to global memory at %s", emu_pc_text(emu_pc(pc)).s);
  } else {
    store_later(t, p, value);
  }
  emu_machine.changes++;
  emu_maybe_preempt(t);
}

void emu_load_unordered(const void *p, void *out, int words)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  const uint32_t offset = shared_offset(t, p, (size_t)words * sizeof(uint32_t), sizeof(uint32_t), "read", pc);
  memcpy(out, p, (size_t)words * sizeof(uint32_t));
  for(int i = 0; i < words; i++) {
    const uint32_t taint = shadow_word_taint(t, offset + 4u * (uint32_t)i, pc), bits = EMU_TAINT | taint;
    if(taint != 0)
      memcpy((uint8_t *)out + (size_t)i * sizeof(bits), &bits, sizeof(bits));
  }
}

uint32_t emu_add(uint32_t *p, uint32_t value)
{
  struct thread *t = running();
  uint32_t old;
  scoped(t, p, ACCESS_WRITE | ACCESS_UPDATE, __builtin_return_address(0));
  old = *p;
  *p = old + value;
  emu_machine.changes++;
  emu_maybe_preempt(t);
  return old;
}

void emu_or(uint32_t *p, uint32_t value)
{
  struct thread *t = running();
  scoped(t, p, ACCESS_WRITE | ACCESS_UPDATE, __builtin_return_address(0));
  *p |= value;
  emu_machine.changes++;
  emu_maybe_preempt(t);
}

void emu_or_release(uint32_t *p, uint32_t value)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  if(!scoped(t, p, ACCESS_WRITE | ACCESS_UPDATE, pc))
    emu_fail(EMU_UNSUPPORTED, t, pc, "release update of global memory at %s", emu_pc_text(emu_pc(pc)).s);
  *p |= value;
  clock_release(t, shadow_release_clock(t->cta, word_offset(t, p), true)); /* joined with what the word's earlier releases left */
  emu_machine.changes++;
  emu_maybe_preempt(t);
}

void emu_fence_async_proxy(void)
{
  struct thread *t = running();
  if(t->nfences == t->max_fences) {
    const uint32_t max = t->max_fences == 0 ? 16 : 2 * t->max_fences;
    t->fences = emu_need(realloc(t->fences, max * sizeof(*t->fences)));
    t->max_fences = max;
  }
  t->fences[t->nfences++] = (struct fence){t->tick, t->read_tick};
  clock_tick(t);
  emu_maybe_preempt(t);
}
