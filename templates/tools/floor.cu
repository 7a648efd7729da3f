// floor.cu - the HBM floors: bring the weights of the active experts into shared memory, and do nothing else.
//
// No kernel that computes with these weights can be faster than the faster of these two, up to what its own start-up costs, so a candidate's time is
// judged by its ratio to that. Both do what a good kernel must do: one persistent CTA per SM, an equal share of the bytes for each, copies of up to 16 KB,
// evict_first, many of them in flight; and nothing stands before the first copy: no load (the experts are in the parameters) and no division.
//
//   mf_floor         long copies of contiguous bytes, whatever they mean: the floor of any layout of the weights, packed ones too. A CTA copies its share
//                    of up(e0) up(e1) ..., then its share of down(e0) down(e1) ...
//   mf_floor_tensor  the checkpoint's layout as the timed kernel reads it: its tensor maps, its boxes, its units dealt round robin, its rows of w2. What a
//                    kernel loses to this is its own; what this loses to the other is the layout's.
//
// Runs on: any grid of one CTA per SM; one thread does the work. Nothing is written; the ring's contents are never read.
#include "../hw/hw.cuh"
#include "../hw/bulk.cuh"
#include "floor_core.h"

namespace floor_kernel {

// --- Shared memory ---
struct alignas(1024) Shared {
  uint8_t ring[MF_FLOOR_STAGES][MF_FLOOR_STAGE_BYTES];
  alignas(8) hw::Mbarrier landed[MF_FLOOR_STAGES]; // 1 + bytes: the stage's copy is there
};
static_assert(sizeof(Shared) == MF_FLOOR_SHARED_BYTES, "shared memory: floor_params.h mirrors struct Shared");

// --- The ring: a stage is taken again when its last copy has landed ---
struct Ring {
  Shared &shared;
  const hw::Watchdog dog;
  int stage = 0;
  uint32_t parity = 1; // of the phase before the first one, which counts as complete
  int taken = 0;

  MF_DEVICE explicit Ring(Shared &s) : shared(s), dog(hw::make_watchdog(nullptr))
  {
    for(int i = 0; i < MF_FLOOR_STAGES; ++i)
      hw::mbarrier_init(&shared.landed[i], 1);
    hw::mbarrier_init_fence();
  }

  MF_DEVICE void wait()
  {
    if(taken >= MF_FLOOR_STAGES)
      hw::mbarrier_wait(&shared.landed[stage], parity, dog, 0);
  }

  MF_DEVICE void advance()
  {
    ++taken;
    if(++stage == MF_FLOOR_STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }

  // Waits for everything that is in flight.
  MF_DEVICE void drain()
  {
    const int open = taken < MF_FLOOR_STAGES ? taken : MF_FLOOR_STAGES;
    if(taken < MF_FLOOR_STAGES) { // stages 0 .. taken - 1, in their first phase
      stage = 0;
      parity = 0;
    }
    for(int i = 0; i < open; ++i) {
      hw::mbarrier_wait(&shared.landed[stage], parity, dog, 0);
      if(++stage == MF_FLOOR_STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

MF_DEVICE void stream_section(Ring &ring, const mf_floor_section &section, const uint16_t *experts, uint64_t policy)
{
  mf_floor_walk walk = mf_floor_begin(&section, (uint32_t)hw::cta_index());
  MF_LOOP
  while(walk.left > 0) {
    const uint32_t bytes = mf_floor_bytes(&section, &walk);
    const uint8_t *source = (const uint8_t *)section.base + mf_floor_offset(&section, &walk, experts[walk.slot]);
    ring.wait();
    hw::mbarrier_arrive_expect(&ring.shared.landed[ring.stage], bytes);
    hw::copy_bulk(ring.shared.ring[ring.stage], source, bytes, &ring.shared.landed[ring.stage], policy);
    ring.advance();
    mf_floor_advance(&section, &walk);
  }
}

// Unit u of slot s is the (s * units + u)-th; CTA c has the units c, c + ctas, ...
MF_DEVICE void stream_units(Ring &ring, const mf_floor_tensor_params &prm, const hw::TensorMap &map, uint64_t policy)
{
  int slot = 0, unit = hw::cta_index();
  MF_LOOP
  for(;; unit += prm.ctas) {
    while(unit >= prm.units) {
      unit -= prm.units;
      ++slot;
    }
    if(slot >= prm.active)
      return;
    const int row = prm.experts[slot] * 2 * prm.units + unit;
    MF_LOOP
    for(int k = 0; k < prm.unit_stages; ++k) {
      ring.wait();
      hw::mbarrier_arrive_expect(&ring.shared.landed[ring.stage], MF_FLOOR_STAGE_BYTES);
      hw::copy_tensor_5d(ring.shared.ring[ring.stage], &map, 0, 0, 0, row, k * prm.box_blocks, &ring.shared.landed[ring.stage], policy);
      ring.advance();
    }
  }
}

// The CTA's rows of w2 of every expert.
MF_DEVICE void stream_rows(Ring &ring, const mf_floor_tensor_params &prm, const hw::TensorMap &map, uint64_t policy)
{
  if(hw::cta_index() >= prm.down_ctas)
    return;
  MF_LOOP
  for(int slot = 0; slot < prm.active; ++slot) {
    const int row = prm.experts[slot] * prm.hidden + hw::cta_index() * prm.down_rows;
    MF_LOOP
    for(int first = 0; first < prm.down_blocks; first += prm.piece_blocks) {
      const int left = prm.down_blocks - first, blocks = prm.offset < 0 || left > prm.piece_blocks ? prm.piece_blocks : left;
      hw::Mbarrier *landed = &ring.shared.landed[ring.stage];
      uint8_t *to = ring.shared.ring[ring.stage];
      ring.wait();
      hw::mbarrier_arrive_expect(landed, blocks * prm.down_rows * 128);
      if(prm.offset < 0) {
        hw::copy_tensor_3d(to, &map, 0, row, first, landed, policy);
      } else {
        MF_LOOP
        for(int b = 0; b < blocks; ++b)
          hw::copy_tensor_3d(to + b * prm.down_rows * 128, &map, (first + b) * 128 - prm.offset, row, 0, landed, policy);
      }
      ring.advance();
    }
  }
}

} // namespace floor_kernel

extern "C" __global__ void __launch_bounds__(MF_FLOOR_THREADS, 1) mf_floor(const __grid_constant__ mf_floor_params prm)
{
  if(hw::thread_index() == 0) {
    const uint64_t policy = hw::policy_evict_first();
    floor_kernel::Ring ring(*reinterpret_cast<floor_kernel::Shared *>(hw::dynamic_shared()));
    floor_kernel::stream_section(ring, prm.up, prm.experts, policy);
    floor_kernel::stream_section(ring, prm.down, prm.experts, policy);
    ring.drain();
  }
}

extern "C" __global__ void __launch_bounds__(MF_FLOOR_THREADS, 1)
mf_floor_tensor(const __grid_constant__ mf_floor_tensor_params prm, const __grid_constant__ hw::TensorMap up_map, const __grid_constant__ hw::TensorMap down_map)
{
  if(hw::thread_index() == 0) {
    const uint64_t policy = hw::policy_evict_first();
    floor_kernel::Ring ring(*reinterpret_cast<floor_kernel::Shared *>(hw::dynamic_shared()));
    floor_kernel::stream_units(ring, prm, up_map, policy);
    floor_kernel::stream_rows(ring, prm, down_map, policy);
    ring.drain();
  }
}
