/* device_cuda.h - what the parts of the CUDA device share: device_cuda.c (weights, kernels), device_cuda_driver.c (the driver and its devices),
 * device_cuda_case.c (running one case), device_cuda_time.c (profiles and rounds), device_cuda_behind.c (the same behind another kernel),
 * device_cuda_trace.c (traced launches); and what device_emu.c, the same device over an emulated driver, needs of
 * them. Nobody else includes it. */
#ifndef MOEFORGE_TUNER_DEVICE_CUDA_H
#define MOEFORGE_TUNER_DEVICE_CUDA_H

#include "cuda_api.h"
#include "device.h"
#include "recipe.h"

#define GUARD_BYTES 4096 /* before and behind every buffer that a kernel is given */
#define POISON 0xFF      /* bf16 and f32 NaN, e4m3 NaN, id -1 */

struct cuda_layer {
  CUdeviceptr w13, s13, w2, s2, bias;
  struct mf_weights weights;
};

struct device_kernel {
  struct device_kernel *next; /* all kernels of the device */
  struct mf_recipe recipe;
  CUmodule module;
  CUfunction function;
  struct recipe_block *blocks; /* one per layer */
  CUdeviceptr workspace;       /* guard, workspace, guard */
  uint32_t launches;           /* since the workspace was initialised */
  unsigned cases;              /* run so far */
};

/* What the open profile is timed with behind another kernel; all zero if it is not. */
struct cuda_behind {
  CUmodule module;
  CUfunction router;
  CUdeviceptr matrices;    /* of the layers' routers */
  CUdeviceptr written;     /* by the router: x and logits of all launches */
  CUgraphExec *graphs;     /* [count + 1][BEHIND_KINDS], the last row of the router alone; NULL: there is none */
  unsigned char **want;    /* [count]: what the kernel writes behind plain edges, all launches; NULL: not known */
};

/* An open timing profile; all zero if there is none. */
struct cuda_profile {
  int tokens, launches, count;
  CUdeviceptr inputs;      /* x, logits, out of all launches */
  size_t x_bytes, logits_bytes, out_bytes; /* of one launch, 256-byte multiples */
  CUgraphExec floor;
  CUgraphExec floor_tensor; /* reads as the first kernel does; NULL if its way is not known */
  CUgraphExec *graphs;     /* [count] */
  struct device_kernel **kernels;
  CUevent begin, end;
  double active;           /* mean */
  struct cuda_behind behind;
};

struct device {
  struct cuda_api api;
  int ordinal;
  CUdevice handle;
  bool context_retained;
  CUcontext context;
  CUstream stream;
  struct device_info info;
  CUmodule datagen, floor_module;
  CUfunction gen_weights, gen_scales, gen_bias, floor, floor_tensor;
  bool problem_loaded;
  struct mf_problem problem;
  float routed_scaling;
  int nlayers, tokens_max;
  struct cuda_layer *layers;
  struct device_kernel *kernels;
  CUdeviceptr scratch; /* inputs and outputs of a case; grows, kept from case to case */
  size_t scratch_bytes;
  struct cuda_profile profile;
};

/* Opens and initialises the driver; MF_ERR_NO_DEVICE says what to do. cuda_api_close() ends it. */
enum mf_status cuda_driver_open(struct cuda_api *api, struct error *err);
enum mf_status cuda_describe(const struct cuda_api *api, int ordinal, CUdevice *handle, struct device_info *out, struct error *err);
enum mf_status cuda_count(int *out, struct error *err);
enum mf_status cuda_info(int ordinal, struct device_info *out, struct error *err);
enum mf_status cuda_state(int ordinal, struct device_state *out, struct error *err);

/* Opens device 'ordinal' of the driver 'api', which is taken over: closed with the device, or on failure. */
enum mf_status cuda_open_on(const struct cuda_api *api, int ordinal, const struct device_tools *tools, struct device **out, struct error *err);

