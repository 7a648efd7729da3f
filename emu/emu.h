/* emu.h - runs a kernel that was compiled as host code on an emulated Hopper GPU, and reports what it did wrong.
 *
 * One machine per process, single-threaded. A kernel is a shared object compiled from a template against emu/hw_host.h; it calls back through
 * emu_hw.h. A launch runs every CUDA thread of the grid as a fiber; a seed decides who runs when and when asynchronous work is done. The same seed, kernel
 * and inputs give the same run.
 *
 *   emu_memory_add(...)           global memory that kernels may touch
 *   emu_launch(&launch, &found)   runs a grid to its end, or to the first finding
 *
 * docs/emulator.md says what is modelled and what is not. */
#ifndef MOEFORGE_EMU_EMU_H
#define MOEFORGE_EMU_EMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_FINDING_TABLE(X)                                                                                                             \
  X(EMU_NONE, "none")                                                                                                                    \
  X(EMU_RACE, "race")                                /* two accesses, one of them a write, in no order */                                \
  X(EMU_NO_PROXY_FENCE, "missing proxy fence")       /* ordinary accesses and the async proxy without fence_async_proxy between them */  \
  X(EMU_EARLY_OVERWRITE, "overwritten while in use") /* a copy's destination may still be read or written by an earlier operation */     \
  X(EMU_UNINITIALISED, "uninitialised read")         /* a thread read shared memory that nobody wrote in this launch */                  \
  X(EMU_BOUNDS, "out of bounds")                     /* outside shared memory, global buffers, the thread's own stack; not aligned */     \
  X(EMU_DEADLOCK, "deadlock")                        /* nobody can go on; the text has who waits for what */                             \
  X(EMU_DIVERGENCE, "divergence")                    /* lanes of a warp, or warps of a warpgroup, meet in different operations */        \
  X(EMU_BARRIER, "barrier misuse")                   /* counts, phases, initialisation of named barriers and mbarriers */                \
  X(EMU_WGMMA, "wgmma misuse")                       /* accumulators touched before the wait, no fence, uncommitted products, layout */  \
  X(EMU_UNFINISHED, "unfinished work")               /* the kernel ended with copies, products or transaction bytes outstanding */       \
  X(EMU_STACK, "stack overflow")                                                                                                         \
  X(EMU_UNSUPPORTED, "not emulated")                                                                                                     \
  X(EMU_TIMEOUT, "no end")                           /* more scheduling steps than the launch was allowed */                             \
  X(EMU_NO_MEMORY, "out of memory")

enum emu_finding_kind {
#define EMU_FINDING_ENUM(name, text) name,
  EMU_FINDING_TABLE(EMU_FINDING_ENUM)
#undef EMU_FINDING_ENUM
  EMU_FINDING_KINDS
};
const char *emu_finding_name(enum emu_finding_kind kind);

/* What a launch did wrong. Code addresses are as the fibers saw them: emu_finding_locate() turns them into source lines. */
struct emu_finding {
  enum emu_finding_kind kind;
  int cta, warp, lane;    /* who noticed; -1: nobody in particular */
  const void *pc;         /* where; NULL: not known */
  const void *other_pc;   /* the earlier access or operation; NULL: none or not known */
  char text[6000];        /* one line; a deadlock has one line for each group of waiters below it */
};

struct emu_launch {
  void (*entry)(void **params);  /* calls the kernel with its arguments */
  void **params;                 /* handed to entry */
  int ctas, threads;             /* threads: a multiple of 32 */
  size_t shared_bytes;           /* dynamic shared memory per CTA */
  uint64_t seed;
  bool early;                    /* as a dependent launch that has begun before the kernels ahead of it have ended */
  uint64_t max_steps;            /* scheduling steps; 0: a generous default */
  const void *code;              /* loaded image of the kernel: */
  size_t code_bytes;             /* its constants may be read, and addresses in findings are relative to it */
};

/* Runs the grid. True if it ended without a finding; else *finding (text complete but for source lines) says what happened and memory is as the
 * launch left it. 'finding' may not be NULL. */
bool emu_launch(const struct emu_launch *launch, struct emu_finding *finding);

/* Replaces code addresses by source lines (addr2line on 'object', the shared object's file) and appends them to the text: "... at
 * stream/up.cuh:92 (up_units); earlier: stream/producer.cuh:147". Does nothing if addr2line is missing. */
void emu_finding_locate(struct emu_finding *finding, const struct emu_launch *launch, const char *object);

/* Declares global memory: kernels may read and write [base, base + bytes). At most EMU_MAX_BUFFERS at a time; false if there are more or no memory is left. */
#define EMU_MAX_BUFFERS 512
bool emu_memory_add(void *base, size_t bytes);
void emu_memory_remove(void *base);

/* What the machine did since the process started, for tests and reports. */
struct emu_counters {
  uint64_t launches, steps, switches, accesses, copies, products;
};
struct emu_counters emu_counters(void);

#endif
