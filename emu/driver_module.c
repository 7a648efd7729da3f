/* driver_module.c - the emulated driver's images, modules and launches; see driver.h. */
#include "driver_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IMAGE_MAGIC "MFEMU01"
#define IMAGE_BUILTIN "MFEMUBI"
#define SHARED_WITHOUT_ASKING 49152 /* dynamic shared memory of a launch without cuFuncSetAttribute */
#define SHARED_OF_SYSTEM 1024      /* shared memory of each CTA that the system keeps */
#define THREADS_PER_SM 2048

/* The head of an image; behind it lie the source with its NUL, and the metadata. */
struct image {
  char magic[8];
  char kernel[64];
  uint64_t source_bytes, meta_bytes;
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

static struct emu_driver_state *const driver = &emu_driver_state;

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
    return emu_driver_explain(CUDA_ERROR_INVALID_IMAGE, text);
  }
  while(at < bytes && have[at] == want[at])
    at++;
  if(at == bytes)
    return CUDA_SUCCESS;
  snprintf(text, sizeof(text), "mf_meta of the host's build differs from the cubin's in byte %zu (%u, %u)", at, have[at], want[at]);
  return emu_driver_explain(CUDA_ERROR_INVALID_IMAGE, text);
}

static CUresult load_source(struct module *module, const struct image *head, const char *source)
{
  char why[EMU_DRIVER_TEXT_BYTES];
  CUresult result;
  driver->jit = emu_jit_load(&driver->config.jit, source, head->kernel, &module->kernel, why, sizeof(why));
  if(driver->jit != EMU_JIT_OK)
    return emu_driver_explain(jit_result(driver->jit), why);
  result = compare_meta(&module->kernel, (const unsigned char *)source + head->source_bytes, head->meta_bytes);
  if(result == CUDA_SUCCESS)
    return result;
  driver->jit = EMU_JIT_UNUSABLE;
  emu_jit_unload(&module->kernel);
  return result;
}

CUresult CUDAAPI emu_driver_module_load(CUmodule *out, const void *image)
{
  struct module *module = calloc(1, sizeof(*module));
  struct image head;
  CUresult result = CUDA_SUCCESS;
  *out = NULL;
  driver->jit = EMU_JIT_OK;
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

CUresult CUDAAPI emu_driver_module_unload(CUmodule handle)
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
  for(size_t i = 0; i < driver->config.nbuiltins; i++)
    if(strcmp(driver->config.builtins[i].name, name) == 0)
      return &driver->config.builtins[i];
  return NULL;
}

CUresult CUDAAPI emu_driver_module_get_function(CUfunction *out, CUmodule handle, const char *name)
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

CUresult CUDAAPI emu_driver_func_set_attribute(CUfunction handle, CUfunction_attribute which, int value)
{
  struct function *function = (struct function *)(void *)handle;
  if(which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > driver->config.shared_bytes_per_cta)
    return CUDA_ERROR_INVALID_VALUE;
  function->shared_limit = (size_t)value;
  return CUDA_SUCCESS;
}

/* CTAs of this size that one multiprocessor holds at once. */
static int resident_ctas(int threads, size_t shared_bytes)
{
  const int by_threads = threads > 0 ? THREADS_PER_SM / threads : 0;
  const long by_shared = driver->config.shared_bytes_per_sm / ((long)shared_bytes + SHARED_OF_SYSTEM);
  return by_shared < by_threads ? (int)by_shared : by_threads;
}

CUresult CUDAAPI emu_driver_occupancy(int *out, CUfunction handle, int threads, size_t shared_bytes)
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
  driver->seed = seed;
  driver->salt = salt;
  driver->launches = 0;
}

static bool wants(const CUlaunchConfig *config, CUlaunchAttributeID id)
{
  for(unsigned int i = 0; i < config->numAttrs; i++) {
    const CUlaunchAttributeValue *value = &config->attrs[i].value;
    if(config->attrs[i].id == id && (id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE ? value->cooperative : value->programmaticStreamSerializationAllowed) != 0)
      return true;
  }
  return false;
}

/* What a driver refuses before anything runs. */
static CUresult check_launch(const CUlaunchConfig *c, const struct function *function)
{
  const unsigned int threads = c->blockDimX;
  if(c->gridDimX == 0 || threads == 0 || threads > (unsigned int)driver->config.max_threads_per_cta || c->sharedMemBytes > function->shared_limit)
    return CUDA_ERROR_INVALID_VALUE;
  if(c->gridDimY != 1 || c->gridDimZ != 1 || c->blockDimY != 1 || c->blockDimZ != 1 || (function->builtin == NULL && threads % 32 != 0))
    return emu_driver_explain(CUDA_ERROR_NOT_SUPPORTED, "the emulated device runs one-dimensional grids of whole warps");
  if(wants(c, CU_LAUNCH_ATTRIBUTE_COOPERATIVE) && c->gridDimX > (uint64_t)driver->config.sms * (uint64_t)resident_ctas((int)threads, c->sharedMemBytes))
    return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  return CUDA_SUCCESS;
}

/* A launch ended with a finding: the context is lost. */
static CUresult lose(struct emu_finding *found, const struct emu_launch *launch, const struct emu_kernel *kernel, uint32_t number)
{
  char text[EMU_DRIVER_TEXT_BYTES];
  emu_finding_locate(found, launch, kernel->object);
  snprintf(text, sizeof(text), "seed %llu, launch %u: %s", (unsigned long long)driver->seed, number, found->text);
  driver->finding = found->kind;
  driver->broken = found->kind == EMU_NO_MEMORY     ? CUDA_ERROR_OUT_OF_MEMORY
                  : found->kind == EMU_UNSUPPORTED ? CUDA_ERROR_NOT_SUPPORTED
                                                   : CUDA_ERROR_LAUNCH_FAILED;
  return emu_driver_explain(driver->broken, text);
}

CUresult CUDAAPI emu_driver_launch_kernel(const CUlaunchConfig *config, CUfunction handle, void **params, void **extra)
{
  const struct function *function = (const struct function *)(void *)handle;
  const struct emu_kernel *kernel = &function->module->kernel;
  struct emu_launch launch = {.params = params, .ctas = (int)config->gridDimX, .threads = (int)config->blockDimX, .shared_bytes = config->sharedMemBytes,
                              .max_steps = driver->config.max_steps, .code = kernel->code, .code_bytes = kernel->code_bytes, .entry = kernel->entry,
                              .early = wants(config, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)};
  struct emu_finding found;
  const CUresult refused = driver->broken != CUDA_SUCCESS ? driver->broken : check_launch(config, function);
  (void)extra;
  if(refused != CUDA_SUCCESS)
    return refused;
  if(function->builtin != NULL) {
    if(function->builtin->run == NULL)
      return CUDA_ERROR_NOT_SUPPORTED;
    function->builtin->run(params);
    return CUDA_SUCCESS;
  }
  launch.seed = emu_driver_launch_seed(driver->seed, driver->salt, driver->launches++);
  memset(&found, 0, sizeof(found));
  return emu_launch(&launch, &found) ? CUDA_SUCCESS : lose(&found, &launch, kernel, driver->launches - 1);
}
