// copy.cuh - asynchronous copies from global to shared memory.
#pragma once

namespace hw {

// A tensor map as cuTensorMapEncodeTiled makes it; a __grid_constant__ kernel argument.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// prefetch.tensormap: brings the map into the cache of descriptors.
MF_DEVICE void prefetch_map(const TensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// createpolicy.fractional.L2: an L2 eviction policy for the copies below.
MF_DEVICE uint64_t policy_evict_first()
{
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
MF_DEVICE uint64_t policy_evict_normal()
{
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// cp.async.bulk.tensor.3d: copies the map's box at coordinates (c0, c1, c2) to shared memory through the async proxy and
// completes the box's bytes on the barrier. Returns at once; one thread issues.
MF_DEVICE void copy_tensor_3d(void *dst, const TensorMap *map, int c0, int c1, int c2, Mbarrier *bar, uint64_t policy)
{
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2,%3,%4}], [%5], %6;"
               ::"r"(shared_address(dst)), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(shared_address(bar)), "l"(policy) : "memory");
}

// cp.async.bulk.tensor.5d: the same for a map of rank 5.
MF_DEVICE void copy_tensor_5d(void *dst, const TensorMap *map, int c0, int c1, int c2, int c3, int c4, Mbarrier *bar, uint64_t policy)
{
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2,%3,%4,%5,%6}], [%7], %8;"
               ::"r"(shared_address(dst)), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(shared_address(bar)), "l"(policy) : "memory");
}

// cp.async.ca, 4 and 16 bytes: a per-thread copy in the generic proxy. Done after copy_async_wait() of this thread, or when
// the barrier of copy_async_arrive() completes.
MF_DEVICE void copy_async_4(void *dst, const void *src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(dst)), "l"(src) : "memory"); }
MF_DEVICE void copy_async_16(void *dst, const void *src) { asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(dst)), "l"(src) : "memory"); }

// cp.async.wait_all: this thread's earlier cp.async have landed (visible to itself; a barrier passes that on).
MF_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// cp.async.mbarrier.arrive.noinc: one of the barrier's expected arrivals, made when this thread's earlier cp.async have landed.
MF_DEVICE void copy_async_arrive(Mbarrier *bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory"); }

} // namespace hw
