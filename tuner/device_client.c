/* device_client.c - see device_client.h. One request at a time: request_new(), fill in, transact(), read the reply.
 *
 * The parent waits in slices of WAIT_SLICE_MS, so that an interrupt ends any call. Time limits are those of the child plus MARGIN_MS: the child
 * notices a hanging kernel itself and can say which case it was; the limit here is for a child that is stuck in the driver. */
#include "device_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device_client_internal.h"
#include "device_wire.h"
#include "progress.h"

#define WAIT_SLICE_MS 200
#define MARGIN_MS 60000
#define START_TIMEOUT_MS 120000   /* the driver's start, a context, the weights of all layers */
#define COMPILE_TOOL_TIMEOUT_MS 120000
#define ROUND_LIMIT_MS 120000
#define BEHIND_MARGIN_MS 5000     /* a few replays of microseconds, captures, copies of outputs */
#define ASKING_DRIVER "asking the CUDA driver for its GPUs (--device none goes on without)"

/* ---- requests ---- */
struct frame request_new(const char *op)
{
  struct frame req;
  memset(&req, 0, sizeof(req));
  req.head = json_pack("{s:s}", "op", op);
  return req;
}

/* Borrows the bytes: they are not freed with the request. */
void request_blob(struct frame *req, int blob, const void *bytes, size_t count)
{
  req->blob[blob] = (void *)(uintptr_t)bytes;
  req->blob_bytes[blob] = count;
}

void request_end(struct frame *req)
{
  json_decref(req->head);
  memset(req, 0, sizeof(*req));
}

