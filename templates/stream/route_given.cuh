// route_given.cuh - experts and weights that the engine has chosen: nothing is scored, the router only reads and tidies up.
//
// Who runs it   one warp per token, its router (route.cuh); lane j has the token's j-th id.
// Reads         ids, weights (global): kTopK of each. Everything else stays in registers.
//
// An id without an expert (-1, or one that does not exist) may stand anywhere in the row. An expert that is named twice counts once, at its
// first place, with the sum of its weights in the order of the row: y is the same as if both were computed.
#pragma once
#include "stream/route_keys.cuh"

namespace stream {

template <class L>
struct GivenSelection {
  int id;        // of the lane; -1: none
  float given;   // its weight
  bool bad;      // the id does not exist

  MF_DEVICE static int log_warps(int) { return 0; }

  MF_DEVICE void load(const Context<L> &c, int token, int)
  {
    id = -1;
    given = 0.0f;
    if(c.lane < L::kTopK) {
      id = ((const int32_t *)c.p.logits)[(size_t)token * c.p.logits_pitch + c.lane];
      given = c.p.bias[(size_t)token * c.p.weights_pitch + c.lane];
    }
  }

  MF_DEVICE uint32_t first_word() const { return (uint32_t)id; } // of what load() loads
  MF_DEVICE void score_experts(const Context<L> &, int, int) {}

  MF_DEVICE void prepare(const Context<L> &c, int)
  {
    bad = id < -1 || id >= L::kColumns;
    id = bad ? -1 : id;
    float sum = 0.0f;
    bool again = false; // an earlier lane has the same expert
    MF_UNROLL
    for(int j = 0; j < L::kTopK; ++j) {
      const int other = hw::shuffle(id, j);
      const float weight = hw::shuffle(given, j);
      sum = other == id ? mf_exact_add(sum, weight) : sum;
      again = again || (other == id && j < c.lane);
    }
    given = sum;
    id = again ? -1 : id;
  }

  MF_DEVICE bool has_nan(int) const { return false; }

  MF_DEVICE uint32_t pop(const Context<L> &, int) { return 0; }
  MF_DEVICE void settle(const Context<L> &, int) {}

  // Of the lane's own id.
  MF_DEVICE bool picked() const { return id >= 0; }
  MF_DEVICE uint32_t expert() const { return (uint32_t)id; }
  MF_DEVICE float weight(const Context<L> &c) const { return picked() ? mf_exact_mul(given, c.p.scaling) : 0.0f; }
};

} // namespace stream
