// layout.cuh - constants that follow from shape and schedule, the warps' roles, and the shared-memory map.
//
// Nothing here runs. Every assumption of the stage files about sizes is a static_assert of `Layout`.
//
// Words used throughout the family:
//   k-block   128 columns of a weight matrix: one scale, one 128-byte row of a swizzled tile.
//   atom      8 rows x 128 bytes, 1 KB, the unit of the 128-byte swizzle.
//   unit      8 features of one expert (8 gate rows and 8 up rows) over all of K, or 4 of them (Schedule::kUnitFeatures). The up projection's
//             piece of work.
//   stage     16 KB of the ring: for up 16 rows x 8 k-blocks, or 8 x 16; for down what fits of the CTA's rows of one or two experts.
//   slot      position of an active expert in the launch's list (at most tokens * top-k of them).
//   rank      position of a slot among the slots of one token, 0 .. top-k + shared experts - 1; picks without a slot come behind.
//   h group   one ready-made wgmma B operand: 8 columns (token, rank) of h. See kernel.cuh, "Rank groups".
#pragma once
#include "hw/hw.cuh"
#include "stream/params.h"

namespace stream {

// Sums of accumulators: a set per tile, or (0) one set for all.
template <int kTiles>
struct SumsOf {
  using Type = float[kTiles][4];
};
template <>
struct SumsOf<0> {
  using Type = float[4];
};

template <class ShapeT, class ScheduleT>
struct Layout {
  using Shape = ShapeT;
  using Schedule = ScheduleT;

  // --- Shape ---
  static constexpr int kExperts = Shape::kExperts;
  static constexpr int kTopK = Shape::kTopK;
  static constexpr int kIntermediate = Shape::kIntermediate;
  static constexpr int kHidden = Shape::kHidden;
  static constexpr int kMaxTokens = MF_STREAM_MAX_TOKENS;
  static constexpr int kShared = Shape::kSharedExperts; // active for every token, stored behind the rank's routed experts
  static constexpr int kRanks = kTopK + kShared;        // experts of a token
  static constexpr int kMaxSlots = kMaxTokens * kTopK + kShared;
  static constexpr int kOffset = Shape::kIntermediateOffset; // of the first feature in its 128-block of the unsharded matrix
  static constexpr int kKBlocks = kHidden / 128;                       // of w13
  static constexpr int kHBlocks = (kOffset + kIntermediate + 127) / 128; // of w2, scale blocks and quantisation groups of h
  static constexpr bool kWholeHBlocks = kOffset == 0 && kIntermediate % 128 == 0; // else the first or last is shared with other ranks

  // --- Routing. The logits' columns are the routed experts and, behind them, those whose experts do nothing here. ---
  static constexpr int kColumns = kExperts + Shape::kZeroExperts;
  static constexpr int kExpertBegin = Shape::kExpertBegin;   // this rank holds the experts kExpertBegin ...
  static constexpr int kLocalExperts = Shape::kExpertCount;
  static constexpr bool kGiven = Shape::kScoring == MF_STREAM_GIVEN;       // the engine has routed (route_given.cuh)
  static constexpr bool kAllLocal = kLocalExperts == kColumns && !kGiven && kShared == 0; // picks are the list: all of this rank, those that found nothing last
  static constexpr int kExpertsPerLane = (kColumns + 31) / 32;
  static constexpr int kTableExperts = (kLocalExperts + kShared + 31) / 32 * 32; // rows of tables that are indexed by local expert
  static constexpr bool kPacked = Shape::kScoring == MF_STREAM_SOFTMAX && !Shape::kLogitsF32; // a key holds a logit (route_packed.cuh)
  static constexpr int kHGroups = kRanks;                    // with more than four tokens, each rank is a group of its own
  static constexpr int kRankSlots = kRanks > 8 ? kRanks : 8;
  static constexpr int kMaskWords = (kHGroups + 7) / 8;

