// handoff.cuh - h between the projections: finalisers publish it, one CTA quantises each row, the loaders of every CTA fetch that.
//
// Who runs it   helper warps: the first kReduceBuffers finalise items, the last one quantises, the others load h. The exchange through the workspace
//               is stream's (stream/handoff.cuh), as are prepare_down and wait_for_progress: inverted words, 0 for what is not there
//               yet, two buffers in turn. No word of a quantised row is 0: the conversion to e4m3 never makes 0xFF, and a scale is positive.
//
// Finaliser b
//   Reads       reduce[b][..] and reduce_unit[b], tokens[], slot_at[], with weights on the input weight[].
//   Writes      h of the launch's parity (workspace, relaxed stores), published[b].
//   Waits for   reduce_full[b] (the consumers). A buffer always belongs to the same warp: phases must be seen in turn.
//   Visible by  reduce_empty[b] for the buffer; h carries its own flag.
//   No deadlock the consumers end with a mark in every buffer.
// Quantiser (all CTAs)
//   Reads       published[], tokens[], slot_at[], then h of the rows that fall to the CTA, one to four or so of the launch's (relaxed loads).
//   Writes      the quantised rows (workspace, relaxed stores).
//   Waits for   this CTA's own progress, then for the words of h themselves.
//   Visible by  itself.
//   No deadlock h is published by CTAs that all run at once (the grid is co-resident) and whose finalisers wait for no quantiser.
// Loader j (CTAs with down rows)
//   Reads       published[], tokens[], passes[], slot_at[], weight[], then the quantised rows (workspace, relaxed loads).
//   Writes      the h sets, h_scale for the items j, j + kHLoaders, ... (item = slot * groups + group); h_loaded[..][j].
//   Waits for   this CTA's own progress, then for the words of the rows themselves. With kOverlay: first all items' low ranks, then x_free,
//               then all items' high ranks, which lie where x was.
//   Visible by  sync_warp, release store to h_loaded[half][j].
//   No deadlock neither the finalisers nor the quantisers of any CTA wait for a loader.
//               x_free comes from the end of this CTA's up phase, which waits for no loader either.
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

// Where the quantised row of (token, rank) is in the workspace.
template <class L>
MF_DEVICE char *quantised_row(const Context<L> &c, uint32_t launch, int token, int rank)
{
  return c.workspace(MF_BATCH_WS_ROWS(L::kGroups, L::kRanks, L::kIntermediate)) + (size_t)(launch & 1) * L::kRowsBytes + (token * L::kRanks + rank) * L::kRowPitch;
}

// Behind kBarrierListed: no quantised row is there for the next launch yet.
template <class L>
MF_DEVICE void clear_rows(const Context<L> &c, int helper, uint32_t launch)
{
  hw::U32x4 *rows = (hw::U32x4 *)quantised_row(c, launch ^ 1, 0, 0);
  MF_LOOP
  for(int i = c.cta * L::kHelperThreads + helper * 32 + c.lane; i < L::kRowsBytes / 16; i += L::kHelperThreads * L::kGridCtas)
    rows[i] = hw::U32x4{0, 0, 0, 0};
}

// A row of h as the finalisers publish it.
template <class L>
struct HRow : stream::HRow<L> {
  using Base = stream::HRow<L>;
  using Base::chunk;
  using Base::kChunks;
  using Base::rank;
  using Base::token;

  MF_DEVICE HRow(const Context<L> &c, uint32_t launch, int slot, int t)
  {
    token = t;
    rank = rank_at(c, t, slot);
    const char *h = c.workspace(MF_BATCH_WS_H) + (size_t)(launch & 1) * L::kHBytes;
    this->source = (const hw::U32x4 *)(h + (size_t)(t * L::kRanks + rank) * (L::kIntermediate * 2)) + (c.lane - L::kOffset / 8);
  }

