// router.cu - stands for the kernel that a program runs ahead of an MoE layer: it reads a router's matrix and x, and writes x and the logits.
//
// It is there to time launches behind another kernel (docs/timing.md). It does the memory accesses of a router, each CTA a few rows of the matrix times all
// tokens, but the products are thrown away: what it writes is a copy, so that the layer's routing is the one that was asked for. As a router does,
// it writes at its end: a layer that reads too early reads what was there before.
//
// Runs on: any grid of MF_ROUTER_THREADS threads. A dependent launch may begin at once; it waits for its own predecessor itself.
#include "../hw/hw.cuh"
#include "router_params.h"

namespace router {

MF_DEVICE float dot(uint32_t a, uint32_t b, float sum)
{
  return hw::fma_rn(hw::bf16_high(a), hw::bf16_high(b), hw::fma_rn(hw::bf16_low(a), hw::bf16_low(b), sum));
}

// The thread's part of the CTA's rows times all tokens.
MF_DEVICE float multiply(const mf_router_params &prm)
{
  const int pieces = prm.hidden / 8;
  const hw::U32x4 *matrix = (const hw::U32x4 *)prm.matrix, *x = (const hw::U32x4 *)prm.from;
  float sum = 0.0f;
  MF_LOOP
  for(int row = hw::cta_index(); row < prm.rows; row += prm.ctas) {
    MF_LOOP
    for(int piece = hw::thread_index(); piece < pieces; piece += MF_ROUTER_THREADS) {
      const hw::U32x4 w = matrix[(size_t)row * pieces + piece];
      for(int token = 0; token < prm.tokens; ++token) {
        const hw::U32x4 v = x[(size_t)token * pieces + piece];
        sum = dot(w.x, v.x, dot(w.y, v.y, dot(w.z, v.z, dot(w.w, v.w, sum))));
      }
    }
  }
  return sum;
}

// The sum over the CTA.
MF_DEVICE float add_up(float sum)
{
  float *partial = (float *)hw::dynamic_shared();
  const int warp = hw::warp_index(); // an operation of the whole warp: not in the condition below
  MF_UNROLL
  for(int o = 16; o >= 1; o >>= 1)
    sum += hw::shuffle_xor(sum, o);
  if(hw::lane_index() == 0)
    partial[warp] = sum;
  hw::sync_cta();
  sum = 0.0f;
  MF_UNROLL
  for(int w = 0; w < MF_ROUTER_THREADS / 32; ++w)
    sum += partial[w];
  return sum;
}

} // namespace router

extern "C" __global__ void __launch_bounds__(MF_ROUTER_THREADS) mf_router(const __grid_constant__ mf_router_params prm)
{
  hw::launch_dependents();
  hw::wait_for_predecessors();
  const float sum = router::add_up(router::multiply(prm));
  const uint32_t changed = sum > 3e38f ? 1 : 0; // never; but the compiler does not know, and the stores wait for the products
  MF_LOOP
  for(int i = hw::cta_index() * MF_ROUTER_THREADS + hw::thread_index(); i < prm.words; i += prm.ctas * MF_ROUTER_THREADS) {
    hw::U32x4 word = ((const hw::U32x4 *)prm.from)[i];
    word.x ^= changed;
    ((hw::U32x4 *)prm.to)[i] = word;
  }
}