  // --- Up projection ---
  static constexpr int kStageBytes = 16384;
  static constexpr int kUnitFeatures = Schedule::kUnitFeatures; // 8, or 4
  static constexpr int kStageKBlocks = 64 / kUnitFeatures;     // of a unit's 2 * kUnitFeatures rows
  static constexpr int kUnits = kIntermediate / kUnitFeatures; // units per expert
  static constexpr int kTileKBlocks = kStageKBlocks / 2;       // of a warpgroup's tile of 64 rows
  static constexpr int kWarpKBlocks = kTileKBlocks / 4;        // whose sums a warp keeps
  static constexpr int kUnitStages = (kKBlocks + kStageKBlocks - 1) / kStageKBlocks; // stages per unit; the last may hold less
  // What products of a unit's last stage read behind x. Whole units: up to 7 KB, whatever lies there. Half ones: up to 15 KB, and then h has as much.
  static constexpr int kBehindX = (kUnitStages * kStageKBlocks - kKBlocks) * 1024;
  static constexpr int kBehindXRoom = kUnitFeatures == 4 && kBehindX > 0 ? kBehindX : 1;
  static constexpr int kRingStages = Schedule::kRingStages;
  static constexpr int kScaleSlots = Schedule::kScaleSlots;    // units whose scale rows fit into shared memory
  static constexpr int kTurnsPerWhole = 8 / kUnitFeatures;     // in the time of a whole unit: tickets are drawn as much time ahead with half ones
  static constexpr int kLookahead = Schedule::kTicketLookahead * kTurnsPerWhole;

  // --- Down projection: CTA c < kDownCtas owns the rows c * kDownRows ... of w2, for every active expert; the last may own fewer ---
  static constexpr int kGridCtas = Schedule::kGridCtas;
  static constexpr int kDownRows = 8 * ((kHidden / 8 + kGridCtas - 1) / kGridCtas);
  static constexpr int kDownCtas = (kHidden + kDownRows - 1) / kDownRows;
  static constexpr bool kSlab = kDownRows == 16; // the slab trick (up.cuh) for 16 rows; dense or plain 64-row tiles otherwise
  static constexpr int kDownRowBlocks = 128 % kDownRows == 0 ? 1 : 2; // scale blocks that the CTA's rows touch
  static constexpr int kDownKBlockBytes = kDownRows * 128;
  static constexpr int kDownKBlocksAtMost = kStageBytes / kDownKBlockBytes;
  static constexpr int kDownPieces = (kHBlocks + kDownKBlocksAtMost - 1) / kDownKBlocksAtMost; // stages per slot
  static constexpr int kDownKBlocks = (kHBlocks + kDownPieces - 1) / kDownPieces;              // k-blocks of a piece
  static constexpr bool kEvenPieces = kDownPieces * kDownKBlocks == kHBlocks;                   // else the last one has fewer
  static constexpr int kDownCopyBytes = kDownKBlocks * kDownKBlockBytes;
  static constexpr int kDownSlots = kSlab && kDownCopyBytes <= kStageBytes / 2 ? 2 : 1; // slots per stage
  static constexpr int kDownGroups = kDownRows / 8;                                     // of 8 rows: an atom of a stage is one of them in one k-block
  static constexpr int kDownTiles = (kDownKBlocks * kDownGroups + 7) / 8;               // 64-row tiles that a stage's atoms fill
  static constexpr bool kDense = kDownRows > 16 && kDownTiles < kDownKBlocks;           // tiles run on over k-blocks: down_dense.cuh
  using DownSums = typename SumsOf<kDense ? kDownTiles : 0>::Type;                       // what a consumer thread adds up of y