/* A driver failure as an error: "what: CUDA_ERROR_...: description". MF_ERR_NOMEM if memory ran out, else MF_ERR_DEVICE. */
enum mf_status cuda_failed(const struct cuda_api *api, CUresult result, struct error *err, const char *what);
/* A failure of recipe_*(): keeps the runtime's status and adds what the driver said. */
enum mf_status recipe_failed(const struct device *dev, enum mf_status status, CUresult result, const char *what, struct error *err);
/* Waits for the stream by polling, so that a kernel that hangs ends in MF_ERR_TIMEOUT. */
enum mf_status cuda_wait(struct device *dev, int timeout_ms, const char *what, struct error *err);
/* Poisons the kernel's workspace and initialises it as a caller would, in stream order. */
enum mf_status cuda_fresh_workspace(struct device *dev, struct device_kernel *kernel, struct error *err);
CUdeviceptr cuda_workspace(const struct device_kernel *kernel);
void cuda_close_profile(struct device *dev);

enum mf_status cuda_run_case(struct device *dev, struct device_kernel *kernel, const struct test_case *tc, int layer, int replays, int timeout_ms,
                             struct device_output *out, struct error *err);
enum mf_status cuda_open_profile(struct device *dev, struct device_kernel *const *kernels, int count, int tokens, enum routing_kind routing, uint32_t seed,
                                 int launches, struct error *err);
enum mf_status cuda_time_round(struct device *dev, const bool *run, int round, double *us, struct floor_times *floors, double *active, struct error *err);
enum mf_status cuda_open_behind(struct device *dev, const void *router, size_t bytes, struct error *err);
enum mf_status cuda_try_behind(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err);
enum mf_status cuda_time_behind(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, double *us, struct error *err);
void cuda_close_behind(struct device *dev);
enum mf_status cuda_trace(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, void *area, struct error *err);

/* ---- device_cuda_time.c: graphs of the open profile ---- */
#define ROUND_TIMEOUT_MS 20000
/* Enqueues on dev->stream what a graph is made of. */
typedef enum mf_status cuda_enqueue_fn(struct device *dev, const void *context, struct error *err);
enum mf_status cuda_capture(struct device *dev, cuda_enqueue_fn *enqueue, const void *context, CUgraphExec *out, struct error *err);
enum mf_status cuda_launch_graph(struct device *dev, CUgraphExec graph, struct error *err);
/* Microseconds per launch over some replays, behind an untimed one. timeout_ms: of them all. */
enum mf_status cuda_time_graph(struct device *dev, CUgraphExec graph, int timeout_ms, double *us, struct error *err);
/* Where launch 'launch' finds x; logits and out follow. */
CUdeviceptr cuda_launch_inputs(const struct cuda_profile *pf, int launch);
/* Launch 'launch', with x and logits at 'from' and its own out; with the recipe's programmatic dependent launch, or without. */
enum mf_status cuda_enqueue_launch(struct device *dev, const struct device_kernel *kernel, bool pdl, int launch, CUdeviceptr from, struct error *err);

/* ---- device_cuda_floor.c ---- */
struct mf_floor_params;
struct mf_floor_tensor_params;
/* What the kernels are given for 'active' experts; pure. MF_ERR_UNSUPPORTED: too many. False: the recipe's boxes are not known. */
enum mf_status floor_params_make(const struct mf_problem *problem, const void *w13, const void *w2, const int32_t *experts, int active, int ctas,
                                 struct mf_floor_params *out, struct error *err);
bool floor_tensor_params_make(const struct mf_problem *problem, const struct mf_recipe *recipe, const int32_t *experts, int active,
                              struct mf_floor_tensor_params *out);
bool cuda_has_tensor_floor(const struct device *dev, const struct device_kernel *kernel);
enum mf_status cuda_enqueue_floor(struct device *dev, int layer, const int32_t *experts, int active, struct error *err);
enum mf_status cuda_enqueue_tensor_floor(struct device *dev, const struct device_kernel *kernel, int layer, const int32_t *experts, int active,
                                         struct error *err);

#endif
