// handoff.cuh - h between the projections: the finalisers publish it, the loaders of every CTA fetch it.
//
// Who runs it   helper warps: the first kReduceBuffers finalise units, the others load h.
//
// Finaliser b
//   Reads       reduce[b][..] and reduce_unit[b], experts[], rank[], with weights on the input weight[].
//   Writes      h of the launch's parity (workspace, relaxed stores), published[b].
//   Waits for   reduce_full[b] (the consumers). A buffer always belongs to the same warp: phases must be seen in turn.
//   Visible by  reduce_empty[b] for the buffer; h carries its own flag (below).
//   No deadlock the consumers end with a mark in every buffer.
// Loader j (CTAs with down rows)
//   Reads       published[], then h (workspace, relaxed loads).
//   Writes      sm.h, h_scale for the slots j, j + kHLoaders, ... (or batches: handoff_batches.cuh); h_loaded[j].
//   Waits for   this CTA's own progress, then for the words of h themselves.
//   Visible by  fence_async_proxy of every lane, sync_warp, release store to h_loaded[j].
//   No deadlock h of a slot is published by CTAs that all run at once (the grid is co-resident) and whose finalisers
//               wait for no loader.
//
// The exchange. A word of h in the workspace is two bf16, stored inverted; 0 means "not there yet" (0xFFFF in both halves
// is a NaN that the conversion never makes). A word is atomic, so no fence and no flag is needed. There are two buffers,
// used in turn by successive launches; each launch clears the other one for its successor.
#pragma once
#include "stream/quantise.cuh"
#include "stream/trace.cuh"

