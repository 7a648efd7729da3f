// layout.cuh - constants that follow from shape and schedule, the warps' roles, and the shared-memory map of the family `batch`.
//
// Nothing here runs. Every assumption of the stage files about sizes is a static_assert of `Layout`. It has the members that the stages
// shared with the family `stream` ask for, under the same names.
//
// Words used throughout the family, besides those of stream/layout.cuh:
//   group     8 successive tokens: token t is row t % 8 of group t / 8, in x, in h and in every product.
//   stage     8 KB of the ring: 16 rows of w13 x 4 k-blocks. Stage i of a CTA belongs to consumer warpgroup i % 2.
//   down stage  8 or 16 KB, in the ring or where x was: what a set of warps multiplies at a time of the CTA's rows of one expert (down_ring.cuh).
//   pass      one product of a stage: with a group's x (up), with an h set (down).
//   h set     h of the r-th expert of each of a group's tokens, r being the rank: one atom per k-block, as load_columns wants it.
//   item      up: (unit, group), what a finaliser is given. Loading h: what a worker takes at a time, all of a slot's tokens or those of one group, and of either half of the ranks.
#pragma once
#include "batch/params.h"
#include "stream/layout.cuh"

namespace batch {

using stream::Context;
using stream::larger;
using stream::smaller;

// One of two types.
template <bool kFirst, class First, class Second>
struct Choice {
  using Type = First;
};
template <class First, class Second>
struct Choice<false, First, Second> {
  using Type = Second;
};

// Down stages of a slot's k-blocks where `fit` are as many as fit into one, and the warps in a tile can multiply `most`.
MF_ANYWHERE constexpr int down_pieces(int k_blocks, int fit, int most)
{
  const int at_most = fit < most ? fit : most;
  return (k_blocks + at_most - 1) / at_most;
}

// k-blocks of a slot that the busiest warp multiplies, the slot coming in so many pieces.
MF_ANYWHERE constexpr int down_rounds(int k_blocks, int pieces, int tile_warps)
{
  return pieces * (((k_blocks + pieces - 1) / pieces + tile_warps - 1) / tile_warps);
}

template <class ShapeT, class ScheduleT>
struct Layout {
  using Shape = ShapeT;
  using Schedule = ScheduleT;

  // --- Shape ---
  static constexpr int kExperts = Shape::kExperts;
  static constexpr int kTopK = Shape::kTopK;
  static constexpr int kIntermediate = Shape::kIntermediate;
  static constexpr int kHidden = Shape::kHidden;
  static constexpr int kGroups = Schedule::kTokenGroups;
  static constexpr int kMaxTokens = 8 * kGroups;
  static constexpr int kOffset = Shape::kIntermediateOffset; // of the first feature in its 128-block of the unsharded matrix
  static constexpr int kKBlocks = kHidden / 128;                         // of w13
  static constexpr int kHBlocks = (kOffset + kIntermediate + 127) / 128; // of w2, scale blocks and quantisation groups of h
  static constexpr bool kWholeHBlocks = kOffset == 0 && kIntermediate % 128 == 0; // else the first or last is shared with other ranks

  // --- Routing ---
  static constexpr int kColumns = kExperts + Shape::kZeroExperts;
  static constexpr int kExpertBegin = Shape::kExpertBegin;
  static constexpr int kLocalExperts = Shape::kExpertCount;
  static constexpr bool kGiven = Shape::kScoring == MF_STREAM_GIVEN; // the engine has routed (stream/route_given.cuh)
  static constexpr int kShared = Shape::kSharedExperts; // active for every token of the launch, stored behind the rank's routed experts
  static constexpr int kRanks = kTopK + kShared;        // experts of a token
  static constexpr bool kAllLocal = kLocalExperts == kColumns && !kGiven && kShared == 0;
  static constexpr int kExpertsPerLane = (kColumns + 31) / 32;
  static constexpr int kTableExperts = (kLocalExperts + kShared + 31) / 32 * 32; // rows of tables that are indexed by local expert
  static constexpr bool kPacked = Shape::kScoring == MF_STREAM_SOFTMAX && !Shape::kLogitsF32;
  static constexpr int kMaxSlots = (kMaxTokens * kTopK < kLocalExperts ? kMaxTokens * kTopK : kLocalExperts) + kShared;

