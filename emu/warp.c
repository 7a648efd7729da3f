/* warp.c - what a warp's lanes do together, and the CTA's named barriers.
 *
 * Every such operation is a meeting: a lane leaves its operands and waits; the last of the 32 does the work for all. Lanes that meet in different kinds
 * of operation, or of which some have ended, are findings (the latter as a deadlock). Exchanges order no writes, as on the hardware; only sync_warp and the
 * barriers do (internal.h has the rule for reads).
 *
 * Named barriers count whole warps. Those that arrive give their clocks, those that wait take the sum when the count is complete. */
#include "internal.h"

#include <string.h>

static const char *const meeting_names[] = {"nothing",          "sync_warp",  "a shuffle", "a vote",         "reduce_max",  "barrier_sync",
                                            "barrier_arrive", "wgmma_fence", "a product",  "wgmma_commit", "wgmma_wait"};

static void check_meeting(const struct warp *w, const struct thread *t, const void *pc)
{
  for(int lane = 0; lane < LANES; lane++) {
    const struct thread *other = &w->threads[lane];
    if(other->meeting != t->meeting) {
      emu_machine.finding->other_pc = other->pc;
      emu_fail(EMU_DIVERGENCE, t, pc, "lane %d is in %s at %s, lane %d of the same warp in %s at %s", t->self.lane, meeting_names[t->meeting], emu_pc_text(emu_pc(pc)).s, lane,
               meeting_names[other->meeting], emu_pc_text(emu_pc(other->pc)).s);
    }
  }
}

void warp_meet(struct thread *t, enum meeting meeting, uint32_t value, uint32_t argument, const void *pc, void (*act)(struct warp *w, const void *pc))
{
  struct warp *w = t->warp;
  t->meeting = meeting;
  t->value = value;
  t->argument = argument;
  t->pc = pc;
  w->arrived |= 1u << t->self.lane;
  if(w->arrived != ALL_LANES) {
    emu_block(t, WAIT_LANES, 0, pc);
    return;
  }
  check_meeting(w, t, pc);
  w->arrived = 0;
  clock_meet(w);
  for(int lane = 0; lane < LANES; lane++)
    if(&w->threads[lane] != t)
      emu_make_ready(&w->threads[lane]);
  act(w, pc); /* may block this lane, and lanes that it makes wait */
}

/* ---- exchanges ---- */

static void act_shuffle(struct warp *w, const void *pc)
{
  (void)pc;
  for(int lane = 0; lane < LANES; lane++)
    w->threads[lane].result = w->threads[w->threads[lane].argument & 31].value;
}

static void act_ballot(struct warp *w, const void *pc)
{
  uint32_t bits = 0;
  (void)pc;
  for(int lane = 0; lane < LANES; lane++)
    bits |= (uint32_t)(w->threads[lane].value != 0) << lane;
  for(int lane = 0; lane < LANES; lane++)
    w->threads[lane].result = bits;
}

static void act_max(struct warp *w, const void *pc)
{
  uint32_t most = 0;
  (void)pc;
  for(int lane = 0; lane < LANES; lane++)
    most = w->threads[lane].value > most ? w->threads[lane].value : most;
  for(int lane = 0; lane < LANES; lane++)
    w->threads[lane].result = most;
}

static void act_sync(struct warp *w, const void *pc)
{
  (void)pc;
  clock_sync(w);
}

uint32_t emu_shuffle(uint32_t value, int source_lane)
{
  struct thread *t = running();
  warp_meet(t, MEET_SHUFFLE, value, (uint32_t)source_lane, __builtin_return_address(0), act_shuffle);
  return t->result;
}

uint32_t emu_ballot(int condition)
{
  struct thread *t = running();
  warp_meet(t, MEET_BALLOT, condition != 0, 0, __builtin_return_address(0), act_ballot);
  return t->result;
}

uint32_t emu_reduce_max(uint32_t value)
{
  struct thread *t = running();
  warp_meet(t, MEET_MAX, value, 0, __builtin_return_address(0), act_max);
  return t->result;
}

void emu_sync_warp(void)
{
  struct thread *t = running();
  warp_meet(t, MEET_SYNC, 0, 0, __builtin_return_address(0), act_sync);
  emu_maybe_preempt(t);
}

/* ---- named barriers ---- */

