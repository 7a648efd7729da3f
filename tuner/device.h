/* device.h - the one interface behind which a GPU (device_cuda.c) or the emulated device (device_emu.c) stands.
 *
 * It is coarse on purpose and lives in worker processes only: the parent never holds a device (device_client.h is what the parent uses). A device
 * holds weights of several layers of one problem, loaded candidates, and inputs made from test cases. Not thread-safe.
 *
 * After MF_ERR_TIMEOUT or MF_ERR_DEVICE the device may hang or its context be lost: the process must exit without closing anything. */
#ifndef MOEFORGE_TUNER_DEVICE_H
#define MOEFORGE_TUNER_DEVICE_H

#include "error.h"
#include "types.h"

struct device;
struct device_kernel; /* one loaded candidate */

/* Compiled helpers of the tuner itself, templates/tools/<name>.cu. Borrowed for the duration of a call. */
struct device_tools {
  const void *datagen; /* makes weights on the device */
  size_t datagen_bytes;
  const void *floor;   /* the HBM floor kernel */
  size_t floor_bytes;
};

/* What one launch of a case left behind. Owned by the caller (device_output_free). */
struct device_output {
  uint16_t *y;        /* bf16 bits [tokens][K] */
  uint16_t *h;        /* bf16 bits [tokens * top_k][N], in the kernel's row order */
  int32_t *ids;       /* [tokens][top_k] in that order, -1 none */
  float *weights;     /* [tokens][top_k] */
  uint32_t status;    /* MF_WS_* */
  bool replays_equal; /* y of the repeated launches was bitwise the same */
  bool poison_left;   /* an output element was never written */
  bool guard_damaged; /* bytes around a buffer or of an input changed, or the workspace counts other launches than there were */
};

/* What of a device changes from minute to minute, for doctor. */
struct device_state {
  double memory_free_bytes, memory_total_bytes;
  bool cooperative_launch; /* a grid whose CTAs wait for each other can be launched safely */
  bool shared_context;     /* the driver lets only some processes in (exclusive or prohibited compute mode) */
};

/* What trace() launches, and which part of the workspace it brings back. */
struct device_trace {
  int tokens;
  enum routing_kind routing;
  uint32_t seed;         /* launch i has the inputs of device_profile_case(tokens, routing, seed, i) and the weights of layer i % layers */
  int warm, launches;    /* launches before the part is cleared, and after; no wait in between */
  uint64_t offset;       /* of the part in the workspace */
  size_t bytes;
  int timeout_ms;        /* of all launches together */
};

/* How a launch follows the kernel ahead of it, a stand-in for a router (templates/tools/router.cu). */
enum behind_kind {
  BEHIND_PLAIN, /* each kernel begins when the one ahead of it has ended */
  BEHIND_EDGE,  /* the launch may begin when the router lets it: programmatic dependent launch */
  BEHIND_CHAIN, /* and the router when the launch ahead of it lets it */
  BEHIND_KINDS
};

