/* machine.c - one launch: sets up CTAs and fibers, decides who runs, notices when nobody can.
 *
 * The unit of scheduling is the warp: one with ready lanes is drawn at random, and its lanes run one after the other, beginning anywhere, each until it
 * has to wait or gives way; a lane that gives way does not run again in this turn, and often ends it. Between draws, asynchronous work (copies, relaxed
 * global stores) may be done, one random piece at a time, so pieces come late and out of order. Polling lanes are set apart and poll now and then. When
 * nothing is ready and no work is left, all pollers poll once more; if they have done so for some rounds (some look at another word each time) and
 * nothing has changed, nobody will ever go on: a deadlock. Pollers that give way between two looks could keep one another from that state for ever; so
 * when nothing has changed for long, those that are set apart stay there.
 *
 * A seed chooses how all this is done (struct policy), for what finds one bug hides another: how often calls into the machine give way, whether
 * asynchronous work is done at once, at random or hardly before nothing else can, and a set of warps (the same roles in all CTAs, or whole CTAs) that
 * are starved.
 *
 * There are no guard pages: a grid has tens of thousands of stacks, and two mappings each would pass the kernel's limit. A stack's lowest words are
 * checked whenever its fiber stops, and where it has stopped. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define STACK_BYTES ((size_t)256 << 10)
#else
#define STACK_BYTES ((size_t)64 << 10)
#endif
#define STACK_COLOURS 61             /* stacks start at different cache lines */
#define CANARY 0x5AFEC0DE5AFEC0DEull
#define DEFAULT_STEPS 2000000000ull
#define STARVED_TURN 64              /* a starved warp runs once in so many of its draws */
#define FRUITLESS_ROUNDS 32          /* of polling, until it is a deadlock */
#define QUIET_STEPS 65536            /* so long after the last change, pollers wait until nothing else can be done */
#define GARBAGE 0xFF                 /* what shared memory holds at first: e4m3, bf16 and f32 NaN */

struct machine emu_machine;
struct emu_self *emu_self;

static struct machine *const m = &emu_machine;

/* ---- random numbers: splitmix64 ---- */

uint32_t emu_random(uint32_t below)
{
  uint64_t z = m->random += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return (uint32_t)(((z >> 32) * below) >> 32);
}

static bool one_in(uint32_t n)
{
  return n != 0 && emu_random(n) == 0;
}

/* ---- ready and spinning lanes ---- */

static void list_add(struct warp **list, int *count, struct warp *w, int *place)
{
  if(*place >= 0)
    return;
  *place = *count;
  list[(*count)++] = w;
}

static void list_drop_ready(struct warp *w)
{
  struct warp *last = m->ready[--m->nready];
  m->ready[w->place] = last;
  last->place = w->place;
  w->place = -1;
}

static void list_drop_spinning(struct warp *w)
{
  struct warp *last = m->spinners[--m->nspinners];
  m->spinners[w->spin_place] = last;
  last->spin_place = w->spin_place;
  w->spin_place = -1;
}

void emu_make_ready(struct thread *t)
{
  t->wait = WAIT_NOT;
  t->warp->ready |= 1u << t->self.lane;
  list_add(m->ready, &m->nready, t->warp, &t->warp->place);
}

/* All polling lanes of a warp poll again. */
static void wake_spinners(struct warp *w)
{
  for(int lane = 0; lane < LANES; lane++)
    if(w->spinning >> lane & 1)
      emu_make_ready(&w->threads[lane]);
  w->spinning = 0;
  list_drop_spinning(w);
}

static void switch_to_host(struct thread *t, int last)
{
  fiber_switch(&t->fiber, &m->host, last);
}

void emu_block(struct thread *t, enum wait_kind wait, int wait_id, const void *pc)
{
  t->wait = wait;
  t->wait_id = wait_id;
  t->pc = pc;
  if(wait == WAIT_SPIN) {
    t->warp->spinning |= 1u << t->self.lane;
    list_add(m->spinners, &m->nspinners, t->warp, &t->warp->spin_place);
  }
  switch_to_host(t, 0);
}

void emu_maybe_preempt(struct thread *t)
{
  if(!one_in(m->policy.preempt))
    return;
  emu_make_ready(t);
  switch_to_host(t, 0);
}

void *emu_need(void *memory)
{
  if(memory == NULL)
    emu_fail(EMU_NO_MEMORY, m->running, NULL, "the emulated device ran out of memory");
  return memory;
}

/* ---- threads ---- */

static void end_cta(struct cta *cta)
{
  if(cta->copies_pending > 0)
    emu_fail(EMU_UNFINISHED, NULL, NULL, "cta %d ended with %u copies under way", cta->index, (unsigned)cta->copies_pending);
  products_end(cta);
  mbarriers_end(cta);
  cta_named_barriers_end(cta);
  m->live--;
}

