/* moeforge.h - runtime library of tuned fused-MoE decode kernels: open a package, bind a layer, launch.
 *
 * A package (made by `moeforge export`) holds compiled kernels, the recipes that say how to launch them, and the table
 * (problem, device, tokens) -> kernel. libmoeforge reads it, checks it, and interprets the recipes; it neither compiles nor tunes.
 * It needs libc and, opened at run time, libcuda.
 *
 * Ownership: every create/open/bind hands out one object that the caller ends with the matching destroy/close. Objects must be
 * ended in reverse order of creation (layers, then ops, then packages). Device memory (weights, workspace, inputs, outputs) always
 * belongs to the caller and must outlive the layer or the launched work that uses it.
 *
 * Threads: different objects may be used from different threads at once. One layer may be launched from several threads as long
 * as each concurrent stream has a workspace of its own.
 *
 * Versions: structs grow at their end only, and 0 is the neutral value of every member. struct_size says how long the caller's is: a shorter one of an
 * older header is served as if its missing members were 0; a longer one of a newer header is served if what this library does not know is 0, and is
 * MF_ERR_USAGE otherwise.
 *
 * Errors: every call returns an enum mf_status. On failure nothing is created and *out is set to NULL. The MF_MISS_ values say
 * that the package does not serve this request: fall back to your own kernel. */
#ifndef MOEFORGE_H
#define MOEFORGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MF_API __attribute__((visibility("default")))
#else
#define MF_API
#endif

/* The CUDA driver's stream handle (CUstream, cudaStream_t), so that this header needs no CUDA header. */
typedef struct CUstream_st *mf_stream;

/* name, value, exit code of the command line tool, message. Values are part of the ABI and never change. */
#define MF_STATUS_TABLE(X)                                                                            \
  X(MF_OK, 0, 0, "success")                                                                           \
  X(MF_REJECTED, 1, 4, "a rule rejected this candidate")                                              \
  X(MF_ERR_USAGE, 2, 2, "wrong command line or argument")                                             \
  X(MF_ERR_SPEC, 3, 3, "a spec or config file is not valid")                                          \
  X(MF_ERR_UNSUPPORTED, 4, 4, "no kernel family serves this problem")                                 \
  X(MF_ERR_IO, 5, 5, "a file could not be read or written")                                           \
  X(MF_ERR_STORE, 6, 6, "the schedule database cannot be used")                                       \
  X(MF_ERR_TOOLKIT, 7, 7, "the CUDA compiler library is missing or too old")                          \
  X(MF_ERR_NO_DEVICE, 8, 8, "no usable GPU or driver")                                                \
  X(MF_ERR_DEVICE, 9, 9, "the GPU or its driver reported a failure")                                  \
  X(MF_ERR_COMPILE, 10, 10, "a kernel did not compile")                                               \
  X(MF_ERR_CHECK, 11, 11, "a kernel's numbers are wrong")                                             \
  X(MF_ERR_TIMEOUT, 12, 12, "no progress within the time limit")                                      \
  X(MF_ERR_WORKER, 13, 13, "a worker process died")                                                   \
  X(MF_ERR_NOT_FOUND, 14, 14, "no such entry")                                                        \
  X(MF_ERR_NOMEM, 15, 15, "out of memory")                                                            \
  X(MF_ERR_INTERNAL, 16, 70, "internal error")                                                        \
  X(MF_ERR_INTERRUPTED, 17, 130, "interrupted; what was measured is stored")                          \
  X(MF_ERR_CORRUPT, 32, 20, "the package is damaged")                                                 \
  X(MF_ERR_NEWER_FORMAT, 33, 21, "the package was made by a newer version")                           \
  X(MF_MISS_SHAPE, 34, 22, "the package has no kernel for this problem")                              \
  X(MF_MISS_DEVICE, 35, 23, "the package has no kernel for this GPU")                                 \
  X(MF_MISS_TOKENS, 36, 24, "token count outside the tuned interval")                                 \
  X(MF_MISS_DRIVER, 37, 25, "the driver is older than the kernel needs")                              \
  X(MF_MISS_SMS, 38, 26, "too few multiprocessors available to keep the kernel resident")             \
  X(MF_MISS_LAYOUT, 39, 27, "layout (strides, alignment) of weights or inputs that the kernel cannot read")

