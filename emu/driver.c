/* driver.c - see driver.h. driver_module.c has modules and launches. All state is in one struct: a process has one emulated device, as it has one driver.
 *
 * Device memory is a list of blocks, each declared to the emulator; copies and fills are checked against it, as a driver would. A launch that ends with a
 * finding makes the device unusable, as a fault does to a GPU's context: every later call that could notice fails with the same text, until the
 * context is made anew. */
#include "driver_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor.h"

#define MEMORY_ALIGNMENT 256       /* of cuMemAlloc */

struct block {
  struct block *next;
  char *base;
  size_t bytes;
};

struct emu_driver_state emu_driver_state;
static struct emu_driver_state *const driver = &emu_driver_state;

static int stream_object, context_object; /* what the handles point to */

/* ---- errors ---- */
CUresult emu_driver_explain(CUresult result, const char *text)
{
  driver->text_of = result;
  snprintf(driver->text, sizeof(driver->text), "%s", text);
  return result;
}

#define RESULT_TABLE(X)                                                                             \
  X(CUDA_SUCCESS, "no error")                                                                       \
  X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                                   \
  X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                      \
  X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                            \
  X(CUDA_ERROR_INVALID_IMAGE, "the module is no image of the emulated device")                      \
  X(CUDA_ERROR_INVALID_PTX, "the kernel does not compile for the emulated device")                  \
  X(CUDA_ERROR_JIT_COMPILER_NOT_FOUND, "there is no C++ compiler")                                  \
  X(CUDA_ERROR_OPERATING_SYSTEM, "a file of the emulated device cannot be read or written")         \
  X(CUDA_ERROR_INVALID_HANDLE, "invalid handle")                                                    \
  X(CUDA_ERROR_NOT_FOUND, "no such symbol")                                                         \
  X(CUDA_ERROR_LAUNCH_FAILED, "the launch ended with a finding")                                    \
  X(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "the grid does not fit on the multiprocessors at once") \
  X(CUDA_ERROR_NOT_SUPPORTED, "not supported by the emulated device")

static CUresult CUDAAPI get_error_name(CUresult result, const char **out)
{
  switch(result) {
#define RESULT_NAME(name, text) \
  case name: *out = #name; return CUDA_SUCCESS;
    RESULT_TABLE(RESULT_NAME)
#undef RESULT_NAME
    default: *out = NULL; return CUDA_ERROR_INVALID_VALUE;
  }
}

static CUresult CUDAAPI get_error_string(CUresult result, const char **out)
{
  if(result == driver->text_of && driver->text[0] != '\0') {
    *out = driver->text;
    return CUDA_SUCCESS;
  }
  switch(result) {
#define RESULT_TEXT(name, text) \
  case name: *out = text; return CUDA_SUCCESS;
    RESULT_TABLE(RESULT_TEXT)
#undef RESULT_TEXT
    default: *out = NULL; return CUDA_ERROR_INVALID_VALUE;
  }
}