namespace stream {

MF_DEVICE hw::U32x4 inverted(hw::U32x4 v) { return hw::U32x4{~v.x, ~v.y, ~v.z, ~v.w}; }

// Behind kBarrierListed, before kBarrierFront: the scales of the CTA's rows of w2, and the next launch's state. The scales come from HBM, behind the stream's own copies: the
// front does not wait for them, the down phase does (down_scales).
// `launch` is the number of launches that this CTA has completed.
template <class L>
MF_DEVICE void prepare_down(const Context<L> &c, int helper, uint32_t launch)
{
  auto &sm = c.sm;
  const int thread = helper * 32 + c.lane;
  if(c.cta < L::kDownCtas) {
    constexpr int kPerSlot = L::kDownRowBlocks * L::kHBlocks;
    const int row_block = c.cta * L::kDownRows / 128, count = sm.active * kPerSlot;
    MF_LOOP
    for(int i = thread; i < count; i += L::kHelperThreads) {
      const int slot = i / kPerSlot, r = i / L::kHBlocks % L::kDownRowBlocks, block = i % L::kHBlocks;
      const int expert = sm.experts[slot] & 0xFFFF;
      hw::copy_async_4(&sm.down_scale[0][0][0] + i,
                       c.p.s2 + ((size_t)expert * L::kKBlocks + smaller(row_block + r, L::kKBlocks - 1)) * L::kHBlocks + block);
    }
    hw::copy_async_arrive(&sm.barrier.down_scales);
  }
  const int other = (launch & 1) ^ 1;
  hw::U32x4 *h = (hw::U32x4 *)(c.workspace(MF_STREAM_WS_H) + (size_t)other * L::kHBytes);
  MF_LOOP
  for(int i = c.cta * L::kHelperThreads + thread; i < L::kHBytes / 16; i += L::kHelperThreads * L::kGridCtas)
    h[i] = hw::U32x4{0, 0, 0, 0};
  if(thread == 0) {
    ((uint32_t *)c.workspace(MF_STREAM_WS_LAUNCHES))[c.cta] = launch + 1;
    if(c.cta == 0)
      *(uint32_t *)c.workspace(MF_STREAM_WS_TICKETS + other * MF_STREAM_WS_TICKET_STRIDE) = 0;
  }
}

// h of one feature: gate * sigmoid(alpha * gate) * up, both clamped before if there is a limit.
template <class L>
MF_DEVICE float activate(float gate, float up)
{
  using Shape = typename L::Shape;
  if constexpr(Shape::kSwigluLimit > 0.0f) {
    constexpr float kLimit = Shape::kSwigluLimit;
    gate = gate > kLimit ? kLimit : gate;
    up = up > kLimit ? kLimit : up < -kLimit ? -kLimit : up;
  }
  float e;
  if constexpr(Shape::kSwigluAlpha == 1.0f)
    e = hw::fast_exp(-gate);
  else
    e = hw::fast_exp(-Shape::kSwigluAlpha * gate);
  return hw::fast_divide(gate, 1.0f + e) * up;
}

// The routing weight that multiplies a token's input to the slot's expert, which is the same as multiplying gate and up.
template <class L>
MF_DEVICE float input_weight(const Context<L> &c, int slot, int token)
{
  const bool routed = (c.sm.experts[slot] >> (16 + token)) & 1; // else nobody has written a weight
  return routed ? c.sm.weight[token][c.sm.cleared.rank[slot][token]] : 0.0f;
}

MF_DEVICE hw::F32x4 sum_of(hw::F32x4 a, hw::F32x4 b) { return hw::F32x4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
MF_DEVICE hw::F32x2 sum_of(hw::F32x2 a, hw::F32x2 b) { return hw::F32x2{a.x + b.x, a.y + b.y}; }

// What a finaliser's lane makes of a unit's sums: one word of h, two successive features of a token.
template <class L, int kFeatures>
struct UnitLane;

template <class L>
struct UnitLane<L, 8> {
  using Sums = hw::F32x4; // {gate, gate, up, up} of feature lane / 4
  const bool odd;         // of two lanes with successive features, the odd one stores the odd token
  const int token;

  MF_DEVICE explicit UnitLane(int lane) : odd((lane >> 2) & 1), token(2 * (lane & 3) + odd) {}
  MF_DEVICE static int feature(int lane) { return (lane >> 2) & ~1; } // the word's first
  MF_DEVICE static bool stores() { return true; }

  MF_DEVICE uint32_t word(const Context<L> &c, int slot, Sums v) const
  {
    if constexpr(L::Shape::kWeightOnInput) {
      const float w0 = input_weight(c, slot, 2 * (c.lane & 3)), w1 = input_weight(c, slot, 2 * (c.lane & 3) + 1);
      v = hw::F32x4{v.x * w0, v.y * w1, v.z * w0, v.w * w1};
    }
    const float h0 = activate<L>(v.x, v.z);
    const float h1 = activate<L>(v.y, v.w);
    const float partner = hw::shuffle_xor(odd ? h0 : h1, 4);
    return odd ? hw::to_bf16_pair(partner, h1) : hw::to_bf16_pair(h0, partner);
  }
};

template <class L>
struct UnitLane<L, 4> {
  using Sums = hw::F32x2;  // gate of feature lane / 4, or, from lane 16 on, up of the lane 16 before
  const bool up, odd;      // of these two lanes, the one with up has the odd token; of two with successive features the even one stores
  const int token;

  MF_DEVICE explicit UnitLane(int lane) : up(lane >> 4), odd((lane >> 2) & 1), token(2 * (lane & 3) + up) {}
  MF_DEVICE static int feature(int lane) { return (lane >> 2) & 2; }
  MF_DEVICE bool stores() const { return !odd; }

  MF_DEVICE uint32_t word(const Context<L> &c, int slot, Sums v) const
  {
    const float other = hw::shuffle_xor(up ? v.x : v.y, 16);
    float g = up ? other : v.x, u = up ? v.y : other;
    if constexpr(L::Shape::kWeightOnInput) {
      const float w = input_weight(c, slot, token);
      g *= w, u *= w;
    }
    const float h = activate<L>(g, u);
    return hw::to_bf16_pair(h, hw::shuffle_xor(h, 4));
  }
};

// Finaliser `b`: sums the 8 warps' partial sums of a unit, h = activate(gate, up), publishes the unit's features of the routed tokens.
template <class L>
MF_DEVICE void finalise_units(const Context<L> &c, int b, uint32_t launch)
{
  using Lane = UnitLane<L, L::kUnitFeatures>;
  using Sums = typename Lane::Sums;
  auto &sm = c.sm;
  const Lane lane(c.lane);
  const int token = lane.token;
  uint16_t *h = (uint16_t *)(c.workspace(MF_STREAM_WS_H) + (size_t)(launch & 1) * L::kHBytes);
  hw::Stopwatch wait;
  hw::Tally done;
  MF_LOOP
  for(int n = 0;; ++n) {
    wait.start();
    if(!hw::mbarrier_wait(&sm.barrier.reduce_full[b], n & 1, c.dog, L::kWaitReduceFull))
      break;
    wait.stop();
    const uint32_t unit = sm.reduce_unit[b];
    if(unit == L::kEndOfUnits)
      break;
    Sums v[8];
    MF_UNROLL
    for(int w = 0; w < 8; ++w)
      v[w] = ((const Sums *)sm.reduce[b][w])[c.lane];
    const int slot = unit / L::kUnits;
    const int feature = ((int)unit - slot * L::kUnits) * L::kUnitFeatures + Lane::feature(c.lane);
    const bool routed = lane.stores() && ((sm.experts[slot] >> (16 + token)) & 1);
    uint32_t *dst = (uint32_t *)(h + (size_t)(token * L::kRanks + sm.cleared.rank[slot][token]) * L::kIntermediate + feature);
    MF_UNROLL
    for(int o = 4; o >= 1; o >>= 1) {
      MF_UNROLL
      for(int w = 0; w < o; ++w)
        v[w] = sum_of(v[w], v[w + o]);
    }
    const uint32_t pair = lane.word(c, slot, v[0]);
    trace_first(c, MF_HELPER_FIRST, done); // stamped ahead of the store: nobody can have seen it earlier
    trace_event(c, MF_HELPER_LAST);
    trace_entry(c, n, unit);
    done.add();
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
  trace_value(c, MF_HELPER_COUNT, done.total());
  trace_value(c, MF_HELPER_WAIT, wait.total());
}

// Waits until this CTA has published a unit beyond `unit` (or all of its own). All CTAs advance through the units together,
// so what they publish next to it is nearly complete then, and polling L2 earlier would only slow the stream.
template <class L>
MF_DEVICE void wait_for_progress(const Context<L> &c, int unit)
{
  hw::Spin spin;
  for(;;) {
    int most = 0;
    MF_UNROLL
    for(int b = 0; b < L::kReduceBuffers; ++b)
      most = larger(most, (int)hw::load_shared_relaxed(&c.sm.published[b]));
    if(most > unit || !spin.again(c.dog, L::kWaitProgress))
      break;
    hw::sleep_ns(L::kProgressSleepNs);
  }
}

// One row of h on its way from the workspace to the B operand. A step is as many k-blocks as a warp has lanes for (quantise_blocks).
template <class L>
struct HRow {
  static constexpr int kPieces = L::kHBlocks % 4 == 0 || L::kHBlocks == 3 ? 2 : 1, kLanes = 16 / kPieces; // of a lane (two where few lanes then have nothing to do); per block
  static constexpr int kStepBlocks = 32 / kLanes;
  static constexpr int kSteps = (L::kHBlocks + kStepBlocks - 1) / kStepBlocks;
  static constexpr int kChunks = kSteps * kPieces; // pieces of 16 bytes per lane
  int token, rank;
  const hw::U32x4 *source;
  hw::U32x4 chunk[kChunks];

  MF_DEVICE static int block_of(const Context<L> &c, int step) { return step * kStepBlocks + c.lane / kLanes; }
  MF_DEVICE static int piece_of(const Context<L> &c) { return c.lane % kLanes; } // the first one
  MF_DEVICE static constexpr int place_of(int i) { return i / kPieces * (kStepBlocks * 16) + i % kPieces * 8; } // of chunk i behind the lane's first, in pieces

  // The lane's first piece of the row (token, rank) in the workspace.
  MF_DEVICE static const hw::U32x4 *row_of(const Context<L> &c, const char *h, int token, int rank)
  {
    return (const hw::U32x4 *)(h + (size_t)(token * L::kRanks + rank) * (L::kIntermediate * 2)) + (c.lane / kLanes * 16 + piece_of(c) - L::kOffset / 8);
  }

  MF_DEVICE void choose(const Context<L> &c, const char *h, int slot, int t)
  {
    token = t;
    rank = c.sm.cleared.rank[slot][t];
    source = row_of(c, h, token, rank);
    forget();
  }

  MF_DEVICE void forget()
  {
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i)
      chunk[i] = hw::U32x4{0, 0, 0, 0};
  }

  // Whether the lane's features of chunk i are this rank's. Chunks count from the beginning of the first k-block.
  MF_DEVICE static bool exists(const Context<L> &c, int i)
  {
    const int feature = (c.lane / kLanes * 16 + piece_of(c) + place_of(i)) * 8 - L::kOffset;
    return (L::kWholeHBlocks && L::kHBlocks % kStepBlocks == 0) || (uint32_t)feature < (uint32_t)L::kIntermediate;
  }

  // Of what has not come yet; the rest, fetched again, would only take bandwidth from the stream. Features of other ranks are there at once, and zero.
  MF_DEVICE void fetch(const Context<L> &c)
  {
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i) {
      if(!exists(c, i))
        chunk[i] = inverted(hw::U32x4{0, 0, 0, 0});
      else if(!(chunk[i].x && chunk[i].y && chunk[i].z && chunk[i].w))
        chunk[i] = hw::load_global_relaxed(source + place_of(i));
    }
  }

  MF_DEVICE bool complete() const
  {
    bool there = true;
    MF_UNROLL
    for(int i = 0; i < kChunks; ++i)
      there = there && chunk[i].x && chunk[i].y && chunk[i].z && chunk[i].w;
    return hw::all_lanes(there);
  }

  // Where the row goes: column h_column(rank, token) of its h group. The routing weight goes into the scale, if it has not multiplied the input.
  struct Target {
    int group, column;
    float weight;
  };
  MF_DEVICE Target target(const Context<L> &c) const
  {
    return Target{c.h_group(rank), c.h_column(rank, token), L::Shape::kWeightOnInput ? 1.0f : c.sm.weight[token][rank]};
  }

  MF_DEVICE static void place(const Context<L> &c, const Target &to, const hw::U32x2 *quantised, const float *scale)
  {
    MF_UNROLL
    for(int i = 0; i < kSteps; ++i) {
      const int block = block_of(c, i), piece = piece_of(c);
      if(L::kHBlocks % kStepBlocks == 0 || block < L::kHBlocks) {
        store_pieces<kPieces>(c.sm.h[to.group][block], to.column, piece, quantised + i * kPieces);
        if(piece == 0)
          c.sm.cleared.h_scale[to.group][block][to.column] = scale[i] * to.weight;
      }
    }
  }
};

// Up to kRows rows of a slot: fetched, quantised and written together. `tokens` is not 0. (`wait`, `entry`: what a trace is told of the fetching.)
template <class L, int kRows>
MF_DEVICE void load_rows(const Context<L> &c, const char *h, int slot, uint32_t tokens, hw::Stopwatch &wait, int entry)
{
  constexpr int kChunks = HRow<L>::kChunks, kPieces = HRow<L>::kPieces, kSteps = HRow<L>::kSteps;
  HRow<L> row[kRows];
  bool wanted[kRows]; // there is such a row, and it is not all there yet
  const int count = hw::count_bits(tokens);
  MF_UNROLL
  for(int i = 0; i < kRows; ++i) {
    wanted[i] = i < count;
    row[i].choose(c, h, slot, wanted[i] ? hw::lowest_bit(tokens) : 0);
    tokens &= tokens - 1;
  }
  hw::Spin spin;
  wait.start();
  for(;;) {
    MF_UNROLL
    for(int i = 0; i < kRows; ++i) {
      if(wanted[i])
        row[i].fetch(c);
    }
    bool missing = false;
    MF_UNROLL
    for(int i = 0; i < kRows; ++i) {
      if(wanted[i])
        wanted[i] = !row[i].complete();
      missing = missing || wanted[i];
    }
    if(!missing || !spin.again(c.dog, L::kWaitHData))
      break;
  }
  wait.stop();
  trace_entry(c, entry, slot);
  hw::U32x4 chunk[kRows * kChunks];
  hw::U32x2 quantised[kRows * kChunks];
  float scale[kRows * kSteps];
  MF_UNROLL
  for(int i = 0; i < kRows * kChunks; ++i)
    chunk[i] = inverted(row[i / kChunks].chunk[i % kChunks]);
  quantise_blocks<L, kPieces, false>(chunk, quantised, scale);
  MF_UNROLL
  for(int i = 0; i < kRows; ++i) {
    if(i < count)
      HRow<L>::place(c, row[i].target(c), quantised + i * kChunks, scale + i * kSteps);
  }
}

// Loader `j`: slot by slot, two rows at a time.
template <class L>
MF_DEVICE void load_h(const Context<L> &c, int j, uint32_t launch)
{
  auto &sm = c.sm;
  const char *h = c.workspace(MF_STREAM_WS_H) + (size_t)(launch & 1) * L::kHBytes;
  const int active = sm.active;
  hw::Stopwatch wait, h_wait;
  hw::Tally done;
  MF_LOOP
  for(int slot = j; slot < active; slot += L::kHLoaders) {
    wait.start();
    wait_for_progress(c, smaller((slot + 1) * L::kUnits - 1, active * L::kUnits - L::kGridCtas));
    wait.stop();
    trace_entry(c, 3 * done.total(), slot);
    uint32_t tokens = sm.experts[slot] >> 16;
    MF_LOOP
    while(tokens != 0) {
      const uint32_t one = tokens & (0u - tokens), rest = tokens & (tokens - 1), two = rest & (0u - rest);
      if(two == 0)
        load_rows<L, 1>(c, h, slot, one, h_wait, 3 * done.total() + 1); // (in the end: of the slot's last rows)
      else
        load_rows<L, 2>(c, h, slot, one | two, h_wait, 3 * done.total() + 1);
      tokens = rest & (rest - 1);
    }
    hw::fence_async_proxy();
    hw::sync_warp();
    if(c.lane == 0)
      hw::store_shared_release(&sm.h_loaded[j], slot / L::kHLoaders + 1);
    trace_first(c, MF_HELPER_FIRST, done);
    trace_event(c, MF_HELPER_LAST);
    trace_entry(c, 3 * done.total() + 2, slot);
    done.add();
  }
  trace_value(c, MF_HELPER_COUNT, done.total());
  trace_value(c, MF_HELPER_WAIT, wait.total());
  trace_value(c, MF_HELPER_H_WAIT, h_wait.total());
}

} // namespace stream
