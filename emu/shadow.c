/* shadow.c - what is remembered of shared memory, and the checks that need it.
 *
 * Ordinary accesses are tracked per word (struct cell), or per byte in words that somebody accessed in part. A cell knows its last write and the reads
 * since: one reader's tick as long as each new reader has seen the one before, else all of them (struct readers; the FastTrack scheme). An access is a race if the
 * running thread's clock does not cover an earlier conflicting one. So a missing fence or barrier is found in any interleaving, not only in one where it
 * does harm.
 *
 * The async proxy works on lines of 128 bytes (struct line): the last copy that was sent there, and per warp the last product that read it. A product counts as
 * reading until its warp has waited for it, a copy as writing until somebody has waited for its barrier: both are agents whose ticks reach other threads'
 * clocks only through those waits. Where ordinary accesses and async operations meet, each looks at the other's record; what was written by ordinary
 * stores must also have passed a fence_async_proxy of the writing thread that the issuer has seen, and what a copy overwrites one of the threads that have
 * read it. To keep that cheap a line numbers the ordinary accesses and remembers up to which number each warp has looked.
 *
 * Products read whole tiles, also columns that the kernel then throws away, and those may be written meanwhile. So where ordinary stores and a product's
 * operand are in no order, the row in question is *tainted*: what comes of it is a NaN with a number, and only if that reaches a conversion to a
 * narrower format is it a finding (emu_tainted).
 *
 * Not remembered: scoped (atomic) reads; unordered loads (masked columns) as reads; that more than one write went to the same bytes; a reader that a later one has
 * seen, so that only the later one's fence is asked for. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

#define CELL_BYTES 4

/* ---- pools ---- */

static uint16_t clock_take(struct cta *cta)
{
  uint16_t index = (uint16_t)cta->free_clock;
  if(index != 0) {
    cta->free_clock = cta->clocks[index]->ticks[0];
    clock_reset(cta->clocks[index], cta);
    return index;
  }
  if(cta->nclocks == cta->max_clocks) {
    const uint32_t max = cta->max_clocks == 0 ? 64 : 2 * cta->max_clocks;
    cta->clocks = emu_need(realloc(cta->clocks, max * sizeof(struct clock *)));
    cta->max_clocks = max;
  }
  if(cta->nclocks == 0)
    cta->clocks[cta->nclocks++] = NULL; /* index 0 means none */
  if(cta->nclocks > UINT16_MAX)
    emu_fail(EMU_NO_MEMORY, running(), NULL, "more than %d words of shared memory are released at once", UINT16_MAX);
  index = (uint16_t)cta->nclocks;
  cta->clocks[index] = clock_new(cta);
  cta->nclocks++;
  return index;
}

static void clock_give(struct cta *cta, uint16_t index)
{
  if(index == 0)
    return;
  cta->clocks[index]->ticks[0] = cta->free_clock;
  cta->free_clock = index;
}

static uint16_t readers_take(struct cta *cta)
{
  uint16_t index = (uint16_t)cta->free_readers;
  if(index != 0) {
    cta->free_readers = cta->readers[index].low;
    return index;
  }
  if(cta->nreaders + 1 >= cta->max_readers) {
    const uint32_t max = cta->max_readers == 0 ? 256 : 2 * cta->max_readers;
    cta->readers = emu_need(realloc(cta->readers, max * sizeof(*cta->readers)));
    cta->max_readers = max;
  }
  if(cta->nreaders >= UINT16_MAX)
    emu_fail(EMU_NO_MEMORY, running(), NULL, "more than %d words of shared memory are read by several threads at once", UINT16_MAX);
  index = (uint16_t)++cta->nreaders;
  memset(&cta->readers[index], 0, sizeof(cta->readers[index]));
  return index;
}

static void readers_give(struct cta *cta, uint16_t index)
{
  if(index == 0)
    return;
  cta->readers[index].count = 0;
  cta->readers[index].low = cta->free_readers;
  cta->free_readers = index;
}

