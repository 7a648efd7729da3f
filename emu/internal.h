/* internal.h - the emulated machine's state, shared by the files of emu/ (not by hw_host.h, not by the tuner).
 *
 *   machine.c    a launch: set-up, scheduler, end
 *   warp.c       exchange between lanes, named barriers
 *   mbarrier.c   mbarriers
 *   clock.c      vector clocks: who has seen what
 *   shadow.c     what is remembered of every word of shared and global memory; the checks
 *   access.c     ordinary and scoped accesses of the running thread, the compiler's hooks
 *   async.c      copies
 *   product.c    wgmma
 *   report.c     findings
 *
 * Who orders what. Everything that acts on memory is an *agent* of its CTA with a clock that counts its release operations: each thread's writes, each thread's
 * reads; for each warp, its pending products; the bulk copies in flight (from a pool); each thread's cp.async; and the kernels ahead of the launch. A thread's vector clock says up to which tick of
 * every agent it has seen what that agent did. An access is in order with an earlier one if the thread's clock covers the earlier agent's tick at that time. Clocks
 * are per CTA: nothing orders threads of different CTAs within a launch, for the machine layer offers no synchronisation between CTAs but words that are their
 * own flags.
 *
 * Reads are agents of their own because of one rule that the kernels rely on: an operation that all lanes of a warp take part in (a shuffle, a vote, wgmma) comes
 * behind the lanes' earlier reads, so that one lane may then give away what another has read. Their writes it does not order: that takes sync_warp. */
#ifndef MOEFORGE_EMU_INTERNAL_H
#define MOEFORGE_EMU_INTERNAL_H

#include "emu.h"
#include "emu_hw.h"
#include "fiber.h"
#include "tensor.h"

#include <setjmp.h>

#define LANES 32
#define ALL_LANES 0xFFFFFFFFu
#define NAMED_BARRIERS 16
#define COPY_AGENTS 64
#define LINE_BYTES 128 /* granule of the async proxy's bookkeeping */
#define MAX_WARPS 32
#define ACQUIRED 8

enum wait_kind {
  WAIT_NOT,      /* ready, or running */
  WAIT_LANES,    /* for the other lanes of the warp */
  WAIT_BARRIER,  /* at a named barrier */
  WAIT_MBARRIER, /* for a phase */
  WAIT_PRODUCTS, /* for the other warps of the warpgroup to issue theirs */
  WAIT_SPIN,     /* polling */
  WAIT_ENDED
};

enum meeting { MEET_NOTHING, MEET_SYNC, MEET_SHUFFLE, MEET_BALLOT, MEET_MAX, MEET_BARRIER_SYNC, MEET_BARRIER_ARRIVE, MEET_FENCE, MEET_PRODUCT, MEET_COMMIT, MEET_WAIT };

struct cta;
struct warp;

/* Up to which tick of every agent of the CTA somebody has seen what it did. One that several use is not changed any more. */
struct clock {
  uint64_t id;                 /* the contents': what differs, or has differed, has another */
  uint64_t joined;             /* id of the last one that was joined to this one, 0: none */
  uint32_t users;
  struct clock *next;          /* of those that nobody uses */
  struct clock *made;          /* the one that was made before */
  uint32_t ticks[];            /* [cta->max_agents], 0 beyond cta->agents */
};

struct thread {
  struct emu_self self; /* first: emu_self points here */
  struct fiber fiber;
  struct cta *cta;
  struct warp *warp;
  struct clock *seen;   /* what this thread has seen, together with: (clock_seen() has the rule) */
  uint32_t tick, read_tick; /* its own ones, as a writer and as a reader, */
  uint32_t async_seen;  /* its cp.async's, */
  /* and those that the warp's lanes share: struct warp's met and products_seen */
  struct fence {        /* its ticks when it executed fence_async_proxy, rising */
    uint32_t tick, read_tick;
  } *fences;
  uint32_t nfences, max_fences;
  /* While it waits */
  enum wait_kind wait;
  const void *pc;              /* of the call that waits, or of the last call into the machine */
  int wait_id;                 /* number of the wait or of the named barrier */
  uint32_t parity;
  struct mbarrier *barrier;
  struct thread *next_waiter;
  /* In a meeting */
  enum meeting meeting;
  uint32_t value, argument, result;
  uint64_t a, b;               /* a product's operands ... */
  int n, accumulate;
  float *accumulators;         /* ... and where this lane wants its part */
  /* cp.async */
  uint32_t async_agent;        /* 0: has none yet */
  /* relaxed global stores under way */
  uint32_t stores_pending;
};

