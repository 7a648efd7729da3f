/* device_emu.c - see device_emu.h. Each function calls the CUDA device's and adds what is different: the seed of a case, errors in the emulator's words,
 * and the generator kernels of templates/tools/datagen.cu, which are built-in functions over the same datagen_core.h. */
#include "device_emu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compile.h"
#include "datagen.h"
#include "device_cuda.h"
#include "driver.h"
#include "tools/datagen_core.h"

#define META "mf_meta"
#define DEBUG_LINE "#define MF_WATCHDOG 1\n" /* what compile_artifact() has as an option */
#define MEMORY_SHARE 0.9                    /* of the free memory that the device may have */

static struct {
  struct device_emulation emulation; /* driver.c borrows its strings */
  uint64_t seed;
} here;

/* ---- generator kernels; parameters as in tools/datagen.cu ---- */
static uint64_t u64_at(void **params, int index)
{
  return *(const uint64_t *)params[index];
}

static uint64_t key_of(void **params)
{
  return mf_data_key(u64_at(params, 3), *(const uint32_t *)params[4]);
}

static void gen_weights(void **params)
{
  const enum data_stream stream = (enum data_stream) * (const uint32_t *)params[4];
  data_weights(u64_at(params, 3), stream, u64_at(params, 1), (size_t)u64_at(params, 2), *(uint8_t *const *)params[0]);
}

static void gen_scales(void **params)
{
  float *out = *(float *const *)params[0];
  const uint64_t key = key_of(params), first = u64_at(params, 1), count = u64_at(params, 2);
  const float base = *(const float *)params[5];
  for(uint64_t i = 0; i < count; i++)
    out[i] = mf_data_scale(mf_data_hash(key, first + i), base);
}

static void gen_bias(void **params)
{
  float *out = *(float *const *)params[0];
  const uint64_t key = key_of(params), first = u64_at(params, 1), count = u64_at(params, 2);
  for(uint64_t i = 0; i < count; i++)
    out[i] = mf_data_bias(mf_data_hash(key, first + i));
}

static const struct emu_builtin builtins[] = {
    {"mf_gen_weights", gen_weights}, {"mf_gen_scales", gen_scales}, {"mf_gen_bias", gen_bias}, {"mf_floor", NULL}, {"mf_floor_tensor", NULL}, /* for timing */
};

/* ---- this machine ---- */
double device_emu_free_memory(void)
{
  char line[256];
  double kilobytes = 0;
  FILE *f = fopen("/proc/meminfo", "r");
  while(f != NULL && kilobytes <= 0 && fgets(line, sizeof(line), f) != NULL)
    if(strncmp(line, "MemAvailable:", 13) == 0)
      kilobytes = strtod(line + 13, NULL);
  if(f != NULL)
    fclose(f);
  return kilobytes > 0 ? kilobytes * 1024 : 1e9;
}

static struct emu_jit_config jit_config(const struct device_emulation *e)
{
  const struct emu_jit_config jit = {.compiler = e->compiler, .template_dir = e->template_dir, .emu_dir = e->emu_dir, .cache_dir = e->cache_dir,
                                     .sanitize = e->sanitize};
  return jit;
}

void device_emu_configure(const struct device_emulation *emulation)
{
  const struct device_info *info = &here.emulation.info;
  const double room = device_emu_free_memory() * MEMORY_SHARE;
  here.emulation = *emulation;
  here.seed = emulation->seed;
  const struct emu_driver_config config = {
      .name = info->name, .cc_major = info->cc_major, .cc_minor = info->cc_minor, .sms = info->sms, .registers_per_sm = info->registers_per_sm,
      .max_threads_per_cta = info->max_threads_per_cta, .shared_bytes_per_cta = info->shared_bytes_per_cta, .shared_bytes_per_sm = info->shared_bytes_per_sm,
      .l2_bytes = info->l2_bytes, .memory_bytes = (size_t)(info->memory_bytes < room ? info->memory_bytes : room), .jit = jit_config(&here.emulation),
      .builtins = builtins, .nbuiltins = sizeof(builtins) / sizeof(builtins[0]), .max_steps = emulation->max_steps};
  emu_driver_setup(&config);
}

static enum mf_status jit_status(enum emu_jit_status status)
{
  switch(status) {
    case EMU_JIT_OK: return MF_OK;
    case EMU_JIT_NO_COMPILER: return MF_ERR_TOOLKIT;
    case EMU_JIT_FAILED: return MF_ERR_COMPILE;
    case EMU_JIT_IO: return MF_ERR_IO;
    case EMU_JIT_UNUSABLE: return MF_ERR_CORRUPT;
    case EMU_JIT_NO_MEMORY: return MF_ERR_NOMEM;
  }
  return MF_ERR_INTERNAL;
}

