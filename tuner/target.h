/* target.h - which device a command works for: a GPU of this machine, a device that is emulated, or a device spec that is only
 * planned for. */
#ifndef MOEFORGE_TUNER_TARGET_H
#define MOEFORGE_TUNER_TARGET_H

#include "error.h"
#include "options.h"
#include "types.h"

struct target {
  struct device_info dev;
  bool gpu;          /* there is a GPU to check and time on; else times are predicted */
  bool emulated;     /* numbers are checked on the emulated device */
  int ordinal;       /* its CUDA device number */
  char note[1024];   /* why nothing can be measured, one line; "" with a GPU */
};

/* Resolves --device. "auto" without a GPU plans for the device spec "h200"; a GPU that the kernels cannot run on is an error. "emu" is
 * "emu:emu-sm90"; any device spec can be emulated, but is another device then ("... (emulated)"): what is tuned on it is not for the GPU. */
enum mf_status target_resolve(const struct options *opt, struct target *out, struct error *err);
/* Reads "cuda" or "cuda:N"; false if it is neither. */
bool target_cuda_ordinal(const char *text, int *ordinal);
/* --tokens or the spec's list, ascending without repeats. Returns the number through *count. */
enum mf_status target_tokens(const struct options *opt, const struct model_spec *spec, int tokens[MAX_TOKEN_COUNTS], int *count, struct error *err);

#endif