  // Quantises it for all CTAs.
  MF_DEVICE void publish(const Context<L> &c, uint32_t launch)
  {
    hw::U32x2 quantised[kChunks];
    float scale[kChunks];
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i)
      chunk[i] = stream::inverted(chunk[i]);
    stream::quantise_chunks<L>(chunk, quantised, scale);
    char *row = quantised_row(c, launch, token, rank);
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i) {
      const int block = i * 2 + (c.lane >> 4), piece = c.lane & 15;
      if(L::kHBlocks % 2 == 0 || block < L::kHBlocks) {
        uint32_t *words = (uint32_t *)(row + block * 128 + piece * 8);
        hw::store_global_relaxed(words, ~quantised[i].x);
        hw::store_global_relaxed(words + 1, ~quantised[i].y);
        if(piece == 0)
          hw::store_global_relaxed((uint32_t *)(row + L::kRowScales) + block, ~hw::float_bits(scale[i]));
      }
    }
  }
};

// The quantiser: rows of h that fall to this CTA, slot by slot.
template <class L>
MF_DEVICE void quantise_h(const Context<L> &c, uint32_t launch)
{
  const int active = (int)c.sm.active;
  int first = c.cta; // row slot * kMaxTokens + token falls to CTA (row % kGridCtas): the slot's first token that may be this CTA's
  MF_LOOP
  for(int slot = 0; slot < active; ++slot) {
    MF_LOOP
    for(int t = first; t < L::kMaxTokens; t += L::kGridCtas) {
      if(!(c.sm.tokens[slot] >> t & 1))
        continue;
      stream::wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
      HRow<L> row(c, launch, slot, t);
      hw::Spin spin;
      row.fetch(c);
      while(!row.complete() && spin.again(c.dog, L::kWaitHData))
        row.fetch(c);
      row.publish(c, launch);
    }
    first -= L::kMaxTokens % L::kGridCtas;
    first += first < 0 ? L::kGridCtas : 0;
  }
}

// A quantised row on its way to its h set.
template <class L>
struct QuantisedRow {
  static constexpr int kPieces = (L::kHBlocks + 3) / 4; // of 16 bytes, per lane
  int token, rank;
  bool wanted = false; // there is such a row, and it belongs to the half that is being loaded
  uint32_t done = 0;   // with it, so many of the loader's items are there; 0: not the last row of an item
  hw::U32x4 piece[kPieces];
  uint32_t scale;

  MF_DEVICE void fetch(const Context<L> &c, uint32_t launch)
  {
    const char *row = quantised_row(c, launch, token, rank);
    MF_UNROLL
    for(int i = 0; i < kPieces; ++i) {
      piece[i] = hw::U32x4{1, 1, 1, 1};
      if(L::kHBlocks % 4 == 0 || i * 32 + c.lane < L::kHBlocks * 8)
        piece[i] = hw::load_global_relaxed((const hw::U32x4 *)row + i * 32 + c.lane);
    }
    scale = 1;
    if(c.lane < L::kHBlocks)
      scale = hw::load_global_relaxed((const uint32_t *)(row + L::kRowScales) + c.lane);
  }

  MF_DEVICE bool complete() const
  {
    bool there = scale != 0;
    MF_UNROLL
    for(int i = 0; i < kPieces; ++i)
      there = there && piece[i].x && piece[i].y && piece[i].z && piece[i].w;
    return hw::all_lanes(there);
  }

  // Writes it as row token % 8 of its h set; the routing weight goes into the scale, if it has not multiplied the input.
  MF_DEVICE void store(const Context<L> &c) const
  {
    const int group = token >> 3, row = token & 7;
    uint8_t *set = (uint8_t *)&c.sm + L::h_set(group, rank) + row * 128;
    MF_UNROLL
    for(int i = 0; i < kPieces; ++i) {
      const int at = i * 32 + c.lane;
      if(L::kHBlocks % 4 == 0 || at < L::kHBlocks * 8)
        *(hw::U32x4 *)(set + (at >> 3) * 1024 + (((at & 7) ^ row) << 4)) = stream::inverted(piece[i]);
    }
    if(c.lane < L::kHBlocks)
      c.sm.h_scale[group * L::kRanks + rank][c.lane][row] = hw::bits_float(~scale) * (L::Shape::kWeightOnInput ? 1.0f : c.sm.weight[token][rank]);
  }
};

