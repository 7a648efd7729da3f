/* doctor.c - `moeforge doctor`: what this machine has, and what keeps tuning from running or disturbs it.
 *
 * Every check adds one finding: ok, warning (tuning runs, but see the text), failed (tuning cannot run), or not checked. Whatever could crash or hang (the
 * driver, NVML, NVRTC) is asked in a child. The first failed finding decides the exit code; without a GPU that is "no usable GPU", unless --device
 * says that none is wanted: then the GPU's findings are warnings. */
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commands.h"
#include "compile.h"
#include "compile_pool.h"
#include "device_client.h"
#include "device_wire.h"
#include "package_write.h"
#include "store.h"
#include "target.h"

#define MAX_FINDINGS 128
#define MEMORY_WARN_SHARE 0.5 /* less free memory than this share of all is worth a warning */
#define BUSY_PERCENT 5

enum outcome { OUTCOME_OK, OUTCOME_WARNING, OUTCOME_FAILED, OUTCOME_NOT_CHECKED };
static const char *const outcome_names[] = {"ok", "warning", "failed", "not checked"};

struct finding {
  char name[32];
  enum outcome outcome;
  enum mf_status status; /* of a failed one */
  char text[600];
};

struct doctor {
  const struct options *opt;
  bool gpu_wanted;
  int ordinal; /* the GPU that tune would use */
  int driver_version; /* of the GPUs, 0 if there is none */
  struct finding findings[MAX_FINDINGS];
  int count;
};

static void add(struct doctor *d, const char *name, enum outcome outcome, enum mf_status status, const char *fmt, ...) __attribute__((format(printf, 5, 6)));
static void add(struct doctor *d, const char *name, enum outcome outcome, enum mf_status status, const char *fmt, ...)
{
  struct finding *f = &d->findings[d->count];
  va_list args;
  if(d->count == MAX_FINDINGS)
    return;
  d->count++;
  snprintf(f->name, sizeof(f->name), "%s", name);
  f->outcome = outcome;
  f->status = status;
  va_start(args, fmt);
  vsnprintf(f->text, sizeof(f->text), fmt, args);
  va_end(args);
}

/* Something wrong with GPU 'ordinal': it blocks tuning only if tune would use that GPU. */
static enum outcome gpu_trouble(const struct doctor *d, int ordinal)
{
  return d->gpu_wanted && ordinal == d->ordinal ? OUTCOME_FAILED : OUTCOME_WARNING;
}

/* ---- files ---- */
static void check_templates(struct doctor *d)
{
  static const char *const tools = "#include \"tools/datagen.cu\"\n#include \"tools/floor.cu\"\n";
  struct strbuf source;
  struct closure closure;
  struct error err;
  strbuf_init(&source, 1 << 16);
  strbuf_printf(&source, "%s", tools);
  for(const struct family_ops *const *family = families_all(); *family != NULL; family++)
    strbuf_printf(&source, "#include \"%s\"\n", (*family)->entry_include);
  if(closure_collect(d->opt->template_dir, strbuf_text(&source), &closure, &err) == MF_OK) {
    add(d, "templates", OUTCOME_OK, MF_OK, "%s (%d files)", d->opt->template_dir, closure.count);
    closure_free(&closure);
  } else {
    add(d, "templates", OUTCOME_FAILED, err.status, "%s (--templates names the folder)", err.text);
  }
  strbuf_free(&source);
}

static void check_toolkit(struct doctor *d)
{
  char path[512] = "";
  struct error err;
  int version = 0;
  const enum mf_status rc = compile_pool_toolkit(d->opt->program, &version, path, sizeof(path), &err);
  if(rc == MF_OK)
    add(d, "compiler", OUTCOME_OK, MF_OK, "NVRTC %d.%d, %s", version / 1000, version % 1000 / 10, path);
  else
    add(d, "compiler", OUTCOME_FAILED, rc, "%s", err.text);
  if(rc == MF_OK && d->driver_version > 0 && d->driver_version < package_min_driver(version))
    add(d, "compiler", d->gpu_wanted ? OUTCOME_FAILED : OUTCOME_WARNING, MF_MISS_DRIVER, "its kernels need a driver for CUDA %d.0, this one is for %d.%d: update "
        "the driver, or name an older libnvrtc.so in MOEFORGE_NVRTC", package_min_driver(version) / 1000, d->driver_version / 1000,
        d->driver_version % 1000 / 10);
}

