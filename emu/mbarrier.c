/* mbarrier.c - barriers in shared memory that count arrivals and bytes.
 *
 * The eight bytes in shared memory are only a name; the state is kept here, and ordinary accesses to them are findings. A phase completes when all arrivals
 * have come and all announced bytes have landed; bytes may land before they are announced, as long as arrivals are missing. Arrivals give their clocks, a
 * successful wait takes those of the phases completed so far.
 *
 * Only the parity of a phase is waited for, as on the hardware: who lets two phases pass unseen waits for ever or goes on too early, and that then shows as a
 * deadlock or as a race on what the barrier protects. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

void emu_mbarrier_init(uint64_t *bar, uint32_t arrivals)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  struct cta *cta = t->cta;
  const uint32_t offset = shared_offset(t, bar, 8, 8, "mbarrier_init", pc);
  struct mbarrier *b;
  if(cta->mbarrier_at[offset / 8] != 0)
    emu_fail(EMU_BARRIER, t, pc, "the mbarrier at shared+0x%x is initialised a second time at %s", (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  if(arrivals == 0 || arrivals >= 1u << 20)
    emu_fail(EMU_BARRIER, t, pc, "mbarrier_init at %s: %u arrivals; 1 to 2^20 - 1 are possible", emu_pc_text(emu_pc(pc)).s, (unsigned)arrivals);
  if(cta->nmbarriers == cta->max_mbarriers) {
    const uint32_t max = cta->max_mbarriers == 0 ? 64 : 2 * cta->max_mbarriers;
    cta->mbarriers = emu_need(realloc(cta->mbarriers, max * sizeof(struct mbarrier *)));
    cta->max_mbarriers = max;
  }
  shadow_mark_object(t, offset, pc);
  b = emu_need(calloc(1, sizeof(*b)));
  cta->mbarriers[cta->nmbarriers++] = b;
  b->offset = offset;
  b->count = b->pending = arrivals;
  b->init_agent = (uint32_t)t->self.thread;
  b->init_tick = t->tick;
  b->clock = clock_new(cta);
  b->done_clock = clock_new(cta);
  cta->mbarrier_at[offset / 8] = (uint16_t)cta->nmbarriers;
}

void emu_mbarrier_init_fence(void)
{
  const struct thread *t = running();
  for(uint32_t i = 0; i < t->cta->nmbarriers; i++)
    if(t->cta->mbarriers[i]->init_agent == (uint32_t)t->self.thread)
      t->cta->mbarriers[i]->fenced = true;
}

struct mbarrier *mbarrier_find(struct thread *t, const uint64_t *bar, const void *pc)
{
  const uint32_t offset = shared_offset(t, bar, 8, 8, "mbarrier", pc), index = t->cta->mbarrier_at[offset / 8];
  struct mbarrier *b;
  if(index == 0)
    emu_fail(EMU_BARRIER, t, pc, "shared+0x%x, used as an mbarrier at %s, was never initialised", (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  b = t->cta->mbarriers[index - 1];
  if(clock_seen(t, b->init_agent) < b->init_tick)
    emu_fail(EMU_RACE, t, pc, "the mbarrier at shared+0x%x is used at %s: nothing orders that behind its initialisation", (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  return b;
}

static void wake_waiters(struct mbarrier *b)
{
  struct thread *t = b->waiters;
  b->waiters = NULL;
  while(t != NULL) {
    struct thread *next = t->next_waiter;
    t->next_waiter = NULL;
    if((b->phase & 1) != t->parity) {
      clock_acquire(t, b->done_clock);
      emu_make_ready(t);
    } else {
      t->next_waiter = b->waiters;
      b->waiters = t;
    }
    t = next;
  }
}

void mbarrier_complete(struct mbarrier *b, struct cta *cta, int arrivals, int64_t bytes, const struct thread *t, const void *pc)
{
  if((uint32_t)arrivals > b->pending)
    emu_fail(EMU_BARRIER, t, pc, "mbarrier at shared+0x%x: one arrival more than its %u per phase, at %s", (unsigned)b->offset, (unsigned)b->count, emu_pc_text(emu_pc(pc)).s);
  b->pending -= (uint32_t)arrivals;
  b->bytes += bytes;
  if(b->bytes >= 1 << 20 || b->bytes <= -(1 << 20))
    emu_fail(EMU_BARRIER, t, pc, "mbarrier at shared+0x%x: %lld bytes under way, at %s; below 2^20 are possible", (unsigned)b->offset, (long long)b->bytes, emu_pc_text(emu_pc(pc)).s);
  emu_machine.changes++;
  if(b->pending != 0 || b->bytes != 0)
    return;
  b->phase++;
  b->pending = b->count;
  memcpy(b->done_clock->ticks, b->clock->ticks, cta->agents * sizeof(uint32_t));
  clock_changed(b->done_clock);
  wake_waiters(b);
}

static void arrive(uint64_t *bar, uint32_t bytes, const void *pc)
{
  struct thread *t = running();
  struct mbarrier *b = mbarrier_find(t, bar, pc);
  mbarrier_complete(b, t->cta, 0, bytes, t, pc); /* announced first: the arrival may complete the phase */
  clock_release(t, b->clock);
  mbarrier_complete(b, t->cta, 1, 0, t, pc);
  emu_maybe_preempt(t);
}

void emu_mbarrier_arrive(uint64_t *bar)
{
  arrive(bar, 0, __builtin_return_address(0));
}

void emu_mbarrier_arrive_expect(uint64_t *bar, uint32_t bytes)
{
  arrive(bar, bytes, __builtin_return_address(0));
}

static bool has_passed(const struct mbarrier *b, uint32_t parity)
{
  return (b->phase & 1) != parity;
}

int emu_mbarrier_try_wait(uint64_t *bar, uint32_t parity)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  const struct mbarrier *b = mbarrier_find(t, bar, pc);
  emu_maybe_preempt(t);
  if(!has_passed(b, parity & 1))
    return 0;
  clock_acquire(t, b->done_clock);
  return 1;
}

void mbarriers_end(const struct cta *cta)
{
  for(uint32_t i = 0; i < cta->nmbarriers; i++)
    if(cta->mbarriers[i]->bytes != 0)
      emu_fail(EMU_UNFINISHED, NULL, NULL, "cta %d ended with %lld bytes missing on the mbarrier at shared+0x%x", cta->index, (long long)cta->mbarriers[i]->bytes,
               (unsigned)cta->mbarriers[i]->offset);
}

void emu_mbarrier_wait(uint64_t *bar, uint32_t parity, int id)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  struct mbarrier *b = mbarrier_find(t, bar, pc);
  if(parity > 1)
    emu_fail(EMU_BARRIER, t, pc, "mbarrier_wait for parity %u at %s: expected 0 or 1", (unsigned)parity, emu_pc_text(emu_pc(pc)).s);
  if(!has_passed(b, parity)) {
    t->parity = parity;
    t->barrier = b;
    t->next_waiter = b->waiters;
    b->waiters = t;
    emu_block(t, WAIT_MBARRIER, id, pc); /* made ready by the arrival that completes the phase, which also hands over its clock */
    t->barrier = NULL;
  } else {
    clock_acquire(t, b->done_clock);
    emu_maybe_preempt(t);
  }
}
