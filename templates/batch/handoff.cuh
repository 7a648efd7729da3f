// handoff.cuh - h between the projections: the finalisers publish it, the loaders of every CTA fetch it.
//
// Who runs it   helper warps: the first kReduceBuffers finalise items, the others load h. The exchange through the workspace is stream's
//               (stream/handoff.cuh), as are prepare_down and wait_for_progress.
//
// Finaliser b
//   Reads       reduce[b][..] and reduce_unit[b], tokens[], slot_at[], with weights on the input weight[].
//   Writes      h of the launch's parity (workspace, relaxed stores), published[b].
//   Waits for   reduce_full[b] (the consumers). A buffer always belongs to the same warp: phases must be seen in turn.
//   Visible by  reduce_empty[b] for the buffer; h carries its own flag.
//   No deadlock the consumers end with a mark in every buffer.
// Loader j (CTAs with down rows)
//   Reads       published[], tokens[], passes[], slot_at[], weight[], then h (workspace, relaxed loads).
//   Writes      the h sets, h_scale for the items j, j + kHLoaders, ... (item = slot * groups + group); h_loaded[..][j].
//   Waits for   this CTA's own progress, then for the words of h themselves. With kOverlay: first all items' low ranks, then x_free,
//               then all items' high ranks, which lie where x was (kOverSums: and the partial sums).
//   Visible by  sync_warp, release store to h_loaded[half][j]. (The fence_async_proxy ahead of them is left from wgmma; the kernel was timed with it.)
//   No deadlock h of a slot is published by CTAs that all run at once (the grid is co-resident) and whose finalisers wait for no loader.
//               x_free comes from the end of this CTA's up phase (kOverSums: and of its finalisers' reading), which waits for no loader either.
#pragma once
#include "batch/layout.cuh"
#include "stream/handoff.cuh"

namespace batch {

// The routing weight that multiplies a token's input to the slot's expert, which is the same as multiplying gate and up.
template <class L>
MF_DEVICE float input_weight(const Context<L> &c, int slot, int token)
{
  const bool routed = c.sm.tokens[slot] >> token & 1; // else nobody has written a weight
  return routed ? c.sm.weight[token][rank_at(c, token, slot)] : 0.0f;
}

// Finaliser `b`: sums the 8 warps' partial sums of an item, h = activate(gate, up), publishes 8 features of the group's routed tokens.
template <class L>
MF_DEVICE void finalise_items(const Context<L> &c, int b, uint32_t launch)
{
  auto &sm = c.sm;
  const bool odd = (c.lane >> 2) & 1; // of two lanes with successive features, the odd one stores the odd token
  const int row = 2 * (c.lane & 3) + odd;
  uint16_t *h = (uint16_t *)(c.workspace(MF_BATCH_WS_H) + (size_t)(launch & 1) * L::kHBytes);
  MF_LOOP
  for(uint32_t parity = 0;; parity ^= 1) {
    if(!hw::mbarrier_wait(&sm.barrier.reduce_full[b], parity, c.dog, L::kWaitReduceFull))
      break;
    const uint32_t item = sm.reduce_unit[b];
    if(item == L::kEndOfUnits)
      break;
    hw::F32x4 v[8];
    MF_UNROLL
    for(int w = 0; w < 8; ++w)
      v[w] = sm.reduce[b][w][c.lane];
    const int unit = item >> 2, token = (item & 3) * 8 + row, slot = unit / L::kUnits;
    const int feature = (unit - slot * L::kUnits) * 8 + ((c.lane >> 2) & ~1);
    const bool routed = sm.tokens[slot] >> token & 1;
    uint32_t *dst = (uint32_t *)(h + (size_t)(token * L::kRanks + rank_at(c, token, slot)) * L::kIntermediate + feature);
    MF_UNROLL
    for(int o = 4; o >= 1; o >>= 1) {
      MF_UNROLL
      for(int w = 0; w < o; ++w)
        v[w] = hw::F32x4{v[w].x + v[w + o].x, v[w].y + v[w + o].y, v[w].z + v[w + o].z, v[w].w + v[w + o].w};
    }
    if constexpr(L::Shape::kWeightOnInput) {
      const int first = (item & 3) * 8 + 2 * (c.lane & 3);
      const float w0 = batch::input_weight(c, slot, first), w1 = batch::input_weight(c, slot, first + 1);
      v[0] = hw::F32x4{v[0].x * w0, v[0].y * w1, v[0].z * w0, v[0].w * w1};
    }
    const float h0 = stream::activate<L>(v[0].x, v[0].z);
    const float h1 = stream::activate<L>(v[0].y, v[0].w);
    const float partner = hw::shuffle_xor(odd ? h0 : h1, 4);
    const uint32_t pair = odd ? hw::to_bf16_pair(partner, h1) : hw::to_bf16_pair(h0, partner);
    if(routed)
      hw::store_global_relaxed(dst, ~pair);
    hw::sync_warp();
    if(c.lane == 0) {
      hw::mbarrier_arrive(&sm.barrier.reduce_empty[b]);
      hw::store_shared_relaxed(&sm.published[b], unit + 1);
    }
  }
  if(c.lane == 0)
    hw::store_shared_relaxed(&sm.published[b], L::kAllPublished);
}

// One row of h on its way from the workspace to its h set.
template <class L>
struct HRow : stream::HRow<L> {
  using Base = stream::HRow<L>;
  using Base::chunk;
  using Base::kChunks;
  using Base::kPieces;
  using Base::kStepBlocks;
  using Base::kSteps;
  using Base::rank;
  using Base::token;
  bool wanted; // there is such a row, and it belongs to the half that is being loaded

