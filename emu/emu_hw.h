/* emu_hw.h - the machine that emulated kernels run on: what emu/hw_host.h calls for the functions of templates/hw/.
 *
 * Plain C, called only by the fiber of a running CUDA thread, never by the host program (emu.h is for that). The symbols are exported by the
 * program that loads the kernel's shared object; so are the __tsan_* functions, which the compiler calls for ordinary loads and stores.
 *
 * What each function means is written at its twin in templates/hw/; here stands what the emulation checks. A violation is a finding: the launch ends,
 * and the call that found it does not return. */
#ifndef MOEFORGE_EMU_HW_H
#define MOEFORGE_EMU_HW_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The running thread's indices; the pointer changes with the fiber. */
struct emu_self {
  int thread; /* in the CTA */
  int warp, lane;
  int cta;
  uint8_t *shared; /* the CTA's dynamic shared memory, 1024-byte aligned */
};
extern struct emu_self *emu_self;

/* ---- warp: all 32 lanes meet, in the same kind of operation ---- */
void emu_sync_warp(void);                              /* orders memory among the lanes */
uint32_t emu_shuffle(uint32_t value, int source_lane); /* 0..31; like the rest, orders no memory */
uint32_t emu_ballot(int condition);
uint32_t emu_reduce_max(uint32_t value);

/* ---- named barriers: whole warps; counts are in threads ---- */
void emu_barrier_sync(int id, int threads);            /* threads < 0: the whole CTA */
void emu_barrier_arrive(int id, int threads);

/* ---- mbarriers: 8 aligned bytes of shared memory each; ordinary accesses to an initialised one are findings ---- */
void emu_mbarrier_init(uint64_t *bar, uint32_t arrivals);
void emu_mbarrier_init_fence(void);
void emu_mbarrier_arrive(uint64_t *bar);
void emu_mbarrier_arrive_expect(uint64_t *bar, uint32_t bytes);
int emu_mbarrier_try_wait(uint64_t *bar, uint32_t parity);        /* does not wait */
void emu_mbarrier_wait(uint64_t *bar, uint32_t parity, int id);   /* waits; id is the wait's number for reports */

/* ---- memory ---- */
uint32_t emu_load_relaxed(const uint32_t *p, int acquire);        /* shared or global */
void emu_store_relaxed(uint32_t *p, uint32_t value, int release); /* a global one is delivered later, out of order with others */
uint32_t emu_add(uint32_t *p, uint32_t value);                    /* relaxed; returns the old value */
void emu_or(uint32_t *p, uint32_t value);
void emu_or_release(uint32_t *p, uint32_t value);                 /* shared */
void emu_load_unordered(const void *p, void *out, int words);      /* shared; words that are in no order with their last write come out tainted (below) */
void emu_fence_async_proxy(void);

/* ---- asynchronous copies ---- */
/* 'map' is a tensor map of this emulator (tensor.h). Delivered some time later; completes its bytes on the barrier. */
void emu_copy_tensor(void *dst, const void *map, int rank, const int32_t *coordinates, uint64_t *bar);
void emu_copy_bulk(void *dst, const void *src, uint32_t bytes, uint64_t *bar);
void emu_copy_async(void *dst, const void *src, int bytes);       /* 4, 8 or 16 */
void emu_copy_async_wait(void);
void emu_copy_async_arrive(uint64_t *bar);

/* ---- wgmma: e4m3, K-major, both operands in shared memory; whole warps, all four of a warpgroup issue the same sequence ---- */
void emu_wgmma_fence(void);
void emu_wgmma(float *d, int n, uint64_t a, uint64_t b, int accumulate); /* m64 n k32; d: n / 2 accumulators of this lane */
void emu_count_rows(int rows);                                    /* of A, for the lane's warp: the others may be overwritten meanwhile */
void emu_wgmma_commit(void);
void emu_wgmma_wait(void);
void emu_keep_accumulators(float *d, int count);                  /* a finding while products into them are pending */

/* ---- the rest ---- */
void emu_wait_for_predecessors(void);                             /* in a dependent launch, access to global memory is a finding unless it comes behind one */
/* Products mark results that come of operands in doubt with a NaN whose bits are EMU_TAINT | number. Conversions to a narrower format are where such a value would
 * leave: they call emu_tainted(), a finding that says what was wrong with the operand. */
#define EMU_TAINT 0x7FE00000u
#define EMU_TAINT_MASK 0x7FF00000u
void emu_tainted(uint32_t bits);
void emu_spin(int id);      /* a polling loop has not found what it waits for (id as above); returns when something has changed */
void emu_pause(void);       /* a good moment to run somebody else */
uint64_t emu_clock(void);   /* grows */

#ifdef __cplusplus
}
#endif
#endif