struct warp {
  struct cta *cta;
  int index;                   /* in the CTA */
  struct thread *threads;      /* its 32 lanes */
  uint32_t ready, spinning, ended, arrived; /* lanes */
  int place, spin_place;       /* in the machine's lists, -1: not there */
  bool starved;                /* runs only when others cannot, or rarely */
  uint32_t met[LANES];         /* the lanes' ticks as readers, as of their last meeting */
  struct acquired {            /* the lanes' last calls of clock_acquire(), since the others are about to do the same */
    uint64_t seen, from;       /* ids */
    struct clock *result;      /* NULL: none yet */
  } acquired[ACQUIRED];
  uint32_t next_acquired;
  /* products */
  uint32_t agent;
  uint32_t products_seen;      /* tick of them, by all lanes */
  bool fenced;                 /* wgmma_fence since the last wait */
  bool waits;                  /* in wgmma_wait */
  int idle_rows;               /* of a product's 64 rows, so many at the end do not count: emu_count_rows() */
  uint64_t issued, committed, executed; /* products, counted from the launch's start */
  struct accumulators *pending;/* [npending] being computed */
  int npending, max_pending;
};

struct named_barrier {
  int expected, arrived;       /* threads; expected 0: nobody there yet */
  uint32_t warps, waiting;     /* masks of warps that have arrived, and of those that wait */
  struct clock *clock;
  const void *pc;              /* of the first arrival */
};

struct mbarrier {
  uint32_t offset;             /* in shared memory */
  uint32_t count, pending;     /* arrivals per phase, left in this phase */
  int64_t bytes;               /* announced and not yet landed */
  uint64_t phase;              /* completed phases */
  uint32_t init_agent, init_tick;
  bool fenced;                 /* mbarrier_init_fence behind the initialisation */
  struct clock *clock, *done_clock; /* of arrivals so far; of arrivals up to the last completed phase */
  struct thread *waiters;
};

/* Reads of a cell by several threads: the ticks of threads low .. low + count - 1. */
struct readers {
  uint32_t low, count, room;
  uint32_t *ticks;             /* [room] */
};

/* One word (or, for words that were accessed in part, one byte) of shared memory. Ticks of 0: none. */
struct cell {
  uint32_t write_tick, write_pc;
  uint32_t read_tick, read_pc;
  uint16_t write_agent, read_agent;
  uint16_t readers;            /* index of the reads by several threads, 0: none */
  uint16_t release;            /* index of the clock that the last release store left, 0: none */
  uint32_t parts;              /* index of the word's four byte cells, 0: not split */
  uint8_t written;             /* somebody has */
  uint8_t atomic;              /* the last write was a scoped one */
  uint8_t object;              /* an mbarrier */
};

/* What the async proxy did to 128 bytes. */
struct line {
  uint32_t write_tick, write_pc;
  uint16_t write_agent;
  bool touched;                /* something async has happened here in this launch */
  bool landed;                 /* an async copy has written it */
  uint32_t generic;            /* number of the last ordinary access here, 0: none */
  uint32_t read_tick[MAX_WARPS], read_pc; /* by pending or past products, per warp */
  uint32_t verified[MAX_WARPS + 1];       /* ordinary accesses up to this number were checked: per warp (products), last: copies */
};

struct copy {
  struct cta *cta;
  struct mbarrier *barrier;    /* bulk; NULL: cp.async */
  struct thread *thread;       /* that issued it */
  void *dst;
  const void *src;             /* bulk and cp.async */
  uint32_t bytes;
  uint32_t agent, tick;
  bool tensor;
  struct emu_tensor_map map;
  int32_t coordinates[5];
  bool arrive;                 /* no copy: cp.async.mbarrier.arrive, due when the thread's earlier ones have landed */
};

struct store {                 /* a relaxed store to global memory that is not visible yet */
  struct thread *thread;
  uint32_t *address;
  uint32_t value;
};

struct product {               /* what one warpgroup issues; the same in each of its warps */
  uint64_t a, b;
  int n, accumulate, warps;    /* warps that have issued it */
  float *key[4];               /* lane 0's accumulators in each of the warps */
};

/* A warp's part of a product's result, until the warp has waited for it. */
struct accumulators {
  float *lane[LANES];          /* where each lane wants its n / 2 values */
  int n;
  uint32_t row_taint[16], column_taint[256]; /* numbers of taints, 0: none */
  float tile[16 * 256];        /* row-major [16][n] */
};

/* Why an operand of a product is in doubt. */
struct taint {
  enum emu_finding_kind kind;
  const void *pc;              /* of the product, or of the store that met it */
  uint32_t other_pc, agent, offset;
  int cta, warp;
  const char *what, *earlier, *why;
};
#define MAX_TAINTS 512

struct warpgroup {
  struct product *products;    /* ring of max, from 'first' on */
  uint64_t first, issued;
  uint32_t max;
};

