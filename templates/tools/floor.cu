// floor.cu - the HBM floor: brings the weights of the active experts into shared memory, and does nothing else.
//
// No kernel that computes with these weights can be faster than this one, up to what its own start-up costs, so a candidate's time is
// judged by its ratio to it. It does what a good kernel must do: one persistent CTA per SM, an equal share of the bytes for each, bulk copies of
// 16 KB, a bounded number of them in flight, evict_first.
//
//   the active experts' weights as one string of bytes        up(e0) up(e1) ... down(e0) down(e1) ...
//   CTA c of G copies the bytes [c * total / G, (c + 1) * total / G), cut at multiples of 16
//
// Runs on: any grid of one CTA per SM, one warp; lane 0 does the work. Nothing is written; the ring's contents are never read.
#include "../hw/hw.cuh"
#include "../hw/bulk.cuh"
#include "floor_params.h"

namespace floor_kernel {

// --- Shared memory ---
struct alignas(1024) Shared {
  uint8_t ring[MF_FLOOR_STAGES][MF_FLOOR_STAGE_BYTES];
  alignas(8) hw::Mbarrier landed[MF_FLOOR_STAGES]; // 1 + bytes: the stage's copy is there
};
static_assert(sizeof(Shared) == MF_FLOOR_SHARED_BYTES, "shared memory: floor_params.h mirrors struct Shared");

// --- The string of bytes, walked from any position to the right ---
struct Walk {
  const mf_floor_params &prm;
  int part;           // 0 .. active - 1: up of experts[part]; active .. 2 * active - 1: down of experts[part - active]
  int64_t offset;     // within the part
  int64_t left;       // bytes of this CTA's share still to copy

  MF_DEVICE int64_t part_bytes() const { return part < prm.active ? prm.up_bytes : prm.down_bytes; }

  MF_DEVICE const uint8_t *source() const
  {
    const bool up = part < prm.active;
    const int expert = prm.experts[up ? part : part - prm.active];
    return static_cast<const uint8_t *>(up ? prm.w13 : prm.w2) + expert * part_bytes() + offset;
  }

  // Bytes of the next copy: a stage, or what is left of the part or of the share.
  MF_DEVICE uint32_t next_bytes() const
  {
    int64_t bytes = part_bytes() - offset;
    bytes = bytes < left ? bytes : left;
    return bytes < MF_FLOOR_STAGE_BYTES ? (uint32_t)bytes : (uint32_t)MF_FLOOR_STAGE_BYTES;
  }

  MF_DEVICE void advance(uint32_t bytes)
  {
    offset += bytes;
    left -= bytes;
    if(offset == part_bytes()) {
      offset = 0;
      ++part;
    }
  }
};

// The share of CTA `cta` of `ctas`.
MF_DEVICE Walk share_of(const mf_floor_params &prm, int cta, int ctas)
{
  const int64_t up_total = prm.active * prm.up_bytes;
  const int64_t total16 = (up_total + prm.active * prm.down_bytes) / 16;
  const int64_t begin = cta * total16 / ctas * 16, end = (cta + 1) * total16 / ctas * 16;
  if(begin < up_total)
    return Walk{prm, (int)(begin / prm.up_bytes), begin % prm.up_bytes, end - begin};
  const int64_t down = begin - up_total;
  const int64_t row = prm.down_bytes > 0 ? prm.down_bytes : 1;
  return Walk{prm, prm.active + (int)(down / row), down % row, end - begin};
}

// --- Timeline of lane 0: fill the ring, then for each stage in turn wait for its copy and start the next; at the end wait for all ---
MF_DEVICE void stream(const mf_floor_params &prm, Shared &shared)
{
  const hw::Watchdog dog = hw::make_watchdog(nullptr);
  const uint64_t policy = hw::policy_evict_first();
  Walk walk = share_of(prm, hw::cta_index(), prm.ctas);
  int stage = 0, issued = 0;
  uint32_t parity = 0;
  for(; walk.left > 0; ++issued) {
    if(issued >= MF_FLOOR_STAGES)
      hw::mbarrier_wait(&shared.landed[stage], parity, dog, 0);
    const uint32_t bytes = walk.next_bytes();
    hw::mbarrier_arrive_expect(&shared.landed[stage], bytes);
    hw::copy_bulk(shared.ring[stage], walk.source(), bytes, &shared.landed[stage], policy);
    walk.advance(bytes);
    if(++stage == MF_FLOOR_STAGES) {
      stage = 0;
      parity ^= issued >= MF_FLOOR_STAGES;
    }
  }
  const int open = issued < MF_FLOOR_STAGES ? issued : MF_FLOOR_STAGES;
  if(issued < MF_FLOOR_STAGES)
    stage = 0;
  for(int i = 0; i < open; ++i) {
    hw::mbarrier_wait(&shared.landed[stage], parity, dog, 0);
    if(++stage == MF_FLOOR_STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

} // namespace floor_kernel

extern "C" __global__ void __launch_bounds__(MF_FLOOR_THREADS, 1) mf_floor(const __grid_constant__ mf_floor_params prm)
{
  floor_kernel::Shared &shared = *reinterpret_cast<floor_kernel::Shared *>(hw::dynamic_shared());
  if(hw::thread_index() == 0) {
    for(int i = 0; i < MF_FLOOR_STAGES; ++i)
      hw::mbarrier_init(&shared.landed[i], 1);
    hw::mbarrier_init_fence();
    floor_kernel::stream(prm, shared);
  }
}
