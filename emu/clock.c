/* clock.c - vector clocks; internal.h says what they count.
 *
 * A clock has thousands of ticks, a CTA hundreds of threads, and lanes of a warp nearly always have seen the same. So they share one clock (struct clock,
 * counted by its users), and what the lanes know that is not the same, or changes all the time, is kept apart: each thread's own ticks, what it has seen of
 * its cp.async, the ticks as readers that the lanes had when they last met, and the products that the warp has waited for. clock_seen() puts it
 * together; entries for those agents in the shared clock may lag behind, never be ahead.
 *
 * What is joined is nearly always joined by all lanes one after the other: a warp remembers its last calls of clock_acquire(), and a clock which one went into it
 * last. Clocks are told apart by their ids, so that one that is used again is not taken for what it was.
 *
 * Ticks have room for all agents that a CTA can ever have and are zero beyond those in use, so that a new agent costs nothing. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static uint64_t last_id;

/* ---- clocks ---- */

#if defined(__x86_64__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("avx2", "default"), optimize("O3")))
#else
#define VECTORISED
#endif

/* Element-wise maximum into 'to'; the two do not overlap. */
VECTORISED static void join(uint32_t *restrict to, const uint32_t *restrict from, uint32_t agents)
{
  for(uint32_t i = 0; i < agents; i++)
    to[i] = to[i] > from[i] ? to[i] : from[i];
}

/* Is there something in 'from' that 'ticks' has not? */
VECTORISED static bool adds(const uint32_t *ticks, const uint32_t *from, uint32_t agents)
{
  uint32_t more = 0;
  for(uint32_t i = 0; i < agents; i++)
    more |= from[i] > ticks[i];
  return more != 0;
}

static void raise_tick(uint32_t *tick, uint32_t to)
{
  *tick = *tick > to ? *tick : to;
}

static struct clock *make(struct cta *cta)
{
  struct clock *clock = emu_need(calloc(1, sizeof(*clock) + cta->max_agents * sizeof(clock->ticks[0])));
  clock->made = cta->made;
  cta->made = clock;
  return clock;
}

struct clock *clock_new(struct cta *cta)
{
  struct clock *clock = make(cta);
  clock->users = 1;
  clock_changed(clock);
  return clock;
}

void free_clocks(struct cta *cta)
{
  while(cta->made != NULL) {
    struct clock *clock = cta->made;
    cta->made = clock->made;
    free(clock);
  }
}

void clock_changed(struct clock *clock)
{
  clock->id = ++last_id;
}

void clock_reset(struct clock *clock, const struct cta *cta)
{
  memset(clock->ticks, 0, cta->agents * sizeof(clock->ticks[0]));
  clock->joined = 0;
  clock_changed(clock);
}

/* A copy for one user. */
static struct clock *copy_of(struct cta *cta, const struct clock *from)
{
  struct clock *clock = cta->unused;
  if(clock != NULL)
    cta->unused = clock->next;
  else
    clock = make(cta);
  memcpy(clock->ticks, from->ticks, cta->agents * sizeof(clock->ticks[0]));
  clock->joined = 0;
  clock->users = 1;
  clock_changed(clock);
  return clock;
}

static void drop(struct cta *cta, struct clock *clock)
{
  if(--clock->users > 0)
    return;
  clock->next = cta->unused;
  cta->unused = clock;
}

/* 't' shares 'clock' from now on. */
static void share(struct thread *t, struct clock *clock)
{
  clock->users++;
  drop(t->cta, t->seen);
  t->seen = clock;
}

/* ---- what threads do with them ---- */

uint32_t clock_seen_further(const struct thread *t, uint32_t agent)
{
  const struct warp *w = t->warp;
  const uint32_t lane = agent - t->cta->reads - (uint32_t)w->index * LANES;
  uint32_t tick = t->seen->ticks[agent];
  if(lane < LANES)
    raise_tick(&tick, lane == (uint32_t)t->self.lane ? t->read_tick : w->met[lane]);
  else if(agent == w->agent)
    raise_tick(&tick, w->products_seen);
  else if(agent == t->async_agent)
    raise_tick(&tick, t->async_seen);
  return tick;
}

void clock_tick(struct thread *t)
{
  t->tick++;
  t->read_tick++;
}

void clock_meet(struct warp *w)
{
  for(uint32_t lane = 0; lane < LANES; lane++)
    w->met[lane] = w->threads[lane].read_tick++;
}

void clock_release(struct thread *t, struct clock *to)
{
  const struct warp *w = t->warp;
  uint32_t *reads = &to->ticks[t->cta->reads + (uint32_t)w->index * LANES];
  if(to->joined != t->seen->id)
    join(to->ticks, t->seen->ticks, t->cta->agents);
  to->joined = t->seen->id;
  for(int lane = 0; lane < LANES; lane++)
    raise_tick(&reads[lane], w->met[lane]);
  raise_tick(&reads[t->self.lane], t->read_tick);
  raise_tick(&to->ticks[t->self.thread], t->tick);
  raise_tick(&to->ticks[w->agent], w->products_seen);
  if(t->async_agent != 0)
    raise_tick(&to->ticks[t->async_agent], t->async_seen);
  clock_changed(to);
  clock_tick(t);
}

static struct acquired *find_acquired(struct warp *w, uint64_t seen, uint64_t from)
{
  for(int i = 0; i < ACQUIRED; i++)
    if(w->acquired[i].seen == seen && w->acquired[i].from == from)
      return &w->acquired[i];
  return NULL;
}

static void note_acquired(struct warp *w, uint64_t seen, uint64_t from, struct clock *result)
{
  struct acquired *a = &w->acquired[w->next_acquired++ % ACQUIRED];
  if(a->result != NULL)
    drop(w->cta, a->result);
  *a = (struct acquired){seen, from, result};
  result->users++;
}

void clock_acquire(struct thread *t, const struct clock *from)
{
  struct cta *cta = t->cta;
  const uint64_t seen = t->seen->id;
  const struct acquired *before = find_acquired(t->warp, seen, from->id);
  if(before != NULL) {
    share(t, before->result);
    return;
  }
  if(adds(t->seen->ticks, from->ticks, cta->agents)) {
    struct clock *sum = copy_of(cta, t->seen);
    join(sum->ticks, from->ticks, cta->agents);
    share(t, sum);
    drop(cta, sum);
  }
  note_acquired(t->warp, seen, from->id, t->seen);
}

void clock_sync(struct warp *w)
{
  struct cta *cta = w->cta;
  struct clock *all = copy_of(cta, w->threads[0].seen);
  for(int lane = 0; lane < LANES; lane++) {
    struct thread *t = &w->threads[lane];
    if(lane > 0 && t->seen->id != w->threads[lane - 1].seen->id && t->seen->id != w->threads[0].seen->id)
      join(all->ticks, t->seen->ticks, cta->agents);
  }
  for(int lane = 0; lane < LANES; lane++) {
    struct thread *t = &w->threads[lane];
    raise_tick(&all->ticks[t->self.thread], t->tick);
    if(t->async_agent != 0)
      raise_tick(&all->ticks[t->async_agent], t->async_seen);
    w->met[lane] = t->read_tick;
    share(t, all);
    clock_tick(t);
  }
  drop(cta, all);
}

uint32_t agent_new(struct cta *cta)
{
  return cta->agents++; /* max_agents counts one per thread, so there is room */
}