  // --- Warps. Helpers are numbered apart: the first kReduceBuffers finalise units, the rest load h. ---
  static constexpr int kReduceBuffers = Schedule::kReduceBuffers;
  static constexpr int kHLoaders = Schedule::kHLoaders;
  static constexpr int kProgressSleepNs = 20; // of a loader between two looks
  static constexpr bool kBatches = Schedule::kHandOff == 1;    // h may come in batches, which all warps but the producer load: handoff_batches.cuh
  static constexpr int kHelpers = kReduceBuffers + kHLoaders;
  static constexpr int kHelperThreads = 32 * kHelpers;
  static constexpr int kConsumerWarp = 4;  // 4..7 and 8..11: two warpgroups
  static constexpr int kConsumerThreads = 256;
  static constexpr int kProducerWarp = 12;
  static constexpr int kWarps = kHelpers <= 4 ? 13 : 9 + kHelpers;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kFrontWarps = kWarps - 1; // all but the producer: they quantise x
  MF_DEVICE static int helper_of(int warp) { return warp < kConsumerWarp ? warp : warp - 9; }

  // --- Named barriers (0 is the whole CTA) ---
  enum Barrier : int {
    kBarrierHead = 1,   // lister -> producer: the expert of the CTA's first unit
    kBarrierListed = 2, // lister -> all but the producer: the list of active experts is there
    kBarrierFront = 3,  // all but the producer: x and the routing tables are there
    kBarrierOutput = 4, // consumers: partial sums of y are there
    kBarrierList = 5,   // lister -> producer: the whole list
    kBarrierScored = 6, // ... 9, one per token: warps that score experts -> the token's router
    kBarrierRouted = 10, // the other routers -> lister: every token's mask is there
    kBarrierH = 11,      // all that load batches of h -> consumers: all of h is there
  };

  // --- Waits, as the watchdog names them ---
  enum Wait : int {
    kWaitUpStage = 1, kWaitScales, kWaitReduceFree, kWaitDownStage, kWaitH, kWaitReduceFull, kWaitProgress, kWaitHData,
    kWaitRingFree, kWaitFlight, kWaitDownScales,
  };

  // --- Shared memory ---
  struct Barriers {
    hw::Mbarrier reduce_full[kReduceBuffers];  // 8 arrivals: the consumer warps have written their partial sums
    hw::Mbarrier reduce_empty[kReduceBuffers]; // 1: the finaliser has read them
    hw::Mbarrier scales[kScaleSlots];          // 32: the producer's lanes, when their cp.async have landed
    hw::Mbarrier down_scales;                  // kHelperThreads: their cp.async of scale rows of w2 have landed
    hw::Mbarrier full[kRingStages];            // 1 + bytes: the stage has landed
    hw::Mbarrier empty[kRingStages];           // 8: the consumer warps are done with the stage
  };

  union ColumnMask { // byte g: the columns of h group g that belong to the slot
    uint32_t word[2 * kMaskWords];
    uint64_t groups[kMaskWords];
  };

  // What must read as zero before anyone writes it: cleared by warps 0..3 ahead of the first barrier.
  struct alignas(16) Cleared {
    float x_scale[kKBlocks][8];        // [k-block][token]
    float h_scale[kHGroups][kHBlocks][8]; // [h group][k-block][column], routing weight included
    ColumnMask columns[kMaxSlots];
    uint8_t rank[kMaxSlots][8];        // [slot][token]: the slot's rank among the token's slots
    union {
      uint8_t token_mask[kTableExperts]; // bit t: token t has chosen the expert
      uint32_t token_mask_word[kTableExperts / 4];
    };
  };

  // What the warps that score a token's experts leave to its router. Lies where h will be.
  struct Scores {
    static constexpr int kPitch = kPacked || kGiven ? 1 : (kColumns + 3) / 4 * 4; // (none with packed keys)
    float score[kMaxTokens][kPitch];    // without bias; what logits select: the logit
    uint32_t order[kMaxTokens][kPitch]; // mf_exact_order of the value that selects
  };