  // --- Tables of slots and ranks. Up to eight ranks they are made of bytes. ---
  static constexpr bool kManyRanks = kRanks > 8;
  static constexpr int kRankSlots = (kRanks + 7) / 8 * 8; // of a token, in slot_at
  static constexpr int kPassBits = !kManyRanks ? 8 : kRanks <= 16 ? 16 : 32; // of a group, in passes
  static constexpr int kPassWords = (kGroups * kPassBits + 31) / 32;
  static constexpr bool kManySlots = kMaxSlots > 256 || (kMaxSlots == 256 && kManyRanks); // a number takes two bytes
  using SlotNumber = typename Choice<kManySlots, uint16_t, uint8_t>::Type;
  using TwoSlots = typename Choice<kManySlots, uint32_t, uint16_t>::Type;
  static constexpr int kSlotBits = 8 * sizeof(SlotNumber);
  static constexpr int kNoSlot = (1 << kSlotBits) - 1; // slot 255 of bytes exists only where every token has 8 slots, so that no entry is empty
  static constexpr uint32_t kEverySlot = kManySlots ? 0x00010001u : 0x01010101u; // a number times this: as often as a word holds it

  // --- Up projection ---
  static constexpr int kStageBytes = 8192;
  static constexpr int kStageKBlocks = 4;
  static constexpr int kUnits = kIntermediate / 8;
  static constexpr int kUnitStages = 2 * ((kKBlocks + 2 * kStageKBlocks - 1) / (2 * kStageKBlocks)); // even; the last may hold less or nothing
  static constexpr int kRingStages = Schedule::kRingStages;
  static constexpr int kLookahead = Schedule::kTicketLookahead;
  static constexpr int kScaleSlots = kRingStages / kUnitStages + 2; // turns that the scheduler may be ahead of the consumers

  // --- Down projection: CTA c < kDownCtas owns the rows c * kDownRows ... of w2, for every active expert; the last may own fewer ---
  static constexpr int kGridCtas = Schedule::kGridCtas;
  static constexpr int kDownRows = 8 * ((kHidden / 8 + kGridCtas - 1) / kGridCtas);
  static constexpr int kDownCtas = (kHidden + kDownRows - 1) / kDownRows;
  static constexpr int kDownRowBlocks = 128 % kDownRows == 0 ? 1 : 2;
  static constexpr int kDownKBlockBytes = kDownRows * 128;
  static constexpr int kRowTiles = kDownRows <= 16 ? 1 : kDownRows <= 32 ? 2 : 4; // of 16 rows; with 40 or 48 rows the fourth holds none
  static constexpr int kTileWarps = 4 / kRowTiles;      // of four, in each tile: as many may share a stage's k-blocks
  static constexpr int kRowChunks = kHBlocks % 4 == 0 || kHBlocks == 3 ? (kHBlocks + 3) / 4 * 2 : (kHBlocks + 1) / 2; // of 16 bytes, of a row of h, that a loader's lane holds
  static constexpr bool kMoreRegisters = kGroups == 2 && kRowChunks <= 4;         // the consumers can have more, since the others can do with fewer
  static constexpr bool kTwoKBlocks = kMoreRegisters || (kGroups < 4 && kTileWarps > 1); // a consumer has registers to multiply two side by side
  static constexpr int kTileKBlocks = (kTwoKBlocks ? 2 : 1) * kTileWarps;         // of a down stage, at most
  static constexpr int kDownPieces1 = down_pieces(kHBlocks, kStageBytes / kDownKBlockBytes, kTileKBlocks); // with down stages of one stage of the ring
  static constexpr int kDownPieces2 = down_pieces(kHBlocks, 2 * kStageBytes / kDownKBlockBytes, kTileKBlocks);
  static constexpr int kRounds1 = down_rounds(kHBlocks, kDownPieces1, kTileWarps), kRounds2 = down_rounds(kHBlocks, kDownPieces2, kTileWarps);
  static constexpr int kDownParts = kDownPieces2 < kDownPieces1 && kRounds2 <= kRounds1 ? 2 : 1; // stages of the ring in a down stage (down_ring.cuh)
  static constexpr int kDownPieces = kDownParts == 2 ? kDownPieces2 : kDownPieces1; // down stages per slot
  static constexpr int kDownKBlocks = (kHBlocks + kDownPieces - 1) / kDownPieces;
  static constexpr bool kEvenPieces = kDownPieces * kDownKBlocks == kHBlocks;
  static constexpr int kDownCopyBytes = kDownKBlocks * kDownKBlockBytes;
  static constexpr int kDownStageBytes = kDownParts * kStageBytes;

