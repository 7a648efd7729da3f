/* jit.h - from the text of an emitted kernel to host code in this process: the host's C++ compiler, run when a kernel is loaded, as a GPU driver does.
 *
 * The result is a shared object in a cache folder, under a hash of everything that it depends on: the text, every header below the include folders, the
 * compiler's version, the flags. It is used again by whoever asks for the same. Any number of processes may share a cache folder.
 *
 * The kernel calls the functions of emu_hw.h and the __tsan_ hooks, which the program must export (exports.txt). Not thread-safe. */
#ifndef MOEFORGE_EMU_JIT_H
#define MOEFORGE_EMU_JIT_H

#include <stdbool.h>
#include <stddef.h>

/* All strings are borrowed. */
struct emu_jit_config {
  const char *compiler;     /* of C++17; looked for in PATH if it has no slash: "c++" */
  const char *template_dir; /* include folders: the templates, */
  const char *emu_dir;      /* and that of hw_host.h */
  const char *cache_dir;    /* must be there */
  bool sanitize;            /* kernels with UBSan as well, for a program that has it */
};

enum emu_jit_status {
  EMU_JIT_OK,
  EMU_JIT_NO_COMPILER, /* it is not there or does not run */
  EMU_JIT_FAILED,      /* the source does not compile */
  EMU_JIT_IO,          /* headers that cannot be read, a cache folder that cannot be written */
  EMU_JIT_UNUSABLE,    /* what was compiled cannot be loaded or lacks the kernel */
  EMU_JIT_NO_MEMORY
};

struct emu_kernel {
  void *library;
  void (*entry)(void **params); /* calls the kernel */
  const void *meta;             /* its symbol mf_meta; NULL: it has none */
  size_t meta_bytes;
  const void *code;             /* where the object lies in memory */
  size_t code_bytes;
  char object[1024];            /* its file */
};

/* Whether kernels can be compiled here at all: the compiler answers, hw_host.h is there, the cache folder can be written. Every failure of this and the
 * next one leaves one line in 'why'. */
enum emu_jit_status emu_jit_check(const struct emu_jit_config *config, char *why, size_t space);
/* Compiles (unless the cache has it) and loads the function 'kernel' of 'source'. */
enum emu_jit_status emu_jit_load(const struct emu_jit_config *config, const char *source, const char *kernel, struct emu_kernel *out, char *why,
                                 size_t space);
void emu_jit_unload(struct emu_kernel *kernel);

#endif