enum mf_status {
#define MF_STATUS_ENUM(name, value, exit_code, message) name = value,
  MF_STATUS_TABLE(MF_STATUS_ENUM)
#undef MF_STATUS_ENUM
};

/* One sentence for 'status'; never NULL. */
MF_API const char *mf_status_string(enum mf_status status);
/* The identifier itself ("MF_MISS_SHAPE"); never NULL. */
MF_API const char *mf_status_name(enum mf_status status);

/* MF_SCORE_GIVEN: the engine has routed; a call passes ids and weights instead of logits. */
enum mf_score { MF_SCORE_SOFTMAX = 0, MF_SCORE_SIGMOID = 1, MF_SCORE_SQRT_SOFTPLUS = 2, MF_SCORE_TOPK_SOFTMAX = 3, MF_SCORE_GIVEN = 4 };
enum mf_dtype { MF_DTYPE_BF16 = 0, MF_DTYPE_F32 = 1 };
enum mf_act_scale { MF_ACT_SCALE_F32 = 0, MF_ACT_SCALE_UE8M0 = 1 };
#define MF_SHARED_GATED 256 /* added to mf_problem.shared_experts if a call passes gates for them */

/* The operator that a model layer needs on one rank. It is the canonical content of a model shape: two problems with equal fields
 * are the same problem, whatever their names. Set struct_size = sizeof(struct mf_problem) and clear the rest first.
 * Matrices: w13 [expert_count][2*intermediate][hidden] e4m3 (rows 0..N-1 gate, N..2N-1 up), w2 [expert_count][hidden][intermediate]. With S shared
 * experts there are expert_count + S of everything: theirs lie behind the others'. */
struct mf_problem {
  uint32_t struct_size;
  int32_t experts;             /* routed experts E = columns of the router logits */
  int32_t top_k;               /* experts chosen per token */
  int32_t hidden;              /* K: columns of x and out */
  int32_t intermediate;        /* N: features of one expert held by this rank */
  int32_t intermediate_offset; /* o = (rank * N) mod 128: where the rank's first feature lies in its 128-block */
  int32_t expert_begin;        /* first expert held by this rank (expert parallelism), else 0 */
  int32_t expert_count;        /* experts held by this rank, else = experts */
  int32_t zero_experts;        /* extra logits that select nothing (LongCat), else 0 */
  int32_t score;               /* enum mf_score */
  int32_t select_bias;         /* 1: score + bias selects, score alone weighs */
  int32_t groups;              /* expert groups, 1 = none */
  int32_t groups_kept;         /* groups that may be chosen from, 1 with groups = 1 */
  int32_t renormalize;         /* 1: the chosen weights are divided by their sum */
  int32_t weight_on_input;     /* 1: the routing weight multiplies x (Llama-4) */
  int32_t logits_dtype;        /* enum mf_dtype */
  int32_t act_scale;           /* enum mf_act_scale */
  int32_t shared_experts;      /* always-active experts fused into the call, else 0; + MF_SHARED_GATED: see mf_call.shared_gate */
  float swiglu_limit;          /* clamp of gate and up, 0 = none */
  float swiglu_alpha;          /* gate * sigmoid(alpha * gate), 0 or 1 = SiLU */
};

struct mf_package;
struct mf_op;
struct mf_layer;

/* Weights of one layer, on the device of the op. Strides are in elements; 0 means dense. Set struct_size first. */
struct mf_weights {
  uint32_t struct_size;
  uint32_t reserved;
  const void *w13;            /* e4m3 [expert_count + shared experts][2N][K], 16-byte aligned; likewise below */
  const float *s13;           /* f32 [expert_count][2][ceil((o+N)/128)][ceil(K/128)], 16-byte aligned */
  const void *w2;             /* e4m3 [expert_count][K][N], 16-byte aligned */
  const float *s2;            /* f32 [expert_count][ceil(K/128)][ceil((o+N)/128)] */
  const float *bias;          /* f32 [experts + zero_experts], 16-byte aligned, needed if problem.select_bias */
  int64_t w13_row_stride;     /* between rows of w13; the experts must follow each other without a gap */
  int64_t w2_row_stride;      /* between rows of w2 */
  float routed_scaling;       /* factor on the routing weights; 0 means 1 */
  float reserved_f;
};

