/* product.c - wgmma.
 *
 * A product is issued by each of a warpgroup's four warps, in the same order with the same operands. It reads shared memory at some time between issue and the
 * warp's wait, so it is computed as late as possible: in wgmma_wait, warp by warp, once all four have issued it. Until then the lanes' accumulators hold NaN,
 * and touching them is a finding.
 *
 * The warp's products are an agent whose tick rises with each commit; only wgmma_wait brings it into the lanes' clocks. So whoever overwrites an operand must
 * have heard from each warp that reads it after that warp has waited. */
#include "internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct warpgroup *group_of(const struct warp *w)
{
  return &w->cta->groups[w->index / 4];
}

static struct product *product_at(const struct warpgroup *g, uint64_t number)
{
  return &g->products[number % g->max];
}

/* ---- accumulators ---- */

static struct accumulators *find_accumulators(const struct warp *w, const float *key)
{
  for(int i = 0; i < w->npending; i++)
    if(w->pending[i].lane[0] == key)
      return &w->pending[i];
  return NULL;
}

/* Takes the lanes' values into a tile, and leaves NaN in their place. */
static void take_accumulators(struct warp *w)
{
  const struct thread *first = &w->threads[0];
  struct accumulators *acc = find_accumulators(w, first->accumulators);
  if(acc != NULL)
    return;
  if(w->npending == w->max_pending) {
    const int max = w->max_pending == 0 ? 4 : 2 * w->max_pending;
    w->pending = emu_need(realloc(w->pending, (size_t)max * sizeof(*w->pending)));
    w->max_pending = max;
  }
  acc = &w->pending[w->npending++];
  acc->n = first->n;
  memset(acc->row_taint, 0, sizeof(acc->row_taint));
  memset(acc->column_taint, 0, sizeof(acc->column_taint));
  for(int lane = 0; lane < LANES; lane++)
    acc->lane[lane] = w->threads[lane].accumulators;
  for(int row = 0; row < 16; row++) {
    for(int column = 0; column < acc->n; column++) {
      int lane, index;
      emu_wgmma_place(row, column, &lane, &index);
      acc->tile[row * acc->n + column] = acc->lane[lane][index];
      acc->lane[lane][index] = NAN;
    }
  }
}

static float result(const struct accumulators *acc, int row, int column)
{
  const uint32_t taint = acc->column_taint[column] != 0 ? acc->column_taint[column] : acc->row_taint[row], bits = EMU_TAINT | taint;
  float value = acc->tile[row * acc->n + column];
  if(taint != 0)
    memcpy(&value, &bits, sizeof(value));
  return value;
}

static void give_accumulators(struct warp *w)
{
  for(int i = 0; i < w->npending; i++) {
    const struct accumulators *acc = &w->pending[i];
    for(int row = 0; row < 16; row++) {
      for(int column = 0; column < acc->n; column++) {
        int lane, index;
        emu_wgmma_place(row, column, &lane, &index);
        acc->lane[lane][index] = result(acc, row, column);
      }
    }
  }
  w->npending = 0;
}

void product_pending_check(struct thread *t, const void *p, size_t bytes, const void *pc)
{
  const struct warp *w = t->warp;
  for(int i = 0; i < w->npending; i++) {
    const uintptr_t from = (uintptr_t)w->pending[i].lane[t->self.lane], to = from + (size_t)w->pending[i].n / 2 * sizeof(float);
    if((uintptr_t)p < to && (uintptr_t)p + bytes > from)
      emu_fail(EMU_WGMMA, t, pc, "accumulators are touched at %s before wgmma_wait", emu_pc_text(emu_pc(pc)).s);
  }
}

void emu_keep_accumulators(float *d, int count)
{
  product_pending_check(running(), d, (size_t)count * sizeof(*d), __builtin_return_address(0));
}

/* ---- execution ---- */

static void execute(struct warp *w, const struct product *p)
{
  const struct emu_matrix a = emu_matrix_decode(p->a), b = emu_matrix_decode(p->b);
  struct accumulators *acc = find_accumulators(w, p->key[w->index & 3]);
  emu_wgmma_warp(w->cta->shared, &a, 16 * (w->index & 3), &b, p->n, p->accumulate != 0, acc->tile);
  emu_machine.counters.products++;
}

/* Forgets the products that all warps have executed. */
static void forget(struct cta *cta, int group)
{
  struct warpgroup *g = &cta->groups[group];
  uint64_t oldest = g->issued;
  for(int i = group * 4; i < group * 4 + 4 && i < cta->nwarps; i++)
    oldest = cta->warps[i].executed < oldest ? cta->warps[i].executed : oldest;
  g->first = oldest;
}

