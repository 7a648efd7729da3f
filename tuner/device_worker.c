/* device_worker.c - the child that holds a device: reads requests (device_client.h lists them), answers them, ends at end of file.
 *
 * One thread. Each request is one function of the table at the end. A failure is an answer like any other, except that after a fatal one
 * (wire_is_fatal: the kernel hangs, or the context is lost) the process leaves at once by _exit: closing anything would wait for the GPU.
 *
 * The requests that need no open device, and how a request's values are read, are in device_worker_tools.c. */
#include "device_worker.h"
#include "worker.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device_emu.h"
#include "device_judge.h"
#include "device_lock.h"

#define PROGRESS_NS 100000000 /* between progress frames */

static enum mf_status need_device(const struct child *c, struct error *err)
{
  return c->dev != NULL ? MF_OK : error_set(err, MF_ERR_USAGE, "device request: no device is open");
}

static enum mf_status read_kernel(const struct child *c, const struct frame *req, int *handle, struct error *err)
{
  enum mf_status rc = need_device(c, err);
  if(rc == MF_OK)
    rc = request_int(req, "kernel", 0, MAX_KERNELS - 1, handle, err);
  if(rc == MF_OK && c->kernels[*handle] == NULL)
    rc = error_set(err, MF_ERR_USAGE, "device request: kernel %d is not loaded", *handle);
  return rc;
}

/* A frame ahead of the answer: {"name": value}. */
static enum mf_status send_note(const struct child *c, const char *name, json_t *value, struct error *err)
{
  struct frame note;
  enum mf_status rc;
  memset(&note, 0, sizeof(note));
  note.head = json_object();
  json_object_set_new(note.head, name, value);
  rc = frame_write(c->fd, &note, err);
  frame_free(&note);
  return rc;
}

/* ---- device, weights, kernels ---- */
/* From here on this process has the emulated device and no GPU. */
static enum mf_status emulate(struct child *c, const json_t *request, struct error *err)
{
  struct device_emulation emulation;
  const enum mf_status rc = wire_read_emulation(request, &emulation, err);
  if(rc != MF_OK)
    return rc;
  device_emu_configure(&emulation);
  c->ops = &device_emu;
  return MF_OK;
}

static enum mf_status do_open(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  const struct device_tools tools = {req->blob[0], req->blob_bytes[0], req->blob[1], req->blob_bytes[1]};
  const json_t *emulated = json_object_get(req->head, "emulated");
  int ordinal = 0, threads = 0;
  enum mf_status rc = request_int(req, "ordinal", 0, 1000, &ordinal, err);
  if(rc == MF_OK)
    rc = request_int(req, "threads", 0, 4096, &threads, err);
  if(rc == MF_OK && c->dev != NULL)
    rc = error_set(err, MF_ERR_USAGE, "device request: a device is open already");
  if(rc == MF_OK && emulated != NULL)
    rc = emulate(c, emulated, err);
  if(rc == MF_OK)
    rc = c->ops->info(ordinal, &c->info, err);
  if(rc == MF_OK)
    rc = c->ops->open(ordinal, &tools, &c->dev, err);
  if(rc != MF_OK)
    return rc;
  request_threads(threads);
  json_object_set_new(reply->head, "info", wire_info(&c->info));
  return MF_OK;
}

static enum mf_status do_problem(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  int layers = 0, tokens_max = 0;
  enum mf_status rc = need_device(c, err);
  (void)reply;
  if(rc == MF_OK)
    rc = request_int(req, "layers", 1, COLD_MAX_LAYERS, &layers, err);
  if(rc == MF_OK)
    rc = request_int(req, "tokens_max", 1, MAX_TOKENS, &tokens_max, err);
  if(rc == MF_OK)
    rc = request_struct(req, 0, &c->problem, sizeof(c->problem), "struct mf_problem", err);
  if(rc != MF_OK)
    return rc;
  c->problem_loaded = false;
  memset(c->kernels, 0, sizeof(c->kernels)); /* the device frees them with the old weights */
  c->profile_kernels = 0;
  c->routed_scaling = json_number_value(json_object_get(req->head, "scaling"));
  rc = c->ops->load_problem(c->dev, &c->problem, c->routed_scaling, layers, tokens_max, err);
  c->layers = layers;
  c->problem_loaded = rc == MF_OK;
  return rc;
}

