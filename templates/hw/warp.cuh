// warp.cuh - exchange within a warp. All of these are executed by all 32 lanes together.
#pragma once

namespace hw {

// bar.warp.sync: waits for the warp's lanes and orders their shared and global accesses among each other.
MF_DEVICE void sync_warp() { __syncwarp(); }

// shfl.sync.idx: the value of lane `lane`.
MF_DEVICE uint32_t shuffle(uint32_t v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
MF_DEVICE int shuffle(int v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
MF_DEVICE float shuffle(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }

// shfl.sync.bfly: the value of the lane whose index differs by `mask`.
MF_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
MF_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// vote.sync.ballot: bit i is set if lane i's condition holds.
MF_DEVICE uint32_t ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }

// vote.sync.all / vote.sync.any
MF_DEVICE bool all_lanes(bool condition) { return __all_sync(0xffffffffu, condition); }
MF_DEVICE bool any_lane(bool condition) { return __any_sync(0xffffffffu, condition); }

// elect.sync: true in one lane, always the same one (which one the hardware does not say). Where a condition on the lane's index would do as well, this lets the compiler know that there
// is only one: a tensor copy behind it needs no loop over lanes.
MF_DEVICE bool is_elected()
{
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// redux.sync.max.u32: the largest value of the warp, in every lane.
MF_DEVICE uint32_t reduce_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }

// popc.b32
MF_DEVICE int count_bits(uint32_t v) { return __popc(v); }

// Index of the highest set bit; v must not be 0. (Half the latency of the lowest one's, which is found in the reversed word.)
MF_DEVICE int highest_bit(uint32_t v) { return 31 - __clz((int)v); }

// Index of the lowest set bit; v must not be 0.
MF_DEVICE int lowest_bit(uint32_t v) { return __ffs(v) - 1; }
MF_DEVICE int lowest_bit(uint64_t v) { return __ffsll((long long)v) - 1; }

} // namespace hw
