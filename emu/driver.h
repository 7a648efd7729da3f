/* driver.h - an emulated CUDA driver: fills in the function table of runtime/cuda_api.h over the emulator, so that whoever uses a GPU through
 * that table (binding, tensor maps, launching, guarded cases) works on the emulated device unchanged.
 *
 * What is not like a driver: one device, one context, one stream, one thread; a launch runs to its end inside cuLaunchKernelEx; device memory is host
 * memory; graphs and events are not supported (CUDA_ERROR_NOT_SUPPORTED): times mean nothing here.
 *
 * A *module* is not a cubin but an image of this file's own (emu_image_make): the emitted source, which is compiled by the host's compiler when the
 * module is loaded (jit.h), or the set of built-in functions that the caller has given. */
#ifndef MOEFORGE_EMU_DRIVER_H
#define MOEFORGE_EMU_DRIVER_H

#include "emu.h"
#include "jit.h"

/* Part of every key under which a verdict of the emulated device is kept: raise it when the emulator judges or computes differently. */
#define EMU_VERSION 1

struct cuda_api;

/* A kernel that the host computes itself; its arguments as in cuLaunchKernel. */
struct emu_builtin {
  const char *name;
  void (*run)(void **params); /* NULL: can be loaded but not launched */
};

struct emu_driver_config {
  const char *name;  /* of the device; all strings and lists are borrowed for as long as the driver is used */
  int cc_major, cc_minor, sms, registers_per_sm, max_threads_per_cta;
  long shared_bytes_per_cta, shared_bytes_per_sm, l2_bytes;
  size_t memory_bytes;
  struct emu_jit_config jit;
  const struct emu_builtin *builtins;
  size_t nbuiltins;
  uint64_t max_steps; /* of one launch, 0: the emulator's default */
};

/* Sets up the one device of this process. Nothing may be allocated or loaded at that time. */
void emu_driver_setup(const struct emu_driver_config *config);
/* The driver's functions; api->library is NULL. */
void emu_driver(struct cuda_api *api);

/* From here on launches are numbered from 0, and launch n has the interleaving emu_driver_launch_seed(seed, salt, n). 'salt' stands for what is launched:
 * with the same seed, different work has different interleavings. Findings name 'seed' and n. */
void emu_driver_seed(uint64_t seed, uint64_t salt);
uint64_t emu_driver_launch_seed(uint64_t seed, uint64_t salt, uint32_t launch);

/* What the last failing call had to say, "" if no call has failed so; cuGetErrorString gives the same text. */
const char *emu_driver_text(void);
/* The kind of the finding that ended a launch, EMU_NONE before the first one. */
enum emu_finding_kind emu_driver_finding(void);
/* How loading the last module ended. */
enum emu_jit_status emu_driver_jit_status(void);

/* Images: 'meta' is what the symbol mf_meta of the loaded kernel must hold (0 bytes: not compared), as the cubin of the same source has it. */
size_t emu_image_bytes(const char *source, size_t meta_bytes);
void emu_image_make(const char *kernel, const char *source, const void *meta, size_t meta_bytes, void *out);
/* The image of the built-in functions. */
size_t emu_image_builtin_bytes(void);
void emu_image_make_builtin(void *out);
/* Whether these bytes are one whole image. */
bool emu_image_valid(const void *image, size_t bytes);

#endif