/* One forward call. x and out must not overlap. Strides are in elements; 0 means dense. Set struct_size first; callers that were compiled against an
 * older header pass its smaller size, which stays valid: the later fields then count as 0.
 * ids and weights are read only if problem.score is MF_SCORE_GIVEN, logits only if it is not. An id is that of the whole model (0 .. experts +
 * zero_experts - 1) or -1, no expert; any other selects nothing and sets a status bit. An expert that a token names twice gets the sum of both weights. */
struct mf_call {
  uint32_t struct_size;
  int32_t tokens;             /* 0 launches nothing and succeeds */
  const void *x;              /* bf16 [tokens][K], 16-byte aligned rows */
  const void *logits;         /* [tokens][experts + zero_experts] of problem.logits_dtype, 16-byte aligned rows */
  void *out;                  /* bf16 [tokens][K] */
  void *workspace;            /* mf_op_workspace_size() bytes, 256-byte aligned, one per concurrent stream */
  int64_t x_stride, logits_stride, out_stride;
  const int32_t *ids;         /* [tokens][top_k] */
  const float *weights;       /* [tokens][top_k]; times routed_scaling, otherwise as they are */
  int64_t ids_stride, weights_stride;
  const void *shared_gate;    /* [tokens][shared experts] of problem.logits_dtype: a shared expert weighs sigmoid(gate); without gates it weighs 1 */
  int64_t shared_gate_stride;
};

/* What a package offers, for listing. 'index' runs from 0; past the end MF_ERR_NOT_FOUND. Pointers live as long as the package. */
struct mf_package_entry {
  uint32_t struct_size;
  int32_t tokens_min, tokens_max;
  int32_t min_driver;         /* CUDA version, 12080 = 12.8 */
  const char *shape_name, *device_name, *schedule;
  struct mf_problem problem;
  float routed_scaling;
  double us, floor_us;        /* as measured when the package was tuned; 0 if only predicted */
};

MF_API enum mf_status mf_package_open(const char *path, struct mf_package **out);
MF_API enum mf_status mf_package_entry_at(const struct mf_package *pkg, size_t index, struct mf_package_entry *out);
/* The JSON manifest, NUL-terminated; lives as long as the package. */
MF_API const char *mf_package_manifest(const struct mf_package *pkg);
MF_API void mf_package_close(struct mf_package *pkg);

/* Selects the kernels that serve 'problem' for 1..max_tokens on CUDA device 'device' and loads them into its primary context, which
 * is retained; the caller's current context is left as it was. Typed misses: shape, device, tokens, driver, SMs. */
MF_API enum mf_status mf_op_create(struct mf_package *pkg, const struct mf_problem *problem, int device, int max_tokens, struct mf_op **out);
/* Bytes of workspace that serve every token count of the op. */
MF_API size_t mf_op_workspace_size(const struct mf_op *op);
MF_API int mf_op_max_tokens(const struct mf_op *op);
/* Prepares a workspace, in stream order: once, and again after a launch that was aborted. */
MF_API enum mf_status mf_workspace_init(const struct mf_op *op, void *workspace, mf_stream stream);
MF_API void mf_op_destroy(struct mf_op *op);

/* Encodes the tensor maps of one layer; the caller's current context is left as it was. The weights' memory must stay where it is until the layer is
 * destroyed. */
MF_API enum mf_status mf_layer_bind(struct mf_op *op, const struct mf_weights *weights, struct mf_layer **out);
/* Launches one layer: no allocation, no synchronisation, capturable. 'stream' is one of the op's primary context; stream 0 and the per-thread default
 * stream are those of the current context, which must then be the op's (as it is in any program that uses the CUDA runtime and has set that device).
 * tokens > max_tokens is MF_MISS_TOKENS and launches nothing. */
MF_API enum mf_status mf_moe_forward(const struct mf_layer *layer, const struct mf_call *call, mf_stream stream);
MF_API void mf_layer_destroy(struct mf_layer *layer);

#ifdef __cplusplus
}
#endif
#endif