  // --- h sets. With kOverlay, those of the ranks from kLowRanks on lie where x was (with many ranks, and the partial sums behind it): they are
  // written once the CTA's up phase is over. As many as there is room for, half of them at most. ---
  static constexpr bool kOverlay = Schedule::kOverlay;
  static constexpr bool kOverSums = kOverlay && kManyRanks;
  static constexpr int kReduceBuffers = 4; // one per finaliser
  static constexpr int kHighRoom = (kGroups * kKBlocks + (kOverSums ? kReduceBuffers * 4 : 0)) / (kGroups * kHBlocks);
  static constexpr int kHighRanks = !kOverlay ? 0 : kRanks / 2 < kHighRoom ? kRanks / 2 : kHighRoom;
  static constexpr int kLowRanks = kRanks - kHighRanks;

  // --- Down stages: in the ring, and where x was, behind the h sets there. Of 128 KB at most. ---
  static constexpr int kHighBytes = kHighRanks * kHBlocks * kGroups * 1024, kXBytes = kGroups * kKBlocks * 1024;
  static constexpr int kInX = kXBytes > kHighBytes ? (kXBytes - kHighBytes) / kDownStageBytes : 0;
  static constexpr int kDownPlaces = kRingStages / kDownParts + kInX < 131072 / kDownStageBytes ? kRingStages / kDownParts + kInX : 131072 / kDownStageBytes;

  // --- Who multiplies a down stage: kSharers warps per tile, each with two of its k-blocks if there are as many, so that what a warp does besides products is done for both; or with
  // three, where they come in threes and there are registers for them. The 8 consumer warps are that many sets, which have the stages in turn. With few places it stays at four warps
  // per stage: every warp needs one that is on its way. (And where registers are short, with four groups, if pieces are uneven.) ---
  static constexpr int kBlocksEach = kMoreRegisters && kEvenPieces && kDownKBlocks % 3 == 0 ? 3 : 2;
  static constexpr int kFewSharers = kTileWarps < (kDownKBlocks + kBlocksEach - 1) / kBlocksEach ? kTileWarps : (kDownKBlocks + kBlocksEach - 1) / kBlocksEach;
  static constexpr int kSharers = kFewSharers <= 2 && (kTwoKBlocks || kEvenPieces) && kDownPlaces >= 16 / (kRowTiles * kFewSharers) ? kFewSharers : kTileWarps;
  static constexpr int kSetWarps = kRowTiles * kSharers, kSets = 8 / kSetWarps;
  static constexpr int kWarpKBlocks = (kDownKBlocks + kSharers - 1) / kSharers; // of a down stage: 1 to 3
  static constexpr int kDownRing = kDownPlaces / kSets * kSets;
  static constexpr int kInRing = kRingStages / kDownParts < kDownRing ? kRingStages / kDownParts : kDownRing;

