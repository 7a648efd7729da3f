/* device_emu.h - the emulated device behind device.h: the CUDA device (device_cuda.c) over the emulated driver (emu/driver.h), so that weights, bound
 * layers, guarded cases and what is read back are the very same code.
 *
 * It executes every candidate's own source, compiled for this machine when it is loaded, so a "cubin" is here an image (device_emu_image). Numbers and
 * protocol are judged by execution; times mean nothing: open_profile and time_round are MF_ERR_UNSUPPORTED.
 *
 * Reproducible: a case starts on a fresh workspace, and the interleaving of its n-th launch follows from the seed, the case and n alone. A finding's text
 * begins "seed N, launch n: "; the same case with the seed N ends in the same finding. */
#ifndef MOEFORGE_TUNER_DEVICE_EMU_H
#define MOEFORGE_TUNER_DEVICE_EMU_H

#include "device.h"
#include "error.h"
#include "types.h"

#define EMU_BASE_SEED 1 /* of what is stored */

/* Everything that a process needs to know to have the device. */
struct device_emulation {
  struct device_info info;  /* the device that it pretends to be */
  char template_dir[1024];
  char emu_dir[1024];       /* folder of hw_host.h */
  char cache_dir[1024];     /* compiled kernels; must be there */
  char compiler[1024];      /* C++ compiler */
  uint64_t seed;
  uint64_t max_steps;       /* of one launch, 0: the emulator's default */
  bool sanitize;            /* kernels with UBSan as well, for a program that has it */
};

extern const struct device_ops device_emu;
/* What device_emu is in this process; before any other call of it. Not while a device is open. */
void device_emu_configure(const struct device_emulation *emulation);
/* Whether it would work: compiler, headers, cache folder. MF_ERR_TOOLKIT, MF_ERR_IO. */
enum mf_status device_emu_check(const struct device_emulation *emulation, struct error *err);
/* What load_kernel takes for a compiled artifact: its source, and the metadata of its cubin that the host's build must have, too. 'debug' as in
 * compile_artifact(). The caller frees *out. */
enum mf_status device_emu_image(const struct artifact *art, const char *kernel, bool debug, void **out, size_t *bytes, struct error *err);
/* Part of every key of what the emulated device has judged: version and seed. */
void device_emu_key(const struct device_emulation *emulation, char *out, size_t space);
/* Memory of this machine that can still be had, bytes. */
double device_emu_free_memory(void);

#endif