static enum mf_status do_kernel(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct mf_recipe recipe;
  int handle = 0;
  enum mf_status rc = need_device(c, err);
  if(rc == MF_OK && !c->problem_loaded)
    rc = error_set(err, MF_ERR_USAGE, "device request: no problem is loaded");
  if(rc == MF_OK)
    rc = request_struct(req, 1, &recipe, sizeof(recipe), "struct mf_recipe", err);
  while(rc == MF_OK && handle < MAX_KERNELS && c->kernels[handle] != NULL)
    handle++;
  if(rc == MF_OK && handle == MAX_KERNELS)
    rc = error_set(err, MF_ERR_USAGE, "device request: %d kernels are loaded already, unload some", MAX_KERNELS);
  if(rc == MF_OK)
    rc = c->ops->load_kernel(c->dev, req->blob[0], req->blob_bytes[0], &recipe, &c->kernels[handle], err);
  if(rc == MF_OK)
    json_object_set_new(reply->head, "kernel", json_integer(handle));
  return rc;
}

static enum mf_status do_unload(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  int handle = 0;
  const enum mf_status rc = read_kernel(c, req, &handle, err);
  (void)reply;
  if(rc != MF_OK)
    return rc;
  c->ops->unload_kernel(c->dev, c->kernels[handle]);
  c->kernels[handle] = NULL;
  return MF_OK;
}