/* ---- device and context ---- */
static CUresult CUDAAPI init(unsigned int flags)
{
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult CUDAAPI driver_get_version(int *out)
{
  *out = 0; /* nobody's */
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI device_get_count(int *out)
{
  *out = 1;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI device_get(CUdevice *out, int ordinal)
{
  *out = 0;
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult CUDAAPI device_get_name(char *out, int space, CUdevice device)
{
  (void)device;
  snprintf(out, (size_t)space, "%s", driver->config.name);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI device_get_uuid(CUuuid *out, CUdevice device)
{
  (void)device;
  memset(out, 0, sizeof(*out));
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI device_get_attribute(int *out, CUdevice_attribute which, CUdevice device)
{
  const struct emu_driver_config *c = &driver->config;
  (void)device;
  switch(which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = c->cc_major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = c->cc_minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = c->sms; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = (int)c->shared_bytes_per_cta; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = (int)c->shared_bytes_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *out = c->registers_per_sm; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = c->max_threads_per_cta; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = (int)c->l2_bytes; break;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *out = 1; break;
    default: *out = 0; break;
  }
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI device_total_mem(size_t *out, CUdevice device)
{
  (void)device;
  *out = driver->config.memory_bytes;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_retain(CUcontext *out, CUdevice device)
{
  (void)device;
  driver->broken = CUDA_SUCCESS;
  driver->finding = EMU_NONE;
  driver->text[0] = '\0';
  *out = (CUcontext)(void *)&context_object;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_release(CUdevice device)
{
  (void)device;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_set(CUcontext context)
{
  (void)context;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_pop(CUcontext *out)
{
  if(out != NULL)
    *out = (CUcontext)(void *)&context_object;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_synchronize(void)
{
  return driver->broken;
}

/* ---- memory ---- */
static CUresult CUDAAPI mem_alloc(CUdeviceptr *out, size_t bytes)
{
  const size_t whole = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
  struct block *block;
  *out = 0;
  if(driver->broken != CUDA_SUCCESS)
    return driver->broken;
  if(bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if(whole < bytes || whole > driver->config.memory_bytes - driver->used)
    return CUDA_ERROR_OUT_OF_MEMORY;
  block = malloc(sizeof(*block));
  if(block == NULL)
    return CUDA_ERROR_OUT_OF_MEMORY;
  block->base = aligned_alloc(MEMORY_ALIGNMENT, whole);
  block->bytes = bytes;
  if(block->base == NULL || !emu_memory_add(block->base, bytes)) {
    free(block->base);
    free(block);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  block->next = driver->blocks;
  driver->blocks = block;
  driver->used += bytes;
  *out = (CUdeviceptr)(uintptr_t)block->base;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_free(CUdeviceptr pointer)
{
  struct block **link = &driver->blocks, *block;
  while(*link != NULL && (CUdeviceptr)(uintptr_t)(*link)->base != pointer)
    link = &(*link)->next;
  block = *link;
  if(block == NULL)
    return CUDA_ERROR_INVALID_VALUE;
  *link = block->next;
  driver->used -= block->bytes;
  emu_memory_remove(block->base);
  free(block->base);
  free(block);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_get_info(size_t *free_bytes, size_t *total)
{
  *total = driver->config.memory_bytes;
  *free_bytes = driver->config.memory_bytes - driver->used;
  return CUDA_SUCCESS;
}

/* Host address of device memory; NULL if it is not 'bytes' of one block. */
static void *device_memory(CUdeviceptr pointer, size_t bytes)
{
  const uintptr_t at = (uintptr_t)pointer;
  for(const struct block *block = driver->blocks; block != NULL; block = block->next) {
    const uintptr_t base = (uintptr_t)block->base;
    if(at >= base && at - base <= block->bytes && bytes <= block->bytes - (at - base))
      return (void *)at; // NOLINT(performance-no-int-to-ptr)
  }
  return NULL;
}

static CUresult CUDAAPI copy_to_device(CUdeviceptr to, const void *from, size_t bytes)
{
  void *at = device_memory(to, bytes);
  if(driver->broken != CUDA_SUCCESS || at == NULL)
    return driver->broken != CUDA_SUCCESS ? driver->broken : CUDA_ERROR_INVALID_VALUE;
  memcpy(at, from, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI copy_to_host(void *to, CUdeviceptr from, size_t bytes)
{
  const void *at = device_memory(from, bytes);
  if(driver->broken != CUDA_SUCCESS || at == NULL)
    return driver->broken != CUDA_SUCCESS ? driver->broken : CUDA_ERROR_INVALID_VALUE;
  memcpy(to, at, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
  void *target = device_memory(to, bytes);
  const void *source = device_memory(from, bytes);
  if(driver->broken != CUDA_SUCCESS || target == NULL || source == NULL)
    return driver->broken != CUDA_SUCCESS ? driver->broken : CUDA_ERROR_INVALID_VALUE;
  memmove(target, source, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI fill(CUdeviceptr to, unsigned char value, size_t bytes)
{
  void *at = device_memory(to, bytes);
  if(driver->broken != CUDA_SUCCESS || at == NULL)
    return driver->broken != CUDA_SUCCESS ? driver->broken : CUDA_ERROR_INVALID_VALUE;
  memset(at, value, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI fill_async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
  (void)stream;
  return fill(to, value, bytes);
}

/* ---- streams; graphs and events, which are not there ---- */
static CUresult CUDAAPI stream_create(CUstream *out, unsigned int flags)
{
  (void)flags;
  *out = (CUstream)(void *)&stream_object;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI stream_done(CUstream stream)
{
  (void)stream;
  return driver->broken;
}

static CUresult CUDAAPI stream_destroy(CUstream stream)
{
  (void)stream;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI begin_capture(CUstream stream, CUstreamCaptureMode mode)
{
  (void)stream;
  (void)mode;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI end_capture(CUstream stream, CUgraph *out)
{
  (void)stream;
  *out = NULL;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI graph_instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
  (void)graph;
  (void)flags;
  *out = NULL;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI graph_launch(CUgraphExec graph, CUstream stream)
{
  (void)graph;
  (void)stream;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI graph_exec_destroy(CUgraphExec graph)
{
  (void)graph;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI graph_destroy(CUgraph graph)
{
  (void)graph;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI event_create(CUevent *out, unsigned int flags)
{
  (void)flags;
  *out = NULL;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI event_use(CUevent event)
{
  (void)event;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI event_record(CUevent event, CUstream stream)
{
  (void)event;
  (void)stream;
  return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult CUDAAPI event_elapsed_time(float *out, CUevent begin, CUevent end)
{
  (void)begin;
  (void)end;
  *out = 0;
  return CUDA_ERROR_NOT_SUPPORTED;
}

/* ---- tensor maps ---- */
static CUresult CUDAAPI encode_tiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *dim,
                                     const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *element_stride, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill_kind)
{
  static const uint32_t swizzle_bytes[] = {
      [CU_TENSOR_MAP_SWIZZLE_NONE] = 0, [CU_TENSOR_MAP_SWIZZLE_32B] = 32, [CU_TENSOR_MAP_SWIZZLE_64B] = 64, [CU_TENSOR_MAP_SWIZZLE_128B] = 128};
  struct emu_tensor_map map = {.base = base, .rank = rank};
  const char *fault;
  (void)promotion;
  if(rank < 1 || rank > 5)
    return emu_driver_explain(CUDA_ERROR_INVALID_VALUE, "tensor map: the rank is not 1 to 5");
  if(type != CU_TENSOR_MAP_DATA_TYPE_UINT8 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill_kind != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
     (size_t)swizzle >= sizeof(swizzle_bytes) / sizeof(swizzle_bytes[0]))
    return emu_driver_explain(CUDA_ERROR_NOT_SUPPORTED, "tensor map: only bytes, not interleaved, filled with zeros, are emulated");
  map.swizzle = swizzle_bytes[swizzle];
  for(uint32_t i = 0; i < rank; i++) {
    map.dim[i] = dim[i];
    map.box[i] = box[i];
    if(i + 1 < rank)
      map.stride[i] = stride[i];
    if(element_stride[i] != 1)
      return emu_driver_explain(CUDA_ERROR_NOT_SUPPORTED, "tensor map: only element strides of 1 are emulated");
  }
  fault = emu_tensor_map_fault(&map);
  if(fault != NULL)
    return emu_driver_explain(CUDA_ERROR_INVALID_VALUE, fault);
  emu_tensor_map_encode(&map, out);
  return CUDA_SUCCESS;
}

/* ---- the table ---- */
void emu_driver_setup(const struct emu_driver_config *config)
{
  memset(driver, 0, sizeof(*driver));
  driver->config = *config;
}

const char *emu_driver_text(void)
{
  return driver->text;
}

enum emu_finding_kind emu_driver_finding(void)
{
  return driver->finding;
}

enum emu_jit_status emu_driver_jit_status(void)
{
  return driver->jit;
}

void emu_driver(struct cuda_api *api)
{
  const struct cuda_api functions = {
      .library = NULL,
      .p_cuInit = init,
      .p_cuDriverGetVersion = driver_get_version,
      .p_cuGetErrorName = get_error_name,
      .p_cuGetErrorString = get_error_string,
      .p_cuDeviceGetCount = device_get_count,
      .p_cuDeviceGet = device_get,
      .p_cuDeviceGetName = device_get_name,
      .p_cuDeviceGetUuid = device_get_uuid,
      .p_cuDeviceGetAttribute = device_get_attribute,
      .p_cuDeviceTotalMem = device_total_mem,
      .p_cuDevicePrimaryCtxRetain = context_retain,
      .p_cuDevicePrimaryCtxRelease = context_release,
      .p_cuCtxPushCurrent = context_set,
      .p_cuCtxPopCurrent = context_pop,
      .p_cuCtxSetCurrent = context_set,
      .p_cuCtxSynchronize = context_synchronize,
      .p_cuModuleLoadData = emu_driver_module_load,
      .p_cuModuleUnload = emu_driver_module_unload,
      .p_cuModuleGetFunction = emu_driver_module_get_function,
      .p_cuFuncSetAttribute = emu_driver_func_set_attribute,
      .p_cuOccupancyMaxActiveBlocksPerMultiprocessor = emu_driver_occupancy,
      .p_cuMemAlloc = mem_alloc,
      .p_cuMemFree = mem_free,
      .p_cuMemGetInfo = mem_get_info,
      .p_cuMemcpyHtoD = copy_to_device,
      .p_cuMemcpyDtoH = copy_to_host,
      .p_cuMemcpyDtoD = copy_on_device,
      .p_cuMemsetD8 = fill,
      .p_cuMemsetD8Async = fill_async,
      .p_cuStreamCreate = stream_create,
      .p_cuStreamDestroy = stream_destroy,
      .p_cuStreamSynchronize = stream_done,
      .p_cuStreamQuery = stream_done,
      .p_cuStreamBeginCapture = begin_capture,
      .p_cuStreamEndCapture = end_capture,
      .p_cuGraphInstantiateWithFlags = graph_instantiate,
      .p_cuGraphLaunch = graph_launch,
      .p_cuGraphExecDestroy = graph_exec_destroy,
      .p_cuGraphDestroy = graph_destroy,
      .p_cuEventCreate = event_create,
      .p_cuEventDestroy = event_use,
      .p_cuEventRecord = event_record,
      .p_cuEventSynchronize = event_use,
      .p_cuEventElapsedTime = event_elapsed_time,
      .p_cuLaunchKernelEx = emu_driver_launch_kernel,
      .p_cuTensorMapEncodeTiled = encode_tiled,
  };
  *api = functions;
}