static void folder_of(const char *path, char *out, size_t space)
{
  const char *slash = strrchr(path, '/');
  snprintf(out, space, "%.*s", slash == NULL ? 1 : slash == path ? 1 : (int)(slash - path), slash == NULL ? "." : path);
}

static void check_store(struct doctor *d)
{
  const char *path = d->opt->store_path;
  struct store *st = NULL;
  struct error err;
  char folder[1024];
  if(access(path, F_OK) != 0) {
    folder_of(path, folder, sizeof(folder));
    if(access(folder, W_OK | X_OK) == 0)
      add(d, "store", OUTCOME_OK, MF_OK, "%s will be made", path);
    else
      add(d, "store", OUTCOME_FAILED, MF_ERR_IO, "%s cannot be made: %s: %s; name another place with --store", path, folder, strerror(errno));
    return;
  }
  if(store_open(path, true, &st, &err) != MF_OK) {
    add(d, "store", OUTCOME_FAILED, err.status, "%s", err.text);
    return;
  }
  store_close(st);
  if(access(path, W_OK) == 0)
    add(d, "store", OUTCOME_OK, MF_OK, "%s", path);
  else
    add(d, "store", OUTCOME_FAILED, MF_ERR_IO, "%s can be read but not written: %s", path, strerror(errno));
}

/* ---- GPUs ---- */
static void name_of(int ordinal, const char *what, char *out, size_t space)
{
  snprintf(out, space, "gpu %d%s%s", ordinal, what[0] != '\0' ? " " : "", what);
}

static void check_gpu(struct doctor *d, int ordinal, const struct device_info *info)
{
  char name[32];
  name_of(ordinal, "", name, sizeof(name));
  if(compile_arch(info->cc_major, info->cc_minor) == NULL)
    add(d, name, gpu_trouble(d, ordinal), MF_ERR_NO_DEVICE, "%s has compute capability %d.%d; the kernels need 9.0 (Hopper)", info->name, info->cc_major,
        info->cc_minor);
  else
    add(d, name, OUTCOME_OK, MF_OK, "%s, %d SMs, L2 %.0f MB, %.0f GB, %d-bit at %d MHz (%.0f GB/s), %s", info->name, info->sms, (double)info->l2_bytes / 1e6,
        info->memory_bytes / 1e9, info->memory_bus_bits, info->memory_clock_khz / 1000, info->bandwidth_gbps, info->uuid);
  if(info->mig) {
    name_of(ordinal, "mig", name, sizeof(name));
    add(d, name, OUTCOME_WARNING, MF_OK, "a MIG slice: what is tuned here serves such slices only");
  }
}

static void check_state(struct doctor *d, int ordinal, const json_t *device)
{
  const json_t *state = json_object_get(device, "state");
  const double free_gb = json_number_value(json_object_get(state, "memory_free_bytes")) / 1e9;
  const double total_gb = json_number_value(json_object_get(state, "memory_total_bytes")) / 1e9;
  char name[32];
  name_of(ordinal, "memory", name, sizeof(name));
  if(state == NULL) {
    const char *why = json_string_value(json_object_get(device, "state_error"));
    add(d, name, gpu_trouble(d, ordinal), MF_ERR_DEVICE, "%s", why != NULL ? why : "no context can be made");
    return;
  }
  add(d, name, free_gb < MEMORY_WARN_SHARE * total_gb ? OUTCOME_WARNING : OUTCOME_OK, MF_OK, "%.1f of %.1f GB are free", free_gb, total_gb);
  name_of(ordinal, "launch", name, sizeof(name));
  if(json_is_true(json_object_get(state, "cooperative_launch")))
    add(d, name, OUTCOME_OK, MF_OK, "cooperative launch is supported");
  else
    add(d, name, gpu_trouble(d, ordinal), MF_ERR_NO_DEVICE, "no cooperative launch: kernels whose CTAs wait for each other cannot be launched safely");
  if(json_is_true(json_object_get(state, "shared_context"))) {
    name_of(ordinal, "mode", name, sizeof(name));
    add(d, name, OUTCOME_WARNING, MF_OK, "the compute mode is exclusive: use --check-jobs 1, or `nvidia-smi -c DEFAULT`");
  }
}

