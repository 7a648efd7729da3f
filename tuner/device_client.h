/* device_client.h - the parent's side of a device: a typed API over worker processes, so that whatever a kernel does costs a child, never the tuner.
 *
 *   device_tools_build          compiles the tuner's own helper kernels once (in a child); every later child gets the cubins
 *   device_client_probe         how many devices, and what they are
 *   device_client_start         a child that holds one device; then load_problem, load_kernel, check | lock, open_profile, round
 *   device_client_references    fills the reference cache with several children before anything is checked
 *   device_client_check_many    checks many candidates with several children; a fault costs only the candidate in progress
 *
 * Failures are typed: MF_ERR_NO_DEVICE (no driver, no GPU), MF_ERR_TIMEOUT (hang: the child was killed), MF_ERR_WORKER (the child died: text says
 * how), MF_ERR_DEVICE (the driver reported an error: the child is ended, its context is lost), MF_ERR_NOMEM (text: needed and free). After any of
 * TIMEOUT, WORKER, DEVICE, INTERNAL the client is *dead*: every further call but stop returns MF_ERR_WORKER.
 *
 * Frames (worker.h). Parent and child are the same executable, so plain structs travel as bytes in blobs. One request is outstanding at a time:
 *   {"op":"probe"}                                       -> {"devices":[{info}]}
 *   {"op":"doctor"}                                      -> {"devices":[{"info","state" | "state_error","nvml","lock_holder" | "lock_error"}]}
 *   {"op":"tool","name","template_dir","arch"}           -> {} + cubin
 *   {"op":"open","ordinal","threads"} + datagen + floor  -> {"info":{info}}; the emulated device: "emulated":{...}, no blobs
 *   {"op":"problem","scaling","layers","tokens_max"} + struct mf_problem -> {}
 *   {"op":"kernel"} + cubin | image + struct mf_recipe   -> {"kernel":handle}
 *   {"op":"unload","kernel"}                             -> {}
 *   {"op":"check","kernel","cache_dir","layers","replays","timeout_ms"[,"seed"]} + struct test_case[] -> {"result":{...}}, after {"progress":cases} frames
 *   {"op":"reference","cache_dir","scaling","layer","threads"} + struct mf_problem + struct test_case -> {}
 *   {"op":"lock"}                                        -> {}, after {"waiting":"..."} frames
 *   {"op":"profile","kernels":[handle],"tokens","routing","seed","launches"} -> {}
 *   {"op":"round","round","run":[bool]}                  -> {"us":[n],"floor_us","floor_tensor_us","active"}
 *   {"op":"behind"} + router cubin                       -> {}
 *   {"op":"behind_try","kernel","kind","timeout_ms"}     -> {["refused":"..."]}
 *   {"op":"behind_time","kernel","kind","timeout_ms"}    -> {"us"}
 *   {"op":"trace","kernel"} + struct device_trace       -> {} + the part of the workspace
 * A reply has "ok":true; a failure is {"ok":false,"status":n,"text":"..."}. */
#ifndef MOEFORGE_TUNER_DEVICE_CLIENT_H
#define MOEFORGE_TUNER_DEVICE_CLIENT_H

#include "check.h"
#include "device.h"
#include "device_emu.h"
#include "error.h"
#include "types.h"
#include <jansson.h>

#define DEVICES_MAX 16

/* ---- helper kernels ---- */
/* Owns the cubins of 'tools'; device_tool_set_free() ends it. */
struct device_tool_set {
  struct device_tools tools;
};
/* Compiles templates/tools/{datagen,floor}.cu for 'arch' (compile_arch) in a child. */
enum mf_status device_tools_build(const char *program, const char *template_dir, const char *arch, struct device_tool_set *out, struct error *err);
void device_tool_set_free(struct device_tool_set *set);
/* One of them, templates/tools/<name>.cu; the caller frees *cubin. */
enum mf_status device_tool_build(const char *program, const char *template_dir, const char *arch, const char *name, const void **cubin, size_t *bytes,
                                 struct error *err);

/* ---- one device ---- */
/* Asks a child. At most DEVICES_MAX devices. */
enum mf_status device_client_probe(const char *program, struct device_info out[DEVICES_MAX], int *count, struct error *err);
/* Asks a child for everything that doctor shows of the devices: a JSON object as above, owned by the caller. */
enum mf_status device_client_examine(const char *program, json_t **out, struct error *err);

struct device_client;
/* Starts a child and opens device 'ordinal' in it. 'threads': CPU threads that the child may use for references, 0 = all. */
enum mf_status device_client_start(const char *program, int ordinal, const struct device_tools *tools, int threads, struct device_client **out,
                                   struct error *err);
/* The same with an emulated device. Its kernels are images (device_emu_image) instead of cubins. */
enum mf_status device_client_start_emulated(const char *program, const struct device_emulation *emulation, int threads, struct device_client **out,
                                            struct error *err);
