/* hw_host.h - the names of templates/hw/ for kernels that are compiled as host C++ and run on the emulated GPU.
 *
 * templates/hw/hw.cuh includes this instead of its own files when MF_HOST_EMULATION is defined. What a function means is written at its twin in
 * templates/hw/. Whatever has to do with other threads, with shared or global memory beyond an ordinary access, or with asynchronous work goes to
 * emu_hw.h; arithmetic is done here, with the bits that the PTX instruction makes. There is no state.
 *
 * A kernel becomes a shared object from
 *
 *   #define MF_HOST_EMULATION
 *   #include "<emitted file>"
 *   extern "C" __attribute__((visibility("default"))) void mf_emu_entry(void **params) { hw::call_kernel(mf_moe, params); }
 *
 * compiled with -fsanitize=thread, so that every ordinary load and store of stage code calls a __tsan_* function, and linked without it (the emulator
 * has these functions). Two things follow for the code below:
 *
 *   Inlined code is instrumented like the stage code around it, whatever attributes it has. So what must not be seen as an access of the kernel (the
 *   emulator's emu_self, the parameters as the host holds them) is read in functions that are not inlined: MF_UNSEEN.
 *   All else is inlined, so that the caller of an emu_* function is a line of stage code when it is looked up.
 *
 * Options that matter: -ffp-contract=off (each operation rounds once), -fno-strict-aliasing (as nvcc), -fno-exceptions, -fvisibility=hidden and, with
 * gcc, -fno-gnu-unique (all kernels have the same names, and several may be loaded at a time), -Wno-psabi (a tensor map is passed by value). */
#ifndef MOEFORGE_EMU_HW_HOST_H
#define MOEFORGE_EMU_HW_HOST_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <utility>

#include "emu_hw.h"

#define MF_DEVICE inline __attribute__((always_inline))
#define MF_ANYWHERE
#define MF_UNROLL
#define MF_LOOP
#define MF_UNSEEN inline __attribute__((noinline, no_sanitize("thread"), visibility("hidden")))

/* What emitted files use of CUDA. A __device__ object (mf_meta) is looked up by name. */
#define __device__ __attribute__((visibility("default")))
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)