struct cta {
  int index;
  uint8_t *shared;
  size_t shared_bytes;
  int nthreads, nwarps, live;  /* live: threads that have not ended */
  struct thread *threads;
  struct warp *warps;
  struct warpgroup *groups;
  /* Agents: [0, nthreads) writes; [products ...) one per warp; [bulk ...) copies; [reads ...) one per thread; the kernels ahead of the launch, whose end is
   * their tick 1; then each thread's cp.async as it comes */
  uint32_t products, bulk, reads, ahead;
  uint32_t agents, max_agents; /* in use, room */
  uint32_t *ticks;             /* [max_agents] own ticks of the agents that are no threads */
  uint64_t busy_copy_agents;   /* bits */
  uint32_t next_copy_agent;
  struct named_barrier named[NAMED_BARRIERS];
  struct mbarrier **mbarriers;
  uint32_t nmbarriers, max_mbarriers;
  uint16_t *mbarrier_at;       /* [shared_bytes / 8]: 1 + index */
  struct cell *cells;          /* [shared_bytes / 4] */
  struct cell *parts;          /* groups of four; [0] unused */
  uint32_t nparts, max_parts;
  struct line *lines;          /* [shared_bytes / LINE_BYTES] */
  struct clock *made, *unused; /* all clocks, and those that nobody uses */
  struct clock *started;       /* of the kernels ahead of the launch: that they have ended */
  struct clock **clocks;       /* releases, which cells index; [0] unused */
  uint32_t nclocks, max_clocks;
  uint32_t free_clock;         /* chain through entry 0 of free ones */
  struct readers *readers;     /* which cells index; [0] unused */
  uint32_t nreaders, max_readers;
  uint32_t free_readers;       /* chain through 'low' of free ones */
  uint32_t generic;            /* ordinary accesses so far that touched lines */
  uint32_t copies_pending;
};

/* How a seed likes to schedule. */
struct policy {
  uint32_t preempt;            /* one in so many calls into the machine gives way */
  uint32_t deliver;            /* one in so many scheduling steps lets asynchronous work happen */
  bool eager;                  /* asynchronous work happens before anything else */
  uint32_t spin;               /* one in so many steps polls */
};

struct machine {
  const struct emu_launch *launch;
  struct emu_finding *finding;
  bool failed;
  uint64_t random, steps, max_steps, changes;
  struct policy policy;
  struct cta *ctas;
  int nctas;
  int live;                    /* CTAs with live threads */
  struct warp **ready;         /* warps with ready lanes, in no order */
  int nready;
  struct warp **spinners;      /* warps with spinning lanes */
  int nspinners;
  struct copy *copies;         /* under way, in no order */
  int ncopies, max_copies;
  struct taint taints[MAX_TAINTS]; /* [0] unused; equal ones only once */
  uint32_t ntaints;
  struct store *stores;        /* the same */
  int nstores, max_stores;
  jmp_buf give_up;             /* where a finding on the host's stack goes */
  struct fiber host;
  struct thread *running;
  uint8_t *stacks, *arena;
  size_t stack_bytes, stacks_bytes, arena_bytes, shared_stride;
  uint32_t launch_number;      /* marks global shadow */
  struct emu_counters counters;
};
extern struct machine emu_machine;

/* ---- machine.c ---- */
static inline struct thread *running(void)
{
  return emu_machine.running;
}
uint32_t emu_random(uint32_t below); /* 0 .. below - 1 */
/* Stops the running thread here until somebody makes it ready. */
void emu_block(struct thread *t, enum wait_kind wait, int wait_id, const void *pc);
void emu_make_ready(struct thread *t);
/* Called at the end of most calls into the machine: now and then lets others run. */
void emu_maybe_preempt(struct thread *t);
/* Memory from calloc or realloc that the launch cannot do without; EMU_NO_MEMORY if there is none. */
void *emu_need(void *memory);

/* ---- report.c ---- */
/* Ends the launch; does not return. The text may have code addresses as emu_pc_text() makes them. */
_Noreturn void emu_fail(enum emu_finding_kind kind, const struct thread *t, const void *pc, const char *format, ...) __attribute__((format(printf, 4, 5)));
/* A code address relative to the image, 0 if it is not in it; and its form in texts, which emu_finding_locate() replaces. */
uint32_t emu_pc(const void *pc);
struct pc_text {
  char s[24];
} emu_pc_text(uint32_t pc);
struct agent_text {
  char s[64];
} emu_agent_text(const struct cta *cta, uint32_t agent);
_Noreturn void emu_report_deadlock(void);
/* The number of a taint like this one. */
uint32_t emu_taint_number(const struct taint *taint);