static void check_lock(struct doctor *d, int ordinal, const json_t *device)
{
  const char *holder = json_string_value(json_object_get(device, "lock_holder")), *why = json_string_value(json_object_get(device, "lock_error"));
  char name[32];
  name_of(ordinal, "lock", name, sizeof(name));
  if(why != NULL)
    add(d, name, gpu_trouble(d, ordinal), MF_ERR_IO, "%s", why);
  else if(holder != NULL)
    add(d, name, OUTCOME_WARNING, MF_OK, "being timed by %s: tune would wait for it", holder);
  else
    add(d, name, OUTCOME_OK, MF_OK, "no other tune is timing on it");
}

static void check_processes(struct doctor *d, int ordinal, const json_t *nvml)
{
  const json_t *processes = json_object_get(nvml, "processes"), *busy = json_object_get(nvml, "utilization_percent");
  const long percent = (long)json_integer_value(busy);
  const size_t count = json_array_size(processes);
  char name[32];
  name_of(ordinal, "others", name, sizeof(name));
  if(processes == NULL && busy == NULL)
    add(d, name, OUTCOME_NOT_CHECKED, MF_OK, "NVML does not tell which processes use the GPU");
  else if(count > 0)
    add(d, name, OUTCOME_WARNING, MF_OK, "%zu other process(es) on the GPU, the first is %d; it is %ld %% busy: timing needs it alone", count,
        (int)json_integer_value(json_object_get(json_array_get(processes, 0), "pid")), percent);
  else if(percent > BUSY_PERCENT)
    add(d, name, OUTCOME_WARNING, MF_OK, "the GPU is %ld %% busy, by a process that cannot be seen from here: timing needs it alone", percent);
  else
    add(d, name, OUTCOME_OK, MF_OK, "no other process, %ld %% busy", percent);
}

static void check_clocks(struct doctor *d, int ordinal, const json_t *nvml)
{
  const json_t *reasons = json_object_get(nvml, "throttle");
  char name[32], list[256] = "";
  name_of(ordinal, "clocks", name, sizeof(name));
  for(size_t i = 0; i < json_array_size(reasons); i++) {
    const size_t length = strlen(list);
    snprintf(list + length, sizeof(list) - length, "%s%s", i > 0 ? ", " : "", json_string_value(json_array_get(reasons, i)));
  }
  if(reasons == NULL && json_object_get(nvml, "sm_mhz") == NULL)
    add(d, name, OUTCOME_NOT_CHECKED, MF_OK, "NVML does not tell the clocks");
  else
    add(d, name, list[0] != '\0' ? OUTCOME_WARNING : OUTCOME_OK, MF_OK, "SM %d of %d MHz, memory %d of %d MHz now%s%s",
        (int)json_integer_value(json_object_get(nvml, "sm_mhz")), (int)json_integer_value(json_object_get(nvml, "sm_max_mhz")),
        (int)json_integer_value(json_object_get(nvml, "memory_mhz")), (int)json_integer_value(json_object_get(nvml, "memory_max_mhz")),
        list[0] != '\0' ? "; held down by: " : reasons == NULL ? "; throttling not checked" : "; not throttled", list);
}

static void check_nvml(struct doctor *d, int ordinal, const json_t *nvml)
{
  const char *missing = json_string_value(json_object_get(nvml, "missing"));
  char name[32];
  if(missing == NULL) {
    check_processes(d, ordinal, nvml);
    check_clocks(d, ordinal, nvml);
    return;
  }
  name_of(ordinal, "others", name, sizeof(name));
  add(d, name, OUTCOME_NOT_CHECKED, MF_OK, "other processes and streams: %s", missing);
  name_of(ordinal, "clocks", name, sizeof(name));
  add(d, name, OUTCOME_NOT_CHECKED, MF_OK, "clocks and throttling: %s", missing);
}