static void run_thread(void *argument)
{
  struct thread *t = argument;
  m->launch->entry(m->launch->params);
  t->wait = WAIT_ENDED;
  t->warp->ended |= 1u << t->self.lane;
  m->changes++;
  if(--t->cta->live == 0)
    end_cta(t->cta);
  switch_to_host(t, 1);
}

static uint64_t *canary_of(const struct thread *t)
{
  return (uint64_t *)(uintptr_t)t->fiber.stack;
}

static void run_lane(struct thread *t)
{
  m->running = t;
  emu_self = &t->self;
  m->counters.switches++;
  fiber_switch(&m->host, &t->fiber, 0);
  m->running = NULL;
  emu_self = NULL;
  if(m->failed)
    longjmp(m->give_up, 1);
  if(*canary_of(t) != CANARY || (uintptr_t)t->fiber.sp < (uintptr_t)t->fiber.stack)
    emu_fail(EMU_STACK, t, t->pc, "a thread needs more than %zu bytes of stack", m->stack_bytes);
}

static uint32_t first_lane(uint32_t lanes, uint32_t from)
{
  return (uint32_t)__builtin_ctz((lanes & from) != 0 ? lanes & from : lanes);
}

/* Stacks are far apart, and few are in the caches: what a lane needs when it runs, and run_lane() when it stops, is fetched while the one before it runs. */
static void fetch_lane(const struct thread *t)
{
  __builtin_prefetch(t->fiber.sp, 1);
  __builtin_prefetch((const uint8_t *)t->fiber.sp + 64, 1);
  __builtin_prefetch((const uint8_t *)t->fiber.sp + 128, 1);
  __builtin_prefetch(canary_of(t));
}

/* Lets the warp's ready lanes run until none is or the warp gives way. */
static void run_warp(struct warp *w)
{
  const uint32_t from = ALL_LANES << emu_random(LANES);
  uint32_t held = 0; /* lanes that gave way: they are ready again */
  for(int left = LANES * 4; left > 0 && (w->ready & ~held) != 0; left--) {
    const uint32_t lanes = w->ready & ~held, lane = first_lane(lanes, from), others = lanes & ~(1u << lane);
    w->ready &= ~(1u << lane);
    if(others != 0)
      fetch_lane(&w->threads[first_lane(others, from)]);
    m->steps++;
    run_lane(&w->threads[lane]);
    if((w->ready >> lane & 1) == 0)
      continue;
    held |= 1u << lane;
    if(one_in(2))
      break;
  }
  if(w->ready == 0 && w->place >= 0)
    list_drop_ready(w);
}

/* ---- scheduling ---- */

static bool deliver_one(void)
{
  const int count = m->ncopies + m->nstores;
  int index;
  if(count == 0)
    return false;
  index = (int)emu_random((uint32_t)count);
  m->changes++;
  if(index < m->ncopies)
    deliver_copy(index);
  else
    deliver_store(index - m->ncopies);
  return true;
}

static void deliver_some(void)
{
  if(m->policy.eager) {
    while(deliver_one()) {
    }
    return;
  }
  if(!one_in(m->policy.deliver))
    return;
  for(int left = 1 + (m->ncopies + m->nstores) / 8; left > 0 && deliver_one(); left--) {
  }
}

static struct warp *draw(void)
{
  struct warp *w = m->ready[emu_random((uint32_t)m->nready)];
  for(int again = 0; w->starved && again < 8 && !one_in(STARVED_TURN); again++)
    w = m->ready[emu_random((uint32_t)m->nready)];
  return w;
}

static void schedule(void)
{
  uint64_t polled_at = UINT64_MAX; /* m->changes when all pollers were last woken because nothing else could be done, ... */
  int rounds = 0;                  /* ... so many times */
  uint64_t seen = 0, quiet_from = 0; /* m->changes as last looked at, and the step since when it has been that */
  while(m->live > 0) {
    if(m->steps > m->max_steps)
      emu_fail(EMU_TIMEOUT, NULL, NULL, "the launch has not ended after %llu scheduling steps", (unsigned long long)m->max_steps);
    deliver_some();
    if(m->changes != seen) {
      seen = m->changes;
      quiet_from = m->steps;
    }
    if(m->nspinners > 0 && m->steps - quiet_from < QUIET_STEPS && one_in(m->policy.spin))
      wake_spinners(m->spinners[emu_random((uint32_t)m->nspinners)]);
    if(m->nready > 0) {
      run_warp(draw());
    } else if(deliver_one()) {
      continue;
    } else if(m->nspinners > 0 && (polled_at != m->changes || rounds < FRUITLESS_ROUNDS)) {
      rounds = polled_at == m->changes ? rounds + 1 : 1;
      polled_at = m->changes;
      while(m->nspinners > 0)
        wake_spinners(m->spinners[0]);
    } else {
      emu_report_deadlock();
    }
  }
  while(deliver_one()) { /* relaxed stores */
  }
}

