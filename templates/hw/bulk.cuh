// bulk.cuh - contiguous asynchronous copies without a tensor map. Include it behind hw.cuh.
#pragma once

namespace hw {

// cp.async.bulk: copies `bytes` contiguous bytes (a multiple of 16; both addresses 16-byte aligned) to shared memory through the async
// proxy and completes them on the barrier. Returns at once; one thread issues.
MF_DEVICE void copy_bulk(void *dst, const void *src, uint32_t bytes, Mbarrier *bar, uint64_t policy)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(bar)), "l"(policy) : "memory");
}

} // namespace hw
