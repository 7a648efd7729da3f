/* device_cuda.c - a GPU behind device.h: opens it, fills it with generated weights, loads candidates.
 *
 * Ownership: struct device owns its context reference, modules, weights, kernels and profile. Loading a problem frees the kernels of the one before,
 * because they are bound to its weights. Every launch goes through runtime/recipe.c, so that what is checked and timed is what is shipped.
 *
 * device_cuda_driver.c knows the driver, device_cuda_case.c runs cases, device_cuda_time.c times.
 *
 * Weights are made on the GPU by templates/tools/datagen.cu, with the same bits as tuner/datagen.c makes on the CPU for the reference: nothing
 * is uploaded but inputs. */
#include "device_cuda.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "datagen.h"
#include "spec.h"
#include "tools/floor_params.h"

#define MEMORY_RESERVE_BYTES 256e6 /* left for inputs, outputs, workspaces and modules when weights are loaded */
#define POLL_SPIN_NS 300000L       /* polls without sleeping for this long, then sleeps between polls */
#define POLL_SLEEP_NS 50000L
#define GENERATE_TIMEOUT_MS 60000

/* ---- weights ---- */
static void free_device(struct device *dev, CUdeviceptr *ptr)
{
  if(*ptr != 0)
    dev->api.p_cuMemFree(*ptr);
  *ptr = 0;
}

static void unload_kernel(struct device *dev, struct device_kernel *kernel)
{
  struct device_kernel **link = &dev->kernels;
  if(kernel == NULL)
    return;
  while(*link != NULL && *link != kernel)
    link = &(*link)->next;
  if(*link != NULL) {
    *link = kernel->next;
    cuda_close_profile(dev); /* its graphs may launch the kernel */
  }
  free_device(dev, &kernel->workspace);
  if(kernel->module != NULL)
    dev->api.p_cuModuleUnload(kernel->module);
  free(kernel->blocks);
  free(kernel);
}

static void unload_problem(struct device *dev)
{
  cuda_close_profile(dev);
  while(dev->kernels != NULL)
    unload_kernel(dev, dev->kernels);
  for(int i = 0; i < dev->nlayers && dev->layers != NULL; i++) {
    free_device(dev, &dev->layers[i].w13);
    free_device(dev, &dev->layers[i].s13);
    free_device(dev, &dev->layers[i].w2);
    free_device(dev, &dev->layers[i].s2);
    free_device(dev, &dev->layers[i].bias);
  }
  free(dev->layers);
  dev->layers = NULL;
  dev->nlayers = 0;
  dev->problem_loaded = false;
}

static size_t blocks128(int extent)
{
  return ((size_t)extent + 127) / 128;
}

/* Elements of a layer's tensors. */
struct layer_sizes {
  size_t w13, w2, s13, s2, bias;
};

static struct layer_sizes layer_sizes_of(const struct mf_problem *p)
{
  const size_t experts = (size_t)problem_stored_experts(p), matrix = (size_t)p->intermediate * (size_t)p->hidden;
  const size_t blocks = blocks128(p->intermediate_offset + p->intermediate) * blocks128(p->hidden);
  const struct layer_sizes sizes = {.w13 = experts * 2 * matrix, .w2 = experts * matrix, .s13 = experts * 2 * blocks, .s2 = experts * blocks,
                                    .bias = p->select_bias ? (size_t)(p->experts + p->zero_experts) : 0};
  return sizes;
}

static enum mf_status check_room(struct device *dev, const struct mf_problem *problem, int layers, struct error *err)
{
  const double needed = device_weights_bytes(problem, layers) + MEMORY_RESERVE_BYTES;
  size_t free_bytes = 0, total = 0;
  const CUresult result = dev->api.p_cuMemGetInfo(&free_bytes, &total);
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "asking for free memory");
  if(needed <= (double)free_bytes)
    return MF_OK;
  return error_set(err, MF_ERR_NOMEM, "%s: %d layers of weights need %.2f GB of device memory, %.2f of %.2f GB are free (end other processes on the GPU)",
                   dev->info.name, layers, needed / 1e9, (double)free_bytes / 1e9, (double)total / 1e9);
}

