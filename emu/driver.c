/* driver.c - see driver.h. All state is in one static struct: a process has one emulated device, as it has one driver.
 *
 * Device memory is a list of blocks, each declared to the emulator; copies and fills are checked against it, as a driver would. A launch that ends with a
 * finding makes the device unusable, as a fault does to a GPU's context: every later call that could notice fails with the same text, until the
 * context is made anew. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_api.h"
#include "tensor.h"

#define IMAGE_MAGIC "MFEMU01"
#define IMAGE_BUILTIN "MFEMUBI"
#define MEMORY_ALIGNMENT 256       /* of cuMemAlloc */
#define SHARED_WITHOUT_ASKING 49152 /* dynamic shared memory of a launch without cuFuncSetAttribute */
#define SHARED_OF_SYSTEM 1024      /* shared memory of each CTA that the system keeps */
#define THREADS_PER_SM 2048
#define TEXT_BYTES 2048

/* The head of an image; behind it lie the source with its NUL, and the metadata. */
struct image {
  char magic[8];
  char kernel[64];
  uint64_t source_bytes, meta_bytes;
};

struct block {
  struct block *next;
  char *base;
  size_t bytes;
};

struct function {
  struct function *next;
  struct module *module;
  const struct emu_builtin *builtin; /* NULL: the module's kernel */
  size_t shared_limit;
};

struct module {
  struct emu_kernel kernel; /* library NULL: the built-in functions */
  char name[64];
  struct function *functions;
};

static struct {
  struct emu_driver_config config;
  struct block *blocks;
  size_t used;
  CUresult broken;        /* CUDA_SUCCESS, or what the context is lost to */
  CUresult text_of;       /* the result that 'text' explains */
  char text[TEXT_BYTES];
  enum emu_finding_kind finding;
  enum emu_jit_status jit;
  uint64_t seed, salt;
  uint32_t launches;
} driver;

static int stream_object, context_object; /* what the handles point to */