/* The barrier is complete: the waiting warps take what all have given and go on. */
static void open_barrier(struct cta *cta, struct named_barrier *b)
{
  for(int i = 0; i < cta->nwarps; i++) {
    struct warp *w = &cta->warps[i];
    if(!(b->waiting >> i & 1))
      continue;
    for(int lane = 0; lane < LANES; lane++) {
      clock_acquire(&w->threads[lane], b->clock);
      if(w->threads[lane].wait == WAIT_BARRIER)
        emu_make_ready(&w->threads[lane]);
    }
  }
  clock_reset(b->clock, cta);
  b->expected = b->arrived = 0;
  b->warps = b->waiting = 0;
  emu_machine.changes++;
}

static void check_arrival(const struct named_barrier *b, const struct warp *w, const struct thread *t, int id, int threads, const void *pc)
{
  for(int lane = 0; lane < LANES; lane++)
    if(w->threads[lane].value != t->value || w->threads[lane].argument != t->argument)
      emu_fail(EMU_DIVERGENCE, t, pc, "the lanes of a warp name different barriers or counts at %s", emu_pc_text(emu_pc(pc)).s);
  if(id < 0 || id >= NAMED_BARRIERS || threads % LANES != 0 || threads < LANES || threads > w->cta->nthreads)
    emu_fail(EMU_BARRIER, t, pc, "barrier %d for %d threads at %s: there are barriers 0 to 15, for whole warps of the CTA's %d threads", id, threads, emu_pc_text(emu_pc(pc)).s,
             w->cta->nthreads);
  if(b->expected != 0 && b->expected != threads)
    emu_fail(EMU_BARRIER, t, pc, "barrier %d: %d threads are expected at %s, but %d by those who came first, at %s", id, threads, emu_pc_text(emu_pc(pc)).s, b->expected,
             emu_pc_text(emu_pc(b->pc)).s);
  if(b->warps >> w->index & 1)
    emu_fail(EMU_BARRIER, t, pc, "warp %d arrives at barrier %d at %s a second time before it is complete (%d of %d threads)", w->index, id, emu_pc_text(emu_pc(pc)).s, b->arrived,
             b->expected);
}

static void arrive(struct warp *w, bool waits, const void *pc)
{
  struct cta *cta = w->cta;
  struct thread *t = running();
  const int id = (int)t->value, threads = (int)t->argument < 0 ? cta->nthreads : (int)t->argument;
  struct named_barrier *b = &cta->named[id & (NAMED_BARRIERS - 1)];
  check_arrival(b, w, t, id, threads, pc);
  if(b->expected == 0)
    b->pc = pc;
  b->expected = threads;
  b->arrived += LANES;
  b->warps |= 1u << w->index;
  for(int lane = 0; lane < LANES; lane++)
    clock_release(&w->threads[lane], b->clock);
  if(waits)
    b->waiting |= 1u << w->index;
  if(b->arrived >= b->expected) {
    open_barrier(cta, b);
  } else if(waits) { /* the other lanes were made ready by the meeting: they wait, too */
    for(int lane = 0; lane < LANES; lane++) {
      struct thread *other = &w->threads[lane];
      other->wait = WAIT_BARRIER;
      other->wait_id = id;
      other->pc = pc;
    }
    w->ready = 0;
    emu_block(t, WAIT_BARRIER, id, pc);
  }
}

static void act_barrier_sync(struct warp *w, const void *pc)
{
  arrive(w, true, pc);
}

static void act_barrier_arrive(struct warp *w, const void *pc)
{
  arrive(w, false, pc);
}

void emu_barrier_sync(int id, int threads)
{
  warp_meet(running(), MEET_BARRIER_SYNC, (uint32_t)id, (uint32_t)threads, __builtin_return_address(0), act_barrier_sync);
}

void emu_barrier_arrive(int id, int threads)
{
  warp_meet(running(), MEET_BARRIER_ARRIVE, (uint32_t)id, (uint32_t)threads, __builtin_return_address(0), act_barrier_arrive);
  emu_maybe_preempt(running());
}

void cta_named_barriers_end(struct cta *cta)
{
  for(int i = 0; i < NAMED_BARRIERS; i++)
    if(cta->named[i].arrived != 0)
      emu_fail(EMU_UNFINISHED, NULL, cta->named[i].pc, "cta %d ended with %d of %d threads at barrier %d, the first at %s", cta->index, cta->named[i].arrived, cta->named[i].expected, i,
               emu_pc_text(emu_pc(cta->named[i].pc)).s);
}
