/* device_worker_tools.c - the requests of a device child that need no open device, and what all requests are read with. */
#include "device_worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compile.h"
#include "device_lock.h"
#include "device_nvml.h"

/* ---- reading requests ---- */
enum mf_status request_int(const struct frame *req, const char *name, long low, long high, int *out, struct error *err)
{
  const json_t *value = json_object_get(req->head, name);
  const json_int_t number = json_integer_value(value);
  if(!json_is_integer(value) || number < low || number > high)
    return error_set(err, MF_ERR_USAGE, "device request: %s: expected an integer from %ld to %ld", name, low, high);
  *out = (int)number;
  return MF_OK;
}

enum mf_status request_text(const struct frame *req, const char *name, const char **out, struct error *err)
{
  *out = json_string_value(json_object_get(req->head, name));
  return *out != NULL ? MF_OK : error_set(err, MF_ERR_USAGE, "device request: %s: expected a string", name);
}

enum mf_status request_struct(const struct frame *req, int blob, void *out, size_t bytes, const char *what, struct error *err)
{
  if(req->blob_bytes[blob] != bytes)
    return error_set(err, MF_ERR_USAGE, "device request: %s: expected %zu bytes, got %zu", what, bytes, req->blob_bytes[blob]);
  memcpy(out, req->blob[blob], bytes);
  return MF_OK;
}

void request_threads(int threads)
{
  if(threads > 0)
    reference_set_threads(threads);
}

/* ---- requests ---- */
enum mf_status answer_probe(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  json_t *devices = json_array();
  int count = 0;
  enum mf_status rc = c->ops->count(&count, err);
  (void)req;
  for(int i = 0; i < count && rc == MF_OK; i++) {
    struct device_info info;
    rc = c->ops->info(i, &info, err);
    if(rc == MF_OK)
      json_array_append_new(devices, wire_info(&info));
  }
  json_object_set_new(reply->head, "devices", devices);
  return rc;
}

static void examine_lock(const char *uuid, json_t *out)
{
  char holder[64];
  struct error err;
  int fd = -1;
  if(device_lock_try(uuid, &fd, holder, sizeof(holder), &err) != MF_OK)
    json_object_set_new(out, "lock_error", json_string(err.text));
  else if(fd < 0)
    json_object_set_new(out, "lock_holder", json_string(holder));
  else
    close(fd);
}

static json_t *examine(const struct child *c, int ordinal, const struct device_info *info)
{
  json_t *out = json_object();
  struct device_state state;
  struct error err;
  json_object_set_new(out, "info", wire_info(info));
  json_object_set_new(out, "nvml", nvml_probe(info->uuid)); /* before our own context makes the GPU busy */
  if(c->ops->state(ordinal, &state, &err) == MF_OK)
    json_object_set_new(out, "state",
                        json_pack("{s:f, s:f, s:b, s:b}", "memory_free_bytes", state.memory_free_bytes, "memory_total_bytes", state.memory_total_bytes,
                                  "cooperative_launch", (int)state.cooperative_launch, "shared_context", (int)state.shared_context));
  else
    json_object_set_new(out, "state_error", json_string(err.text));
  examine_lock(info->uuid, out);
  return out;
}

enum mf_status answer_doctor(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  json_t *devices = json_array();
  int count = 0;
  enum mf_status rc = c->ops->count(&count, err);
  (void)req;
  for(int i = 0; i < count && rc == MF_OK; i++) {
    struct device_info info;
    rc = c->ops->info(i, &info, err);
    if(rc == MF_OK)
      json_array_append_new(devices, examine(c, i, &info));
  }
  json_object_set_new(reply->head, "devices", devices);
  return rc;
}

/* templates/tools/<name>.cu -> cubin. */
enum mf_status answer_tool(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct nvrtc *nvrtc = NULL;
  struct artifact art;
  struct closure closure;
  const char *name = NULL, *template_dir = NULL, *arch = NULL;
  char source[NAME_MAX_LEN + 32];
  enum mf_status rc = request_text(req, "name", &name, err);
  (void)c;
  memset(&art, 0, sizeof(art));
  memset(&closure, 0, sizeof(closure));
  if(rc == MF_OK)
    rc = request_text(req, "template_dir", &template_dir, err);
  if(rc == MF_OK)
    rc = request_text(req, "arch", &arch, err);
  if(rc != MF_OK)
    return rc;
  snprintf(art.name, sizeof(art.name), "%s", name);
  snprintf(source, sizeof(source), "#include \"tools/%s.cu\"\n", art.name);
  art.source = strdup(source);
  if(art.source == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = nvrtc_open(&nvrtc, err);
  if(rc == MF_OK)
    rc = closure_collect(template_dir, art.source, &closure, err);
  if(rc == MF_OK)
    rc = compile_artifact(nvrtc, &closure, arch, COMPILE_PLAIN, &art, err);
  /* Compiled, but the log does not say what each kernel uses: with several kernels in a file NVRTC's threads write into one log at once, and lines get
   * lost (seen on a 16-core machine). It matters for candidates, which have one kernel each, not for tools; their symbols are checked when they are loaded. */
  if(rc == MF_ERR_CORRUPT && art.cubin != NULL)
    rc = MF_OK;
  if(rc == MF_OK) {
    reply->blob[0] = art.cubin;
    reply->blob_bytes[0] = art.cubin_bytes;
    art.cubin = NULL;
  }
  closure_free(&closure);
  artifact_free(&art);
  if(nvrtc != NULL)
    nvrtc_close(nvrtc);
  return rc;
}

enum mf_status answer_reference(struct child *c, const struct frame *req, struct frame *reply, struct error *err)
{
  struct mf_problem problem;
  struct test_case tc;
  struct reference_result result;
  const char *cache_dir = NULL;
  int layer = 0, threads = 0;
  enum mf_status rc = request_text(req, "cache_dir", &cache_dir, err);
  (void)c;
  (void)reply;
  if(rc == MF_OK)
    rc = request_int(req, "layer", 0, COLD_MAX_LAYERS - 1, &layer, err);
  if(rc == MF_OK)
    rc = request_int(req, "threads", 0, 4096, &threads, err);
  if(rc == MF_OK)
    rc = request_struct(req, 0, &problem, sizeof(problem), "struct mf_problem", err);
  if(rc == MF_OK)
    rc = request_struct(req, 1, &tc, sizeof(tc), "struct test_case", err);
  if(rc != MF_OK)
    return rc;
  request_threads(threads);
  rc = reference_cached(cache_dir, &problem, (float)json_number_value(json_object_get(req->head, "scaling")), (uint32_t)layer, &tc, &result, err);
  if(rc == MF_OK)
    reference_free(&result);
  return rc;
}