// A loader's items one after the other, and the rows of each: those of the slot's tokens in the group.
template <class L>
struct LoaderItems {
  const Context<L> &c;
  const int half, count;
  int item;          // the present one
  uint32_t rows = 0; // of it, still to be fetched
  bool new_item = false; // its units may not be published yet

  MF_DEVICE LoaderItems(const Context<L> &context, int loader, int which)
      : c(context), half(which), count((int)context.sm.active * L::kGroups), item(loader - L::kHLoaders) {}

  MF_DEVICE int slot() const { return item / L::kGroups; }
  MF_DEVICE int group() const { return item % L::kGroups; }
  MF_DEVICE int last_unit() const { return smaller((slot() + 1) * L::kUnits - 1, (int)c.sm.active * L::kUnits - L::kGridCtas); }

  // Once the present one is through, goes on to the next that has rows of this half. False behind the last.
  MF_DEVICE bool advance()
  {
    const uint32_t ranks = half == 0 ? (1u << L::kLowRanks) - 1 : 255u << L::kLowRanks & 255u;
    MF_LOOP
    while(rows == 0) {
      item += L::kHLoaders;
      if(item >= count)
        return false;
      if(c.sm.cleared.passes[slot()] >> (8 * group()) & ranks) {
        rows = c.sm.tokens[slot()] >> (8 * group()) & 255u;
        new_item = true;
      }
    }
    return true;
  }

  MF_DEVICE void take(QuantisedRow<L> &row)
  {
    row.token = group() * 8 + hw::lowest_bit(rows);
    row.rank = rank_at(c, row.token, slot());
    row.wanted = !L::kOverlay || (row.rank >= L::kLowRanks) == (half == 1);
    rows &= rows - 1;
    row.done = rows == 0 ? item / L::kHLoaders + 1 : 0;
  }
};

// Loader `j`: rows of one or several items together, so that their latencies overlap.
template <class L>
MF_DEVICE void load_h(const Context<L> &c, int j, uint32_t launch)
{
  constexpr int kPieces = QuantisedRow<L>::kPieces, kTogether = kPieces == 1 ? 4 : 2; // (registers)
  auto &sm = c.sm;
  MF_LOOP
  for(int half = 0; half < (L::kOverlay ? 2 : 1); ++half) {
    LoaderItems<L> items(c, j, half);
    if(half == 1)
      hw::mbarrier_wait(&sm.barrier.x_free, 0, c.dog, L::kWaitXFree);
    MF_LOOP
    while(items.advance()) {
      QuantisedRow<L> row[kTogether];
      if(items.new_item)
        stream::wait_for_progress(c, items.last_unit());
      items.new_item = false;
      items.take(row[0]);
      MF_UNROLL
      for(int i = 1; i < kTogether; ++i) {
        if(!items.advance() || (items.new_item && !hw::all_lanes(stream::progress(c) > items.last_unit())))
          continue;
        items.new_item = false;
        items.take(row[i]);
      }
      MF_UNROLL
      for(int i = 0; i < kTogether; ++i) {
        if(row[i].wanted)
          row[i].fetch(c, launch);
      }
      MF_UNROLL
      for(int i = 0; i < kTogether; ++i) {
        if(row[i].wanted) {
          hw::Spin spin;
          while(!row[i].complete() && spin.again(c.dog, L::kWaitHData))
            row[i].fetch(c, launch);
          row[i].store(c);
        }
        hw::sync_warp();
        if(row[i].done != 0 && c.lane == 0)
          hw::store_shared_release(&sm.h_loaded[half][j], row[i].done);
      }
    }
  }
}

} // namespace batch