/* Makes room for threads low .. end - 1, among them those that are there. */
static void readers_extend(struct readers *r, uint32_t low, uint32_t end)
{
  const uint32_t count = end - low, before = r->count != 0 ? r->low - low : 0;
  if(count > r->room) {
    r->ticks = emu_need(realloc(r->ticks, count * sizeof(r->ticks[0])));
    r->room = count;
  }
  memmove(r->ticks + before, r->ticks, r->count * sizeof(r->ticks[0]));
  memset(r->ticks, 0, before * sizeof(r->ticks[0]));
  memset(r->ticks + before + r->count, 0, (count - before - r->count) * sizeof(r->ticks[0]));
  r->low = low;
  r->count = count;
}

/* Notes a read by a thread, with room for all of its warp. */
static void readers_set(struct readers *r, uint32_t thread, uint32_t tick)
{
  const uint32_t first = thread / LANES * LANES, low = r->count != 0 && r->low < first ? r->low : first,
                 end = r->count != 0 && r->low + r->count > first + LANES ? r->low + r->count : first + LANES;
  if(end - low > r->count)
    readers_extend(r, low, end);
  r->ticks[thread - r->low] = tick;
}

void free_readers(struct cta *cta)
{
  for(uint32_t i = 1; i <= cta->nreaders; i++)
    free(cta->readers[i].ticks);
  free(cta->readers);
}

/* Cells of a word's four bytes, made from the word's. */
static struct cell *split(struct cta *cta, uint32_t word)
{
  struct cell *whole = &cta->cells[word];
  if(whole->parts == 0) {
    if(cta->nparts + 8 > cta->max_parts) {
      const uint32_t max = cta->max_parts == 0 ? 256 : 2 * cta->max_parts;
      cta->parts = emu_need(realloc(cta->parts, max * sizeof(*cta->parts)));
      cta->max_parts = max;
    }
    if(cta->nparts == 0)
      cta->nparts = CELL_BYTES;
    for(uint32_t i = 0; i < CELL_BYTES; i++) {
      struct cell *part = &cta->parts[cta->nparts + i];
      *part = *whole;
      part->release = 0;
      if(whole->readers != 0) {
        const uint16_t index = readers_take(cta);
        const struct readers *from = &cta->readers[whole->readers];
        readers_extend(&cta->readers[index], from->low, from->low + from->count);
        memcpy(cta->readers[index].ticks, from->ticks, from->count * sizeof(from->ticks[0]));
        part->readers = index;
      }
    }
    whole->parts = cta->nparts;
    cta->nparts += CELL_BYTES;
  }
  return &cta->parts[whole->parts];
}

/* ---- findings ---- */

static const char *verb(int flags)
{
  return flags & ACCESS_UPDATE ? "update" : flags & ACCESS_WRITE ? "write" : "read";
}

_Noreturn static void race(struct thread *t, enum emu_finding_kind kind, uint32_t offset, const char *what, const void *pc, const char *earlier, uint32_t agent, uint32_t other_pc,
                           const char *why)
{
  emu_machine.finding->other_pc = other_pc != 0 ? (const char *)emu_machine.launch->code + other_pc : NULL;
  emu_fail(kind, t, pc, "%s of shared+0x%x at %s, and %s by %s at %s: %s", what, (unsigned)offset, emu_pc_text(emu_pc(pc)).s, earlier, emu_agent_text(t->cta, agent).s,
           emu_pc_text(other_pc).s, why);
}

/* ---- ordinary accesses ---- */

static bool covered(const struct thread *t, uint32_t agent, uint32_t tick)
{
  return clock_seen(t, agent) >= tick;
}

