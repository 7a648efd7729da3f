// thread.cuh - indices, shared memory's base, barriers of named thread sets, dependent launch.
#pragma once

namespace hw {

// Index of the thread in its CTA.
MF_DEVICE int thread_index() { return threadIdx.x; }

// Index of the thread in its warp.
MF_DEVICE int lane_index() { return threadIdx.x & 31; }

// Index of the warp in its CTA. Goes through redux.sync, whose result is a uniform register: what derives from it (matrix
// descriptors, barrier addresses) then stays in uniform registers, which some instructions ask for.
MF_DEVICE int warp_index() { return (int)__reduce_max_sync(0xffffffffu, threadIdx.x >> 5); }

// No instruction: v is computed before this point, not where it is first needed (say, behind the wait that follows).
MF_DEVICE void compute_now(int &v) { asm volatile("" : "+r"(v)); }

// Index of the CTA in the grid.
MF_DEVICE int cta_index() { return blockIdx.x; }

// First byte of the launch's dynamic shared memory, 1024-byte aligned (the kernels have no static shared memory).
MF_DEVICE uint8_t *dynamic_shared()
{
  extern __shared__ __align__(1024) uint8_t mf_shared[];
  return mf_shared;
}

// Shared-window address of a pointer into shared memory (cvta.to.shared).
MF_DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// CTA barriers have the aligned form: the threads of a warp arrive together. Which warps use which copy of the instruction does not matter to the hardware,
// but compute-sanitizer's synccheck takes warps of different roles that meet in one barrier for divergent, except in the unaligned form.
#ifdef MF_UNALIGNED_BARRIERS
#define MF_BARRIER "barrier"
#else
#define MF_BARRIER "bar"
#endif

// bar.sync 0: waits for all threads of the CTA; orders their earlier shared and global accesses before the later ones.
MF_DEVICE void sync_cta() { asm volatile(MF_BARRIER ".sync 0;" ::: "memory"); }

// bar.sync: waits until `threads` threads have arrived at the named barrier. Memory is ordered as by sync_cta() among
// those who arrive and those who wait.
MF_DEVICE void barrier_sync(int id, int threads) { asm volatile(MF_BARRIER ".sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// bar.arrive: counts as an arrival of this warp at the named barrier without waiting; releases earlier accesses.
MF_DEVICE void barrier_arrive(int id, int threads) { asm volatile(MF_BARRIER ".arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// griddepcontrol.launch_dependents: for all that this CTA minds, the next grid of the stream may start. It may when every CTA of the grid has executed
// this (one thread of it will do) or ended. Orders no memory.
MF_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// griddepcontrol.wait: waits until the grids that this one depends on have finished and their writes are visible. At once if it was launched behind their end.
MF_DEVICE void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// nanosleep.u32: hint to leave the issue slots to other warps for about `ns` nanoseconds.
MF_DEVICE void sleep_ns(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// %clock64: cycles of the SM's clock.
MF_DEVICE uint64_t clock()
{
  uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t));
  return t;
}

// %clock: the low word of clock().
MF_DEVICE uint32_t clock_low()
{
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory");
  return t;
}

// The same, read when `loaded` has arrived: the read is predicated on it. (0 if it is the one bit pattern that no load here has.)
MF_DEVICE uint32_t clock_behind(uint32_t loaded)
{
  uint32_t t;
  asm volatile("{\n.reg .pred P;\n"
               "setp.ne.u32 P, %1, 0x7FA5C3E1;\n"
               "mov.u32 %0, 0;\n"
               "@P mov.u32 %0, %%clock;\n}"
               : "=r"(t) : "r"(loaded) : "memory");
  return t;
}

// %globaltimer: nanoseconds on a clock that all SMs share. It may advance in steps of 32 ns, or of a microsecond.
MF_DEVICE uint64_t global_timer()
{
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// %smid: the SM that the CTA runs on.
MF_DEVICE uint32_t sm_index()
{
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

// setmaxnreg.inc / setmaxnreg.dec: the warp's registers per thread from here on, a multiple of 8. All four warps of an aligned group of four do the same, each when it
// gets there; `more` waits until others have given back enough.
template <int kRegisters>
MF_DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
MF_DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

} // namespace hw
