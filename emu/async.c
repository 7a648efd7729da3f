/* async.c - copies that land later.
 *
 * A copy is checked and noted when it is issued; its bytes arrive at a random later moment (deliver_copy), and until then its destination holds NaN.
 *
 *   bulk and tensor copies   go through the async proxy, in whole lines. Each is an agent of its own, from a pool; its tick reaches others' clocks by way
 *                            of the mbarrier on which its bytes complete.
 *   cp.async                 are ordinary writes by the issuing thread's cp.async agent; its tick reaches the thread by copy_async_wait, others by the mbarrier
 *                            of copy_async_arrive. That arrival happens when the thread's earlier copies have landed, and hands over only them. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define GARBAGE 0xFF

static struct copy *add_copy(struct cta *cta)
{
  struct machine *m = &emu_machine;
  struct copy *c;
  if(m->ncopies == m->max_copies) {
    const int max = m->max_copies == 0 ? 256 : 2 * m->max_copies;
    m->copies = emu_need(realloc(m->copies, (size_t)max * sizeof(*m->copies)));
    m->max_copies = max;
  }
  c = &m->copies[m->ncopies++];
  memset(c, 0, sizeof(*c));
  c->cta = cta;
  cta->copies_pending++;
  return c;
}

/* ---- bulk and tensor copies ---- */

/* Who waits for a copy is taken to have seen the earlier ones of its agent. So those come first whose earlier copies the issuer has waited for; of the others the
 * one that is unused for longest. */
static uint32_t take_copy_agent(struct thread *t, const void *pc)
{
  struct cta *cta = t->cta;
  const uint32_t first = cta->bulk;
  for(uint32_t i = 0; i < 2 * COPY_AGENTS; i++) {
    const uint32_t index = (cta->next_copy_agent + i) % COPY_AGENTS;
    if((cta->busy_copy_agents >> index & 1) || (i < COPY_AGENTS && t->seen->ticks[first + index] < cta->ticks[first + index]))
      continue;
    cta->busy_copy_agents |= 1ull << index;
    cta->next_copy_agent = index + 1;
    cta->ticks[first + index]++;
    return first + index;
  }
  emu_fail(EMU_UNSUPPORTED, t, pc, "more than %d bulk copies under way in one CTA at %s", COPY_AGENTS, emu_pc_text(emu_pc(pc)).s);
}

/* Everything but where the bytes come from. */
static struct copy *issue(struct thread *t, void *dst, size_t bytes, uint64_t *bar, const void *pc)
{
  const uint32_t offset = shared_offset(t, dst, bytes, LINE_BYTES, "destination of a copy", pc);
  struct mbarrier *b = mbarrier_find(t, bar, pc);
  const uint32_t agent = take_copy_agent(t, pc);
  struct copy *c;
  if(!b->fenced)
    emu_fail(EMU_BARRIER, t, pc, "a copy at %s completes on the mbarrier at shared+0x%x, whose initialisation no mbarrier_init_fence made visible to the async proxy", emu_pc_text(emu_pc(pc)).s,
             (unsigned)b->offset);
  shadow_async_write(t, agent, t->cta->ticks[agent], offset, (uint32_t)bytes, pc);
  memset(dst, GARBAGE, bytes);
  c = add_copy(t->cta);
  c->barrier = b;
  c->thread = t;
  c->dst = dst;
  c->bytes = (uint32_t)bytes;
  c->agent = agent;
  c->tick = t->cta->ticks[agent];
  emu_machine.counters.copies++;
  return c;
}

void emu_copy_tensor(void *dst, const void *map, int rank, const int32_t *coordinates, uint64_t *bar)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  struct emu_tensor_map decoded;
  const uint8_t *low, *high;
  struct copy *c;
  if(!emu_tensor_map_decode(map, &decoded) || decoded.rank != (uint32_t)rank)
    emu_fail(EMU_UNSUPPORTED, t, pc, "tensor copy at %s: the map is none of rank %d", emu_pc_text(emu_pc(pc)).s, rank);
  if(emu_tensor_box_extent(&decoded, coordinates, &low, &high))
    check_global(t, low, (size_t)(high - low), "tensor copy", pc);
  c = issue(t, dst, emu_tensor_box_bytes(&decoded), bar, pc);
  c->tensor = true;
  c->map = decoded;
  memcpy(c->coordinates, coordinates, (size_t)rank * sizeof(coordinates[0]));
  emu_maybe_preempt(t);
}