/* Only gcc says this, once everything is inlined: values are carried along where they were not set, but not used there. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace hw {

struct alignas(8) U32x2 {
  uint32_t x, y;
};
struct alignas(16) U32x4 {
  uint32_t x, y, z, w;
};
struct alignas(8) F32x2 {
  float x, y;
};
struct alignas(16) F32x4 {
  float x, y, z, w;
};

// ---- thread.cuh ----

MF_UNSEEN int thread_index() { return emu_self->thread; }
MF_UNSEEN int lane_index() { return emu_self->lane; }
MF_UNSEEN int warp_index() { return (int)emu_reduce_max((uint32_t)emu_self->warp); } // of the whole warp, as on a GPU
MF_UNSEEN int cta_index() { return emu_self->cta; }
MF_UNSEEN uint8_t *dynamic_shared() { return emu_self->shared; }

// The shared window begins with the CTA's dynamic shared memory.
MF_DEVICE uint32_t shared_address(const void *p) { return (uint32_t)((uintptr_t)p - (uintptr_t)dynamic_shared()); }

MF_DEVICE void compute_now(int &) {}
template <int>
MF_DEVICE void more_registers() {}
template <int>
MF_DEVICE void fewer_registers() {}
MF_DEVICE void sync_cta() { emu_barrier_sync(0, -1); }
MF_DEVICE void barrier_sync(int id, int threads) { emu_barrier_sync(id, threads); }
MF_DEVICE void barrier_arrive(int id, int threads) { emu_barrier_arrive(id, threads); }
MF_DEVICE void launch_dependents() {}
MF_DEVICE void wait_for_predecessors() { emu_wait_for_predecessors(); }
MF_DEVICE void sleep_ns(uint32_t) { emu_pause(); }
MF_DEVICE uint64_t clock() { return emu_clock(); }
MF_DEVICE uint32_t clock_low() { return (uint32_t)emu_clock(); }
MF_DEVICE uint32_t clock_behind(uint32_t) { return (uint32_t)emu_clock(); }
MF_DEVICE uint64_t global_timer() { return emu_clock(); }
MF_DEVICE uint32_t sm_index() { return (uint32_t)cta_index(); }

// ---- convert.cuh: bits ----

MF_DEVICE uint32_t float_bits(float f) { return __builtin_bit_cast(uint32_t, f); }
MF_DEVICE float bits_float(uint32_t u) { return __builtin_bit_cast(float, u); }

// ---- warp.cuh ----

MF_DEVICE void sync_warp() { emu_sync_warp(); }
MF_DEVICE uint32_t shuffle(uint32_t v, int lane) { return emu_shuffle(v, lane & 31); }
MF_DEVICE int shuffle(int v, int lane) { return (int)emu_shuffle((uint32_t)v, lane & 31); }
MF_DEVICE float shuffle(float v, int lane) { return bits_float(emu_shuffle(float_bits(v), lane & 31)); }
MF_DEVICE uint32_t shuffle_xor(uint32_t v, int mask) { return emu_shuffle(v, (lane_index() ^ mask) & 31); }
MF_DEVICE float shuffle_xor(float v, int mask) { return bits_float(emu_shuffle(float_bits(v), (lane_index() ^ mask) & 31)); }
MF_DEVICE uint32_t ballot(bool condition) { return emu_ballot(condition); }
MF_DEVICE bool is_elected() { return emu_ballot(1) != 0 && lane_index() == 0; }
MF_DEVICE bool all_lanes(bool condition) { return emu_ballot(condition) == 0xFFFFFFFFu; }
MF_DEVICE bool any_lane(bool condition) { return emu_ballot(condition) != 0; }
MF_DEVICE uint32_t reduce_max(uint32_t v) { return emu_reduce_max(v); }
MF_DEVICE int count_bits(uint32_t v) // (the builtin would call libgcc)
{
  v -= v >> 1 & 0x55555555u;
  v = (v & 0x33333333u) + (v >> 2 & 0x33333333u);
  return (int)(((v + (v >> 4)) & 0x0F0F0F0Fu) * 0x01010101u >> 24);
}
MF_DEVICE int highest_bit(uint32_t v) { return 31 - __builtin_clz(v); }
MF_DEVICE int lowest_bit(uint32_t v) { return __builtin_ffs((int)v) - 1; }
MF_DEVICE int lowest_bit(uint64_t v) { return __builtin_ffsll((long long)v) - 1; }

// ---- memory.cuh ----

MF_DEVICE uint32_t load_global_relaxed(const uint32_t *p) { return emu_load_relaxed(p, 0); }
MF_DEVICE U32x4 load_global_relaxed(const U32x4 *p)
{
  U32x4 v;
  v.x = emu_load_relaxed(&p->x, 0);
  v.y = emu_load_relaxed(&p->y, 0);
  v.z = emu_load_relaxed(&p->z, 0);
  v.w = emu_load_relaxed(&p->w, 0);
  return v;
}
MF_DEVICE void store_global_relaxed(uint32_t *p, uint32_t v) { emu_store_relaxed(p, v, 0); }
MF_DEVICE uint32_t increment_global(uint32_t *p) { return emu_add(p, 1); }
MF_DEVICE void or_global(uint32_t *p, uint32_t v) { emu_or(p, v); }
MF_DEVICE uint32_t load_shared_relaxed(const uint32_t *p) { return emu_load_relaxed(p, 0); }
MF_DEVICE void store_shared_relaxed(uint32_t *p, uint32_t v) { emu_store_relaxed(p, v, 0); }
MF_DEVICE uint32_t load_shared_acquire(const uint32_t *p) { return emu_load_relaxed(p, 1); }
MF_DEVICE void store_shared_release(uint32_t *p, uint32_t v) { emu_store_relaxed(p, v, 1); }
MF_DEVICE uint32_t add_shared(uint32_t *p, uint32_t v) { return emu_add(p, v); }
MF_DEVICE void or_shared(uint32_t *p, uint32_t v) { emu_or(p, v); }
MF_DEVICE void or_shared_release(uint32_t *p, uint32_t v) { emu_or_release(p, v); }
MF_DEVICE F32x2 load_shared_unordered(const F32x2 *p)
{
  F32x2 v;
  emu_load_unordered(p, &v, 2);
  return v;
}
MF_DEVICE void fence_async_proxy() { emu_fence_async_proxy(); }

// ---- watchdog.cuh: the emulator itself finds waits that never end ----

struct Watchdog {};
MF_DEVICE Watchdog make_watchdog(uint32_t *) { return Watchdog{}; }

struct Spin {
  MF_DEVICE bool again(const Watchdog &, int id)
  {
    emu_spin(id);
    return true;
  }
};

MF_DEVICE void wait_shared_at_least(const uint32_t *p, uint32_t value, const Watchdog &, int id)
{
  while(load_shared_acquire(p) < value)
    emu_spin(id);
}

// ---- mbarrier.cuh ----

using Mbarrier = uint64_t;

MF_DEVICE void mbarrier_init(Mbarrier *bar, uint32_t arrivals) { emu_mbarrier_init(bar, arrivals); }
MF_DEVICE void mbarrier_init_fence() { emu_mbarrier_init_fence(); }
MF_DEVICE void mbarrier_arrive(Mbarrier *bar) { emu_mbarrier_arrive(bar); }
MF_DEVICE void mbarrier_arrive_expect(Mbarrier *bar, uint32_t bytes) { emu_mbarrier_arrive_expect(bar, bytes); }
MF_DEVICE bool mbarrier_try_wait(Mbarrier *bar, uint32_t parity) { return emu_mbarrier_try_wait(bar, parity) != 0; }
MF_DEVICE bool mbarrier_test(Mbarrier *bar, uint32_t parity) { return emu_mbarrier_try_wait(bar, parity) != 0; }
MF_DEVICE bool mbarrier_wait(Mbarrier *bar, uint32_t parity, const Watchdog &, int id)
{
  emu_mbarrier_wait(bar, parity, id);
  return true;
}

// ---- copy.cuh, bulk.cuh ----

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

MF_DEVICE void prefetch_map(const TensorMap *) {}
MF_DEVICE uint64_t policy_evict_first() { return 1; }
MF_DEVICE uint64_t policy_evict_normal() { return 2; }
MF_DEVICE void copy_tensor_3d(void *dst, const TensorMap *map, int c0, int c1, int c2, Mbarrier *bar, uint64_t)
{
  const int32_t at[3] = {c0, c1, c2};
  emu_copy_tensor(dst, map, 3, at, bar);
}
MF_DEVICE void copy_tensor_5d(void *dst, const TensorMap *map, int c0, int c1, int c2, int c3, int c4, Mbarrier *bar, uint64_t)
{
  const int32_t at[5] = {c0, c1, c2, c3, c4};
  emu_copy_tensor(dst, map, 5, at, bar);
}
MF_DEVICE void copy_async_4(void *dst, const void *src) { emu_copy_async(dst, src, 4); }
MF_DEVICE void copy_async_16(void *dst, const void *src) { emu_copy_async(dst, src, 16); }
MF_DEVICE void copy_async_wait() { emu_copy_async_wait(); }
MF_DEVICE void copy_async_arrive(Mbarrier *bar) { emu_copy_async_arrive(bar); }

// bulk.cuh is included by name and defines copy_bulk(void *, const void *, ...) whatever the machine. Calls with byte pointers come here instead, and
// the other, which no host could assemble, is left out because nobody calls it.
MF_DEVICE void copy_bulk(uint8_t *dst, const uint8_t *src, uint32_t bytes, Mbarrier *bar, uint64_t) { emu_copy_bulk(dst, src, bytes, bar); }

// ---- wgmma.cuh ----

MF_DEVICE uint64_t matrix_descriptor(const void *p)
{
  return (uint64_t)((shared_address(p) & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
MF_DEVICE uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }
MF_DEVICE void wgmma_fence() { emu_wgmma_fence(); }
MF_DEVICE void wgmma_commit() { emu_wgmma_commit(); }
MF_DEVICE void wgmma_wait() { emu_wgmma_wait(); }
MF_DEVICE void wgmma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) { emu_wgmma(d, 64, a, b, accumulate); }
MF_DEVICE void wgmma_n32(float (&d)[16], uint64_t a, uint64_t b, int accumulate) { emu_wgmma(d, 32, a, b, accumulate); }
MF_DEVICE void wgmma_n24(float (&d)[12], uint64_t a, uint64_t b, int accumulate) { emu_wgmma(d, 24, a, b, accumulate); }
MF_DEVICE void wgmma_n16(float (&d)[8], uint64_t a, uint64_t b, int accumulate) { emu_wgmma(d, 16, a, b, accumulate); }
MF_DEVICE void wgmma_n8(float (&d)[4], uint64_t a, uint64_t b, int accumulate) { emu_wgmma(d, 8, a, b, accumulate); }
MF_DEVICE void count_rows(int rows) { emu_count_rows(rows); }
template <int kCount>
MF_DEVICE void keep_accumulators(float (&d)[kCount])
{
  emu_keep_accumulators(d, kCount);
}

// ---- convert.cuh: arithmetic. A NaN result is the GPU's, 0x7FFFFFFF, not x86's. ----

// (a taint of the emulator's stays what it is)
MF_DEVICE float gpu_nan(float f) { return f == f || (float_bits(f) & EMU_TAINT_MASK) == EMU_TAINT ? f : bits_float(0x7FFFFFFFu); }
// Subnormal becomes zero of the same sign.
MF_DEVICE float flushed(float f) { return (float_bits(f) & 0x7F800000u) == 0 ? bits_float(float_bits(f) & 0x80000000u) : f; }

MF_DEVICE float reciprocal_approx(float v) { return gpu_nan(flushed(1.0f / flushed(v))); }
MF_DEVICE float add_rn(float a, float b) { return gpu_nan(a + b); }
MF_DEVICE float multiply_rn(float a, float b) { return gpu_nan(a * b); }
MF_DEVICE float fma_rn(float a, float b, float c) { return gpu_nan(fmaf(a, b, c)); }

// The GPU's own algorithm, so that what is outside its domain comes out wrong here, too.
MF_DEVICE float reciprocal_rn(float v)
{
  float r = reciprocal_approx(v);
  r = fma_rn(r, fma_rn(-v, r, 1.0f), r);
  r = fma_rn(r, fma_rn(-v, r, 1.0f), r);
  const uint32_t bits = float_bits(v);
  return (bits & 0x7FFFFFu) == 0x7FFFFFu ? bits_float((0x7E800000u - (bits & 0x7F800000u)) | 1u) : r;
}

MF_DEVICE float fast_exp(float v) { return gpu_nan(flushed(exp2f(v * 1.44269504f))); }
MF_DEVICE float fast_divide(float a, float b)
{
  const bool huge = (float_bits(b) & 0x7FFFFFFFu) > 0x7E800000u; // above 2^126: the reciprocal is flushed
  return gpu_nan(huge && b == b ? a * bits_float(float_bits(b) & 0x80000000u) : a / b);
}

// ---- convert.cuh: bf16 ----

MF_DEVICE float bf16_low(uint32_t pair) { return bits_float(pair << 16); }
MF_DEVICE float bf16_high(uint32_t pair) { return bits_float(pair & 0xFFFF0000u); }
MF_DEVICE uint16_t to_bf16(float v)
{
  const uint32_t bits = float_bits(v);
  if((bits & EMU_TAINT_MASK) == EMU_TAINT)
    emu_tainted(bits);
  return v != v ? 0x7FFF : (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
MF_DEVICE uint32_t to_bf16_pair(float low, float high) { return to_bf16(low) | (uint32_t)to_bf16(high) << 16; }

// The sum in f32 has more than twice as many bits as the result: rounding it a second time is harmless.
MF_DEVICE uint32_t bf16_pair_add(uint32_t a, uint32_t b)
{
  return to_bf16_pair(bf16_low(a) + bf16_low(b), bf16_high(a) + bf16_high(b));
}

// The larger one, +0 above -0. Of a NaN and a number the number.
MF_DEVICE float max_number(float a, float b)
{
  if(a == b)
    return bits_float(float_bits(a) & float_bits(b));
  return a > b || b != b ? a : b;
}
MF_DEVICE float max_nan(float a, float b) { return a != a || b != b ? bits_float(0x7FFFFFFFu) : max_number(a, b); }
MF_DEVICE uint32_t bf16_pair_max_nan(uint32_t a, uint32_t b)
{
  return to_bf16_pair(max_nan(bf16_low(a), bf16_low(b)), max_nan(bf16_high(a), bf16_high(b)));
}
MF_DEVICE uint32_t bf16_pair_max(uint32_t a, uint32_t b)
{
  return to_bf16_pair(max_number(bf16_low(a), bf16_low(b)), max_number(bf16_high(a), bf16_high(b)));
}

// ---- convert.cuh: e4m3 ----

// S EEEE MMM, bias 7, largest number 448 = 0x7E, NaN 0x7F.
MF_DEVICE uint32_t to_e4m3(float v)
{
  const uint32_t sign = float_bits(v) >> 24 & 0x80, magnitude = float_bits(v) & 0x7FFFFFFFu;
  if((magnitude & EMU_TAINT_MASK) == EMU_TAINT)
    emu_tainted(magnitude);
  if(magnitude > 0x7F800000u)
    return 0x7F;
  if(magnitude >= 0x43E00000u) // 448
    return sign | 0x7E;
  if(magnitude < 0x3C800000u) // 2^-6: multiples of 2^-9, which is the last place of numbers from 2^14 on
    return sign | (float_bits(bits_float(magnitude) + 16384.0f) - 0x46800000u);
  const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1);
  return sign | ((rounded >> 20) - (120u << 3));
}
MF_DEVICE uint32_t to_e4m3_pair(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

// ---- mma.cuh: a lane keeps whole rows and columns, those that its results are made of. Loads and products meet as a vote does. ----

struct Rows {
  U32x4 piece[2][8]; // of row l / 4 and of the one 8 further on
};
struct WideRows {
  float value[2][128];
};
struct Columns {
  uint32_t word[2][32]; // of columns 2 (l % 4) and + 1, as they lie in memory; a tainted one is the taint
};

struct RowsAt {
  const uint8_t *low, *high;
};
struct ColumnsBase {
  const uint8_t *atom;
};
using ColumnsAt = ColumnsBase;
MF_DEVICE RowsAt rows_at(const uint8_t *low, const uint8_t *high) { return RowsAt{low, high}; }
MF_DEVICE ColumnsBase columns_base(const uint8_t *atom) { return ColumnsBase{atom}; }
MF_DEVICE ColumnsAt columns_at(const ColumnsBase &base, uint32_t offset) { return ColumnsAt{base.atom + offset}; }

MF_DEVICE void load_rows(Rows &rows, const RowsAt &at, uint32_t offset)
{
  const int r = lane_index() >> 2;
  emu_ballot(1);
  for(int p = 0; p < 8; ++p) {
    rows.piece[0][p] = *(const U32x4 *)(at.low + offset + r * 128 + ((p ^ r) << 4));
    rows.piece[1][p] = *(const U32x4 *)(at.high + offset + r * 128 + ((p ^ r) << 4));
  }
}
MF_DEVICE void load_columns(Columns &columns, const ColumnsAt &at, uint32_t offset)
{
  const uint8_t *first = at.atom + offset + 256 * (lane_index() & 3);
  emu_ballot(1);
  emu_load_unordered(first, columns.word[0], 32);
  emu_load_unordered(first + 128, columns.word[1], 32);
}

// What each e4m3 byte stands for.
struct WideTable {
  float value[256];
  constexpr WideTable() : value()
  {
    for(int v = 0; v < 256; ++v) {
      float magnitude = (float)(v & 7) / 512.0f; // subnormal: multiples of 2^-9
      if((v >> 3 & 15) != 0)
        magnitude = (float)(8 + (v & 7)) / 1024.0f;
      for(int e = 0; e < (v >> 3 & 15); ++e)
        magnitude *= 2.0f;
      value[v] = (v & 0x7F) == 0x7F ? __builtin_nanf("") : v & 0x80 ? -magnitude : magnitude;
    }
  }
};
inline constexpr WideTable wide_table;

MF_UNSEEN void widen(WideRows &wide, const Rows &rows)
{
  for(int i = 0; i < 256; ++i)
    wide.value[i >> 7][i & 127] = wide_table.value[((const uint8_t *)rows.piece)[i]];
}

// Sums of 16 products at a time; with two sums, those of every other chunk apart.
MF_UNSEEN void multiply_lane(float *d, const WideRows &rows, const Columns &columns, int lane, int sums)
{
  for(int c = 0; c < 2; ++c) {
    const int row = 2 * (lane & 3) + c;
    float sum[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
    uint32_t taint = 0;
    for(int s = 0; s < 8; ++s) {
      const uint8_t *chunk = (const uint8_t *)columns.word[c] + ((s ^ row) << 4);
      float part[2] = {0.0f, 0.0f};
      for(int k = 0; k < 16; ++k) {
        const float b = wide_table.value[chunk[k]];
        part[0] += rows.value[0][16 * s + k] * b;
        part[1] += rows.value[1][16 * s + k] * b;
      }
      sum[s % sums][0] += part[0];
      sum[s % sums][1] += part[1];
    }
    for(int i = 0; i < 32; ++i)
      taint = (columns.word[c][i] & EMU_TAINT_MASK) == EMU_TAINT ? columns.word[c][i] : taint;
    d[c] = taint != 0 ? bits_float(taint) : gpu_nan(sum[0][0] + sum[1][0]);
    d[2 + c] = taint != 0 ? bits_float(taint) : gpu_nan(sum[0][1] + sum[1][1]);
  }
}
MF_DEVICE void multiply(float (&d)[4], const WideRows &rows, const Columns &columns)
{
  emu_ballot(1);
  multiply_lane(d, rows, columns, lane_index(), 2);
}
MF_DEVICE void multiply_two(float (&d)[2][4], const WideRows (&rows)[2], const Columns (&columns)[2])
{
  emu_ballot(1);
  for(int j = 0; j < 2; ++j)
    multiply_lane(d[j], rows[j], columns[j], lane_index(), 1);
}

// ---- how the emulator calls a kernel ----

template <class T>
struct Loaded {
  T value;
  MF_UNSEEN static T from(const void *p) // whatever p's alignment
  {
    T v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
};

// (gcc would let the caller, which is instrumented, load the only parameter's address)
#if defined(__GNUC__) && !defined(__clang__)
#define MF_UNMOVED __attribute__((noipa))
#else
#define MF_UNMOVED
#endif

template <class... T, size_t... kIndex>
MF_UNMOVED MF_UNSEEN void call_with(void (*kernel)(T...), void **params, std::index_sequence<kIndex...>)
{
  kernel(Loaded<T>::from(params[kIndex])...);
}

// Calls kernel(*(T0 *)params[0], *(T1 *)params[1], ...), as cuLaunchKernel's parameters.
template <class... T>
MF_DEVICE void call_kernel(void (*kernel)(T...), void **params)
{
  call_with(kernel, params, std::index_sequence_for<T...>());
}

} // namespace hw

#endif