/* Finishes the wait of a warp if all four have issued what it waits for. */
static bool finish_wait(struct warp *w)
{
  const struct warpgroup *g = group_of(w);
  if(w->committed > w->executed && product_at(g, w->committed - 1)->warps < 4)
    return false; /* issued in order, so the last one decides */
  for(; w->executed < w->committed; w->executed++)
    execute(w, product_at(g, w->executed));
  give_accumulators(w);
  w->products_seen = w->cta->ticks[w->agent] - 1;
  w->fenced = false;
  w->waits = false;
  forget(w->cta, w->index / 4);
  return true;
}

static void wake_group(struct warp *w)
{
  for(int i = w->index / 4 * 4; i < w->index / 4 * 4 + 4 && i < w->cta->nwarps; i++) {
    struct warp *other = &w->cta->warps[i];
    if(other->waits && finish_wait(other))
      for(int lane = 0; lane < LANES; lane++)
        emu_make_ready(&other->threads[lane]);
  }
}

/* ---- issue ---- */

/* The line that row 'row' of the warp's part of an operand lies in, as all four k steps of a tile do. */
static uint32_t line_of(const struct emu_matrix *m, int row)
{
  return emu_matrix_address(m, row, 0) / LINE_BYTES;
}

/* A row that does not count is read unseen: whatever is done there meanwhile is well, as long as nothing is made of the result. */
static uint32_t idle_row_taint(const struct warp *w, uint32_t line, const void *pc)
{
  const struct taint taint = {EMU_UNINITIALISED, pc, emu_pc(pc), w->agent, line * LINE_BYTES, w->cta->index, w->index, "product's read", "no write that counts",
                              "count_rows() says that the row is not used"};
  return emu_taint_number(&taint);
}

void emu_count_rows(int rows)
{
  running()->warp->idle_rows = 64 - rows;
}

static void note_reads(struct warp *w, const struct product *p, const void *pc)
{
  const struct emu_matrix a = emu_matrix_decode(p->a), b = emu_matrix_decode(p->b);
  struct thread *t = &w->threads[emu_random(LANES)]; /* what one of them has not seen, the warp has not */
  struct accumulators *acc = find_accumulators(w, p->key[w->index & 3]);
  if(a.swizzle != 128 || b.swizzle != 128)
    emu_fail(EMU_UNSUPPORTED, t, pc, "product at %s: operands with a 128-byte swizzle are emulated", emu_pc_text(emu_pc(pc)).s);
  for(int row = 0; row < 16 + p->n; row++) {
    uint32_t *taint = row < 16 ? &acc->row_taint[row] : &acc->column_taint[row - 16];
    const bool idle = row < 16 && 16 * (w->index & 3) + row >= 64 - w->idle_rows;
    const uint32_t line = row < 16 ? line_of(&a, 16 * (w->index & 3) + row) : line_of(&b, row - 16);
    uint32_t found;
    shared_offset(t, t->self.shared + (size_t)line * LINE_BYTES, LINE_BYTES, LINE_BYTES, "operand of a product", pc);
    found = idle ? idle_row_taint(w, line, pc) : shadow_async_read(t, line, pc);
    *taint = found != 0 ? found : *taint;
  }
}

void product_taint(struct warp *w, uint32_t line, uint32_t taint)
{
  const struct warpgroup *g = group_of(w);
  for(uint64_t i = w->executed; i < w->issued; i++) {
    const struct product *p = product_at(g, i);
    const struct emu_matrix a = emu_matrix_decode(p->a), b = emu_matrix_decode(p->b);
    struct accumulators *acc = find_accumulators(w, p->key[w->index & 3]);
    for(int row = 0; row < 16; row++)
      if(line_of(&a, 16 * (w->index & 3) + row) == line)
        acc->row_taint[row] = taint;
    for(int column = 0; column < p->n; column++)
      if(line_of(&b, column) == line)
        acc->column_taint[column] = taint;
  }
}

static struct product *add_product(struct warpgroup *g)
{
  struct product *p;
  if(g->issued - g->first == g->max) {
    const uint32_t max = g->max == 0 ? 64 : 2 * g->max;
    struct product *larger = emu_need(malloc(max * sizeof(*larger)));
    for(uint64_t i = g->first; g->max != 0 && i < g->issued; i++)
      larger[i % max] = *product_at(g, i);
    free(g->products);
    g->products = larger;
    g->max = max;
  }
  p = product_at(g, g->issued++);
  memset(p, 0, sizeof(*p));
  return p;
}

