/* driver_internal.h - what the two files of the emulated driver share: driver.c (device, memory, streams, tensor maps) and driver_module.c (images, modules,
 * launches). */
#ifndef MOEFORGE_EMU_DRIVER_INTERNAL_H
#define MOEFORGE_EMU_DRIVER_INTERNAL_H

#include "cuda_api.h"
#include "driver.h"

#define EMU_DRIVER_TEXT_BYTES 6144 /* a finding's text and the launch that it is of */

struct block;

struct emu_driver_state {
  struct emu_driver_config config;
  struct block *blocks;
  size_t used;
  CUresult broken;        /* CUDA_SUCCESS, or what the context is lost to */
  CUresult text_of;       /* the result that 'text' explains */
  char text[EMU_DRIVER_TEXT_BYTES];
  enum emu_finding_kind finding;
  enum emu_jit_status jit;
  uint64_t seed, salt;
  uint32_t launches;
};
extern struct emu_driver_state emu_driver_state;

/* Notes a text for a result; returns the result. */
CUresult emu_driver_explain(CUresult result, const char *text);

CUresult CUDAAPI emu_driver_module_load(CUmodule *out, const void *image);
CUresult CUDAAPI emu_driver_module_unload(CUmodule handle);
CUresult CUDAAPI emu_driver_module_get_function(CUfunction *out, CUmodule handle, const char *name);
CUresult CUDAAPI emu_driver_func_set_attribute(CUfunction handle, CUfunction_attribute which, int value);
CUresult CUDAAPI emu_driver_occupancy(int *out, CUfunction handle, int threads, size_t shared_bytes);
CUresult CUDAAPI emu_driver_launch_kernel(const CUlaunchConfig *config, CUfunction handle, void **params, void **extra);

#endif