/* The agent of a reader that 't' has not seen, UINT32_MAX if there is none. */
static uint32_t unseen_reader(const struct thread *t, const struct readers *readers)
{
  const uint32_t first = t->cta->reads + readers->low;
  for(uint32_t i = 0; i < readers->count; i++)
    if(readers->ticks[i] > t->seen->ticks[first + i] && !covered(t, first + i, readers->ticks[i]))
      return first + i;
  return UINT32_MAX;
}

static void note_read(struct thread *t, struct cell *cell, const void *pc)
{
  struct cta *cta = t->cta;
  const uint32_t agent = cta->reads + (uint32_t)t->self.thread, tick = t->read_tick;
  if(cell->readers != 0) {
    readers_set(&cta->readers[cell->readers], agent - cta->reads, tick);
  } else if(cell->read_tick == 0 || cell->read_agent == agent || covered(t, cell->read_agent, cell->read_tick)) {
    cell->read_tick = tick;
    cell->read_agent = (uint16_t)agent;
  } else {
    cell->readers = readers_take(cta);
    readers_set(&cta->readers[cell->readers], cell->read_agent - cta->reads, cell->read_tick);
    readers_set(&cta->readers[cell->readers], agent - cta->reads, tick);
  }
  cell->read_pc = emu_pc(pc);
}

static void note_write(struct thread *t, struct cell *cell, uint32_t agent, uint32_t tick, int flags, const void *pc)
{
  cell->write_tick = tick;
  cell->write_agent = (uint16_t)agent;
  cell->write_pc = emu_pc(pc);
  cell->read_tick = 0;
  readers_give(t->cta, cell->readers);
  cell->readers = 0;
  cell->written = 1;
  cell->atomic = (flags & ACCESS_ATOMIC) != 0;
  if(!(flags & ACCESS_UPDATE)) { /* an update continues the release sequence, a store ends it */
    clock_give(t->cta, cell->release);
    cell->release = 0;
  }
}

