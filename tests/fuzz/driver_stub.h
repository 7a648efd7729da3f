/* driver_stub.h - the CUDA driver for fuzzing libmoeforge: it reads everything that it is handed, as far as a real one would, and does nothing.
 *
 * It stands in for runtime/cuda_api.c: whoever includes this (in one file of a program) must not link that. Functions that the runtime has no business to
 * call end the program. */
#ifndef MOEFORGE_TESTS_DRIVER_STUB_H
#define MOEFORGE_TESTS_DRIVER_STUB_H

#include "cuda_api.h"
#include "moeforge_recipe.h"

#include <elf.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static const struct mf_recipe *stub_recipe; /* of the launches to come: they read all of its parameters; NULL: as many bytes as the image says */
static volatile unsigned stub_sum;          /* of all bytes read, so that no read is left out */
static int stub_launches;
static const unsigned char *stub_image;     /* the ELF image that was loaded last; NULL: a text */
static struct stub_kernel {                 /* what a function's handle points to: what its image says of its parameters, however wrong */
  uint32_t nparams, sizes[MF_RECIPE_MAX_PARAMS];
} stub_kernels[64];
static uint32_t stub_nkernels;

static void stub_read(const void *bytes, size_t count)
{
  const unsigned char *p = bytes;
  unsigned sum = 0;
  for(size_t i = 0; i < count; i++)
    sum += p[i];
  stub_sum = stub_sum + sum;
}

#define STUB_TRAP(name, symbol, parameters)  \
  static CUresult CUDAAPI stub_no_##name parameters \
  {                                          \
    abort();                                 \
  }
CUDA_API_TABLE(STUB_TRAP)
#undef STUB_TRAP