struct device_ops {
  const char *name; /* "cuda", "emu" */
  /* Only of the emulated device, else NULL: the interleavings of the cases that are run from here on follow from 'seed', the case and the launch. */
  void (*set_seed)(struct device *dev, uint64_t seed);
  /* Number of devices, or an error that says what is missing (driver, device node, ...). */
  enum mf_status (*count)(int *out, struct error *err);
  enum mf_status (*info)(int ordinal, struct device_info *out, struct error *err);
  enum mf_status (*state)(int ordinal, struct device_state *out, struct error *err);
  enum mf_status (*open)(int ordinal, const struct device_tools *tools, struct device **out, struct error *err);
  void (*close)(struct device *dev);
  /* Makes the weights of 'layers' layers (generated on the device) and room for tokens_max tokens. Replaces what was there. MF_ERR_NOMEM says what is
   * needed and what is free. */
  enum mf_status (*load_problem)(struct device *dev, const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max, struct error *err);
  enum mf_status (*load_kernel)(struct device *dev, const void *cubin, size_t bytes, const struct mf_recipe *recipe, struct device_kernel **out, struct error *err);
  /* Ends an open profile. */
  void (*unload_kernel)(struct device *dev, struct device_kernel *kernel);
  /* Runs a case on layer 'layer' 'replays' times (>= 2) with poisoned outputs. A launch that does not end within timeout_ms is MF_ERR_TIMEOUT; the
   * process must then exit. */
  enum mf_status (*run_case)(struct device *dev, struct device_kernel *kernel, const struct test_case *tc, int layer, int replays, int timeout_ms,
                             struct device_output *out, struct error *err);
  /* Prepares timing of 'count' kernels under one profile: a graph of at least 'launches' launches for each, over all layers, other routing in each
   * launch; and one of each floor kernel for the same experts. Ends a profile that was open. MF_REJECTED if the weights would not be cold. */
  enum mf_status (*open_profile)(struct device *dev, struct device_kernel *const *kernels, int count, int tokens, enum routing_kind routing, uint32_t seed,
                                 int launches, struct error *err);
  /* One interleaved round in a rotated order: us[i] per launch for each kernel with run[i] true (NAN for the others), those of the two floor kernels, and
   * active experts (mean). */
  enum mf_status (*time_round)(struct device *dev, const bool *run, int round, double *us, struct floor_times *floors, double *active, struct error *err);
  /* Lets the open profile's kernels run behind a router, the kernel in the module 'router', which writes their x and logits. No graph is made yet. */
  enum mf_status (*open_behind)(struct device *dev, const void *router, size_t bytes, struct error *err);
  /* Makes the graph of one kind for one kernel of the profile, by its index there (the number of kernels: the router alone, one behind the other), and replays it.
   * A kernel's BEHIND_PLAIN comes first. *refused: the driver does not take that kind of launch, and why; MF_OK: there is a graph. MF_ERR_CHECK: some output differs
   * from what the same kernel writes behind a plain edge. MF_ERR_TIMEOUT: as in run_case, of one replay. */
  enum mf_status (*try_behind)(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err);
  /* Microseconds per router and launch of a graph that try_behind() has made. timeout_ms: of all replays. */
  enum mf_status (*time_behind)(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, double *us, struct error *err);
  /* Runs a kernel that leaves a trace in its workspace: 'area' receives what->bytes. Ends an open profile. MF_ERR_CHECK if an output element was never
   * written. */
  enum mf_status (*trace)(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, void *area, struct error *err);
};

extern const struct device_ops device_cuda;
void device_output_free(struct device_output *out);

/* ---- arithmetic that planning shares with the devices (device_plan.c); pure ---- */

/* A weight byte counts as cold if at least this many times the L2 size was read since its last use. */
#define COLD_L2_RATIO 3
#define COLD_MIN_LAYERS 3
#define COLD_MAX_LAYERS 256
/* Layers that timing needs for cold weights at 'tokens' tokens or more under any routing input: COLD_MIN_LAYERS, or more for few or small experts. */
int device_layers_needed(const struct mf_problem *problem, const struct device_info *dev, int tokens);
/* Device memory of 'layers' layers: weights, scales, bias. */
double device_weights_bytes(const struct mf_problem *problem, int layers);
/* Device memory that a worker needs in all: weights, inputs and outputs of a profile, workspaces of 'kernels' kernels, the driver's context. */
double device_memory_needed(const struct mf_problem *problem, int layers, int tokens_max, int kernels);
/* Launches of a graph: 'launches' rounded up to whole turns over the layers, so that the graph repeated is cold, too. */
int device_graph_launches(int launches, int layers);
/* The case whose inputs launch 'launch' of a profile has. */
struct test_case device_profile_case(int tokens, enum routing_kind routing, uint32_t seed, int launch);

struct routing_result;
/* The distinct experts of this rank that 'routing' uses, ascending, numbered from 0 in the rank's own tensors. 'ids' has room for problem_stored_experts()
 * entries. Returns their number. */
int device_active_experts(const struct mf_problem *problem, const struct routing_result *routing, int32_t *ids);
/* Smallest number of experts that are read between two uses of the same expert of the same layer when the graph (launch i: counts[i] entries of
 * ids + i * stride, layer i % layers) is replayed for ever; the launches of the two uses themselves do not count. INT64_MAX if no expert is used at
 * all, -1 without memory. */
int64_t device_reuse_experts(const int32_t *ids, const int *counts, int stride, int launches, int layers, int experts);

#endif
