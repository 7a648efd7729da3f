// hw.cuh - everything that stage code asks of the machine, behind plain functions of namespace hw.
//
// The stage files (stream/*.cuh) contain no PTX and no CUDA builtin: they use hw:: and ordinary loads and stores. That is
// what lets the same stage code be compiled a second time as host C++: with MF_HOST_EMULATION defined, hw_host.h (found
// through the include path) provides every name of this directory for a CPU that runs one fiber per thread.
//
// Device side, by topic:
//   thread.cuh    who am I, shared memory's base, CTA-wide and named barriers, programmatic dependent launch
//   warp.cuh      shuffles, votes, reductions, bit counting
//   memory.cuh    scoped loads and stores, atomics, proxy fences
//   watchdog.cuh  how a spin wait gives up
//   mbarrier.cuh  barriers in shared memory, with transaction counts
//   copy.cuh      tensor copies, cp.async, L2 policies
//   wgmma.cuh     e4m3 products of a warpgroup, out of shared memory
//   mma.cuh       e4m3 products of a warp, through registers
//   trace.cuh     stamps of the clock, in traced builds only (the same file on both sides)
//   convert.cuh   bf16 and e4m3 conversions, fast and exactly rounded arithmetic
//
// Macros: MF_DEVICE marks a function of stage code (MF_ANYWHERE a constexpr one that runs nowhere), MF_UNROLL and MF_LOOP stand before loops that must be unrolled
// or must not be. The entry header also declares the vector types U32x2, U32x4, F32x2 and F32x4 (aligned to their size).
#pragma once
#include "hw/ints.h"

#ifdef MF_HOST_EMULATION
#include "hw_host.h"
#else

#define MF_DEVICE __device__ __forceinline__
#define MF_ANYWHERE __host__ __device__
#define MF_UNROLL _Pragma("unroll")
#define MF_LOOP _Pragma("unroll 1")

namespace hw {
using U32x2 = ::uint2;
using U32x4 = ::uint4;
using F32x2 = ::float2;
using F32x4 = ::float4;
} // namespace hw

#include "hw/thread.cuh"
#include "hw/warp.cuh"
#include "hw/memory.cuh"
#include "hw/watchdog.cuh"
#include "hw/mbarrier.cuh"
#include "hw/copy.cuh"
#include "hw/wgmma.cuh"
#include "hw/mma.cuh"
#include "hw/convert.cuh"

#endif

#include "hw/trace.cuh"