int64_t client_now_ms(void)
{
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

bool is_note(const struct frame *frame)
{
  return json_object_get(frame->head, "ok") == NULL;
}

/* Ends the child if its state is unknown after 'rc'. */
static enum mf_status settle(struct device_client *client, enum mf_status rc)
{
  if(rc == MF_ERR_INTERRUPTED || wire_is_fatal(rc))
    worker_stop(&client->worker);
  return rc;
}

/* One frame, at most timeout_ms from now; timeout_ms < 0 waits for ever. */
static enum mf_status receive(struct device_client *client, int timeout_ms, struct frame *out, struct error *err)
{
  const int64_t end = client_now_ms() + timeout_ms;
  for(;;) {
    const enum mf_status rc = worker_receive(&client->worker, out, WAIT_SLICE_MS, err);
    if(rc != MF_ERR_TIMEOUT)
      return rc;
    if(interrupt_requested())
      return error_set(err, MF_ERR_INTERRUPTED, "interrupted while waiting for the device worker");
    if(timeout_ms >= 0 && client_now_ms() > end)
      return error_set(err, MF_ERR_TIMEOUT, "the device worker gave no answer within %d ms; it was killed", timeout_ms);
  }
}

/* Sends the request, receives the reply; notes before it go to 'notify' (may be NULL). Takes over the request's head. */
static enum mf_status transact(struct device_client *client, struct frame *req, int timeout_ms, struct frame *reply, device_notify_fn *notify, void *context,
                               struct error *err)
{
  enum mf_status rc;
  memset(reply, 0, sizeof(*reply));
  if(client->worker.pid == 0) {
    request_end(req);
    return error_set(err, MF_ERR_WORKER, "the device worker has ended");
  }
  rc = worker_send(&client->worker, req, err);
  request_end(req);
  while(rc == MF_OK) {
    const char *waiting;
    rc = receive(client, timeout_ms, reply, err);
    if(rc != MF_OK || !is_note(reply))
      break;
    waiting = json_string_value(json_object_get(reply->head, "waiting"));
    if(waiting != NULL && notify != NULL)
      notify(context, waiting);
    frame_free(reply);
  }
  if(rc == MF_OK)
    rc = wire_read_status(reply, err);
  if(rc != MF_OK)
    frame_free(reply);
  return settle(client, rc);
}

/* For requests whose reply has nothing to read. */
static enum mf_status transact_plain(struct device_client *client, struct frame *req, int timeout_ms, struct error *err)
{
  struct frame reply;
  const enum mf_status rc = transact(client, req, timeout_ms, &reply, NULL, NULL, err);
  frame_free(&reply);
  return rc;
}

/* A reply that lacks what it must have. */
static enum mf_status bad_reply(struct device_client *client, const char *what, struct error *err)
{
  return settle(client, error_set(err, MF_ERR_INTERNAL, "device worker: the answer has no %s", what));
}

/* ---- without a device ---- */
static enum mf_status ask_once(const char *program, const char *doing, struct frame *req, int timeout_ms, struct frame *reply, struct error *err)
{
  struct device_client client;
  enum mf_status rc;
  memset(&client, 0, sizeof(client));
  memset(reply, 0, sizeof(*reply));
  rc = worker_start(program, DEVICE_ROLE, &client.worker, err);
  if(rc != MF_OK) {
    request_end(req);
    return rc;
  }
  rc = transact(&client, req, timeout_ms, reply, NULL, NULL, err);
  worker_stop(&client.worker);
  return rc == MF_ERR_WORKER || rc == MF_ERR_TIMEOUT ? error_prefix(err, "%s", doing) : rc;
}

enum mf_status device_tool_build(const char *program, const char *template_dir, const char *arch, const char *name, const void **cubin, size_t *bytes,
                                 struct error *err)
{
  struct frame req = request_new("tool"), reply;
  enum mf_status rc;
  json_object_set_new(req.head, "name", json_string(name));
  json_object_set_new(req.head, "template_dir", json_string(template_dir));
  json_object_set_new(req.head, "arch", json_string(arch));
  rc = ask_once(program, "compiling the tuner's own kernels", &req, COMPILE_TOOL_TIMEOUT_MS, &reply, err);
  if(rc == MF_OK && reply.blob_bytes[0] == 0)
    rc = error_set(err, MF_ERR_INTERNAL, "tools/%s.cu: the worker sent no cubin", name);
  if(rc == MF_OK) {
    *cubin = reply.blob[0];
    *bytes = reply.blob_bytes[0];
    reply.blob[0] = NULL;
  }
  frame_free(&reply);
  return rc;
}

enum mf_status device_tools_build(const char *program, const char *template_dir, const char *arch, struct device_tool_set *out, struct error *err)
{
  enum mf_status rc;
  memset(out, 0, sizeof(*out));
  if(arch == NULL)
    return error_set(err, MF_ERR_NO_DEVICE, "the GPU's architecture is none that the kernels run on (compute capability 9.0)");
  rc = device_tool_build(program, template_dir, arch, "datagen", &out->tools.datagen, &out->tools.datagen_bytes, err);
  if(rc == MF_OK)
    rc = device_tool_build(program, template_dir, arch, "floor", &out->tools.floor, &out->tools.floor_bytes, err);
  if(rc != MF_OK)
    device_tool_set_free(out);
  return rc;
}

void device_tool_set_free(struct device_tool_set *set)
{
  free((void *)(uintptr_t)set->tools.datagen);
  free((void *)(uintptr_t)set->tools.floor);
  memset(set, 0, sizeof(*set));
}

enum mf_status device_client_probe(const char *program, struct device_info out[DEVICES_MAX], int *count, struct error *err)
{
  struct frame req = request_new("probe"), reply;
  enum mf_status rc = ask_once(program, ASKING_DRIVER, &req, START_TIMEOUT_MS, &reply, err);
  const json_t *devices = json_object_get(reply.head, "devices");
  *count = 0;
  for(size_t i = 0; rc == MF_OK && i < json_array_size(devices) && i < DEVICES_MAX; i++) {
    rc = wire_read_info(json_array_get(devices, i), &out[i], err);
    *count += rc == MF_OK;
  }
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_examine(const char *program, json_t **out, struct error *err)
{
  struct frame req = request_new("doctor"), reply;
  const enum mf_status rc = ask_once(program, ASKING_DRIVER, &req, START_TIMEOUT_MS, &reply, err);
  *out = NULL;
  if(rc == MF_OK)
    *out = json_incref(reply.head);
  frame_free(&reply);
  return rc;
}

/* ---- one device ---- */
struct frame open_request(int ordinal, const struct device_tools *tools, int threads)
{
  struct frame req = request_new("open");
  json_object_set_new(req.head, "ordinal", json_integer(ordinal));
  json_object_set_new(req.head, "threads", json_integer(threads));
  request_blob(&req, 0, tools->datagen, tools->datagen_bytes);
  request_blob(&req, 1, tools->floor, tools->floor_bytes);
  return req;
}

struct frame open_emulated_request(const struct device_emulation *emulation, int threads)
{
  const struct device_tools none = {NULL, 0, NULL, 0};
  struct frame req = open_request(0, &none, threads);
  json_object_set_new(req.head, "emulated", wire_emulation(emulation));
  return req;
}

struct frame problem_request(const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max)
{
  struct frame req = request_new("problem");
  json_object_set_new(req.head, "scaling", wire_number(routed_scaling));
  json_object_set_new(req.head, "layers", json_integer(layers));
  json_object_set_new(req.head, "tokens_max", json_integer(tokens_max));
  request_blob(&req, 0, problem, sizeof(*problem));
  return req;
}

struct frame kernel_request(const void *cubin, size_t bytes, const struct mf_recipe *recipe)
{
  struct frame req = request_new("kernel");
  request_blob(&req, 0, cubin, bytes);
  request_blob(&req, 1, recipe, sizeof(*recipe));
  return req;
}

struct frame unload_request(int kernel)
{
  struct frame req = request_new("unload");
  json_object_set_new(req.head, "kernel", json_integer(kernel));
  return req;
}

struct frame check_request(int kernel, const struct check_plan *plan, const struct test_case *cases, int ncases)
{
  struct frame req = request_new("check");
  json_object_set_new(req.head, "kernel", json_integer(kernel));
  json_object_set_new(req.head, "cache_dir", json_string(plan->cache_dir));
  json_object_set_new(req.head, "layers", json_integer(plan->layers));
  json_object_set_new(req.head, "replays", json_integer(plan->replays));
  json_object_set_new(req.head, "timeout_ms", json_integer(plan->timeout_ms));
  if(plan->seed != NULL)
    json_object_set_new(req.head, "seed", json_integer((json_int_t)*plan->seed));
  request_blob(&req, 0, cases, (size_t)ncases * sizeof(*cases));
  return req;
}

int check_limit_ms(const struct check_plan *plan)
{
  return plan->timeout_ms * plan->replays + MARGIN_MS;
}

int start_limit_ms(void)
{
  return START_TIMEOUT_MS;
}

/* Takes over the request. */
static enum mf_status start(const char *program, struct frame *req, struct device_client **out, struct error *err)
{
  struct device_client *client = calloc(1, sizeof(*client));
  struct frame reply;
  enum mf_status rc = client != NULL ? worker_start(program, DEVICE_ROLE, &client->worker, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  *out = NULL;
  if(rc != MF_OK) {
    request_end(req);
    free(client);
    return rc;
  }
  rc = transact(client, req, START_TIMEOUT_MS, &reply, NULL, NULL, err);
  if(rc == MF_OK)
    rc = wire_read_info(json_object_get(reply.head, "info"), &client->info, err);
  frame_free(&reply);
  if(rc != MF_OK) {
    device_client_stop(client);
    return rc;
  }
  *out = client;
  return MF_OK;
}

enum mf_status device_client_start(const char *program, int ordinal, const struct device_tools *tools, int threads, struct device_client **out,
                                   struct error *err)
{
  struct frame req = open_request(ordinal, tools, threads);
  return start(program, &req, out, err);
}

enum mf_status device_client_start_emulated(const char *program, const struct device_emulation *emulation, int threads, struct device_client **out,
                                            struct error *err)
{
  struct frame req = open_emulated_request(emulation, threads);
  return start(program, &req, out, err);
}

void device_client_stop(struct device_client *client)
{
  if(client == NULL)
    return;
  worker_stop(&client->worker);
  free(client);
}

const struct device_info *device_client_info(const struct device_client *client)
{
  return &client->info;
}

bool device_client_alive(const struct device_client *client)
{
  return client->worker.pid != 0;
}

enum mf_status device_client_load_problem(struct device_client *client, const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max,
                                          struct error *err)
{
  struct frame req = problem_request(problem, routed_scaling, layers, tokens_max);
  return transact_plain(client, &req, START_TIMEOUT_MS, err);
}

enum mf_status device_client_load_kernel(struct device_client *client, const void *cubin, size_t bytes, const struct mf_recipe *recipe, int *kernel,
                                         struct error *err)
{
  struct frame req = kernel_request(cubin, bytes, recipe), reply;
  const json_t *handle;
  enum mf_status rc = transact(client, &req, MARGIN_MS, &reply, NULL, NULL, err);
  if(rc != MF_OK)
    return rc;
  handle = json_object_get(reply.head, "kernel");
  if(json_is_integer(handle))
    *kernel = (int)json_integer_value(handle);
  else
    rc = bad_reply(client, "kernel handle", err);
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_unload_kernel(struct device_client *client, int kernel, struct error *err)
{
  struct frame req = unload_request(kernel);
  return transact_plain(client, &req, MARGIN_MS, err);
}

enum mf_status device_client_check(struct device_client *client, int kernel, const struct check_plan *plan, struct check_result *result, struct error *err)
{
  struct frame req = check_request(kernel, plan, plan->cases, plan->ncases), reply;
  enum mf_status rc = transact(client, &req, check_limit_ms(plan), &reply, NULL, NULL, err);
  if(rc != MF_OK)
    return rc;
  rc = settle(client, wire_read_check_result(json_object_get(reply.head, "result"), result, err));
  frame_free(&reply);
  return rc;
}

/* ---- timing ---- */
enum mf_status device_client_lock(struct device_client *client, device_notify_fn *notify, void *context, struct error *err)
{
  struct frame req = request_new("lock"), reply;
  const enum mf_status rc = transact(client, &req, -1, &reply, notify, context, err);
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_open_profile(struct device_client *client, const int *kernels, int count, int tokens, enum routing_kind routing, uint32_t seed,
                                          int launches, struct error *err)
{
  struct frame req = request_new("profile");
  json_t *handles = json_array();
  enum mf_status rc;
  for(int i = 0; i < count; i++)
    json_array_append_new(handles, json_integer(kernels[i]));
  json_object_set_new(req.head, "kernels", handles);
  json_object_set_new(req.head, "tokens", json_integer(tokens));
  json_object_set_new(req.head, "routing", json_integer((int)routing));
  json_object_set_new(req.head, "seed", json_integer(seed));
  json_object_set_new(req.head, "launches", json_integer(launches));
  rc = transact_plain(client, &req, ROUND_LIMIT_MS, err);
  client->profile_kernels = rc == MF_OK ? count : 0;
  return rc;
}

enum mf_status device_client_round(struct device_client *client, const bool *run, int round, double *us, struct floor_times *floors, double *active,
                                   struct error *err)
{
  struct frame req = request_new("round"), reply;
  const json_t *times;
  enum mf_status rc;
  json_object_set_new(req.head, "round", json_integer(round));
  if(run != NULL) {
    json_t *wanted = json_array();
    for(int i = 0; i < client->profile_kernels; i++)
      json_array_append_new(wanted, json_boolean(run[i]));
    json_object_set_new(req.head, "run", wanted);
  }
  rc = transact(client, &req, ROUND_LIMIT_MS, &reply, NULL, NULL, err);
  if(rc != MF_OK)
    return rc;
  times = json_object_get(reply.head, "us");
  if(json_array_size(times) != (size_t)client->profile_kernels)
    rc = bad_reply(client, "time for each kernel", err);
  for(size_t i = 0; rc == MF_OK && i < json_array_size(times); i++)
    us[i] = wire_read_number(json_array_get(times, i));
  floors->copy_us = wire_read_number(json_object_get(reply.head, "floor_us"));
  floors->tensor_us = wire_read_number(json_object_get(reply.head, "floor_tensor_us"));
  *active = wire_read_number(json_object_get(reply.head, "active"));
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_open_behind(struct device_client *client, const void *router, size_t bytes, struct error *err)
{
  struct frame req = request_new("behind");
  request_blob(&req, 0, router, bytes);
  return transact_plain(client, &req, ROUND_LIMIT_MS, err);
}

static struct frame behind_request(const char *op, int kernel, enum behind_kind kind, int timeout_ms)
{
  struct frame req = request_new(op);
  json_object_set_new(req.head, "kernel", json_integer(kernel));
  json_object_set_new(req.head, "kind", json_integer((int)kind));
  json_object_set_new(req.head, "timeout_ms", json_integer(timeout_ms));
  return req;
}

enum mf_status device_client_try_behind(struct device_client *client, int kernel, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err)
{
  struct frame req = behind_request("behind_try", kernel, kind, timeout_ms), reply;
  const enum mf_status rc = transact(client, &req, timeout_ms + BEHIND_MARGIN_MS, &reply, NULL, NULL, err);
  const char *text = rc == MF_OK ? json_string_value(json_object_get(reply.head, "refused")) : NULL;
  *refused = (struct error){MF_OK, ""};
  if(text != NULL)
    error_set(refused, MF_ERR_DEVICE, "%s", text);
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_time_behind(struct device_client *client, int kernel, enum behind_kind kind, int timeout_ms, double *us, struct error *err)
{
  struct frame req = behind_request("behind_time", kernel, kind, timeout_ms), reply;
  const enum mf_status rc = transact(client, &req, timeout_ms + BEHIND_MARGIN_MS, &reply, NULL, NULL, err);
  if(rc == MF_OK)
    *us = wire_read_number(json_object_get(reply.head, "us"));
  frame_free(&reply);
  return rc;
}

enum mf_status device_client_trace(struct device_client *client, int kernel, const struct device_trace *what, void **area, struct error *err)
{
  struct frame req = request_new("trace"), reply;
  enum mf_status rc;
  *area = NULL;
  json_object_set_new(req.head, "kernel", json_integer(kernel));
  request_blob(&req, 0, what, sizeof(*what));
  rc = transact(client, &req, what->timeout_ms + MARGIN_MS, &reply, NULL, NULL, err);
  client->profile_kernels = 0;
  if(rc == MF_OK && reply.blob_bytes[0] != what->bytes)
    rc = bad_reply(client, "trace of the right size", err);
  if(rc == MF_OK) {
    *area = reply.blob[0];
    reply.blob[0] = NULL;
  }
  frame_free(&reply);
  return rc;
}