/* ---- errors ---- */
static CUresult explain(CUresult result, const char *text)
{
  driver.text_of = result;
  snprintf(driver.text, sizeof(driver.text), "%s", text);
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
  if(result == driver.text_of && driver.text[0] != '\0') {
    *out = driver.text;
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
  snprintf(out, (size_t)space, "%s", driver.config.name);
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
  const struct emu_driver_config *c = &driver.config;
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
  *out = driver.config.memory_bytes;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI context_retain(CUcontext *out, CUdevice device)
{
  (void)device;
  driver.broken = CUDA_SUCCESS;
  driver.finding = EMU_NONE;
  driver.text[0] = '\0';
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
  return driver.broken;
}

/* ---- memory ---- */
static CUresult CUDAAPI mem_alloc(CUdeviceptr *out, size_t bytes)
{
  const size_t whole = (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
  struct block *block;
  *out = 0;
  if(driver.broken != CUDA_SUCCESS)
    return driver.broken;
  if(bytes == 0)
    return CUDA_ERROR_INVALID_VALUE;
  if(whole < bytes || whole > driver.config.memory_bytes - driver.used)
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
  block->next = driver.blocks;
  driver.blocks = block;
  driver.used += bytes;
  *out = (CUdeviceptr)(uintptr_t)block->base;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_free(CUdeviceptr pointer)
{
  struct block **link = &driver.blocks, *block;
  while(*link != NULL && (CUdeviceptr)(uintptr_t)(*link)->base != pointer)
    link = &(*link)->next;
  block = *link;
  if(block == NULL)
    return CUDA_ERROR_INVALID_VALUE;
  *link = block->next;
  driver.used -= block->bytes;
  emu_memory_remove(block->base);
  free(block->base);
  free(block);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI mem_get_info(size_t *free_bytes, size_t *total)
{
  *total = driver.config.memory_bytes;
  *free_bytes = driver.config.memory_bytes - driver.used;
  return CUDA_SUCCESS;
}

/* Host address of device memory; NULL if it is not 'bytes' of one block. */
static void *device_memory(CUdeviceptr pointer, size_t bytes)
{
  const uintptr_t at = (uintptr_t)pointer;
  for(const struct block *block = driver.blocks; block != NULL; block = block->next) {
    const uintptr_t base = (uintptr_t)block->base;
    if(at >= base && at - base <= block->bytes && bytes <= block->bytes - (at - base))
      return (void *)at; // NOLINT(performance-no-int-to-ptr)
  }
  return NULL;
}

static CUresult CUDAAPI copy_to_device(CUdeviceptr to, const void *from, size_t bytes)
{
  void *at = device_memory(to, bytes);
  if(driver.broken != CUDA_SUCCESS || at == NULL)
    return driver.broken != CUDA_SUCCESS ? driver.broken : CUDA_ERROR_INVALID_VALUE;
  memcpy(at, from, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI copy_to_host(void *to, CUdeviceptr from, size_t bytes)
{
  const void *at = device_memory(from, bytes);
  if(driver.broken != CUDA_SUCCESS || at == NULL)
    return driver.broken != CUDA_SUCCESS ? driver.broken : CUDA_ERROR_INVALID_VALUE;
  memcpy(to, at, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
  void *target = device_memory(to, bytes);
  const void *source = device_memory(from, bytes);
  if(driver.broken != CUDA_SUCCESS || target == NULL || source == NULL)
    return driver.broken != CUDA_SUCCESS ? driver.broken : CUDA_ERROR_INVALID_VALUE;
  memmove(target, source, bytes);
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI fill(CUdeviceptr to, unsigned char value, size_t bytes)
{
  void *at = device_memory(to, bytes);
  if(driver.broken != CUDA_SUCCESS || at == NULL)
    return driver.broken != CUDA_SUCCESS ? driver.broken : CUDA_ERROR_INVALID_VALUE;
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
  return driver.broken;
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

/* ---- images ---- */
size_t emu_image_bytes(const char *source, size_t meta_bytes)
{
  return sizeof(struct image) + strlen(source) + 1 + meta_bytes;
}

void emu_image_make(const char *kernel, const char *source, const void *meta, size_t meta_bytes, void *out)
{
  struct image head = {.magic = IMAGE_MAGIC, .source_bytes = strlen(source) + 1, .meta_bytes = meta_bytes};
  snprintf(head.kernel, sizeof(head.kernel), "%s", kernel);
  memcpy(out, &head, sizeof(head));
  memcpy((char *)out + sizeof(head), source, head.source_bytes);
  if(meta_bytes > 0)
    memcpy((char *)out + sizeof(head) + head.source_bytes, meta, meta_bytes);
}

size_t emu_image_builtin_bytes(void)
{
  return sizeof(struct image);
}

void emu_image_make_builtin(void *out)
{
  const struct image head = {.magic = IMAGE_BUILTIN};
  memcpy(out, &head, sizeof(head));
}

bool emu_image_valid(const void *image, size_t bytes)
{
  struct image head;
  const char *source = (const char *)image + sizeof(head);
  if(bytes < sizeof(head))
    return false;
  memcpy(&head, image, sizeof(head));
  if(memcmp(head.magic, IMAGE_BUILTIN, sizeof(head.magic)) == 0)
    return bytes == sizeof(head);
  bytes -= sizeof(head);
  return memcmp(head.magic, IMAGE_MAGIC, sizeof(head.magic)) == 0 && memchr(head.kernel, '\0', sizeof(head.kernel)) != NULL && head.source_bytes > 0 &&
         head.source_bytes <= bytes && head.meta_bytes == bytes - head.source_bytes &&
         memchr(source, '\0', head.source_bytes) == source + head.source_bytes - 1;
}

/* ---- modules ---- */
static CUresult jit_result(enum emu_jit_status status)
{
  switch(status) {
    case EMU_JIT_OK: return CUDA_SUCCESS;
    case EMU_JIT_NO_COMPILER: return CUDA_ERROR_JIT_COMPILER_NOT_FOUND;
    case EMU_JIT_FAILED: return CUDA_ERROR_INVALID_PTX;
    case EMU_JIT_IO: return CUDA_ERROR_OPERATING_SYSTEM;
    case EMU_JIT_UNUSABLE: return CUDA_ERROR_INVALID_IMAGE;
    case EMU_JIT_NO_MEMORY: return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_ERROR_OPERATING_SYSTEM;
}

/* The host's build must say of itself what the GPU's says. */
static CUresult compare_meta(const struct emu_kernel *kernel, const unsigned char *want, size_t bytes)
{
  const unsigned char *have = kernel->meta;
  char text[200];
  size_t at = 0;
  if(bytes == 0)
    return CUDA_SUCCESS;
  if(have == NULL || kernel->meta_bytes != bytes) {
    snprintf(text, sizeof(text), "mf_meta of the host's build has %zu bytes, the cubin's has %zu", have != NULL ? kernel->meta_bytes : (size_t)0, bytes);
    return explain(CUDA_ERROR_INVALID_IMAGE, text);
  }
  while(at < bytes && have[at] == want[at])
    at++;
  if(at == bytes)
    return CUDA_SUCCESS;
  snprintf(text, sizeof(text), "mf_meta of the host's build differs from the cubin's in byte %zu (%u, %u)", at, have[at], want[at]);
  return explain(CUDA_ERROR_INVALID_IMAGE, text);
}

static CUresult load_source(struct module *module, const struct image *head, const char *source)
{
  char why[TEXT_BYTES];
  CUresult result;
  driver.jit = emu_jit_load(&driver.config.jit, source, head->kernel, &module->kernel, why, sizeof(why));
  if(driver.jit != EMU_JIT_OK)
    return explain(jit_result(driver.jit), why);
  result = compare_meta(&module->kernel, (const unsigned char *)source + head->source_bytes, head->meta_bytes);
  if(result == CUDA_SUCCESS)
    return result;
  driver.jit = EMU_JIT_UNUSABLE;
  emu_jit_unload(&module->kernel);
  return result;
}

static CUresult CUDAAPI module_load(CUmodule *out, const void *image)
{
  struct module *module = calloc(1, sizeof(*module));
  struct image head;
  CUresult result = CUDA_SUCCESS;
  *out = NULL;
  driver.jit = EMU_JIT_OK;
  if(module == NULL)
    return CUDA_ERROR_OUT_OF_MEMORY;
  memcpy(&head, image, sizeof(head));
  memcpy(module->name, head.kernel, sizeof(module->name));
  if(memcmp(head.magic, IMAGE_MAGIC, sizeof(head.magic)) == 0)
    result = load_source(module, &head, (const char *)image + sizeof(head));
  else if(memcmp(head.magic, IMAGE_BUILTIN, sizeof(head.magic)) != 0)
    result = CUDA_ERROR_INVALID_IMAGE;
  if(result != CUDA_SUCCESS) {
    free(module);
    return result;
  }
  *out = (CUmodule)(void *)module;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI module_unload(CUmodule handle)
{
  struct module *module = (struct module *)(void *)handle;
  if(module == NULL)
    return CUDA_ERROR_INVALID_HANDLE;
  while(module->functions != NULL) {
    struct function *next = module->functions->next;
    free(module->functions);
    module->functions = next;
  }
  emu_jit_unload(&module->kernel);
  free(module);
  return CUDA_SUCCESS;
}

static const struct emu_builtin *find_builtin(const char *name)
{
  for(size_t i = 0; i < driver.config.nbuiltins; i++)
    if(strcmp(driver.config.builtins[i].name, name) == 0)
      return &driver.config.builtins[i];
  return NULL;
}

static CUresult CUDAAPI module_get_function(CUfunction *out, CUmodule handle, const char *name)
{
  struct module *module = (struct module *)(void *)handle;
  const struct emu_builtin *builtin = module->kernel.library == NULL ? find_builtin(name) : NULL;
  struct function *function;
  *out = NULL;
  if(builtin == NULL && (module->kernel.library == NULL || strcmp(module->name, name) != 0))
    return CUDA_ERROR_NOT_FOUND;
  function = calloc(1, sizeof(*function));
  if(function == NULL)
    return CUDA_ERROR_OUT_OF_MEMORY;
  function->module = module;
  function->builtin = builtin;
  function->shared_limit = SHARED_WITHOUT_ASKING;
  function->next = module->functions;
  module->functions = function;
  *out = (CUfunction)(void *)function;
  return CUDA_SUCCESS;
}

static CUresult CUDAAPI func_set_attribute(CUfunction handle, CUfunction_attribute which, int value)
{
  struct function *function = (struct function *)(void *)handle;
  if(which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > driver.config.shared_bytes_per_cta)
    return CUDA_ERROR_INVALID_VALUE;
  function->shared_limit = (size_t)value;
  return CUDA_SUCCESS;
}

/* CTAs of this size that one multiprocessor holds at once. */
static int resident_ctas(int threads, size_t shared_bytes)
{
  const int by_threads = threads > 0 ? THREADS_PER_SM / threads : 0;
  const long by_shared = driver.config.shared_bytes_per_sm / ((long)shared_bytes + SHARED_OF_SYSTEM);
  return by_shared < by_threads ? (int)by_shared : by_threads;
}

static CUresult CUDAAPI occupancy(int *out, CUfunction handle, int threads, size_t shared_bytes)
{
  (void)handle;
  *out = resident_ctas(threads, shared_bytes);
  return CUDA_SUCCESS;
}

/* ---- launches ---- */
static uint64_t mix(uint64_t h)
{
  h ^= h >> 32;
  h *= 0x9FB21C651E98DF25u;
  h ^= h >> 29;
  h *= 0xD6E8FEB86659FD93u;
  return h ^ h >> 32;
}

uint64_t emu_driver_launch_seed(uint64_t seed, uint64_t salt, uint32_t launch)
{
  return mix(mix(mix(seed + 0x632BE59BD9B4E019u) + salt * 0xA24BAED4963EE407u) + launch * 0x9E3779B97F4A7C15u);
}

void emu_driver_seed(uint64_t seed, uint64_t salt)
{
  driver.seed = seed;
  driver.salt = salt;
  driver.launches = 0;
}

static bool wants_cooperation(const CUlaunchConfig *config)
{
  for(unsigned int i = 0; i < config->numAttrs; i++)
    if(config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && config->attrs[i].value.cooperative != 0)
      return true;
  return false;
}

/* What a driver refuses before anything runs. */
static CUresult check_launch(const CUlaunchConfig *c, const struct function *function)
{
  const unsigned int threads = c->blockDimX;
  if(c->gridDimX == 0 || threads == 0 || threads > (unsigned int)driver.config.max_threads_per_cta || c->sharedMemBytes > function->shared_limit)
    return CUDA_ERROR_INVALID_VALUE;
  if(c->gridDimY != 1 || c->gridDimZ != 1 || c->blockDimY != 1 || c->blockDimZ != 1 || (function->builtin == NULL && threads % 32 != 0))
    return explain(CUDA_ERROR_NOT_SUPPORTED, "the emulated device runs one-dimensional grids of whole warps");
  if(wants_cooperation(c) && c->gridDimX > (uint64_t)driver.config.sms * (uint64_t)resident_ctas((int)threads, c->sharedMemBytes))
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  return CUDA_SUCCESS;
}

/* A launch ended with a finding: the context is lost. */
static CUresult lose(struct emu_finding *found, const struct emu_launch *launch, const struct emu_kernel *kernel, uint32_t number)
{
  char text[TEXT_BYTES];
  emu_finding_locate(found, launch, kernel->object);
  snprintf(text, sizeof(text), "seed %llu, launch %u: %s", (unsigned long long)driver.seed, number, found->text);
  driver.finding = found->kind;
  driver.broken = found->kind == EMU_NO_MEMORY     ? CUDA_ERROR_OUT_OF_MEMORY
                  : found->kind == EMU_UNSUPPORTED ? CUDA_ERROR_NOT_SUPPORTED
                                                   : CUDA_ERROR_LAUNCH_FAILED;
  return explain(driver.broken, text);
}

static CUresult CUDAAPI launch_kernel(const CUlaunchConfig *config, CUfunction handle, void **params, void **extra)
{
  const struct function *function = (const struct function *)(void *)handle;
  const struct emu_kernel *kernel = &function->module->kernel;
  struct emu_launch launch = {.params = params, .ctas = (int)config->gridDimX, .threads = (int)config->blockDimX, .shared_bytes = config->sharedMemBytes,
                              .max_steps = driver.config.max_steps, .code = kernel->code, .code_bytes = kernel->code_bytes, .entry = kernel->entry};
  struct emu_finding found;
  const CUresult refused = driver.broken != CUDA_SUCCESS ? driver.broken : check_launch(config, function);
  (void)extra;
  if(refused != CUDA_SUCCESS)
    return refused;
  if(function->builtin != NULL) {
    if(function->builtin->run == NULL)
      return CUDA_ERROR_NOT_SUPPORTED;
    function->builtin->run(params);
    return CUDA_SUCCESS;
  }
  launch.seed = emu_driver_launch_seed(driver.seed, driver.salt, driver.launches++);
  memset(&found, 0, sizeof(found));
  return emu_launch(&launch, &found) ? CUDA_SUCCESS : lose(&found, &launch, kernel, driver.launches - 1);
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
    return explain(CUDA_ERROR_INVALID_VALUE, "tensor map: the rank is not 1 to 5");
  if(type != CU_TENSOR_MAP_DATA_TYPE_UINT8 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill_kind != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
     (size_t)swizzle >= sizeof(swizzle_bytes) / sizeof(swizzle_bytes[0]))
    return explain(CUDA_ERROR_NOT_SUPPORTED, "tensor map: only bytes, not interleaved, filled with zeros, are emulated");
  map.swizzle = swizzle_bytes[swizzle];
  for(uint32_t i = 0; i < rank; i++) {
    map.dim[i] = dim[i];
    map.box[i] = box[i];
    if(i + 1 < rank)
      map.stride[i] = stride[i];
    if(element_stride[i] != 1)
      return explain(CUDA_ERROR_NOT_SUPPORTED, "tensor map: only element strides of 1 are emulated");
  }
  fault = emu_tensor_map_fault(&map);
  if(fault != NULL)
    return explain(CUDA_ERROR_INVALID_VALUE, fault);
  emu_tensor_map_encode(&map, out);
  return CUDA_SUCCESS;
}

/* ---- the table ---- */
void emu_driver_setup(const struct emu_driver_config *config)
{
  memset(&driver, 0, sizeof(driver));
  driver.config = *config;
}

const char *emu_driver_text(void)
{
  return driver.text;
}

enum emu_finding_kind emu_driver_finding(void)
{
  return driver.finding;
}

enum emu_jit_status emu_driver_jit_status(void)
{
  return driver.jit;
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
      .p_cuModuleLoadData = module_load,
      .p_cuModuleUnload = module_unload,
      .p_cuModuleGetFunction = module_get_function,
      .p_cuFuncSetAttribute = func_set_attribute,
      .p_cuOccupancyMaxActiveBlocksPerMultiprocessor = occupancy,
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
      .p_cuLaunchKernelEx = launch_kernel,
      .p_cuTensorMapEncodeTiled = encode_tiled,
  };
  *api = functions;
}
