// memory.cuh - loads and stores with a scope, atomics, and fences between the generic and the async proxy.
//
// Relaxed accesses are single-copy atomic per 32-bit word and order nothing else. Plain C++ loads and stores are used
// wherever a barrier orders the access.
#pragma once

namespace hw {

// --- Global memory ---

// ld.relaxed.gpu.global.v4.u32: reads L2, never a stale L1 line; each of the four words is atomic by itself.
MF_DEVICE U32x4 load_global_relaxed(const U32x4 *p)
{
  U32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// ld.relaxed.gpu.global.u32
MF_DEVICE uint32_t load_global_relaxed(const uint32_t *p)
{
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// st.relaxed.gpu.global.u32: visible to relaxed loads of the whole GPU in due time; orders nothing.
MF_DEVICE void store_global_relaxed(uint32_t *p, uint32_t v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// atom.relaxed.gpu.global.inc.u32: returns the old value; for counters that stay below 2^30. (Not add: of the adds of a warp's lanes ptxas makes one, which its lanes then wait
// for and share out, even where only one lane adds. An inc that wraps at 2^32 is an add to it.)
MF_DEVICE uint32_t increment_global(uint32_t *p)
{
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(0x3FFFFFFFu) : "memory");
  return old;
}

// red.relaxed.gpu.global.or.b32
MF_DEVICE void or_global(uint32_t *p, uint32_t v) { asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

// --- Shared memory; every pointer points into it ---

// ld.relaxed.cta.shared.u32
MF_DEVICE uint32_t load_shared_relaxed(const uint32_t *p)
{
  uint32_t v;
  asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

// st.relaxed.cta.shared.u32
MF_DEVICE void store_shared_relaxed(uint32_t *p, uint32_t v) { asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory"); }

// ld.acquire.cta.shared.u32: later accesses of this thread come after it.
MF_DEVICE uint32_t load_shared_acquire(const uint32_t *p)
{
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

// st.release.cta.shared.u32: earlier accesses of this thread (and those ordered before it, as by sync_warp) come before it.
MF_DEVICE void store_shared_release(uint32_t *p, uint32_t v) { asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory"); }

// atom.relaxed.cta.shared.add.u32: returns the old value.
MF_DEVICE uint32_t add_shared(uint32_t *p, uint32_t v)
{
  uint32_t old;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(shared_address(p)), "r"(v) : "memory");
  return old;
}

// red.relaxed.cta.shared.or.b32
MF_DEVICE void or_shared(uint32_t *p, uint32_t v) { asm volatile("red.relaxed.cta.shared::cta.or.b32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory"); }

// red.release.cta.shared.or.b32: earlier accesses of this thread (and those ordered before it, as by sync_warp) come before it.
MF_DEVICE void or_shared_release(uint32_t *p, uint32_t v) { asm volatile("red.release.cta.shared::cta.or.b32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory"); }

// An ordinary load of words that others may be writing: the caller uses only those that it knows to be there, say by a mask.
// No word is torn. (The emulated device marks the others, so that a use is found.)
MF_DEVICE F32x2 load_shared_unordered(const F32x2 *p) { return *p; }

// --- Proxies ---

// fence.proxy.async.shared::cta: between this thread's earlier ordinary accesses to shared memory and the async proxy's (wgmma operands, bulk copies) of whoever is
// ordered behind the fence. Stores become visible to them; loads are through before a copy overwrites what they read. Every lane that has stored or loaded executes it.
MF_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

} // namespace hw