/* Kills the child. NULL is allowed. */
void device_client_stop(struct device_client *client);
const struct device_info *device_client_info(const struct device_client *client);
bool device_client_alive(const struct device_client *client);

/* As in device_ops. Kernel handles are small integers, valid until unload, the next load_problem, or the child's end. */
enum mf_status device_client_load_problem(struct device_client *client, const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max,
                                          struct error *err);
enum mf_status device_client_load_kernel(struct device_client *client, const void *cubin, size_t bytes, const struct mf_recipe *recipe, int *kernel,
                                         struct error *err);
enum mf_status device_client_unload_kernel(struct device_client *client, int kernel, struct error *err);

/* What a check runs. Borrowed. */
struct check_plan {
  const struct mf_problem *problem;
  double routed_scaling;
  const char *cache_dir;          /* reference cache; created if missing */
  const struct test_case *cases;
  int ncases;
  int layers;                     /* case i runs on layer i % layers; >= 1 */
  int replays;                    /* >= 2 */
  int timeout_ms;                 /* of one launch */
  const uint64_t *seed;           /* of the emulated device's interleavings, instead of the one that it was opened with; NULL */
  const uint64_t *item_seeds;     /* check_many: one for each item, instead of 'seed'; NULL */
};
/* Runs and judges the cases in the child. MF_OK whatever the verdict (*result); a fault is an error. */
enum mf_status device_client_check(struct device_client *client, int kernel, const struct check_plan *plan, struct check_result *result, struct error *err);

/* Waits until no other process times on this GPU (device_lock.h), held until stop. 'notify' is called with one line if it has to wait. Waiting ends with
 * MF_ERR_INTERRUPTED on a signal. */
typedef void device_notify_fn(void *context, const char *line);
enum mf_status device_client_lock(struct device_client *client, device_notify_fn *notify, void *context, struct error *err);
enum mf_status device_client_open_profile(struct device_client *client, const int *kernels, int count, int tokens, enum routing_kind routing, uint32_t seed,
                                          int launches, struct error *err);
/* run: one per kernel of the profile, or NULL for all. us: NAN where run is false. */
enum mf_status device_client_round(struct device_client *client, const bool *run, int round, double *us, struct floor_times *floors, double *active,
                                   struct error *err);

/* As in device_ops. */
enum mf_status device_client_open_behind(struct device_client *client, const void *router, size_t bytes, struct error *err);
enum mf_status device_client_try_behind(struct device_client *client, int kernel, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err);
enum mf_status device_client_time_behind(struct device_client *client, int kernel, enum behind_kind kind, int timeout_ms, double *us, struct error *err);

/* As in device_ops; the caller frees *area, what->bytes long. */
enum mf_status device_client_trace(struct device_client *client, int kernel, const struct device_trace *what, void **area, struct error *err);

/* ---- many candidates ---- */
/* Called as work gets done; false stops with MF_ERR_INTERRUPTED. May be NULL. */
typedef bool device_progress_fn(void *context, int done, int total);
/* Makes the references of all cases with 'jobs' children; what the cache has is not made again. */
enum mf_status device_client_references(const char *program, const struct check_plan *plan, int jobs, device_progress_fn *progress, void *context,
                                        struct error *err);

struct check_item {
  const void *cubin; /* for the emulated device: an image */
  size_t cubin_bytes;
  const struct mf_recipe *recipe;
  const struct test_case *cases; /* instead of the plan's, of which they must be some; NULL */
  int ncases;
};

/* What became of one candidate. */
struct check_verdict {
  enum mf_status status;      /* MF_OK passed; MF_ERR_CHECK: result says which gate; else a fault: TIMEOUT, WORKER, DEVICE, MISS_..., CORRUPT */
  struct check_result result; /* of the last run; zeroed after a fault */
  char fault[ERROR_TEXT_MAX]; /* "" or one line: "killed by signal 11 ...", "no progress within 2000 ms" */
  int runs;                   /* 1, or 2 if it was judged again */
};
/* Receives each candidate's final verdict, in any order. A failing status stops everything and is returned. */
typedef enum mf_status check_done_fn(void *context, size_t index, const struct check_verdict *verdict, struct error *err);

struct check_pool {
  const char *program;
  int ordinal;
  const struct device_tools *tools;
  int jobs;                   /* children at most; fewer if device memory is short */
  const struct device_emulation *emulation; /* NULL: a GPU; else ordinal and tools mean nothing */
};
/* Checks all items. A candidate that fails or faults is judged once more, in a fresh child that runs nothing else, and the second verdict stands,
 * unless the first run was such a one already and the two disagree: not reproducible is a failure. An error is returned only if no verdicts can be had at
 * all (no device, no memory, interrupt, 'done' failed); verdicts given until then stand. */
enum mf_status device_client_check_many(const struct check_pool *pool, const struct check_plan *plan, const struct check_item *items, size_t count,
                                        check_done_fn *done, void *context, struct error *err);

#endif
