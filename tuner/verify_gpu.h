/* verify_gpu.h - one problem on the GPU for `moeforge verify`: weights, inputs and launches, through the public mf_ API.
 *
 * The weight tensors exist in full, but only the experts that a case activates are generated and uploaded; the others stay zero, so that a kernel that
 * reads the wrong expert is wrong visibly. A launch that does not end within the time limit leaves the GPU busy: after MF_ERR_TIMEOUT
 * nothing may be freed and the process should end. */
#ifndef MOEFORGE_TUNER_VERIFY_GPU_H
#define MOEFORGE_TUNER_VERIFY_GPU_H

#include "cuda_api.h"
#include "error.h"
#include "reference.h"
#include "types.h"

/* The GPU that is verified on; context current on the calling thread. */
struct verify_gpu {
  struct cuda_api api;
  CUdevice device;
  CUcontext context;
  CUstream stream;
  int ordinal;
  int timeout_ms;
  char name[NAME_MAX_LEN];
};

enum mf_status verify_gpu_open(int ordinal, int timeout_ms, struct verify_gpu *gpu, struct error *err);
void verify_gpu_close(struct verify_gpu *gpu);
/* A status behind which the GPU may still be at work: nothing more can be done with it, and closing it would wait. */
bool verify_gpu_is_busy(enum mf_status rc);

/* The weights of layer 0 of one problem, on the device. */
struct verify_weights {
  const struct mf_problem *problem;
  uint64_t layer_seed;
  float routed_scaling;
  CUdeviceptr w13, w2, s13, s2, bias;
  bool *uploaded; /* [problem_stored_experts()] */
};
enum mf_status verify_weights_make(struct verify_gpu *gpu, const struct mf_problem *problem, float routed_scaling, struct verify_weights *out,
                                   struct error *err);
void verify_weights_free(struct verify_gpu *gpu, struct verify_weights *weights);

/* One entry of the package, ready to run. */
struct verify_kernel {
  const struct verify_weights *weights;
  struct mf_op *op;
  struct mf_layer *layer;
  CUdeviceptr workspace, x, logits, out;
  size_t workspace_bytes, x_bytes, logits_bytes, out_bytes; /* for the op's largest token count; guards come on top */
};
/* Creates op and layer. The typed misses of mf_op_create and mf_layer_bind come back as they are. */
enum mf_status verify_kernel_make(struct verify_gpu *gpu, struct mf_package *pkg, const struct verify_weights *weights, int max_tokens,
                                  struct verify_kernel *out, struct error *err);
void verify_kernel_free(struct verify_gpu *gpu, struct verify_kernel *kernel);

/* Uploads the weights of the case's experts and runs it once: y (bf16, tokens * K) and whether the guards survived. */
enum mf_status verify_run(struct verify_gpu *gpu, struct verify_kernel *kernel, const struct test_case *tc, const struct routing_result *routing,
                          uint16_t *y, bool *guards_intact, struct error *err);

/* Launches the case that verify_run() ran last again, 'launches' times, back to back as an engine would: how many gave another y than 'y' (bf16, tokens * K),
 * and which was the first (from 1; 0: none). 64 launches at a time, which must end within timeout_ms together. Guards are not looked at. */
enum mf_status verify_soak(struct verify_gpu *gpu, struct verify_kernel *kernel, int tokens, int launches, const uint16_t *y, int *different, int *first,
                           struct error *err);

#endif