/* ---- a seed's habits ---- */

static void choose_policy(uint64_t seed)
{
  static const uint32_t preempt[] = {3, 10, 40, 400}, deliver[] = {1, 4, 20, 5000};
  uint32_t roles = 0;
  int starved_cta = -1;
  m->random = seed * 0xD1342543DE82EF95ull + 1;
  m->policy.preempt = preempt[emu_random(4)];
  m->policy.eager = one_in(4);
  m->policy.deliver = deliver[emu_random(4)];
  m->policy.spin = 8 + emu_random(56);
  if(one_in(2))
    roles = emu_random(UINT32_MAX) & emu_random(UINT32_MAX);
  if(one_in(4))
    starved_cta = (int)emu_random((uint32_t)m->nctas);
  for(int c = 0; c < m->nctas; c++)
    for(int w = 0; w < m->ctas[c].nwarps; w++)
      m->ctas[c].warps[w].starved = c == starved_cta || (roles >> w & 1) != 0;
}

/* ---- set-up ---- */

static void *map_memory(size_t bytes)
{
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* Stacks and shared memory stay mapped from launch to launch. */
static bool reserve(uint8_t **base, size_t *have, size_t bytes)
{
  if(bytes <= *have)
    return true;
  if(*base != NULL)
    munmap(*base, *have);
  *base = map_memory(bytes);
  *have = *base != NULL ? bytes : 0;
  return *base != NULL;
}

static void make_warps(struct cta *cta)
{
  for(int i = 0; i < cta->nwarps; i++) {
    struct warp *w = &cta->warps[i];
    w->cta = cta;
    w->index = i;
    w->threads = &cta->threads[(size_t)i * LANES];
    w->place = w->spin_place = -1;
    w->agent = cta->products + (uint32_t)i;
    cta->ticks[w->agent] = 1;
  }
  for(int i = 0; i < NAMED_BARRIERS; i++)
    cta->named[i].clock = clock_new(cta);
}

static void make_threads(struct cta *cta)
{
  struct clock *nothing = clock_new(cta);
  cta->started = clock_new(cta);
  cta->started->ticks[cta->ahead] = 1;
  nothing->ticks[cta->ahead] = m->launch->early ? 0 : 1;
  for(int i = 0; i < cta->nthreads; i++) {
    struct thread *t = &cta->threads[i];
    const size_t number = (size_t)cta->index * (size_t)cta->nthreads + (size_t)i;
    uint8_t *stack = m->stacks + (number + 1) * m->stack_bytes; /* below the first one there is room for it to overflow */
    t->self = (struct emu_self){.thread = i, .warp = i / LANES, .lane = i % LANES, .cta = cta->index, .shared = cta->shared};
    t->cta = cta;
    t->warp = &cta->warps[i / LANES];
    t->seen = nothing;
    nothing->users++;
    t->tick = t->read_tick = 1;
    fiber_make(&t->fiber, stack, m->stack_bytes - number % STACK_COLOURS * 64, run_thread, t);
    *canary_of(t) = CANARY;
    emu_make_ready(t);
  }
}

static bool make_cta(struct cta *cta, int index, const struct emu_launch *launch)
{
  const size_t shared = m->shared_stride, threads = (size_t)launch->threads;
  cta->index = index;
  cta->nthreads = cta->live = launch->threads;
  cta->nwarps = launch->threads / LANES;
  cta->shared = m->arena + (size_t)index * m->shared_stride;
  cta->shared_bytes = launch->shared_bytes;
  cta->products = (uint32_t)cta->nthreads;
  cta->bulk = cta->products + (uint32_t)cta->nwarps;
  cta->reads = cta->bulk + COPY_AGENTS;
  cta->ahead = cta->reads + (uint32_t)cta->nthreads;
  cta->agents = cta->ahead + 1;
  cta->max_agents = cta->agents + (uint32_t)cta->nthreads;
  cta->threads = calloc(threads, sizeof(*cta->threads));
  cta->warps = calloc((size_t)cta->nwarps, sizeof(*cta->warps));
  cta->groups = calloc((size_t)(cta->nwarps + 3) / 4, sizeof(*cta->groups));
  cta->ticks = calloc(cta->max_agents, sizeof(*cta->ticks));
  cta->mbarrier_at = calloc(shared / 8, sizeof(*cta->mbarrier_at));
  cta->cells = map_memory(shared / 4 * sizeof(*cta->cells));
  cta->lines = calloc(shared / LINE_BYTES, sizeof(*cta->lines));
  if(cta->threads == NULL || cta->warps == NULL || cta->groups == NULL || cta->ticks == NULL || cta->mbarrier_at == NULL || cta->cells == NULL || cta->lines == NULL)
    return false;
  memset(cta->shared, GARBAGE, launch->shared_bytes);
  make_warps(cta);
  make_threads(cta);
  return true;
}

static void free_cta(struct cta *cta)
{
  const size_t shared = m->shared_stride;
  free_clocks(cta);
  for(uint32_t i = 0; i < cta->nmbarriers; i++)
    free(cta->mbarriers[i]);
  for(int i = 0; cta->threads != NULL && i < cta->nthreads; i++)
    free(cta->threads[i].fences);
  for(int i = 0; cta->groups != NULL && i < (cta->nwarps + 3) / 4; i++)
    free(cta->groups[i].products);
  for(int i = 0; cta->warps != NULL && i < cta->nwarps; i++)
    free(cta->warps[i].pending);
  if(cta->cells != NULL)
    munmap(cta->cells, shared / 4 * sizeof(*cta->cells));
  free(cta->mbarriers);
  free(cta->mbarrier_at);
  free(cta->clocks);
  free(cta->parts);
  free(cta->lines);
  free(cta->ticks);
  free(cta->groups);
  free(cta->warps);
  free(cta->threads);
}

static bool set_up(const struct emu_launch *launch)
{
  const size_t ctas = (size_t)launch->ctas, warps = ctas * (size_t)launch->threads / LANES;
  m->stack_bytes = STACK_BYTES;
  m->shared_stride = (launch->shared_bytes + 4095) / 4096 * 4096 + 4096;
  m->nctas = m->live = launch->ctas;
  m->nready = m->nspinners = m->ncopies = m->nstores = 0;
  m->changes = 0;
  m->max_steps = launch->max_steps != 0 ? launch->max_steps : DEFAULT_STEPS;
  m->launch_number++;
  m->ntaints = 1;
  m->ctas = calloc(ctas, sizeof(*m->ctas));
  m->ready = calloc(warps, sizeof(struct warp *));
  m->spinners = calloc(warps, sizeof(struct warp *));
  if(m->ctas == NULL || m->ready == NULL || m->spinners == NULL)
    return false;
  if(!reserve(&m->stacks, &m->stacks_bytes, (ctas * (size_t)launch->threads + 1) * m->stack_bytes) || !reserve(&m->arena, &m->arena_bytes, ctas * m->shared_stride))
    return false;
  for(int i = 0; i < launch->ctas; i++)
    if(!make_cta(&m->ctas[i], i, launch))
      return false;
  choose_policy(launch->seed);
  return true;
}

static void tear_down(void)
{
  for(int i = 0; m->ctas != NULL && i < m->nctas; i++)
    free_cta(&m->ctas[i]);
  free(m->ctas);
  free(m->ready);
  free(m->spinners);
  m->ctas = NULL;
  m->ready = m->spinners = NULL;
  m->launch = NULL;
  m->running = NULL;
  emu_self = NULL;
}

bool emu_launch(const struct emu_launch *launch, struct emu_finding *finding)
{
  memset(finding, 0, sizeof(*finding));
  finding->cta = finding->warp = finding->lane = -1;
  m->launch = launch;
  m->finding = finding;
  m->failed = false;
  m->steps = 0;
  if(setjmp(m->give_up) == 0) {
    if(launch->threads % LANES != 0 || launch->threads < LANES || launch->threads > MAX_WARPS * LANES || launch->ctas < 1 || launch->shared_bytes > (size_t)256 << 10)
      emu_fail(EMU_UNSUPPORTED, NULL, NULL, "a grid of %d CTAs of %d threads with %zu bytes of shared memory", launch->ctas, launch->threads, launch->shared_bytes);
    if(!set_up(launch))
      emu_fail(EMU_NO_MEMORY, NULL, NULL, "no memory for %d emulated CTAs of %d threads", launch->ctas, launch->threads);
    schedule();
  }
  m->counters.launches++;
  m->counters.steps += m->steps;
  tear_down();
  return !m->failed;
}

struct emu_counters emu_counters(void)
{
  return m->counters;
}

/* ---- called by kernels ---- */

void emu_spin(int id)
{
  emu_block(running(), WAIT_SPIN, id, __builtin_return_address(0));
}

void emu_pause(void)
{
  struct thread *t = running();
  t->pc = __builtin_return_address(0);
  emu_make_ready(t);
  switch_to_host(t, 0);
}

uint64_t emu_clock(void)
{
  return m->steps;
}
