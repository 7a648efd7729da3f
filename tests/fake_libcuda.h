/* fake_libcuda.h - how tests use the scripted CUDA driver that fake_libcuda.c builds (build/tests/libfakecuda.so).
 *
 * The script is the environment variable FAKECUDA, comma-separated, read at every cuInit; an unknown key makes cuInit fail:
 *   no_device         cuInit reports that there is no GPU          devices=N     number of GPUs (1)
 *   cc=90             compute capability                           sms=132       multiprocessors
 *   driver=13000      CUDA version of the driver                   name=TEXT     device name ("NVIDIA H200")
 *   l2=BYTES          L2 size                                      mem=BYTES     device memory; beyond it allocations fail
 *   oom               every allocation fails                       occupancy=N   CTAs per multiprocessor (1)
 *   load_fail         modules are for another GPU                  map_fail      tensor maps cannot be encoded
 *   launch_fail       launches return an error                     fault         launches succeed, the next synchronisation reports a fault
 *   early_fail        cooperative launches that may begin early return an error
 *   hang              launched kernels never end                   time_us=X     every kernel takes X microseconds
 *   light             launches are not kept, run or logged: for measuring what a caller costs
 * FAKECUDA_TIME_US=X is the same as time_us=X. Without either a kernel's time is a fixed function of its module, grid and arguments (addresses aside).
 * FAKECUDA_LOG=FILE: one line per module, launch, memset and graph launch is appended.
 *
 * A module is a real cubin (its parameter sizes are read from the ELF), or a text "FAKECUBIN <kernel> <size> <size> ...\n". Kernels do nothing,
 * unless the test gives a function (fakecuda_on_launch) that does their work on the host. */
#ifndef MOEFORGE_TESTS_FAKE_LIBCUDA_H
#define MOEFORGE_TESTS_FAKE_LIBCUDA_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FAKECUDA_MAX_PARAMS 16

/* One launch as the driver saw it. params[i] points to sizes[i] bytes. */
struct fakecuda_launch {
  const char *kernel;
  unsigned grid[3], block[3], shared_bytes;
  int cooperative, pdl;
  int captured; /* runs as part of a graph */
  int nparams;
  size_t sizes[FAKECUDA_MAX_PARAMS];
  const void *params[FAKECUDA_MAX_PARAMS];
  void *stream;
};

/* What a tensor map of the fake driver holds in its 128 bytes. */
struct fakecuda_map {
  unsigned magic; /* FAKECUDA_MAP_MAGIC */
  unsigned char type, rank, interleave, swizzle, promotion, fill, reserved[2];
  unsigned short box[5];
  unsigned char element_stride[5], reserved2;
  unsigned long long address;
  unsigned long long dim[5];
  unsigned long long stride[4];
};
#define FAKECUDA_MAP_MAGIC 0x50414d46u

typedef void fakecuda_launch_fn(void *context, const struct fakecuda_launch *launch);
/* Symbol of the fake library: 'fn' is called for every kernel that runs (also from graphs), NULL ends that. It must not call the driver. */
typedef void fakecuda_on_launch_fn(fakecuda_launch_fn *fn, void *context);
/* Symbol of the fake library, to be called from a launch function: the kernel that runs never ends. */
typedef void fakecuda_hang_fn(void);
/* Symbol of the fake library: allocations, modules, streams, contexts and graphs that are alive. */
typedef int fakecuda_alive_fn(void);

/* Path of the library: beside the running test, or FAKECUDA_LIBRARY. */
static inline const char *fakecuda_path(void)
{
  static char path[4096];
  const char *given = getenv("FAKECUDA_LIBRARY");
  ssize_t n;
  char *slash;
  if(given != NULL)
    return given;
  n = readlink("/proc/self/exe", path, sizeof(path) - 32);
  path[n > 0 ? n : 0] = '\0';
  slash = strrchr(path, '/');
  snprintf(slash != NULL ? slash + 1 : path, 32, "libfakecuda.so");
  return path;
}

/* Makes this process use the fake driver with 'script'; 'log' may be NULL. */
static inline void fakecuda_use(const char *script, const char *log)
{
  setenv("MOEFORGE_LIBCUDA", fakecuda_path(), 1);
  setenv("FAKECUDA", script, 1);
  unsetenv("FAKECUDA_TIME_US");
  if(log != NULL)
    setenv("FAKECUDA_LOG", log, 1);
  else
    unsetenv("FAKECUDA_LOG");
}

/* A symbol of the fake library; the library stays loaded. */
static inline void *fakecuda_symbol(const char *name)
{
  void *library = dlopen(fakecuda_path(), RTLD_NOW | RTLD_LOCAL);
  return library != NULL ? dlsym(library, name) : NULL;
}

#endif