  struct alignas(1024) Shared {
    uint8_t ring[kRingStages][kStageBytes]; // first: a down tile's unused rows may be read past the last stage
    uint8_t x[kKBlocks][1024];              // quantised x, one atom (8 tokens) per k-block; a last stage's may be read past the end
    union {
      uint8_t h[kHGroups][kHBlocks][1024];         // quantised h, one atom per h group and k-block
      Scores scores;                        // dead before kBarrierFront; larger than h if there are many experts and few features
      uint8_t behind_x[kBehindXRoom];       // read by products, for nothing
    };
    hw::F32x4 reduce[kReduceBuffers][8][32]; // [buffer][consumer warp][lane]; [0] (with dense tiles, one per tile) also combine y at the end
    Cleared cleared;
    alignas(16) float up_scale[kScaleSlots][2][kKBlocks];            // [unit % kScaleSlots][gate, up][k-block]
    float down_scale[kMaxSlots][kDownRowBlocks][kHBlocks];
    float weight[kMaxTokens][kRankSlots];   // [token][rank]
    uint32_t experts[kMaxSlots];            // [slot]: expert | token mask << 16
    uint32_t active;                        // length of the list
    uint32_t head;                          // expert of the CTA's first unit, kNoExpert if that is only known with the list
    uint32_t reduce_unit[kReduceBuffers];   // unit in the buffer, kEndOfUnits after the last
    uint32_t published[kReduceBuffers];     // 1 + last unit that the finaliser has published, kAllPublished at the end
    uint32_t h_loaded[kHLoaders];           // slots whose h the loader has written
    uint32_t batches_taken;                 // batches of h that a warp has taken on itself
    uint32_t launch;                        // number of launches that this CTA has completed: which ticket counter is this one's
    uint32_t stage_unit[kRingStages];       // unit of an up stage, kEndOfUnits for a down stage
    uint8_t slot_of[kTableExperts];         // of active experts (unused with one token)
    alignas(8) Barriers barrier;
  };
  static constexpr uint32_t kEndOfUnits = 0xFFFFFFFFu;
  static constexpr uint32_t kNoExpert = 0xFFFFFFFFu;
  static constexpr uint32_t kAllPublished = 1u << 30;
  static constexpr int kSharedBytes = sizeof(Shared);

  // Where the token's atom of x lies, and its row in it.
  MF_DEVICE static uint8_t *x_atom(Shared &sm, uint32_t block, uint32_t) { return sm.x[block]; }
  MF_DEVICE static uint32_t x_row(uint32_t token) { return token; }

  // --- Workspace ---
  static constexpr int kHRows = MF_STREAM_WS_H_ROWS(kRanks);
  static constexpr int kHBytes = MF_STREAM_WS_H_BYTES(kRanks, kIntermediate); // of one parity
  static constexpr int kWorkspaceBytes = MF_STREAM_WS_BYTES(kRanks, kIntermediate);