/* Runs one generator kernel over 'count' units of work. */
static enum mf_status generate(struct device *dev, CUfunction function, size_t units, void **params, const char *what, struct error *err)
{
  const size_t per_cta = 256, most = 4096;
  const size_t ctas = (units + per_cta - 1) / per_cta;
  CUlaunchConfig config;
  CUresult result;
  memset(&config, 0, sizeof(config));
  config.gridDimX = (unsigned)(ctas < most ? ctas : most);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = (unsigned)per_cta;
  config.blockDimY = config.blockDimZ = 1;
  config.hStream = dev->stream;
  result = dev->api.p_cuLaunchKernelEx(&config, function, params, NULL);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, what);
}

static enum mf_status generate_weights(struct device *dev, CUdeviceptr to, size_t count, uint64_t seed, uint32_t stream, struct error *err)
{
  uint64_t first = 0, bytes = count;
  void *params[] = {&to, &first, &bytes, &seed, &stream};
  return generate(dev, dev->gen_weights, count / 8 + 1, params, "generating weights", err);
}

static enum mf_status generate_scales(struct device *dev, CUdeviceptr to, size_t count, uint64_t seed, enum data_stream stream, struct error *err)
{
  uint64_t first = 0, elements = count;
  uint32_t number = stream;
  float base = data_scale_base(&dev->problem, stream);
  void *params[] = {&to, &first, &elements, &seed, &number, &base};
  return generate(dev, dev->gen_scales, count, params, "generating block scales", err);
}

static enum mf_status generate_bias(struct device *dev, CUdeviceptr to, size_t count, uint64_t seed, struct error *err)
{
  uint64_t first = 0, elements = count;
  uint32_t number = DATA_BIAS;
  void *params[] = {&to, &first, &elements, &seed, &number};
  return count > 0 ? generate(dev, dev->gen_bias, count, params, "generating the bias", err) : MF_OK;
}

static enum mf_status allocate(struct device *dev, CUdeviceptr *out, size_t bytes, const char *what, struct error *err)
{
  const CUresult result = bytes > 0 ? dev->api.p_cuMemAlloc(out, bytes) : CUDA_SUCCESS;
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, what);
}

static enum mf_status make_layer(struct device *dev, struct cuda_layer *layer, uint32_t index, struct error *err)
{
  const struct layer_sizes sizes = layer_sizes_of(&dev->problem);
  const uint64_t seed = data_layer_seed(index);
  enum mf_status rc = allocate(dev, &layer->w13, sizes.w13, "allocating w13", err);
  if(rc == MF_OK)
    rc = allocate(dev, &layer->w2, sizes.w2, "allocating w2", err);
  if(rc == MF_OK)
    rc = allocate(dev, &layer->s13, sizes.s13 * sizeof(float), "allocating s13", err);
  if(rc == MF_OK)
    rc = allocate(dev, &layer->s2, sizes.s2 * sizeof(float), "allocating s2", err);
  if(rc == MF_OK)
    rc = allocate(dev, &layer->bias, sizes.bias * sizeof(float), "allocating the bias", err);
  if(rc == MF_OK)
    rc = generate_weights(dev, layer->w13, sizes.w13, seed, DATA_W13, err);
  if(rc == MF_OK)
    rc = generate_weights(dev, layer->w2, sizes.w2, seed, DATA_W2, err);
  if(rc == MF_OK)
    rc = generate_scales(dev, layer->s13, sizes.s13, seed, DATA_S13, err);
  if(rc == MF_OK)
    rc = generate_scales(dev, layer->s2, sizes.s2, seed, DATA_S2, err);
  if(rc == MF_OK)
    rc = generate_bias(dev, layer->bias, sizes.bias, seed, err);
  layer->weights.struct_size = sizeof(layer->weights);
  layer->weights.w13 = (const void *)(uintptr_t)layer->w13;
  layer->weights.s13 = (const float *)(uintptr_t)layer->s13;
  layer->weights.w2 = (const void *)(uintptr_t)layer->w2;
  layer->weights.s2 = (const float *)(uintptr_t)layer->s2;
  layer->weights.bias = (const float *)(uintptr_t)layer->bias;
  layer->weights.routed_scaling = dev->routed_scaling;
  return rc;
}

