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
// Loaders (CTAs with down rows), and finalisers that are through with their items
//   Reads       published[] (loaders), tokens[], slot_at[], weight[], then h (workspace, relaxed loads).
//   Writes      h_taken, the h sets and h_scale of the items that they take, h_done[].
//   Waits for   loaders: this CTA's own progress; then for the words of h themselves. With kOverlay: first come all items' low ranks, then
//               all items' high ranks, which lie where x was (kOverSums: and the partial sums) and wait for x_free.
//   Visible by  sync_warp, release update of the slot's byte of h_done[].
//   No deadlock h of a slot is published by CTAs that all run at once (the grid is co-resident), and a finaliser publishes all its items before it loads
//               anything. x_free comes from the end of this CTA's up phase (kOverSums: and of its finalisers' reading), which waits for no loader either.
//
// Who loads is not laid down beforehand: with all tokens on few experts h comes all at once, at the end of the up phase, and every warp that is free counts.
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
  using Base::kPieces;
  using Base::kStepBlocks;
  using Base::kSteps;
  using Base::rank;
  using Base::token;

  // `rank_of_lane`: the rank at which token `lane` has the slot.
  MF_DEVICE void choose(const Context<L> &c, const char *h, int t, int rank_of_lane)
  {
    token = t;
    rank = hw::shuffle(rank_of_lane, t);
    this->source = Base::row_of(c, h, t, rank);
    Base::forget();
  }

  // Writes it as row token % 8 of its h set; the routing weight goes into the scale, if it has not multiplied the input.
  MF_DEVICE void place(const Context<L> &c, const hw::U32x2 *quantised, const float *scale) const
  {
    const int group = token >> 3, row = token & 7;
    const float weight = L::Shape::kWeightOnInput ? 1.0f : c.sm.weight[token][rank];
    uint8_t *set = (uint8_t *)&c.sm + L::h_set(group, rank);
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

// Quantises kRows rows side by side and writes the first `count` of them.
template <class L, int kRows>
MF_DEVICE void quantise_rows(const Context<L> &c, const HRow<L> *row, int count)
{
  constexpr int kChunks = HRow<L>::kChunks, kSteps = HRow<L>::kSteps;
  hw::U32x4 chunk[kRows * kChunks];
  hw::U32x2 quantised[kRows * kChunks];
  float scale[kRows * kSteps];
  MF_UNROLL
  for(int i = 0; i < kRows * kChunks; ++i)
    chunk[i] = stream::inverted(row[i / kChunks].chunk[i % kChunks]);
  stream::quantise_blocks<L, HRow<L>::kPieces, false>(chunk, quantised, scale);
  MF_UNROLL
  for(int i = 0; i < kRows; ++i) {
    if(i < count)
      row[i].place(c, quantised + i * kChunks, scale + i * kSteps);
  }
}

// The rows of an item: `wanted` has a bit for each token. Some at a time, so that their latencies overlap.
template <class L>
MF_DEVICE void load_rows(const Context<L> &c, const char *h, uint32_t wanted, int rank_of_lane)
{
#ifdef MF_WATCHDOG
  constexpr bool kMuch = true;
#else
  constexpr bool kMuch = (L::kOverlay && (L::kMoreRegisters || L::Shape::kWeightOnInput)) || !L::kWholeHBlocks || L::kHBlocks % HRow<L>::kStepBlocks != 0;
#endif
  constexpr int kChunks = HRow<L>::kChunks; // registers: of two chunks each, three rows where there is much else to keep
  constexpr int kTogether = kChunks == 2 && kMuch ? 3 : kChunks <= 2 ? 4 : kChunks <= 4 ? 2 : 1, kPair = kTogether > 1 ? 2 : 1;
  MF_LOOP
  while(wanted != 0) {
    HRow<L> row[kTogether];
    bool missing[kTogether]; // there is such a row, and it is not all there yet
    const int count = hw::count_bits(wanted);
    MF_UNROLL
    for(int i = 0; i < kTogether; ++i) {
      missing[i] = i < count;
      row[i].choose(c, h, missing[i] ? hw::highest_bit(wanted) : 0, rank_of_lane);
      wanted &= ~(1u << row[i].token);
    }
    hw::Spin spin;
    for(;;) {
      MF_UNROLL
      for(int i = 0; i < kTogether; ++i) {
        if(missing[i])
          row[i].fetch(c);
      }
      bool any = false;
      MF_UNROLL
      for(int i = 0; i < kTogether; ++i) {
        if(missing[i])
          missing[i] = !row[i].complete();
        any = any || missing[i];
      }
      if(!any || !spin.again(c.dog, L::kWaitHData))
        break;
    }
    batch::quantise_rows<L, kPair>(c, row, count);
    if constexpr(kTogether > kPair) {
      if(count > kPair)
        batch::quantise_rows<L, kTogether - kPair>(c, row + kPair, count - kPair);
    }
  }
}

// Takes item after item until there is none left. `loader`: else a finaliser that is through with its units.
template <class L>
MF_DEVICE void load_h(const Context<L> &c, bool loader, uint32_t launch)
{
  auto &sm = c.sm;
  const char *h = c.workspace(MF_BATCH_WS_H) + (size_t)(launch & 1) * L::kHBytes;
  const int active = (int)sm.active;
  const bool by_group = L::kGroups == 2 || c.p.tokens * L::kRanks >= 4 * active; // slots of many tokens are shared out between workers
  const int items = by_group ? active * L::kGroups : active;  // of either half
  MF_LOOP
  for(;;) {
    int item = 0;
    if(c.lane == 0)
      item = (int)hw::add_shared(&sm.cleared.h_taken[0], 1);
    item = hw::shuffle(item, 0);
    const int high = L::kOverlay && item >= items;
    item -= high ? items : 0;
    if(item >= items)
      break;
    const int slot = by_group ? item / L::kGroups : item, group = by_group ? item - slot * L::kGroups : 0;
    const uint32_t tokens = sm.tokens[slot] & (by_group ? 255u << (8 * group) : 0xFFFFFFFFu);
    const bool mine = c.lane < L::kMaxTokens && (tokens >> c.lane & 1);
    const int rank = mine ? rank_at(c, c.lane, slot) : 0;
    const uint32_t wanted = hw::ballot(mine && (!L::kOverlay || (rank >= L::kLowRanks) == (high == 1)));
    if(wanted == 0)
      continue;
    if(high)
      hw::mbarrier_wait(&sm.barrier.x_free, 0, c.dog, L::kWaitXFree);
    if(loader)
      stream::wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
    batch::load_rows(c, h, wanted, rank);
    hw::sync_warp(); // all lanes have written
    if(c.lane == 0)
      hw::or_shared_release(&sm.cleared.h_done[slot >> 2], (by_group ? 1u << group : 15u) << (L::h_bit(0, high) + 8 * (slot & 3)));
  }
}

} // namespace batch