/* ---- the device that the fixtures' packages are for ---- */
static CUresult CUDAAPI stub_init(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
static CUresult CUDAAPI stub_version(int *version) { return *version = 13000, CUDA_SUCCESS; }
static CUresult CUDAAPI stub_device(CUdevice *device, int ordinal) { return *device = ordinal, ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
static CUresult CUDAAPI stub_name(char *name, int space, CUdevice device)
{
  (void)device;
  return strncpy(name, "NVIDIA H200", (size_t)space), CUDA_SUCCESS;
}
static CUresult CUDAAPI stub_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
  (void)device;
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : 0;
  return CUDA_SUCCESS;
}
static CUresult CUDAAPI stub_retain(CUcontext *context, CUdevice device) { return *context = (CUcontext)(uintptr_t)(device + 16), CUDA_SUCCESS; }
static CUresult CUDAAPI stub_release(CUdevice device) { return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
static CUresult CUDAAPI stub_push(CUcontext context) { return context != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
static CUresult CUDAAPI stub_pop(CUcontext *context) { return context == NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

/* ---- modules: an image is read as far as it says that it goes, a text up to its NUL ---- */
static CUresult CUDAAPI stub_load(CUmodule *module, const void *image)
{
  const unsigned char *bytes = image;
  Elf64_Ehdr head;
  *module = (CUmodule)(uintptr_t)64;
  stub_image = NULL;
  if(memcmp(image, "\x7f", 1) != 0 || strncmp(image, "\x7f" "ELF", 4) != 0) {
    stub_read(image, strlen(image));
    return CUDA_SUCCESS;
  }
  memcpy(&head, image, sizeof(head));
  for(uint32_t i = 0; i < head.e_shnum; i++) {
    Elf64_Shdr s, names;
    memcpy(&s, bytes + head.e_shoff + i * sizeof(s), sizeof(s));
    memcpy(&names, bytes + head.e_shoff + head.e_shstrndx * sizeof(s), sizeof(s));
    stub_read(bytes + names.sh_offset + s.sh_name, strlen((const char *)bytes + names.sh_offset + s.sh_name));
    if(s.sh_type != SHT_NOBITS && s.sh_type != SHT_NULL)
      stub_read(bytes + s.sh_offset, (size_t)s.sh_size);
  }
  for(uint32_t i = 0; i < head.e_phnum; i++) {
    Elf64_Phdr p;
    memcpy(&p, bytes + head.e_phoff + i * sizeof(p), sizeof(p));
    stub_read(bytes + p.p_offset, (size_t)p.p_filesz);
  }
  stub_image = bytes;
  return CUDA_SUCCESS;
}
/* Takes the parameters of kernel 'name' from the image, wherever a record looks like one. */
static void stub_parameters(const unsigned char *bytes, const char *name, struct stub_kernel *kernel)
{
  Elf64_Ehdr head;
  memcpy(&head, bytes, sizeof(head));
  for(uint32_t i = 0; i < head.e_shnum; i++) {
    Elf64_Shdr s, names;
    const char *found;
    memcpy(&s, bytes + head.e_shoff + i * sizeof(s), sizeof(s));
    memcpy(&names, bytes + head.e_shoff + head.e_shstrndx * sizeof(s), sizeof(s));
    found = (const char *)bytes + names.sh_offset + s.sh_name;
    if(strncmp(found, ".nv.info.", 9) != 0 || strcmp(found + 9, name) != 0 || s.sh_type == SHT_NOBITS || s.sh_type == SHT_NULL)
      continue;
    for(uint64_t at = s.sh_offset, end = at + s.sh_size; at + 4 <= end; at += 4 + (bytes[at] == 4 ? bytes[at + 2] + 256u * bytes[at + 3] : 0)) {
      if(bytes[at] != 4 || bytes[at + 1] != 0x17 || at + 16 > end)
        continue;
      kernel->nparams = kernel->nparams > bytes[at + 8] + 1u ? kernel->nparams : bytes[at + 8] + 1u;
      if(kernel->nparams > MF_RECIPE_MAX_PARAMS || bytes[at + 9] != 0)
        abort(); /* more than a launch passes */
      kernel->sizes[bytes[at + 8]] = (bytes[at + 14] + 256u * bytes[at + 15]) >> 2;
    }
  }
}
static CUresult CUDAAPI stub_unload(CUmodule module) { return module != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
static CUresult CUDAAPI stub_function(CUfunction *function, CUmodule module, const char *name)
{
  (void)module;
  stub_read(name, strlen(name));
  if(stub_image == NULL)
    return *function = (CUfunction)(uintptr_t)128, CUDA_SUCCESS;
  stub_nkernels = (stub_nkernels + 1) % 64; /* an op has fewer */
  memset(&stub_kernels[stub_nkernels], 0, sizeof(stub_kernels[0]));
  stub_parameters(stub_image, name, &stub_kernels[stub_nkernels]);
  return *function = (CUfunction)(void *)&stub_kernels[stub_nkernels], CUDA_SUCCESS;
}
static CUresult CUDAAPI stub_limit(CUfunction function, CUfunction_attribute attribute, int value)
{
  (void)function, (void)attribute;
  return value >= 0 && value <= 232448 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult CUDAAPI stub_occupancy(int *blocks, CUfunction function, int threads, size_t shared_bytes)
{
  (void)function;
  if(threads < 1 || threads > 1024 || shared_bytes > 232448)
    return CUDA_ERROR_INVALID_VALUE;
  return *blocks = 16, CUDA_SUCCESS;
}

/* ---- bind and launch ---- */
static CUresult CUDAAPI stub_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
                                    const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *element_stride, CUtensorMapInterleave interleave,
                                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
  (void)type, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
  if(rank < 1 || rank > 5 || (uintptr_t)address % 16 != 0 || (uintptr_t)map % 64 != 0)
    abort(); /* the validator and bind must not let it come this far */
  stub_read(dim, rank * sizeof(*dim));
  stub_read(stride, (rank - 1) * sizeof(*stride));
  stub_read(box, rank * sizeof(*box));
  stub_read(element_stride, rank * sizeof(*element_stride));
  memset(map, 0x5a, sizeof(*map));
  return CUDA_SUCCESS;
}
/* As many bytes as the kernel's image says; of a text nobody knows. */
static size_t stub_bytes(CUfunction function, uint32_t param)
{
  const struct stub_kernel *kernel = (const void *)function;
  return (uintptr_t)function == 128 || kernel->sizes[param] == 0 ? 1 : kernel->sizes[param];
}
static CUresult CUDAAPI stub_launch(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
  if(function == NULL || extra != NULL || config->gridDimX == 0 || (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ > 1024)
    abort();
  stub_read(config->attrs, config->numAttrs * sizeof(*config->attrs));
  for(uint32_t i = 0; i < MF_RECIPE_MAX_PARAMS; i++)
    stub_read(params[i], stub_recipe == NULL ? stub_bytes(function, i) : i < stub_recipe->nparams ? stub_recipe->params[i].size : 0);
  stub_launches++;
  return CUDA_SUCCESS;
}
static CUresult CUDAAPI stub_memset(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
  (void)value, (void)stream;
  return address != 0 && bytes > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cuda_api_open(struct cuda_api *api, char *why, unsigned long why_bytes)
{
  (void)why, (void)why_bytes;
  memset(api, 0, sizeof(*api));
#define SET(name, symbol, parameters) api->p_##name = stub_no_##name;
  CUDA_API_TABLE(SET)
#undef SET
  api->p_cuInit = stub_init;
  api->p_cuDriverGetVersion = stub_version;
  api->p_cuDeviceGet = stub_device;
  api->p_cuDeviceGetName = stub_name;
  api->p_cuDeviceGetAttribute = stub_attribute;
  api->p_cuDevicePrimaryCtxRetain = stub_retain;
  api->p_cuDevicePrimaryCtxRelease = stub_release;
  api->p_cuCtxPushCurrent = stub_push;
  api->p_cuCtxPopCurrent = stub_pop;
  api->p_cuModuleLoadData = stub_load;
  api->p_cuModuleUnload = stub_unload;
  api->p_cuModuleGetFunction = stub_function;
  api->p_cuFuncSetAttribute = stub_limit;
  api->p_cuOccupancyMaxActiveBlocksPerMultiprocessor = stub_occupancy;
  api->p_cuTensorMapEncodeTiled = stub_encode;
  api->p_cuLaunchKernelEx = stub_launch;
  api->p_cuMemsetD8Async = stub_memset;
  return 0;
}

void cuda_api_close(struct cuda_api *api)
{
  memset(api, 0, sizeof(*api));
}

#endif
