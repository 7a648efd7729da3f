/* clock.c - vector clocks; internal.h says what they count.
 *
 * Arrays have room for all agents that a CTA can ever have and are zero beyond those in use, so that a new agent costs nothing. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default"), optimize("O3"))) /* most of the emulator's time goes through here */
#endif
void clock_join(uint32_t *restrict to, const uint32_t *restrict from, uint32_t agents)
{
  for(uint32_t i = 0; i < agents; i++)
    to[i] = to[i] > from[i] ? to[i] : from[i];
}

uint32_t *clock_new(const struct cta *cta)
{
  return emu_need(calloc(cta->max_agents, sizeof(uint32_t)));
}

void clock_tick(struct thread *t)
{
  t->clock[t->self.thread]++;
  t->clock[t->cta->reads + (uint32_t)t->self.thread]++;
}

void clock_meet(struct warp *w)
{
  const uint32_t first = w->cta->reads + (uint32_t)(w->index * LANES);
  uint32_t ticks[LANES];
  for(uint32_t lane = 0; lane < LANES; lane++)
    ticks[lane] = w->threads[lane].clock[first + lane];
  for(uint32_t lane = 0; lane < LANES; lane++) {
    memcpy(&w->threads[lane].clock[first], ticks, sizeof(ticks));
    w->threads[lane].clock[first + lane]++;
  }
}

void clock_release(struct thread *t, uint32_t *to)
{
  clock_join(to, t->clock, t->cta->agents);
  clock_tick(t);
}

uint32_t agent_new(struct cta *cta)
{
  return cta->agents++; /* max_agents counts one per thread, so there is room */
}