  // --- Warps: 0..3 finalise, 4..7 and 8..11 consume, 12 produces, 13..18 load h, 19 schedules ---
  static constexpr int kHLoaders = 6; // (finalisers join them once they are through)
  static constexpr int kProgressSleepNs = 100; // of a loader between two looks: its issue slots are the consumers'
  static constexpr int kHelpers = kReduceBuffers + kHLoaders;
  static constexpr int kHelperThreads = 32 * kHelpers;
  static constexpr int kConsumerWarp = 4;
  static constexpr int kConsumerThreads = 256;
  static constexpr int kProducerWarp = 12;
  static constexpr int kSchedulerWarp = 19;
  static constexpr int kWarps = 20;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRegisters = 65536 / kThreads / 8 * 8;          // of a thread at launch: what there is
  static constexpr int kConsumerRegisters = kMoreRegisters ? 144 : 128; // behind the front
  static constexpr int kOtherRegisters = kMoreRegisters ? 64 : 72;
  static constexpr int kFrontWarps = kHelpers + 8; // all but producer and scheduler: they quantise x
  static constexpr int kRouters = 16; // consumers, loaders and two finalisers: each routes one or two tokens
  static constexpr int kRouteRounds = (kMaxTokens + kRouters - 1) / kRouters;
  MF_DEVICE static int helper_of(int warp) { return warp < kConsumerWarp ? warp : warp - 9; }
  MF_DEVICE static int router_of(int warp) { return warp < kProducerWarp ? warp - 2 : warp - 3; } // negative: none

  // --- Named barriers (0 is the whole CTA) ---
  enum Barrier : int {
    kBarrierRouted = 1, // routers -> producer: every token's picks are in token_mask
    kBarrierListed = 2, // producer -> all: the list of active experts is there
    kBarrierFront = 3,  // all but producer and scheduler: x and the routing tables are there
    kBarrierOutput = 4, // consumers: partial sums of y are there
    kBarrierScored = 6, // (of stream, with few tokens: never used here)
  };

  // --- Waits, as the watchdog names them: the first ten as in stream ---
  enum Wait : int {
    kWaitUpStage = 1, kWaitScales, kWaitReduceFree, kWaitDownStage, kWaitH, kWaitReduceFull, kWaitProgress, kWaitHData,
    kWaitRingFree, kWaitFlight, kWaitTicket, kWaitUnitDone, kWaitXFree, kWaitDownScales, kWaitDownFree,
  };

  // --- Shared memory ---
  struct Barriers {
    hw::Mbarrier reduce_full[kReduceBuffers];  // 8 arrivals: the consumer warps have written their partial sums
    hw::Mbarrier reduce_empty[kReduceBuffers]; // 1: the finaliser has read them
    hw::Mbarrier scales[kScaleSlots];          // 32: the scheduler's lanes, when their cp.async have landed
    hw::Mbarrier unit_done[kScaleSlots];       // 8: the consumer warps are through with the turn
    hw::Mbarrier turn[kScaleSlots];            // 1: the scheduler has written the queue's entry
    hw::Mbarrier x_free;                       // 8: the consumer warps are through with x
    hw::Mbarrier down_full[kDownRing];         // 1 + bytes: the down stage has landed
    hw::Mbarrier down_empty[kDownRing];        // kSetWarps: they have it in registers
    hw::Mbarrier down_scales;                  // kHelperThreads: their cp.async of scale rows of w2 have landed
    hw::Mbarrier full[kRingStages];            // 1 + bytes: the stage has landed
    hw::Mbarrier empty[kRingStages];           // 4: the warps of the stage's warpgroup are done with it
  };

  // What must read as zero before anyone writes it: cleared by warps 0..3 ahead of the first barrier.
  struct alignas(16) Cleared {
    float x_scale[kKBlocks][kMaxTokens];
    uint32_t token_mask[kTableExperts]; // bit t: token t has chosen the expert
    uint32_t passes[(kMaxSlots * kPassWords + 3) / 4 * 4]; // of the slot; bit kPassBits * group + rank: one of the group's tokens has it at this rank
    uint32_t h_done[(kMaxSlots + 15) / 16 * 4]; // a byte for each slot; bit h_bit(group, high): h of the group's tokens, of the low (high) ranks, is there
    uint32_t h_taken[4];                        // [0]: items of h that workers have taken
  };
  MF_DEVICE static int h_bit(int group, int high) { return group + 4 * high; }