/* Pending accumulators are the same as the new product's, or others altogether. */
static void check_shape(const struct warp *w, const struct thread *t, const void *pc)
{
  const uintptr_t from = (uintptr_t)t->accumulators, to = from + (size_t)t->n / 2 * sizeof(float);
  if(t->n < 8 || t->n > 256 || t->n % 8 != 0)
    emu_fail(EMU_UNSUPPORTED, t, pc, "product of %d columns at %s: multiples of 8 up to 256 are possible", t->n, emu_pc_text(emu_pc(pc)).s);
  for(int i = 0; i < w->npending; i++) {
    const uintptr_t other = (uintptr_t)w->pending[i].lane[0], end = other + (size_t)w->pending[i].n / 2 * sizeof(float);
    if(from < end && other < to && (from != other || to != end))
      emu_fail(EMU_WGMMA, t, pc, "accumulators of a product at %s overlap those of one that is pending, in part", emu_pc_text(emu_pc(pc)).s);
  }
}

static void act_product(struct warp *w, const void *pc)
{
  struct warpgroup *g = group_of(w);
  const struct thread *t = &w->threads[0];
  struct product *p;
  for(int lane = 1; lane < LANES; lane++) {
    const struct thread *other = &w->threads[lane];
    if(other->a != t->a || other->b != t->b || other->n != t->n || other->accumulate != t->accumulate)
      emu_fail(EMU_DIVERGENCE, other, pc, "lanes 0 and %d give a product at %s different operands", lane, emu_pc_text(emu_pc(pc)).s);
  }
  check_shape(w, t, pc);
  if(!w->fenced)
    emu_fail(EMU_WGMMA, t, pc, "product at %s without a wgmma_fence since the last wait", emu_pc_text(emu_pc(pc)).s);
  if(w->index / 4 * 4 + 4 > w->cta->nwarps)
    emu_fail(EMU_WGMMA, t, pc, "product at %s: warp %d belongs to no whole warpgroup", emu_pc_text(emu_pc(pc)).s, w->index);
  if(w->issued == g->issued) {
    p = add_product(g);
    p->a = t->a;
    p->b = t->b;
    p->n = t->n;
    p->accumulate = t->accumulate;
  } else {
    p = product_at(g, w->issued);
    if(p->a != t->a || p->b != t->b || p->n != t->n || p->accumulate != t->accumulate)
      emu_fail(EMU_DIVERGENCE, t, pc, "warp %d gives a product at %s other operands than the warps of its group before it", w->index, emu_pc_text(emu_pc(pc)).s);
  }
  p->warps++;
  p->key[w->index & 3] = t->accumulators;
  w->issued++;
  take_accumulators(w);
  note_reads(w, p, pc);
  if(p->warps == 4)
    wake_group(w);
}

void emu_wgmma(float *d, int n, uint64_t a, uint64_t b, int accumulate)
{
  struct thread *t = running();
  t->a = a;
  t->b = b;
  t->n = n;
  t->accumulate = accumulate != 0;
  t->accumulators = d;
  warp_meet(t, MEET_PRODUCT, 0, 0, __builtin_return_address(0), act_product);
}

static void act_fence(struct warp *w, const void *pc)
{
  (void)pc;
  w->fenced = true;
}

void emu_wgmma_fence(void)
{
  warp_meet(running(), MEET_FENCE, 0, 0, __builtin_return_address(0), act_fence);
}

static void act_commit(struct warp *w, const void *pc)
{
  (void)pc;
  w->committed = w->issued;
  w->cta->ticks[w->agent]++;
}

void emu_wgmma_commit(void)
{
  warp_meet(running(), MEET_COMMIT, 0, 0, __builtin_return_address(0), act_commit);
  emu_maybe_preempt(running());
}

static void act_wait(struct warp *w, const void *pc)
{
  struct thread *t = running();
  if(w->committed < w->issued)
    emu_fail(EMU_WGMMA, t, pc, "wgmma_wait at %s: %llu products are not committed", emu_pc_text(emu_pc(pc)).s, (unsigned long long)(w->issued - w->committed));
  if(finish_wait(w))
    return;
  w->waits = true;
  w->ready = 0; /* the meeting has made the other lanes ready */
  for(int lane = 0; lane < LANES; lane++) {
    w->threads[lane].wait = WAIT_PRODUCTS;
    w->threads[lane].pc = pc;
  }
  emu_block(t, WAIT_PRODUCTS, 0, pc);
}

void emu_wgmma_wait(void)
{
  warp_meet(running(), MEET_WAIT, 0, 0, __builtin_return_address(0), act_wait);
  emu_maybe_preempt(running());
}

void products_end(struct cta *cta)
{
  for(int i = 0; i < cta->nwarps; i++)
    if(cta->warps[i].executed < cta->warps[i].issued)
      emu_fail(EMU_UNFINISHED, NULL, NULL, "cta %d warp %d ended with %llu products that nobody waited for", cta->index, i,
               (unsigned long long)(cta->warps[i].issued - cta->warps[i].executed));
}