static void access_cell(struct thread *t, uint32_t agent, uint32_t tick, struct cell *cell, uint32_t offset, int flags, const void *pc)
{
  const bool atomic = (flags & ACCESS_ATOMIC) != 0, write = (flags & ACCESS_WRITE) != 0;
  if(cell->object)
    emu_fail(EMU_BARRIER, t, pc, "ordinary %s of the mbarrier at shared+0x%x at %s", verb(flags), (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  if(!(atomic && cell->atomic) && !covered(t, cell->write_agent, cell->write_tick))
    race(t, EMU_RACE, offset, verb(flags), pc, "the earlier write", cell->write_agent, cell->write_pc, "nothing orders them");
  if((!write || (flags & ACCESS_UPDATE)) && !cell->written && !t->cta->lines[offset / LINE_BYTES].landed)
    emu_fail(EMU_UNINITIALISED, t, pc, "%s of shared+0x%x at %s: nobody has written it in this launch", verb(flags), (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  if(write) {
    const uint32_t unseen = cell->readers != 0 ? unseen_reader(t, &t->cta->readers[cell->readers]) : UINT32_MAX;
    if(unseen != UINT32_MAX)
      race(t, EMU_RACE, offset, verb(flags), pc, "an earlier read", unseen, cell->read_pc, "nothing orders them");
    if(cell->readers == 0 && cell->read_tick != 0 && !covered(t, cell->read_agent, cell->read_tick))
      race(t, EMU_RACE, offset, verb(flags), pc, "an earlier read", cell->read_agent, cell->read_pc, "nothing orders them");
    note_write(t, cell, agent, tick, flags, pc);
  } else if(!atomic) {
    note_read(t, cell, pc);
  }
}

/* The part of an ordinary access that concerns what the async proxy did here. */
static void access_line(struct thread *t, struct line *line, uint32_t offset, int flags, const void *pc)
{
  line->generic = ++t->cta->generic;
  if(!line->touched)
    return;
  if(!covered(t, line->write_agent, line->write_tick))
    race(t, EMU_RACE, offset, verb(flags), pc, "the copy to it", line->write_agent, line->write_pc, "the copy's completion was not waited for");
  if(!(flags & ACCESS_WRITE))
    return;
  for(int w = 0; w < t->cta->nwarps; w++) {
    struct warp *reader = &t->cta->warps[w];
    if(!covered(t, reader->agent, line->read_tick[w])) {
      const struct taint taint = {EMU_EARLY_OVERWRITE, pc, line->read_pc, reader->agent, offset, t->self.cta, t->self.warp, "write", "the reading", "the products may still be reading it"};
      product_taint(reader, offset / LINE_BYTES, emu_taint_number(&taint));
    }
  }
}

void shadow_shared(struct thread *t, uint32_t agent, uint32_t tick, uint32_t offset, uint32_t bytes, int flags, const void *pc)
{
  struct cta *cta = t->cta;
  for(uint32_t line = offset / LINE_BYTES; line <= (offset + bytes - 1) / LINE_BYTES; line++)
    access_line(t, &cta->lines[line], line * LINE_BYTES < offset ? offset : line * LINE_BYTES, flags, pc);
  for(uint32_t at = offset; at < offset + bytes;) {
    const uint32_t word = at / CELL_BYTES, end = (word + 1) * CELL_BYTES < offset + bytes ? (word + 1) * CELL_BYTES : offset + bytes;
    if(end - at == CELL_BYTES && cta->cells[word].parts == 0) {
      access_cell(t, agent, tick, &cta->cells[word], at, flags, pc);
    } else {
      split(cta, word);
      for(; at < end; at++)
        access_cell(t, agent, tick, &cta->parts[cta->cells[word].parts + at % CELL_BYTES], at, flags, pc);
    }
    at = end;
  }
}

uint32_t shadow_word_taint(struct thread *t, uint32_t offset, const void *pc)
{
  const struct cell *whole = &t->cta->cells[offset / CELL_BYTES];
  const struct line *line = &t->cta->lines[offset / LINE_BYTES];
  if(!covered(t, line->write_agent, line->write_tick)) {
    const struct taint taint = {EMU_RACE, pc, line->write_pc, line->write_agent, offset, t->self.cta, t->self.warp, "read", "the copy to it",
                                "the copy's completion was not waited for"};
    return emu_taint_number(&taint);
  }
  for(uint32_t i = 0; i < (whole->parts != 0 ? CELL_BYTES : 1); i++) {
    const struct cell *cell = whole->parts != 0 ? &t->cta->parts[whole->parts + i] : whole;
    const struct taint taint = {EMU_RACE, pc, cell->write_pc, cell->write_agent, offset + i, t->self.cta, t->self.warp, "read", "the write", "nothing orders them"};
    if(!covered(t, cell->write_agent, cell->write_tick))
      return emu_taint_number(&taint);
  }
  return 0;
}

void shadow_mark_object(struct thread *t, uint32_t offset, const void *pc)
{
  shadow_shared(t, (uint32_t)t->self.thread, t->tick, offset, 8, ACCESS_WRITE, pc);
  for(uint32_t word = offset / CELL_BYTES; word < offset / CELL_BYTES + 2; word++) {
    t->cta->cells[word].object = 1;
    for(uint32_t i = 0; i < CELL_BYTES && t->cta->cells[word].parts != 0; i++)
      t->cta->parts[t->cta->cells[word].parts + i].object = 1;
  }
}

struct clock *shadow_release_clock(struct cta *cta, uint32_t offset, bool make)
{
  struct cell *cell = &cta->cells[offset / CELL_BYTES];
  if(cell->release == 0 && make) {
    const uint16_t index = clock_take(cta);
    cell->release = index;
  }
  return cell->release != 0 ? cta->clocks[cell->release] : NULL;
}

void shadow_drop_release(struct cta *cta, uint32_t offset)
{
  struct cell *cell = &cta->cells[offset / CELL_BYTES];
  clock_give(cta, cell->release);
  cell->release = 0;
}

/* ---- the async proxy ---- */

/* Has the thread seen a fence_async_proxy of 'by' behind its tick 'tick', as a reader or as a writer? */
static bool fence_seen(const struct thread *t, const struct thread *by, uint32_t tick, bool read)
{
  const uint32_t seen = clock_seen(t, (uint32_t)by->self.thread);
  uint32_t low = 0, high = by->nfences;
  while(low < high) { /* the first fence at or behind the tick */
    const uint32_t middle = (low + high) / 2;
    if((read ? by->fences[middle].read_tick : by->fences[middle].tick) < tick)
      low = middle + 1;
    else
      high = middle;
  }
  return low < by->nfences && by->fences[low].tick < seen;
}

/* Has it seen a fence of the reader behind that read? Of the first agent for which it has not, the number; UINT32_MAX if there is none. */
static uint32_t unfenced_reader(const struct thread *t, const struct cell *cell)
{
  const struct cta *cta = t->cta;
  const struct readers *r = &cta->readers[cell->readers];
  if(cell->readers == 0)
    return cell->read_tick == 0 || fence_seen(t, &cta->threads[cell->read_agent - cta->reads], cell->read_tick, true) ? UINT32_MAX : cell->read_agent;
  for(uint32_t i = 0; i < r->count; i++)
    if(r->ticks[i] != 0 && !fence_seen(t, &cta->threads[r->low + i], r->ticks[i], true))
      return cta->reads + r->low + i;
  return UINT32_MAX;
}

/* What is wrong with an async operation that 't' issues on what ordinary stores have left in a cell; kind EMU_NONE if nothing is. */
static struct taint store_fault(const struct thread *t, const struct cell *cell, uint32_t offset, const char *what, const void *pc)
{
  struct taint fault = {EMU_NONE, pc, cell->write_pc, cell->write_agent, offset, t->self.cta, t->self.warp, what, "the store", ""};
  if(!covered(t, cell->write_agent, cell->write_tick)) {
    fault.kind = EMU_RACE;
    fault.why = "nothing orders them";
  } else if(cell->write_tick != 0 && cell->write_agent < (uint32_t)t->cta->nthreads && !fence_seen(t, &t->cta->threads[cell->write_agent], cell->write_tick, false)) {
    fault.kind = EMU_NO_PROXY_FENCE;
    fault.why = "no fence_async_proxy of the storing thread lies between them";
  }
  return fault;
}

static void check_no_object(const struct thread *t, const struct cell *cell, uint32_t offset, const char *what, const void *pc)
{
  if(cell->object)
    emu_fail(EMU_BARRIER, t, pc, "%s the mbarrier at shared+0x%x at %s", what, (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
  if(cell->write_tick != 0 && cell->write_agent >= (uint32_t)t->cta->nthreads)
    emu_fail(EMU_UNSUPPORTED, t, pc, "%s shared+0x%x at %s, which cp.async wrote", what, (unsigned)offset, emu_pc_text(emu_pc(pc)).s);
}

/* One cell against a copy to it. */
static uint32_t copy_meets_cell(struct thread *t, const struct cell *cell, uint32_t offset, const void *pc)
{
  static const char what[] = "copy to";
  const struct taint fault = store_fault(t, cell, offset, what, pc);
  uint32_t unseen = UINT32_MAX;
  check_no_object(t, cell, offset, what, pc);
  if(fault.kind != EMU_NONE)
    race(t, fault.kind, offset, what, pc, fault.earlier, fault.agent, fault.other_pc, fault.why);
  if(cell->readers != 0)
    unseen = unseen_reader(t, &t->cta->readers[cell->readers]);
  else if(cell->read_tick != 0 && !covered(t, cell->read_agent, cell->read_tick))
    unseen = cell->read_agent;
  if(unseen != UINT32_MAX)
    race(t, EMU_EARLY_OVERWRITE, offset, what, pc, "a read", unseen, cell->read_pc, "nothing orders them");
  unseen = unfenced_reader(t, cell);
  if(unseen != UINT32_MAX)
    race(t, EMU_NO_PROXY_FENCE, offset, what, pc, "a read", unseen, cell->read_pc, "no fence_async_proxy of the reading thread lies between them");
  return 0;
}

/* One cell against a product that reads it. */
static uint32_t product_meets_cell(struct thread *t, const struct cell *cell, uint32_t offset, const void *pc)
{
  static const char what[] = "product's read";
  const struct taint fault = store_fault(t, cell, offset, what, pc);
  check_no_object(t, cell, offset, what, pc);
  return fault.kind != EMU_NONE ? emu_taint_number(&fault) : 0;
}

/* All ordinary accesses to the line that 'viewer' has not looked at yet; the last taint. */
static uint32_t meet_cells(struct thread *t, uint32_t line, int viewer, uint32_t (*meet)(struct thread *, const struct cell *, uint32_t, const void *), const void *pc)
{
  struct cta *cta = t->cta;
  struct line *l = &cta->lines[line];
  uint32_t taint = 0;
  if(l->generic <= l->verified[viewer])
    return 0;
  for(uint32_t word = line * (LINE_BYTES / CELL_BYTES); word < (line + 1) * (LINE_BYTES / CELL_BYTES); word++) {
    const struct cell *cell = &cta->cells[word];
    for(uint32_t i = 0; i < (cell->parts != 0 ? CELL_BYTES : 1); i++) {
      const uint32_t found = meet(t, cell->parts != 0 ? &cta->parts[cell->parts + i] : cell, word * CELL_BYTES + i, pc);
      taint = found != 0 ? found : taint;
    }
  }
  if(taint == 0)
    l->verified[viewer] = l->generic;
  return taint;
}

void shadow_async_write(struct thread *t, uint32_t agent, uint32_t tick, uint32_t offset, uint32_t bytes, const void *pc)
{
  struct cta *cta = t->cta;
  for(uint32_t line = offset / LINE_BYTES; line <= (offset + bytes - 1) / LINE_BYTES; line++) {
    struct line *l = &cta->lines[line];
    if(!covered(t, l->write_agent, l->write_tick))
      race(t, EMU_EARLY_OVERWRITE, line * LINE_BYTES, "copy to", pc, "an earlier copy to it", l->write_agent, l->write_pc, "the earlier copy's completion was not waited for");
    for(int w = 0; w < cta->nwarps; w++)
      if(!covered(t, cta->warps[w].agent, l->read_tick[w]))
        race(t, EMU_EARLY_OVERWRITE, line * LINE_BYTES, "copy to", pc, "reading", cta->warps[w].agent, l->read_pc, "the products may still be reading it");
    meet_cells(t, line, MAX_WARPS, copy_meets_cell, pc);
    l->write_agent = (uint16_t)agent;
    l->write_tick = tick;
    l->write_pc = emu_pc(pc);
    l->touched = true;
  }
}

uint32_t shadow_async_read(struct thread *t, uint32_t line, const void *pc)
{
  struct cta *cta = t->cta;
  struct line *l = &cta->lines[line];
  const int w = t->warp->index;
  const uint32_t taint = meet_cells(t, line, w, product_meets_cell, pc);
  if(!covered(t, l->write_agent, l->write_tick))
    race(t, EMU_RACE, line * LINE_BYTES, "product's read", pc, "the copy to it", l->write_agent, l->write_pc, "the copy's completion was not waited for");
  l->read_tick[w] = cta->ticks[t->warp->agent];
  l->read_pc = emu_pc(pc);
  l->touched = true;
  return taint;
}

void shadow_async_landed(struct cta *cta, uint32_t offset, uint32_t bytes)
{
  for(uint32_t line = offset / LINE_BYTES; line <= (offset + bytes - 1) / LINE_BYTES; line++)
    cta->lines[line].landed = true;
}