  // What a router keeps of its token's experts. Lies where the ring will be, which is larger but with very many experts.
  struct Scores {
    static constexpr int kPitch = kPacked || kGiven ? 1 : (kColumns + 3) / 4 * 4; // (none with packed keys)
    float score[kRouters][kPitch];
    uint32_t order[kRouters][kPitch];
  };

  struct alignas(1024) RingAndX {
    union { // first: a down tile's unused rows may be read past the last stage
      uint8_t ring[kRingStages][kStageBytes];
      Scores scores;                        // dead before kBarrierRouted
    };
    alignas(1024) uint8_t x[kGroups][kKBlocks][1024]; // quantised x, one atom (8 tokens) per group and k-block; later maybe h sets
  };
  struct HThenSums : RingAndX {
    uint8_t h[kGroups * kLowRanks][kHBlocks][1024];
    hw::F32x4 reduce[kReduceBuffers][8][32]; // [buffer][consumer warp][lane]; at the end [group]: combines y
  };
  struct SumsThenH : RingAndX { // with many ranks: h sets may lie in reduce as well, and then it is next to x
    hw::F32x4 reduce[kReduceBuffers][8][32];
    uint8_t h[kGroups * kLowRanks][kHBlocks][1024];
  };
  using Tiles = typename Choice<kManyRanks, SumsThenH, HThenSums>::Type;

  struct alignas(1024) Shared : Tiles {
    Cleared cleared;
    alignas(16) float up_scale[kScaleSlots][2][kKBlocks]; // [turn % kScaleSlots][gate, up][k-block]
    hw::U32x4 queue[kScaleSlots];           // what comes after the static rounds: {unit, its row block in w13, first chunk of k, -}
    float h_scale[kGroups * kRanks][kHBlocks][8]; // [group * kRanks + rank][k-block][row], routing weight included
    float down_scale[kMaxSlots][kDownRowBlocks][kHBlocks];
    float weight[kMaxTokens][kRanks];       // [token][rank]
    uint32_t experts[kMaxSlots];            // [slot], by rising index
    uint32_t tokens[kMaxSlots];             // [slot]: bit t
    alignas(8) SlotNumber slot_at[kMaxTokens][kRankSlots];  // [token][rank], kNoSlot where there is none
    alignas(8) SlotNumber slot_by_rank[kRanks][kMaxTokens]; // the same the other way round
    uint32_t active;                        // length of the list
    uint32_t reduce_unit[kReduceBuffers];   // 4 * unit + group of the item in the buffer, kEndOfUnits after the last
    uint32_t published[kReduceBuffers];     // 1 + last unit that the finaliser has published some of, kAllPublished at the end
    uint32_t stage_unit[kRingStages];       // unit of an up stage, kEndOfUnits behind the last one
    SlotNumber slot_of[kTableExperts];      // of active experts
    alignas(8) Barriers barrier;
  };
  static constexpr uint32_t kEndOfUnits = 0xFFFFFFFFu;
  static constexpr uint32_t kAllPublished = 1u << 30;
  static constexpr int kSharedBytes = sizeof(Shared);

  // Where the token's atom of x lies, and its row in it.
  MF_DEVICE static uint8_t *x_atom(Shared &sm, uint32_t block, uint32_t token) { return sm.x[token >> 3][block]; }
  MF_DEVICE static uint32_t x_row(uint32_t token) { return token & 7; }

  static constexpr uint32_t kXOffset = ((sizeof(Scores) > sizeof(RingAndX::ring) ? sizeof(Scores) : sizeof(RingAndX::ring)) + 1023) / 1024 * 1024; // of x, from the ring on
  static constexpr uint32_t kXPlaces = kXOffset + kHighBytes; // of the first down stage there