  // --- Assumptions ---
  static_assert(kExperts >= 1 && kColumns <= MF_STREAM_MAX_COLUMNS, "experts: an index of 10 bits, at most 32 per lane of the routing warp");
  static_assert(kExpertBegin >= 0 && kLocalExperts >= 1 && kExpertBegin + kLocalExperts <= kExperts, "expert_begin: this rank's experts exist");
  static_assert(kTopK >= 1 && kTopK <= kColumns && kRanks <= MF_STREAM_MAX_TOPK, "topk: a lane per pick, a byte of a column mask per h group");
  static_assert(!Shape::kWeightOnInput || !Shape::kSharedGate, "weight_on_input: the weight of a shared expert would multiply its input");
  static_assert(Shape::kSwigluLimit >= 0.0f && Shape::kSwigluAlpha > 0.0f, "swiglu: 0 for no limit, 1 for SiLU");
  static_assert(kShared >= 0 && (kShared > 0 || !Shape::kSharedGate), "shared_experts: a gate has an expert");
  static_assert(kMaxSlots <= 256, "topk: a slot's number is a byte");
  static_assert(kHidden % 128 == 0 && kHidden >= 1024 && kHidden <= 8192, "hidden: whole k-blocks, a unit's scale rows in one cp.async per lane");
  static_assert(kIntermediate % 16 == 0 && kIntermediate >= 16, "intermediate: rows of w2 are 16-byte aligned, units are whole");
  static_assert(kUnitFeatures == 8 || kUnitFeatures == 4, "unit_features: 8 or 4");
  static_assert(kOffset % 16 == 0 && kOffset >= 0 && kOffset < 128, "intermediate_offset: eight features of a lane or unit lie in one block");
  static_assert(kDownRows <= 64, "grid_ctas: at most 64 rows each, one product tile");
  static_assert(kDownCtas <= kGridCtas && kDownCtas == Schedule::kDownCtas, "down_ctas: the host counts as the kernel does");
  static_assert(kGridCtas <= MF_STREAM_WS_MAX_GRID, "grid_ctas: the workspace holds one launch count per CTA");
  static_assert(kDownSlots * kDownCopyBytes <= kStageBytes, "down tile: a stage holds what is copied to it");
  static_assert(!kDense || kDownTiles <= 2, "down tile: a stage's atoms are two tiles at most");
  static_assert(!kDense || kDownTiles <= kReduceBuffers, "reduce_buffers: one per dense tile");
  static_assert(kReduceBuffers == 1 || kReduceBuffers == 2 || kReduceBuffers == 4, "reduce_buffers: 1, 2 or 4");
  static_assert(kHLoaders >= 1 && kHLoaders <= 4, "h_loaders: 1..4");
  static_assert(Schedule::kHandOff == 0 || Schedule::kHandOff == 1, "hand_off: 0 or 1");
  static_assert(kHelpers >= 2 && kHelpers <= 7, "helpers: at most 16 warps");
  static_assert(kRingStages >= 4 && kRingStages <= 16, "ring_stages: 4..16");
  static_assert(kRingStages <= (kScaleSlots - 1) * kUnitStages + 1, "scale_slots: a unit's rows live until its last stage is free");
  static_assert(kScaleSlots == 4 || kScaleSlots == 8 || kScaleSlots == 16, "scale_slots: 4, 8 or 16");
  static_assert(kLookahead >= 1 && kLookahead <= 8, "ticket_lookahead: a register each");
  static_assert(kSharedBytes <= 232448, "shared memory: 227 KB per CTA");
  static_assert(sizeof(Cleared) % 16 == 0 && kSharedBytes % 1024 == 0, "shared memory: alignment");
  static_assert(MF_STREAM_WS_WATCHDOG + 4 <= MF_STREAM_WS_IDS(kRanks) && MF_STREAM_WS_IDS(kRanks) + kHRows * 4 <= MF_STREAM_WS_WEIGHTS(kRanks) &&
                    MF_STREAM_WS_WEIGHTS(kRanks) + kHRows * 4 <= MF_STREAM_WS_H,
                "workspace: routing result");
};

// What every role's functions are given.
template <class L>
struct Context {
  typename L::Shared &sm;
  const mf_stream_params &p;
  hw::Watchdog dog;
  int lane, warp, cta;
  hw::Trace trace{}; // where this thread's stamps go (trace.cuh); empty but in traced builds

  MF_DEVICE char *workspace(int offset) const { return (char *)p.workspace + offset; }

  // Rank groups: with few tokens several ranks share one h atom, so that 8 columns are always used.
  // One token: 8 ranks per group, 2: 4, up to 4: 2, more: 1.
  MF_DEVICE int log_ranks() const { return p.tokens == 1 ? 3 : p.tokens == 2 ? 2 : p.tokens <= 4 ? 1 : 0; }
  MF_DEVICE int columns_per_rank() const { return 8 >> log_ranks(); }
  MF_DEVICE int h_group(int rank) const { return rank >> log_ranks(); }
  MF_DEVICE int h_column(int rank, int token) const { return (rank & ((1 << log_ranks()) - 1)) * columns_per_rank() + token; }

  // Rounds of up units that are dealt statically. Tickets are drawn kLookahead turns ahead, so there are at least that many.
  MF_DEVICE int static_rounds() const { return p.static_rounds > L::kLookahead ? p.static_rounds : L::kLookahead; }
};

// A consumer's position in the ring.
template <class L>
struct RingReader {
  int stage = 0;
  uint32_t parity = 0;
  MF_DEVICE void advance()
  {
    if(++stage == L::kRingStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

MF_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
MF_DEVICE int larger(int a, int b) { return a > b ? a : b; }

} // namespace stream
