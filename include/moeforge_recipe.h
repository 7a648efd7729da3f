/* moeforge_recipe.h - the binding recipe: how one compiled kernel is launched, as data.
 *
 * The tuner writes a recipe for each candidate (family_ops.recipe), times the kernel through it, stores it and puts it into packages;
 * the runtime interprets it. Neither has launch code per kernel family. A recipe is one flat little-endian struct without pointers,
 * so that its bytes are its serialised form and its hash is its identity.
 *
 *   argument block (bytes, 64-aligned)          kernel parameters
 *   +--------------------------------+
 *   | params struct                  |  <----   params[0] = {offset, size}
 *   | tensor map 0 (128 bytes)       |  <----   params[1]
 *   | tensor map 1                   |  <----   params[2]
 *   +--------------------------------+
 * Each field writes 'size' bytes at 'offset' of the block from its source. Sources are fixed at bind time (weights, constants, maps) or
 * patched at each call (x, logits, out, workspace, tokens, strides). */
#ifndef MOEFORGE_RECIPE_H
#define MOEFORGE_RECIPE_H

#include <stdint.h>

#define MF_RECIPE_MAGIC 0x4352464du /* "MFRC" */
#define MF_RECIPE_VERSION 2u /* 1: without the sources from MF_SRC_IDS on; a recipe that does without them still says so */
#define MF_RECIPE_MAX_MAPS 4
#define MF_RECIPE_MAX_PARAMS 8
#define MF_RECIPE_MAX_FIELDS 48
#define MF_RECIPE_MAX_BLOCK 1024 /* bytes of the argument block */

/* Where a field, a tensor map's base or a stride gets its value. 'value' is the constant, the map's index, or the multiplier of a stride. */
#define MF_SOURCE_TABLE(X)                                                    \
  X(MF_SRC_CONST, 0, "const")                     /* value */                 \
  X(MF_SRC_TENSOR_MAP, 1, "tensor_map")           /* map number 'value' */    \
  X(MF_SRC_W13, 2, "w13")                                                     \
  X(MF_SRC_S13, 3, "s13")                                                     \
  X(MF_SRC_W2, 4, "w2")                                                       \
  X(MF_SRC_S2, 5, "s2")                                                       \
  X(MF_SRC_BIAS, 6, "bias")                                                   \
  X(MF_SRC_W13_ROW_STRIDE, 7, "w13_row_stride")   /* elements * value */      \
  X(MF_SRC_W2_ROW_STRIDE, 8, "w2_row_stride")                                 \
  X(MF_SRC_ROUTED_SCALING, 9, "routed_scaling")   /* f32 */                   \
  X(MF_SRC_X, 32, "x")                            /* 32 and up: per call */   \
  X(MF_SRC_LOGITS, 33, "logits")                                              \
  X(MF_SRC_OUT, 34, "out")                                                    \
  X(MF_SRC_WORKSPACE, 35, "workspace")                                        \
  X(MF_SRC_TOKENS, 36, "tokens")                  /* i32 */                   \
  X(MF_SRC_X_STRIDE, 37, "x_stride")              /* elements, i32 or i64 */  \
  X(MF_SRC_LOGITS_STRIDE, 38, "logits_stride")                                \
  X(MF_SRC_OUT_STRIDE, 39, "out_stride")                                      \
  X(MF_SRC_IDS, 40, "ids")                        /* 40 and up: version 2 */  \
  X(MF_SRC_WEIGHTS, 41, "weights")                                            \
  X(MF_SRC_IDS_STRIDE, 42, "ids_stride")                                      \
  X(MF_SRC_WEIGHTS_STRIDE, 43, "weights_stride")                              \
  X(MF_SRC_SHARED_GATE, 44, "shared_gate")                                    \
  X(MF_SRC_SHARED_GATE_STRIDE, 45, "shared_gate_stride")

enum mf_source {
#define MF_SOURCE_ENUM(name, value, text) name = value,
  MF_SOURCE_TABLE(MF_SOURCE_ENUM)
#undef MF_SOURCE_ENUM
};
#define MF_SRC_FIRST_PER_CALL 32
#define MF_SRC_FIRST_OF_VERSION_2 40

#define MF_RECIPE_COOPERATIVE 1u /* CTAs wait for each other: launch cooperatively, so that it fails instead of hanging */
#define MF_RECIPE_PDL 2u         /* programmatic dependent launch: the kernel itself waits for what is ahead of it, and its CTAs for each other as with the other flag */

struct mf_recipe_field {
  uint16_t source; /* enum mf_source */
  uint16_t size;   /* bytes: 4, 8, or 128 for a tensor map */
  uint32_t offset; /* in the argument block */
  int64_t value;
};

struct mf_recipe_param {
  uint32_t offset, size; /* in the argument block */
};

struct mf_recipe_stride {
  uint32_t source; /* MF_SRC_CONST, MF_SRC_W13_ROW_STRIDE or MF_SRC_W2_ROW_STRIDE */
  uint32_t reserved;
  uint64_t value;  /* bytes, or bytes per element of the source */
};

/* A tensor map of bytes, innermost dimension first; stride[i] is that of dimension i + 1. */
struct mf_recipe_map {
  uint32_t base;      /* MF_SRC_W13 or MF_SRC_W2 */
  uint32_t rank;      /* 1..5 */
  uint32_t swizzle;   /* bytes: 0, 32, 64, 128 */
  uint32_t promotion; /* L2 promotion, bytes: 0, 64, 128, 256 */
  uint64_t dim[5];
  struct mf_recipe_stride stride[4];
  uint32_t box[5];
  uint32_t reserved;
};

struct mf_recipe {
  uint32_t magic, version;
  uint32_t size;                  /* sizeof(struct mf_recipe) of the writer */
  uint32_t flags;                 /* MF_RECIPE_* */
  char kernel[64];                /* symbol in the cubin, NUL-terminated */
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;          /* dynamic shared memory per CTA */
  uint32_t min_sms;               /* multiprocessors that the grid needs to be resident */
  uint32_t tokens_min, tokens_max; /* what the kernel itself can do; the tuned interval may be smaller */
  uint64_t workspace_bytes;
  uint64_t workspace_zero_bytes;  /* leading bytes that mf_workspace_init clears */
  uint32_t block_bytes;           /* of the argument block */
  uint32_t nparams, nfields, nmaps;
  /* Where a checker finds the kernel's intermediate values in the workspace. */
  uint64_t h_offset;              /* top_k: shared experts included. bf16 [2][tokens_max * top_k][N], bits inverted, buffer = (launches - 1) & 1 */
  uint64_t h_buffer_bytes;        /* of one of the two */
  uint64_t launch_count_offset;   /* u32: launches since mf_workspace_init */
  uint64_t routing_ids_offset;    /* i32 [tokens_max][top_k] in h row order, -1 none */
  uint64_t routing_weights_offset; /* f32, same order */
  uint64_t status_offset;         /* u32: MF_WS_* bits */
  struct mf_recipe_param params[MF_RECIPE_MAX_PARAMS];
  struct mf_recipe_field fields[MF_RECIPE_MAX_FIELDS];
  struct mf_recipe_map maps[MF_RECIPE_MAX_MAPS];
};

#define MF_WS_NAN_LOGIT 1u /* a router logit was NaN; it selected nothing */
#define MF_WS_WATCHDOG 2u  /* a wait gave up (debug builds) */
#define MF_WS_BAD_ID 4u    /* a given expert id does not exist; it selected nothing */

#endif