  // Where an h set's first atom lies, in bytes from the start of shared memory.
  MF_DEVICE static uint32_t h_set(int group, int rank)
  {
    constexpr uint32_t kSet = kHBlocks * 1024;
    constexpr uint32_t kH = sizeof(RingAndX) + (kManyRanks ? sizeof(Tiles::reduce) : 0);
    if(kOverlay && rank >= kLowRanks)
      return kXOffset + (group * kHighRanks + rank - kLowRanks) * kSet;
    return kH + (group * kLowRanks + rank) * kSet;
  }

  // --- Workspace ---
  static constexpr int kHBytes = MF_BATCH_WS_H_BYTES(kGroups, kRanks, kIntermediate); // of one parity
  static constexpr int kWorkspaceBytes = MF_BATCH_WS_BYTES(kGroups, kRanks, kIntermediate);

  // --- Assumptions ---
  static_assert(kGroups >= MF_BATCH_MIN_GROUPS && kGroups <= MF_BATCH_MAX_GROUPS, "token_groups: 2..4, a word of tokens, a buffer per group at the end");
  static_assert(kExperts >= 1 && kColumns <= MF_STREAM_MAX_COLUMNS, "experts: an index of 10 bits, at most 32 per lane of the routing warp");
  static_assert(kExpertBegin >= 0 && kLocalExperts >= 1 && kExpertBegin + kLocalExperts <= kExperts, "expert_begin: this rank's experts exist");
  static_assert(kTopK >= 1 && kTopK <= kColumns && kRanks <= MF_BATCH_MAX_TOPK, "topk: a lane per pick");
  static_assert(kShared >= 0 && (kShared > 0 || !Shape::kSharedGate), "shared_experts: a gate has an expert");
  static_assert(!Shape::kWeightOnInput || !Shape::kSharedGate, "weight_on_input: the weight of a shared expert would multiply its input");
  static_assert(Shape::kSwigluLimit >= 0.0f && Shape::kSwigluAlpha > 0.0f, "swiglu: 0 for no limit, 1 for SiLU");
  static_assert(kMaxSlots <= kNoSlot || (!kManyRanks && kMaxSlots == 256), "topk: a slot's number is none that stands for no slot");
  static_assert(kHidden % 128 == 0 && kHidden >= 1024 && kHidden <= 8192, "hidden: whole k-blocks, a unit's scale rows in one cp.async per lane");
  static_assert(kIntermediate % 16 == 0 && kIntermediate >= 16, "intermediate: rows of w2 are 16-byte aligned, features come in eights");
  static_assert(kOffset % 16 == 0 && kOffset >= 0 && kOffset < 128, "intermediate_offset: eight features of a lane or unit lie in one block");
  static_assert(kDownRows <= 64, "grid_ctas: at most 64 rows each, one product tile");
  static_assert(kSharers * kWarpKBlocks >= kDownKBlocks, "down tile: the warps in it have all of a stage's k-blocks between them");
  static_assert(kDownCtas <= kGridCtas && kDownCtas == Schedule::kDownCtas, "down_ctas: the host counts as the kernel does");
  static_assert(kGridCtas <= MF_STREAM_WS_MAX_GRID, "grid_ctas: the workspace holds one launch count per CTA");
  static_assert(kDownCopyBytes <= kDownStageBytes, "down tile: a down stage holds what is copied to it");
  static_assert(kWarpKBlocks == 1 || kWarpKBlocks == 2 || (kWarpKBlocks == 3 && kBlocksEach == 3 && kSharers * 3 == kDownKBlocks), "down tile: registers for a warp's k-blocks");
  static_assert(kSets * kSetWarps == 8, "down tile: all consumer warps are in a set");
  static_assert(kDownRing >= kSets && kDownRing % kSets == 0 && kInRing >= 1, "down ring: a set has the same places for ever");
  static_assert(kRingStages >= 4 && kRingStages <= 16 && kRingStages % 2 == 0, "ring_stages: even, or a warpgroup misses phases of its stages");
  static_assert(kLookahead >= 1 && kLookahead <= 4, "ticket_lookahead: a register each");
  static_assert(!kOverlay || kHighRanks >= 1, "overlay: h of a rank fits where x was");
  static_assert(kHighBytes <= sizeof(RingAndX::x) + (kOverSums ? sizeof(Tiles::reduce) : 0),
                "overlay: the higher ranks' h fits where x was");
  static_assert(8 * kConsumerRegisters + (kWarps - 8) * kOtherRegisters <= kWarps * kRegisters, "registers: the consumers take what the others give back");
  static_assert(kWarps % 4 == 0 && kConsumerWarp % 4 == 0, "registers: whole warpgroups change their number");
  static_assert(kSharedBytes <= 232448, "shared memory: 227 KB per CTA");
  static_assert(sizeof(Cleared) % 16 == 0 && kSharedBytes % 1024 == 0, "shared memory: alignment");
};

// A consumer warpgroup's position in the ring: every other stage is its own.
template <class L>
struct RingReader {
  int stage;
  uint32_t parity = 0;
  MF_DEVICE explicit RingReader(int warpgroup) : stage(warpgroup) {}
  MF_DEVICE void advance()
  {
    stage += 2;
    if(stage >= L::kRingStages) {
      stage -= L::kRingStages;
      parity ^= 1;
    }
  }
};

// Two words of slots' numbers: the place of the wanted one, which stands in all of 'wanted'; 'none' if it is not there.
template <class L>
MF_DEVICE int find_slot(hw::U32x2 v, uint32_t wanted, int first, int none)
{
  constexpr int kLog = L::kManySlots ? 4 : 3; // bits of a number
  constexpr uint32_t kRest = ~(L::kEverySlot << (L::kSlotBits - 1));
  const uint32_t low = v.x ^ wanted, high = v.y ^ wanted; // a number is 0 where the slot is
  const uint32_t in_low = ~(((low & kRest) + kRest) | low | kRest);  // its uppermost bit
  const uint32_t in_high = ~(((high & kRest) + kRest) | high | kRest);
  return in_low != 0 ? first + (hw::lowest_bit(in_low) >> kLog) : in_high != 0 ? first + (32 >> kLog) + (hw::lowest_bit(in_high) >> kLog) : none;
}

// The rank at which a token has a slot; 0 if it has not.
template <class L>
MF_DEVICE int rank_at(const Context<L> &c, int token, int slot)
{
  constexpr int kInTwo = 64 / L::kSlotBits;
  const hw::U32x2 *numbers = (const hw::U32x2 *)c.sm.slot_at[token];
  const uint32_t wanted = slot * L::kEverySlot;
  int rank = find_slot<L>(numbers[0], wanted, 0, 0);
  MF_UNROLL
  for(int first = kInTwo; first < L::kRankSlots; first += kInTwo)
    rank = find_slot<L>(numbers[first / kInTwo], wanted, first, rank);
  return rank;
}

// The ranks at which tokens of a group have a slot: a bit each. Of all groups at once, or of one.
template <class L>
struct Passes {
  static constexpr uint32_t kAll = 0xFFFFFFFFu >> (32 - L::kPassBits);
  uint32_t word[L::kPassWords];

  MF_DEVICE Passes(const Context<L> &c, int slot)
  {
    MF_UNROLL
    for(int i = 0; i < L::kPassWords; ++i)
      word[i] = c.sm.cleared.passes[slot * L::kPassWords + i];
  }
  MF_DEVICE uint32_t of(int group) const { return word[L::kPassBits * group / 32] >> (L::kPassBits * group & 31) & kAll; }

  MF_DEVICE static void add(const Context<L> &c, int slot, int token, int rank)
  {
    const int bit = (token & ~7) * (L::kPassBits / 8) + rank;
    hw::or_shared(word_of(c, slot, bit), 1u << in_word(bit));
  }
  MF_DEVICE static int in_word(int bit) { return L::kPassWords == 1 ? bit : bit & 31; }
  MF_DEVICE static uint32_t *word_of(const Context<L> &c, int slot, int bit)
  {
    return &c.sm.cleared.passes[slot * L::kPassWords + (L::kPassWords == 1 ? 0 : bit >> 5)];
  }
};

} // namespace batch