/* ---- check ---- */
static int64_t now_ns(void)
{
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static enum mf_status judge_all(struct child *c, const struct judge_run *run, const struct test_case *cases, int count, struct check_result *result,
                                struct error *err)
{
  int64_t told = now_ns();
  enum mf_status rc = MF_OK;
  for(int i = 0; i < count && rc == MF_OK && result->passed; i++) {
    rc = judge_case(run, &cases[i], i, result, err);
    if(rc == MF_OK && now_ns() - told > PROGRESS_NS) {
      told = now_ns();
      rc = send_note(c, "progress", json_integer(i + 1), err);
    }
  }
  return rc;
}

/* "seed" is optional, and only for a device whose interleavings follow from one. */
static enum mf_status take_seed(struct child *c, const struct frame *req, struct error *err)
{
  const json_t *seed = json_object_get(req->head, "seed");
  if(seed == NULL)
    return MF_OK;
  if(!json_is_integer(seed) || c->ops->set_seed == NULL)
    return error_set(err, MF_ERR_USAGE, "device request: seed: expected an integer and an emulated device");
  c->ops->set_seed(c->dev, (uint64_t)json_integer_value(seed));
  return MF_OK;
}

static enum mf_status do_check(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct check_result result = {.passed = true};
  struct judge_run run = {.ops = c->ops, .dev = c->dev, .problem = &c->problem, .routed_scaling = (float)c->routed_scaling};
  const size_t count = req->blob_bytes[0] / sizeof(struct test_case);
  int handle = 0;
  enum mf_status rc = read_kernel(c, req, &handle, err);
  if(rc == MF_OK)
    rc = request_text(req, "cache_dir", &run.cache_dir, err);
  if(rc == MF_OK)
    rc = request_int(req, "layers", 1, c->layers, &run.layers, err);
  if(rc == MF_OK)
    rc = request_int(req, "replays", 2, 8, &run.replays, err);
  if(rc == MF_OK)
    rc = request_int(req, "timeout_ms", 1, 3600000, &run.timeout_ms, err);
  if(rc == MF_OK && (count == 0 || count * sizeof(struct test_case) != req->blob_bytes[0]))
    rc = error_set(err, MF_ERR_USAGE, "device request: cases: expected a list of struct test_case, got %zu bytes", req->blob_bytes[0]);
  if(rc == MF_OK)
    rc = take_seed(c, req, err);
  if(rc != MF_OK)
    return rc;
  run.kernel = c->kernels[handle];
  rc = judge_all(c, &run, req->blob[0], (int)count, &result, err);
  if(rc == MF_OK)
    json_object_set_new(reply->head, "result", wire_check_result(&result));
  return rc;
}

/* ---- timing ---- */
static enum mf_status do_lock(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  char holder[64];
  enum mf_status rc = need_device(c, err);
  (void)req;
  (void)reply;
  if(rc != MF_OK || c->lock_fd >= 0)
    return rc;
  rc = device_lock_try(c->info.uuid, &c->lock_fd, holder, sizeof(holder), err);
  if(rc != MF_OK || c->lock_fd >= 0)
    return rc;
  rc = send_note(c, "waiting", json_sprintf("%s (%s) is being timed by %s: waiting for it to finish", c->info.name, c->info.uuid, holder), err);
  return rc == MF_OK ? device_lock_wait(c->info.uuid, &c->lock_fd, err) : rc;
}

static enum mf_status do_profile(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  const json_t *handles = json_object_get(req->head, "kernels"), *seed = json_object_get(req->head, "seed");
  const size_t count = json_array_size(handles);
  struct device_kernel *kernels[MAX_KERNELS];
  int tokens = 0, launches = 0, routing = 0;
  enum mf_status rc = need_device(c, err);
  (void)reply;
  if(rc == MF_OK)
    rc = request_int(req, "tokens", 1, MAX_TOKENS, &tokens, err);
  if(rc == MF_OK)
    rc = request_int(req, "launches", 1, 4096, &launches, err);
  if(rc == MF_OK)
    rc = request_int(req, "routing", 0, ROUTING_KINDS - 1, &routing, err);
  if(rc == MF_OK && (count < 1 || count > MAX_KERNELS || !json_is_integer(seed)))
    rc = error_set(err, MF_ERR_USAGE, "device request: expected a seed and 1..%d kernels, got %zu", MAX_KERNELS, count);
  for(size_t i = 0; i < count && rc == MF_OK; i++) {
    const json_int_t handle = json_integer_value(json_array_get(handles, i));
    if(handle < 0 || handle >= MAX_KERNELS || c->kernels[handle] == NULL)
      rc = error_set(err, MF_ERR_USAGE, "device request: kernel %d is not loaded", (int)handle);
    else
      kernels[i] = c->kernels[handle];
  }
  c->profile_kernels = 0;
  if(rc == MF_OK)
    rc = c->ops->open_profile(c->dev, kernels, (int)count, tokens, (enum routing_kind)routing, (uint32_t)json_integer_value(seed), launches, err);
  if(rc == MF_OK)
    c->profile_kernels = (int)count;
  return rc;
}

static enum mf_status do_round(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  const json_t *wanted = json_object_get(req->head, "run");
  bool run[MAX_KERNELS];
  struct floor_times floors = {0, NAN};
  double us[MAX_KERNELS], active = 0;
  json_t *times;
  int round = 0;
  enum mf_status rc = need_device(c, err);
  if(rc == MF_OK)
    rc = request_int(req, "round", 0, 1 << 30, &round, err);
  if(rc == MF_OK && (c->profile_kernels == 0 || (wanted != NULL && json_array_size(wanted) != (size_t)c->profile_kernels)))
    rc = error_set(err, MF_ERR_USAGE, "device request: run: expected %d entries, one for each kernel of the open profile", c->profile_kernels);
  for(int i = 0; i < c->profile_kernels; i++)
    run[i] = wanted == NULL || json_is_true(json_array_get(wanted, (size_t)i));
  if(rc == MF_OK)
    rc = c->ops->time_round(c->dev, run, round, us, &floors, &active, err);
  if(rc != MF_OK)
    return rc;
  times = json_array();
  for(int i = 0; i < c->profile_kernels; i++)
    json_array_append_new(times, wire_number(us[i]));
  json_object_set_new(reply->head, "us", times);
  json_object_set_new(reply->head, "floor_us", wire_number(floors.copy_us));
  json_object_set_new(reply->head, "floor_tensor_us", wire_number(floors.tensor_us));
  json_object_set_new(reply->head, "active", wire_number(active));
  return MF_OK;
}

static enum mf_status do_behind(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  const enum mf_status rc = need_device(c, err);
  (void)reply;
  return rc == MF_OK ? c->ops->open_behind(c->dev, req->blob[0], req->blob_bytes[0], err) : rc;
}

/* A kind of launch behind a router. */
struct behind_request {
  int kernel, kind, timeout_ms;
};

static enum mf_status read_behind(const struct child *c, const struct frame *req, struct behind_request *out, struct error *err)
{
  enum mf_status rc = need_device(c, err);
  if(rc == MF_OK)
    rc = request_int(req, "kernel", 0, c->profile_kernels, &out->kernel, err);
  if(rc == MF_OK)
    rc = request_int(req, "kind", 0, BEHIND_KINDS - 1, &out->kind, err);
  return rc == MF_OK ? request_int(req, "timeout_ms", 1, 3600000, &out->timeout_ms, err) : rc;
}

static enum mf_status do_behind_try(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct behind_request what = {0, 0, 0};
  struct error refused = {MF_OK, ""};
  enum mf_status rc = read_behind(c, req, &what, err);
  if(rc == MF_OK)
    rc = c->ops->try_behind(c->dev, what.kernel, (enum behind_kind)what.kind, what.timeout_ms, &refused, err);
  if(refused.status != MF_OK)
    json_object_set_new(reply->head, "refused", json_string(refused.text));
  return rc;
}

static enum mf_status do_behind_time(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct behind_request what = {0, 0, 0};
  double us = 0;
  enum mf_status rc = read_behind(c, req, &what, err);
  if(rc == MF_OK)
    rc = c->ops->time_behind(c->dev, what.kernel, (enum behind_kind)what.kind, what.timeout_ms, &us, err);
  json_object_set_new(reply->head, "us", wire_number(us));
  return rc;
}

/* ---- trace ---- */
static enum mf_status do_trace(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct device_trace what = {0};
  int handle = 0;
  enum mf_status rc = read_kernel(c, req, &handle, err);
  if(rc == MF_OK)
    rc = request_struct(req, 0, &what, sizeof(what), "struct device_trace", err);
  if(rc != MF_OK)
    return rc;
  if(what.bytes == 0)
    return error_set(err, MF_ERR_USAGE, "device request: trace: expected some bytes of the workspace");
  reply->blob[0] = calloc(1, what.bytes);
  reply->blob_bytes[0] = what.bytes;
  if(reply->blob[0] == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for a trace of %zu bytes", what.bytes);
  c->profile_kernels = 0;
  return c->ops->trace(c->dev, c->kernels[handle], &what, reply->blob[0], err);
}

/* ---- the loop ---- */
static const struct {
  const char *op;
  enum mf_status (*run)(struct child *c, const struct frame *req, struct frame *reply, struct error *err);
} requests[] = {
    {"probe", answer_probe}, {"doctor", answer_doctor}, {"tool", answer_tool},   {"reference", answer_reference}, {"open", do_open},   {"problem", do_problem},
    {"kernel", do_kernel}, {"unload", do_unload}, {"check", do_check}, {"lock", do_lock},         {"profile", do_profile}, {"round", do_round},
    {"behind", do_behind}, {"behind_try", do_behind_try}, {"behind_time", do_behind_time}, {"trace", do_trace},
};

static enum mf_status answer(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  const char *op = json_string_value(json_object_get(req->head, "op"));
  for(size_t i = 0; op != NULL && i < sizeof(requests) / sizeof(requests[0]); i++)
    if(strcmp(requests[i].op, op) == 0)
      return requests[i].run(c, req, reply, err);
  return error_set(err, MF_ERR_USAGE, "device request: unknown op \"%s\"", op != NULL ? op : "");
}

/* One request. False ends the loop, with the exit code in *code. */
static bool serve(struct child *c, int *code)
{
  struct frame req, reply;
  struct error err = {MF_OK, ""};
  enum mf_status rc = frame_read(c->fd, &req, &err), sent;
  if(rc != MF_OK) {
    *code = rc == MF_ERR_NOT_FOUND ? 0 : error_exit_code(rc);
    return false;
  }
  memset(&reply, 0, sizeof(reply));
  reply.head = json_pack("{s:b}", "ok", 1);
  rc = answer(c, &req, &reply, &err);
  if(rc != MF_OK) {
    err.status = rc;
    json_decref(reply.head);
    reply.head = wire_error(&err);
  }
  sent = frame_write(c->fd, &reply, &err);
  if(wire_is_fatal(rc))
    _exit(error_exit_code(rc));
  frame_free(&req);
  frame_free(&reply);
  *code = sent == MF_OK ? 0 : error_exit_code(sent);
  return sent == MF_OK;
}

int worker_main_device(int fd)
{
  struct child *c = calloc(1, sizeof(*c));
  int code = error_exit_code(MF_ERR_NOMEM);
  if(c == NULL)
    return code;
  c->fd = fd;
  c->ops = &device_cuda;
  c->lock_fd = -1;
  while(serve(c, &code))
    ;
  c->ops->close(c->dev);
  if(c->lock_fd >= 0)
    close(c->lock_fd);
  free(c);
  return code;
}