enum mf_status device_emu_check(const struct device_emulation *emulation, struct error *err)
{
  const struct emu_jit_config jit = jit_config(emulation);
  char why[ERROR_TEXT_MAX];
  const enum emu_jit_status status = emu_jit_check(&jit, why, sizeof(why));
  return status == EMU_JIT_OK ? MF_OK : error_set(err, jit_status(status), "%s", why);
}

void device_emu_key(const struct device_emulation *emulation, char *out, size_t space)
{
  snprintf(out, space, "emu %d seed %llu%s", EMU_VERSION, (unsigned long long)emulation->seed, emulation->sanitize ? " sanitized" : "");
}

/* ---- images ---- */
static enum mf_status read_meta(const struct artifact *art, void **meta, size_t *bytes, struct error *err)
{
  enum mf_status rc = cubin_symbol_bytes(art->cubin, art->cubin_bytes, META, bytes, err);
  *meta = NULL;
  if(rc != MF_OK)
    return rc;
  *meta = malloc(*bytes > 0 ? *bytes : 1);
  if(*meta == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  rc = cubin_read_symbol(art->cubin, art->cubin_bytes, META, *meta, *bytes, err);
  if(rc != MF_OK) {
    free(*meta);
    *meta = NULL;
  }
  return rc;
}

enum mf_status device_emu_image(const struct artifact *art, const char *kernel, bool debug, void **out, size_t *bytes, struct error *err)
{
  const char *prefix = debug ? DEBUG_LINE : "";
  const size_t source_bytes = strlen(prefix) + strlen(art->source) + 1;
  char *source = malloc(source_bytes);
  size_t meta_bytes = 0;
  void *meta = NULL;
  enum mf_status rc = source != NULL ? read_meta(art, &meta, &meta_bytes, err) : error_set(err, MF_ERR_NOMEM, "out of memory");
  *out = NULL;
  *bytes = 0;
  if(rc != MF_OK) {
    free(source);
    return rc;
  }
  snprintf(source, source_bytes, "%s%s", prefix, art->source);
  *bytes = emu_image_bytes(source, meta_bytes);
  *out = malloc(*bytes);
  if(*out != NULL)
    emu_image_make(kernel, source, meta, meta_bytes, *out);
  free(meta);
  free(source);
  return *out != NULL ? MF_OK : error_set(err, MF_ERR_NOMEM, "out of memory");
}

/* ---- device.h ---- */
static enum mf_status emu_count(int *out, struct error *err)
{
  (void)err;
  *out = 1;
  return MF_OK;
}

static enum mf_status emu_info(int ordinal, struct device_info *out, struct error *err)
{
  if(ordinal != 0)
    return error_set(err, MF_ERR_NO_DEVICE, "there is one emulated device, number 0");
  *out = here.emulation.info;
  return MF_OK;
}

static enum mf_status emu_state(int ordinal, struct device_state *out, struct error *err)
{
  (void)ordinal;
  (void)err;
  memset(out, 0, sizeof(*out));
  out->memory_free_bytes = device_emu_free_memory();
  out->memory_total_bytes = here.emulation.info.memory_bytes;
  out->cooperative_launch = true;
  return MF_OK;
}

static enum mf_status emu_open(int ordinal, const struct device_tools *tools, struct device **out, struct error *err)
{
  struct device_tools images;
  struct cuda_api api;
  void *image = malloc(emu_image_builtin_bytes());
  enum mf_status rc;
  (void)tools; /* its kernels are built in */
  *out = NULL;
  if(image == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory");
  emu_image_make_builtin(image);
  images = (struct device_tools){image, emu_image_builtin_bytes(), image, emu_image_builtin_bytes()};
  rc = device_emu_check(&here.emulation, err);
  if(rc == MF_OK) {
    emu_driver(&api);
    rc = cuda_open_on(&api, ordinal, &images, out, err);
  }
  free(image);
  return rc;
}

static void emu_close(struct device *dev)
{
  device_cuda.close(dev);
}

static void emu_set_seed(struct device *dev, uint64_t seed)
{
  (void)dev;
  here.seed = seed;
}

static enum mf_status emu_load_problem(struct device *dev, const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max,
                                       struct error *err)
{
  return device_cuda.load_problem(dev, problem, routed_scaling, layers, tokens_max, err);
}

static enum mf_status emu_load_kernel(struct device *dev, const void *image, size_t bytes, const struct mf_recipe *recipe, struct device_kernel **out,
                                      struct error *err)
{
  enum mf_status rc;
  *out = NULL;
  if(!emu_image_valid(image, bytes))
    return error_set(err, MF_ERR_CORRUPT, "load_kernel: these %zu bytes are no kernel image of the emulated device", bytes);
  rc = device_cuda.load_kernel(dev, image, bytes, recipe, out, err);
  if(rc == MF_OK || emu_driver_jit_status() == EMU_JIT_OK)
    return rc;
  return error_set(err, jit_status(emu_driver_jit_status()), "%s", emu_driver_text());
}

static void emu_unload_kernel(struct device *dev, struct device_kernel *kernel)
{
  device_cuda.unload_kernel(dev, kernel);
}

/* Deadlocks have one line for each group of waiters: in one line they are parts between bars. */
static void join_lines(const char *text, char *out, size_t space)
{
  size_t used = 0;
  for(; *text != '\0' && used + 4 < space; text++) {
    if(*text != '\n')
      out[used++] = *text;
    else if(text[1] != '\0')
      used += (size_t)snprintf(out + used, space - used, " | ");
  }
  out[used] = '\0';
}

/* A failure that a finding of the emulator is the reason for says so. */
static enum mf_status in_emulators_words(enum mf_status rc, struct error *err)
{
  char text[ERROR_TEXT_MAX];
  if(rc == MF_OK || emu_driver_finding() == EMU_NONE)
    return rc;
  join_lines(emu_driver_text(), text, sizeof(text));
  return error_set(err, emu_driver_finding() == EMU_NO_MEMORY ? MF_ERR_NOMEM : MF_ERR_DEVICE, "%s", text);
}

static enum mf_status emu_run_case(struct device *dev, struct device_kernel *kernel, const struct test_case *tc, int layer, int replays, int timeout_ms,
                                   struct device_output *out, struct error *err)
{
  kernel->cases = 0; /* a fresh workspace: nothing depends on the cases before */
  emu_driver_seed(here.seed, data_case_seed(tc));
  return in_emulators_words(device_cuda.run_case(dev, kernel, tc, layer, replays, timeout_ms, out, err), err);
}

static enum mf_status emu_open_profile(struct device *dev, struct device_kernel *const *kernels, int count, int tokens, enum routing_kind routing,
                                       uint32_t seed, int launches, struct error *err)
{
  (void)dev, (void)kernels, (void)count, (void)tokens, (void)routing, (void)seed, (void)launches;
  return error_set(err, MF_ERR_UNSUPPORTED, "the emulated device has no times: they need a GPU");
}

static enum mf_status emu_time_round(struct device *dev, const bool *run, int round, double *us, struct floor_times *floors, double *active, struct error *err)
{
  (void)dev, (void)run, (void)round, (void)us, (void)floors, (void)active;
  return error_set(err, MF_ERR_UNSUPPORTED, "the emulated device has no times: they need a GPU");
}

static enum mf_status emu_open_behind(struct device *dev, const void *router, size_t bytes, struct error *err)
{
  (void)dev, (void)router, (void)bytes;
  return error_set(err, MF_ERR_UNSUPPORTED, "the emulated device has no times: they need a GPU");
}

static enum mf_status emu_try_behind(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, struct error *refused, struct error *err)
{
  (void)dev, (void)kernel, (void)kind, (void)timeout_ms, (void)refused;
  return error_set(err, MF_ERR_UNSUPPORTED, "the emulated device has no times: they need a GPU");
}

static enum mf_status emu_time_behind(struct device *dev, int kernel, enum behind_kind kind, int timeout_ms, double *us, struct error *err)
{
  (void)dev, (void)kernel, (void)kind, (void)timeout_ms, (void)us;
  return error_set(err, MF_ERR_UNSUPPORTED, "the emulated device has no times: they need a GPU");
}

static enum mf_status emu_trace(struct device *dev, struct device_kernel *kernel, const struct device_trace *what, void *area, struct error *err)
{
  const struct test_case first = device_profile_case(what->tokens, what->routing, what->seed, 0);
  emu_driver_seed(here.seed, data_case_seed(&first));
  return in_emulators_words(device_cuda.trace(dev, kernel, what, area, err), err);
}

const struct device_ops device_emu = {
    .name = "emu",
    .set_seed = emu_set_seed,
    .count = emu_count,
    .info = emu_info,
    .state = emu_state,
    .open = emu_open,
    .close = emu_close,
    .load_problem = emu_load_problem,
    .load_kernel = emu_load_kernel,
    .unload_kernel = emu_unload_kernel,
    .run_case = emu_run_case,
    .open_profile = emu_open_profile,
    .time_round = emu_time_round,
    .open_behind = emu_open_behind,
    .try_behind = emu_try_behind,
    .time_behind = emu_time_behind,
    .trace = emu_trace,
};