/* ---- clock.c ---- */
/* Zero, for one user. free_clocks() frees all of a CTA. */
struct clock *clock_new(struct cta *cta);
void free_clocks(struct cta *cta);
/* To be called when what others may acquire has been changed. */
void clock_changed(struct clock *clock);
void clock_reset(struct clock *clock, const struct cta *cta);
/* A release by 't': what it has seen goes into 'to' (joined); then its own tick rises. */
void clock_release(struct thread *t, struct clock *to);
/* An acquire: 't' has seen what 'from' has. */
void clock_acquire(struct thread *t, const struct clock *from);
void clock_tick(struct thread *t);
/* A meeting of the warp: each lane has seen the others' reads. */
void clock_meet(struct warp *w);
/* sync_warp: each lane has seen what the others have, and have done. */
void clock_sync(struct warp *w);
uint32_t agent_new(struct cta *cta);
/* clock_seen() of agents that are no writing threads. */
uint32_t clock_seen_further(const struct thread *t, uint32_t agent);
/* The tick of an agent up to which 't' has seen what it did. */
static inline uint32_t clock_seen(const struct thread *t, uint32_t agent)
{
  if(agent >= t->cta->products)
    return clock_seen_further(t, agent);
  return agent == (uint32_t)t->self.thread ? t->tick : t->seen->ticks[agent];
}

/* ---- shadow.c ---- */
void free_readers(struct cta *cta);
enum { ACCESS_WRITE = 1, ACCESS_ATOMIC = 2, ACCESS_UPDATE = 4 /* read-modify-write */ };
/* Checks and notes an access of the running thread (agent and tick are its own, or those of its cp.async) to shared memory [offset, offset + bytes). */
void shadow_shared(struct thread *t, uint32_t agent, uint32_t tick, uint32_t offset, uint32_t bytes, int flags, const void *pc);
/* The same for an operation of the async proxy that 't' issues, in whole lines. */
void shadow_async_write(struct thread *t, uint32_t agent, uint32_t tick, uint32_t offset, uint32_t bytes, const void *pc);
/* Number of the taint if ordinary stores to the line are not in order with it or lack the fence, else 0. */
uint32_t shadow_async_read(struct thread *t, uint32_t line, const void *pc);
void shadow_async_landed(struct cta *cta, uint32_t offset, uint32_t bytes);
/* The taint of a word that is in no order with its last write, else 0; notes nothing. */
uint32_t shadow_word_taint(struct thread *t, uint32_t offset, const void *pc);
/* Marks the eight bytes of an mbarrier. */
void shadow_mark_object(struct thread *t, uint32_t offset, const void *pc);
/* The clock that the last release store to a word left, NULL if there is none. 'make': creates it. */
struct clock *shadow_release_clock(struct cta *cta, uint32_t offset, bool make);
void shadow_drop_release(struct cta *cta, uint32_t offset);

/* ---- access.c ---- */
/* Offset of an address in the thread's shared memory; a finding if [p, p + bytes) does not lie in it or is not aligned. */
uint32_t shared_offset(struct thread *t, const void *p, size_t bytes, size_t alignment, const char *what, const void *pc);
bool is_shared(const struct thread *t, const void *p);
/* A finding unless [p, p + bytes) lies in one global buffer. */
void check_global(struct thread *t, const void *p, size_t bytes, const char *what, const void *pc);
/* A finding if one of the bytes, which lie in one global buffer, was written in this launch, and nothing orders that before 't'. */
void check_global_writes(struct thread *t, const void *p, size_t bytes, const void *pc);
/* Checks and notes an access to global memory. */
void access_global(struct thread *t, const void *p, size_t bytes, int flags, const void *pc);
void deliver_store(int index);
void flush_stores(struct thread *t, const void *p, size_t bytes);

/* ---- warp.c, mbarrier.c, async.c, product.c ---- */
/* Waits for the warp's other lanes and has 'act' done once, by the last one; false in the others. */
void warp_meet(struct thread *t, enum meeting meeting, uint32_t value, uint32_t argument, const void *pc, void (*act)(struct warp *w, const void *pc));
void cta_named_barriers_end(struct cta *cta);
struct mbarrier *mbarrier_find(struct thread *t, const uint64_t *bar, const void *pc);
void mbarrier_complete(struct mbarrier *bar, struct cta *cta, int arrivals, int64_t bytes, const struct thread *t, const void *pc);
void mbarriers_end(const struct cta *cta);
void deliver_copy(int index);
/* An ordinary store has met a line that products of 'w' may still be reading: taints what comes of it. */
void product_taint(struct warp *w, uint32_t line, uint32_t taint);
void product_pending_check(struct thread *t, const void *p, size_t bytes, const void *pc);
void products_end(struct cta *cta);

#endif