static enum mf_status cuda_load_problem(struct device *dev, const struct mf_problem *problem, double routed_scaling, int layers, int tokens_max,
                                        struct error *err)
{
  enum mf_status rc;
  unload_problem(dev);
  if(layers < 1 || layers > COLD_MAX_LAYERS || tokens_max < 1 || tokens_max > MAX_TOKENS)
    return error_set(err, MF_ERR_USAGE, "load_problem: expected 1..%d layers and 1..%d tokens, got %d and %d", COLD_MAX_LAYERS, MAX_TOKENS, layers, tokens_max);
  rc = check_room(dev, problem, layers, err);
  if(rc != MF_OK)
    return rc;
  dev->layers = calloc((size_t)layers, sizeof(*dev->layers));
  if(dev->layers == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for %d layers", layers);
  dev->problem = *problem;
  dev->routed_scaling = (float)routed_scaling;
  dev->nlayers = layers;
  dev->tokens_max = tokens_max;
  for(int i = 0; i < layers && rc == MF_OK; i++)
    rc = make_layer(dev, &dev->layers[i], (uint32_t)i, err);
  if(rc == MF_OK)
    rc = cuda_wait(dev, GENERATE_TIMEOUT_MS, "generating weights", err);
  if(rc == MF_OK)
    dev->problem_loaded = true;
  else if(rc != MF_ERR_TIMEOUT)
    unload_problem(dev);
  return rc;
}

/* ---- waiting ---- */
static int64_t now_ns(void)
{
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

enum mf_status cuda_wait(struct device *dev, int timeout_ms, const char *what, struct error *err)
{
  const struct timespec nap = {0, POLL_SLEEP_NS};
  const int64_t start = now_ns(), limit = (int64_t)timeout_ms * 1000000;
  for(;;) {
    const CUresult result = dev->api.p_cuStreamQuery(dev->stream);
    const int64_t waited = now_ns() - start;
    if(result == CUDA_SUCCESS)
      return MF_OK;
    if(result != CUDA_ERROR_NOT_READY)
      return cuda_failed(&dev->api, result, err, what);
    if(waited > limit)
      return error_set(err, MF_ERR_TIMEOUT, "%s: no progress within %d ms", what, timeout_ms);
    if(waited < POLL_SPIN_NS)
      sched_yield();
    else
      nanosleep(&nap, NULL);
  }
}

/* ---- kernels ---- */
CUdeviceptr cuda_workspace(const struct device_kernel *kernel)
{
  return kernel->workspace + GUARD_BYTES;
}

enum mf_status cuda_fresh_workspace(struct device *dev, struct device_kernel *kernel, struct error *err)
{
  const size_t bytes = (size_t)kernel->recipe.workspace_bytes + 2 * (size_t)GUARD_BYTES;
  const CUresult result = dev->api.p_cuMemsetD8Async(kernel->workspace, POISON, bytes, dev->stream);
  enum mf_status rc;
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "poisoning the workspace");
  rc = recipe_workspace_init(&dev->api, &kernel->recipe, (void *)(uintptr_t)cuda_workspace(kernel), dev->stream);
  if(rc != MF_OK)
    return recipe_failed(dev, rc, CUDA_SUCCESS, "initialising the workspace", err);
  kernel->launches = 0;
  return MF_OK;
}

/* What the tuner reads from the workspace must lie in it for every case that the kernel takes. */
static enum mf_status check_recipe(const struct device *dev, const struct mf_recipe *r, struct error *err)
{
  const uint64_t rows = (uint64_t)r->tokens_max * (uint64_t)problem_ranks(&dev->problem), h_bytes = rows * (uint64_t)dev->problem.intermediate * 2;
  const struct {
    const char *name;
    uint64_t offset, bytes;
  } part[] = {
      {"h_offset", r->h_offset, 2 * r->h_buffer_bytes},
      {"launch_count_offset", r->launch_count_offset, 4},
      {"routing_ids_offset", r->routing_ids_offset, rows * 4},
      {"routing_weights_offset", r->routing_weights_offset, rows * 4},
      {"status_offset", r->status_offset, 4},
  };
  if(r->tokens_max == 0 || r->tokens_max > MAX_TOKENS)
    return error_set(err, MF_ERR_CORRUPT, "recipe: tokens_max: expected 1..%d, got %u", MAX_TOKENS, r->tokens_max);
  if(r->h_buffer_bytes < h_bytes)
    return error_set(err, MF_ERR_CORRUPT, "recipe: h_buffer_bytes: expected at least %llu for this problem, got %llu", (unsigned long long)h_bytes,
                     (unsigned long long)r->h_buffer_bytes);
  for(size_t i = 0; i < sizeof(part) / sizeof(part[0]); i++) {
    if(part[i].bytes > r->workspace_bytes || part[i].offset > r->workspace_bytes - part[i].bytes)
      return error_set(err, MF_ERR_CORRUPT, "recipe: %s: %llu + %llu bytes lie outside the workspace of %llu", part[i].name, (unsigned long long)part[i].offset,
                       (unsigned long long)part[i].bytes, (unsigned long long)r->workspace_bytes);
  }
  return MF_OK;
}

static enum mf_status bind_layers(struct device *dev, struct device_kernel *kernel, struct error *err)
{
  kernel->blocks = aligned_alloc(64, (size_t)dev->nlayers * sizeof(*kernel->blocks));
  if(kernel->blocks == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for %d argument blocks", dev->nlayers);
  for(int i = 0; i < dev->nlayers; i++) {
    const enum mf_status rc = recipe_bind(&dev->api, &kernel->recipe, &dev->problem, &dev->layers[i].weights, &kernel->blocks[i]);
    if(rc != MF_OK)
      return recipe_failed(dev, rc, CUDA_SUCCESS, "binding the weights", err);
  }
  return MF_OK;
}

static enum mf_status cuda_load_kernel(struct device *dev, const void *cubin, size_t bytes, const struct mf_recipe *recipe, struct device_kernel **out,
                                       struct error *err)
{
  struct device_kernel *kernel;
  enum mf_status rc;
  *out = NULL;
  if(!dev->problem_loaded)
    return error_set(err, MF_ERR_INTERNAL, "load_kernel: no problem is loaded");
  if(bytes == 0)
    return error_set(err, MF_ERR_CORRUPT, "the cubin is empty");
  rc = recipe_validate(recipe, sizeof(*recipe));
  if(rc != MF_OK)
    return error_set(err, rc, "the binding recipe is not valid: %s", mf_status_string(rc));
  rc = check_recipe(dev, recipe, err);
  if(rc != MF_OK)
    return rc;
  if((int)recipe->min_sms > dev->info.sms)
    return error_set(err, MF_MISS_SMS, "the grid needs %u multiprocessors, %s has %d", recipe->min_sms, dev->info.name, dev->info.sms);
  kernel = calloc(1, sizeof(*kernel));
  if(kernel == NULL)
    return error_set(err, MF_ERR_NOMEM, "no memory for a kernel");
  kernel->recipe = *recipe;
  rc = recipe_load(&dev->api, recipe, cubin, &kernel->module, &kernel->function);
  if(rc != MF_OK)
    rc = recipe_failed(dev, rc, CUDA_SUCCESS, "loading the cubin", err);
  if(rc == MF_OK)
    rc = bind_layers(dev, kernel, err);
  if(rc == MF_OK)
    rc = allocate(dev, &kernel->workspace, (size_t)recipe->workspace_bytes + 2 * (size_t)GUARD_BYTES, "allocating a workspace", err);
  if(rc != MF_OK) {
    unload_kernel(dev, kernel);
    return rc;
  }
  kernel->next = dev->kernels;
  dev->kernels = kernel;
  *out = kernel;
  return MF_OK;
}

/* ---- open and close ---- */
static void cuda_close(struct device *dev)
{
  if(dev == NULL)
    return;
  if(dev->context != NULL) {
    unload_problem(dev);
    free_device(dev, &dev->scratch);
    if(dev->stream != NULL)
      dev->api.p_cuStreamDestroy(dev->stream);
    if(dev->datagen != NULL)
      dev->api.p_cuModuleUnload(dev->datagen);
    if(dev->floor_module != NULL)
      dev->api.p_cuModuleUnload(dev->floor_module);
  }
  if(dev->context_retained) {
    dev->api.p_cuCtxSetCurrent(NULL);
    dev->api.p_cuDevicePrimaryCtxRelease(dev->handle);
  }
  cuda_api_close(&dev->api);
  free(dev);
}

struct tool_function {
  const char *name;
  CUfunction *function;
};

static enum mf_status load_tool(struct device *dev, const void *cubin, size_t bytes, CUmodule *module, const struct tool_function *functions, int count,
                                struct error *err)
{
  CUresult result = bytes > 0 ? dev->api.p_cuModuleLoadData(module, cubin) : CUDA_ERROR_INVALID_IMAGE;
  if(result != CUDA_SUCCESS)
    return cuda_failed(&dev->api, result, err, "loading the tuner's own kernels");
  for(int i = 0; i < count; i++) {
    result = dev->api.p_cuModuleGetFunction(functions[i].function, *module, functions[i].name);
    if(result != CUDA_SUCCESS)
      return cuda_failed(&dev->api, result, err, functions[i].name);
  }
  return MF_OK;
}

static enum mf_status load_tools(struct device *dev, const struct device_tools *tools, struct error *err)
{
  const struct tool_function datagen[] = {{"mf_gen_weights", &dev->gen_weights}, {"mf_gen_scales", &dev->gen_scales}, {"mf_gen_bias", &dev->gen_bias}};
  const struct tool_function floor_function[] = {{"mf_floor", &dev->floor}, {"mf_floor_tensor", &dev->floor_tensor}};
  CUresult result;
  enum mf_status rc = load_tool(dev, tools->datagen, tools->datagen_bytes, &dev->datagen, datagen, 3, err);
  if(rc == MF_OK)
    rc = load_tool(dev, tools->floor, tools->floor_bytes, &dev->floor_module, floor_function, 2, err);
  if(rc != MF_OK)
    return rc;
  result = dev->api.p_cuFuncSetAttribute(dev->floor, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, MF_FLOOR_SHARED_BYTES);
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuFuncSetAttribute(dev->floor_tensor, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, MF_FLOOR_SHARED_BYTES);
  return result == CUDA_SUCCESS ? MF_OK : cuda_failed(&dev->api, result, err, "shared memory of the floor kernel");
}

enum mf_status cuda_open_on(const struct cuda_api *api, int ordinal, const struct device_tools *tools, struct device **out, struct error *err)
{
  struct device *dev = calloc(1, sizeof(*dev));
  CUresult result;
  enum mf_status rc;
  *out = NULL;
  if(dev == NULL) {
    struct cuda_api unused = *api;
    cuda_api_close(&unused);
    return error_set(err, MF_ERR_NOMEM, "no memory for a device");
  }
  dev->api = *api;
  dev->ordinal = ordinal;
  rc = cuda_describe(&dev->api, ordinal, &dev->handle, &dev->info, err);
  if(rc == MF_OK && dev->info.cc_major != 9)
    rc = error_set(err, MF_ERR_NO_DEVICE, "GPU %d (%s) has compute capability %d.%d; the kernels need 9.0 (Hopper)", ordinal, dev->info.name, dev->info.cc_major,
                   dev->info.cc_minor);
  if(rc != MF_OK)
    goto fail;
  result = dev->api.p_cuDevicePrimaryCtxRetain(&dev->context, dev->handle);
  if(result == CUDA_SUCCESS) {
    dev->context_retained = true;
    result = dev->api.p_cuCtxSetCurrent(dev->context);
  }
  /* A stream that waits for the default stream: small uploads there may return before they have arrived. */
  if(result == CUDA_SUCCESS)
    result = dev->api.p_cuStreamCreate(&dev->stream, CU_STREAM_DEFAULT);
  if(result != CUDA_SUCCESS) {
    rc = cuda_failed(&dev->api, result, err, "opening the GPU");
    goto fail;
  }
  rc = load_tools(dev, tools, err);
  if(rc != MF_OK)
    goto fail;
  *out = dev;
  return MF_OK;
fail:
  cuda_close(dev);
  return rc;
}

static enum mf_status cuda_open(int ordinal, const struct device_tools *tools, struct device **out, struct error *err)
{
  struct cuda_api api;
  const enum mf_status rc = cuda_driver_open(&api, err);
  *out = NULL;
  return rc == MF_OK ? cuda_open_on(&api, ordinal, tools, out, err) : rc;
}

const struct device_ops device_cuda = {
    .name = "cuda",
    .count = cuda_count,
    .info = cuda_info,
    .state = cuda_state,
    .open = cuda_open,
    .close = cuda_close,
    .load_problem = cuda_load_problem,
    .load_kernel = cuda_load_kernel,
    .unload_kernel = unload_kernel,
    .run_case = cuda_run_case,
    .open_profile = cuda_open_profile,
    .time_round = cuda_time_round,
    .open_behind = cuda_open_behind,
    .try_behind = cuda_try_behind,
    .time_behind = cuda_time_behind,
    .trace = cuda_trace,
};
