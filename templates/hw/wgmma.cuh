// wgmma.cuh - e4m3 x e4m3 -> f32 products of a warpgroup, both operands in shared memory, K-major, 128-byte swizzle.
//
// The sequence is wgmma_fence, products, wgmma_commit, wgmma_wait, then keep_accumulators before the results are read.
// Accumulator layout: warp w of the group holds rows 16w .. 16w + 15; in lane l, d[4j + 0] and d[4j + 1] are row l / 4 and
// columns 8j + 2(l % 4) and + 1; d[4j + 2] and d[4j + 3] are row l / 4 + 8 of the same columns.
#pragma once

namespace hw {

// Descriptor of an operand at a 1024-byte aligned shared address: rows of 128 bytes, atoms of 8 rows 1024 bytes apart
// (start address / 16 | leading offset 1 (unused) | stride offset 64 | SWIZZLE_128B).
MF_DEVICE uint64_t matrix_descriptor(const void *p)
{
  return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The descriptor `bytes` further on: 32 bytes are the next k step within a swizzled row, multiples of 1024 other atoms.
MF_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

// wgmma.fence.sync.aligned: orders earlier register accesses before the products.
MF_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned: closes the group of products issued since the last commit.
MF_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group 0: all committed products are done; their operands in shared memory may be overwritten.
MF_DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// wgmma.mma_async.m64n64k32: d = A * B, or d += A * B with accumulate != 0.
MF_DEVICE void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate)
{
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
               "%32, %33, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n32k32
MF_DEVICE void wgmma_n32(float (&d)[16], uint64_t a, uint64_t b, int accumulate)
{
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n24k32
MF_DEVICE void wgmma_n24(float (&d)[12], uint64_t a, uint64_t b, int accumulate)
{
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
               : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n16k32
MF_DEVICE void wgmma_n16(float (&d)[8], uint64_t a, uint64_t b, int accumulate)
{
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(a), "l"(b), "r"(accumulate));
}

// wgmma.mma_async.m64n8k32
MF_DEVICE void wgmma_n8(float (&d)[4], uint64_t a, uint64_t b, int accumulate)
{
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, p, 1, 1;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "l"(a), "l"(b), "r"(accumulate));
}

// No instruction. Of the 64 rows of A in this thread's products from here on, only the first `rows` count: the others may be read
// while something else is written there, and their results must not be used. (The emulated device marks them.)
MF_DEVICE void count_rows(int) {}

// Keeps the compiler from reading (moving, copying) the accumulators before the wait. No instruction.
template <int kCount>
MF_DEVICE void keep_accumulators(float (&d)[kCount])
{
  MF_UNROLL
  for(int i = 0; i < kCount; ++i)
    asm volatile("" : "+f"(d[i])::"memory");
}

} // namespace hw