void emu_copy_bulk(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  struct copy *c;
  if(bytes % LINE_BYTES != 0 || bytes == 0)
    emu_fail(EMU_UNSUPPORTED, t, pc, "bulk copy of %u bytes at %s: multiples of %d are emulated", (unsigned)bytes, emu_pc_text(emu_pc(pc)).s, LINE_BYTES);
  check_global(t, src, bytes, "bulk copy", pc);
  check_global_writes(t, src, bytes, pc);
  c = issue(t, dst, bytes, bar, pc);
  c->src = src;
  emu_maybe_preempt(t);
}

static void land_bulk(const struct copy *c)
{
  struct cta *cta = c->cta;
  const uint32_t offset = (uint32_t)((uint8_t *)c->dst - cta->shared);
  if(c->tensor)
    emu_tensor_box_copy(&c->map, c->coordinates, c->dst, offset);
  else
    memcpy(c->dst, c->src, c->bytes);
  shadow_async_landed(cta, offset, c->bytes);
  cta->busy_copy_agents &= ~(1ull << (c->agent - cta->bulk));
  c->barrier->clock->ticks[c->agent] = c->tick;
  mbarrier_complete(c->barrier, cta, 0, -(int64_t)c->bytes, NULL, NULL);
}

/* ---- cp.async ---- */

static uint32_t async_agent(struct thread *t)
{
  if(t->async_agent == 0) {
    t->async_agent = agent_new(t->cta);
    t->cta->ticks[t->async_agent] = 1;
  }
  return t->async_agent;
}

void emu_copy_async(void *dst, const void *src, int bytes)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  const uint32_t agent = async_agent(t), tick = t->cta->ticks[agent], offset = shared_offset(t, dst, (size_t)bytes, (size_t)bytes, "destination of cp.async", pc);
  struct copy *c;
  if((uintptr_t)src % (uintptr_t)bytes != 0)
    emu_fail(EMU_BOUNDS, t, pc, "cp.async at %s: the source is not aligned to %d bytes", emu_pc_text(emu_pc(pc)).s, bytes);
  if(t->stores_pending > 0)
    flush_stores(t, src, (size_t)bytes);
  access_global(t, src, (size_t)bytes, 0, pc);
  shadow_shared(t, agent, tick, offset, (uint32_t)bytes, ACCESS_WRITE, pc);
  memset(dst, GARBAGE, (size_t)bytes);
  c = add_copy(t->cta);
  c->thread = t;
  c->dst = dst;
  c->src = src;
  c->bytes = (uint32_t)bytes;
  c->agent = agent;
  c->tick = tick;
  emu_machine.counters.copies++;
}

/* Lands the thread's cp.async of ticks up to 'tick'. */
static void land_async_of(const struct thread *t, uint32_t tick)
{
  struct machine *m = &emu_machine;
  for(int i = m->ncopies - 1; i >= 0; i--) {
    const struct copy *c = &m->copies[i];
    if(c->thread == t && c->barrier == NULL && c->tick <= tick)
      deliver_copy(i);
  }
}

void emu_copy_async_wait(void)
{
  struct thread *t = running();
  const uint32_t agent = async_agent(t);
  t->pc = __builtin_return_address(0);
  land_async_of(t, UINT32_MAX);
  t->async_seen = t->cta->ticks[agent]++;
  emu_maybe_preempt(t);
}

void emu_copy_async_arrive(uint64_t *bar)
{
  const void *pc = __builtin_return_address(0);
  struct thread *t = running();
  const uint32_t agent = async_agent(t);
  struct mbarrier *b = mbarrier_find(t, bar, pc);
  struct copy *c = add_copy(t->cta);
  c->barrier = b;
  c->thread = t;
  c->agent = agent;
  c->tick = t->cta->ticks[agent]++;
  c->arrive = true;
  emu_maybe_preempt(t);
}

/* ---- delivery ---- */

void deliver_copy(int index)
{
  struct machine *m = &emu_machine;
  const struct copy c = m->copies[index];
  m->copies[index] = m->copies[--m->ncopies];
  c.cta->copies_pending--;
  m->changes++;
  if(c.barrier == NULL) {
    memcpy(c.dst, c.src, c.bytes);
  } else if(c.arrive) {
    land_async_of(c.thread, c.tick);
    c.barrier->clock->ticks[c.agent] = c.tick;
    mbarrier_complete(c.barrier, c.cta, 1, 0, c.thread, NULL);
  } else {
    land_bulk(&c);
  }
}