  MF_DEVICE void choose(const Context<L> &c, const char *h, int slot, int t, bool there, int half)
  {
    token = t;
    rank = rank_at(c, t, slot);
    wanted = there && (!L::kOverlay || (rank >= L::kLowRanks) == (half == 1));
    this->source = Base::row_of(c, h, t, rank);
    Base::forget();
  }

  // Quantises the row and writes it as row token % 8 of its h set; the routing weight goes into the scale, if it has not multiplied the input.
  MF_DEVICE void store(const Context<L> &c)
  {
    const int group = token >> 3, row = token & 7;
    const float weight = L::Shape::kWeightOnInput ? 1.0f : c.sm.weight[token][rank];
    uint8_t *set = (uint8_t *)&c.sm + L::h_set(group, rank);
    hw::U32x2 quantised[kChunks];
    float scale[kSteps];
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i)
      chunk[i] = stream::inverted(chunk[i]);
    stream::quantise_blocks<L, kPieces, false>(chunk, quantised, scale);
    MF_UNROLL
    for(int i = 0; i < kSteps; ++i) {
      const int block = Base::block_of(c, i), piece = Base::piece_of(c);
      if(L::kHBlocks % kStepBlocks == 0 || block < L::kHBlocks) {
        stream::store_pieces<kPieces>(set + block * 1024, row, piece, quantised + i * kPieces);
        if(piece == 0)
          c.sm.h_scale[group * L::kRanks + rank][block][row] = scale[i] * weight;
      }
    }
  }
};

// The rows of one item and half, some at a time so that their latencies overlap.
template <class L>
MF_DEVICE void load_rows(const Context<L> &c, const char *h, int slot, int group, uint32_t rows, int half)
{
#ifdef MF_WATCHDOG
  constexpr bool kMuch = true;
#else
  constexpr bool kMuch = L::kOverlay || !L::kWholeHBlocks;
#endif
  constexpr int kChunks = HRow<L>::kChunks; // registers: with two chunks and 64 of them, three rows where there is much else to keep
  constexpr int kTogether = kChunks == 2 && L::kMoreRegisters && kMuch ? 3 : kChunks <= 2 ? 4 : kChunks <= 4 ? 2 : 1;
  MF_LOOP
  while(rows != 0) {
    HRow<L> row[kTogether];
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      row[i].choose(c, h, slot, group * 8 + (rows != 0 ? hw::lowest_bit(rows) : 0), rows != 0, half);
      rows &= rows - 1;
    }
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      if(row[i].wanted)
        row[i].fetch(c);
    }
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      if(!row[i].wanted)
        continue;
      hw::Spin spin;
      while(!row[i].complete()) {
        if(!spin.again(c.dog, L::kWaitHData))
          break;
        row[i].fetch(c);
      }
      row[i].store(c);
    }
  }
}

// Loader `j`, item by item.
template <class L>
MF_DEVICE void load_h(const Context<L> &c, int j, uint32_t launch)
{
  auto &sm = c.sm;
  const char *h = c.workspace(MF_BATCH_WS_H) + (size_t)(launch & 1) * L::kHBytes;
  const int active = (int)sm.active;
  MF_LOOP
  for(int half = 0; half < (L::kOverlay ? 2 : 1); ++half) {
    const uint32_t ranks = half == 0 ? (1u << L::kLowRanks) - 1 : Passes<L>::kAll << L::kLowRanks & Passes<L>::kAll;
    if(half == 1)
      hw::mbarrier_wait(&sm.barrier.x_free, 0, c.dog, L::kWaitXFree);
    MF_LOOP
    for(int item = j; item < active * L::kGroups; item += L::kHLoaders) {
      const int slot = item / L::kGroups, group = item - slot * L::kGroups;
      if(!(Passes<L>::of(c, slot, group) & ranks))
        continue;
      stream::wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
      load_rows(c, h, slot, group, sm.tokens[slot] >> (8 * group) & 255u, half);
      hw::fence_async_proxy();
      hw::sync_warp();
      if(c.lane == 0)
        hw::store_shared_release(&sm.h_loaded[half][j], item / L::kHLoaders + 1);
    }
  }
}

} // namespace batch