static void check_devices(struct doctor *d)
{
  json_t *answer = NULL;
  const json_t *devices;
  struct error err;
  const enum mf_status rc = device_client_examine(d->opt->program, &answer, &err);
  if(rc != MF_OK) {
    add(d, "gpu", d->gpu_wanted ? OUTCOME_FAILED : OUTCOME_WARNING, rc, "%s", err.text);
    return;
  }
  devices = json_object_get(answer, "devices");
  for(size_t i = 0; i < json_array_size(devices); i++) {
    const json_t *device = json_array_get(devices, i);
    struct device_info info;
    if(wire_read_info(json_object_get(device, "info"), &info, &err) != MF_OK) {
      add(d, "gpu", gpu_trouble(d, (int)i), err.status, "%s", err.text);
      continue;
    }
    d->driver_version = info.driver_version;
    if(i == 0)
      add(d, "driver", OUTCOME_OK, MF_OK, "CUDA %d.%d", info.driver_version / 1000, info.driver_version % 1000 / 10);
    check_gpu(d, (int)i, &info);
    check_state(d, (int)i, device);
    check_lock(d, (int)i, device);
    check_nvml(d, (int)i, json_object_get(device, "nvml"));
  }
  if(d->gpu_wanted && (size_t)d->ordinal >= json_array_size(devices))
    add(d, "gpu", OUTCOME_FAILED, MF_ERR_NO_DEVICE, "--device cuda:%d: this machine has %zu GPU(s), numbered from 0", d->ordinal, json_array_size(devices));
  json_decref(answer);
}

/* ---- the report ---- */
static const struct finding *first_failed(const struct doctor *d)
{
  for(int i = 0; i < d->count; i++)
    if(d->findings[i].outcome == OUTCOME_FAILED)
      return &d->findings[i];
  return NULL;
}

static enum mf_status print_json(const struct doctor *d, struct error *err)
{
  const struct finding *blocker = first_failed(d);
  json_t *list = json_array(), *root;
  char *text;
  for(int i = 0; i < d->count; i++) {
    const struct finding *f = &d->findings[i];
    json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "check", f->name, "outcome", outcome_names[f->outcome], "status",
                                          mf_status_name(f->outcome == OUTCOME_FAILED ? f->status : MF_OK), "text", f->text));
  }
  root = json_pack("{s:b, s:s, s:o}", "can_tune", (int)(blocker == NULL), "status", mf_status_name(blocker != NULL ? blocker->status : MF_OK), "findings", list);
  text = json_dumps(root, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
  json_decref(root);
  if(text == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory for the report");
  puts(text);
  free(text);
  return MF_OK;
}

static void print_text(const struct doctor *d)
{
  for(int i = 0; i < d->count; i++)
    printf("%-12s %-14s %s\n", outcome_names[d->findings[i].outcome], d->findings[i].name, d->findings[i].text);
  printf("%s\n", first_failed(d) != NULL ? "tuning cannot run here" : d->gpu_wanted ? "tuning can run" : "planning can run (no GPU is wanted)");
}

/* Which GPU tune would use: "auto" and "cuda" the first, "cuda:N" that one, anything else none. */
static void read_device_option(struct doctor *d)
{
  d->gpu_wanted = target_cuda_ordinal(d->opt->device, &d->ordinal) || strcmp(d->opt->device, "auto") == 0;
}

enum mf_status doctor_command(const struct options *opt, struct error *err)
{
  struct doctor *d = calloc(1, sizeof(*d));
  const struct finding *blocker;
  enum mf_status rc = MF_OK;
  if(d == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  d->opt = opt;
  read_device_option(d);
  check_devices(d);
  check_toolkit(d);
  check_templates(d);
  check_store(d);
  if(opt->json)
    rc = print_json(d, err);
  else
    print_text(d);
  blocker = first_failed(d);
  if(rc == MF_OK && blocker != NULL)
    rc = error_set(err, blocker->status, "%s: %s", blocker->name, blocker->text);
  free(d);
  return rc;
}
