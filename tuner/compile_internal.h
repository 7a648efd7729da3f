/* compile_internal.h - what nvrtc.c, closure.c, ptxas_log.c and compile.c share; nobody else includes it. */
#ifndef MOEFORGE_TUNER_COMPILE_INTERNAL_H
#define MOEFORGE_TUNER_COMPILE_INTERNAL_H

#include "compile.h"

/* NVRTC's functions: member, exported symbol, parameters. Its own header is not needed: every function returns nvrtcResult (an int enum,
 * 0 = success) and a program is an opaque pointer. */
#define NVRTC_TABLE(X)                                                                                                             \
  X(version, "nvrtcVersion", (int *, int *))                                                                                       \
  X(create, "nvrtcCreateProgram", (void **, const char *, const char *, int, const char *const *, const char *const *))            \
  X(destroy, "nvrtcDestroyProgram", (void **))                                                                                     \
  X(compile, "nvrtcCompileProgram", (void *, int, const char *const *))                                                            \
  X(log_size, "nvrtcGetProgramLogSize", (void *, size_t *))                                                                        \
  X(log, "nvrtcGetProgramLog", (void *, char *))                                                                                   \
  X(cubin_size, "nvrtcGetCUBINSize", (void *, size_t *))                                                                           \
  X(cubin, "nvrtcGetCUBIN", (void *, char *))

#define NVRTC_BUILTIN_FAILURE 7 /* NVRTC_ERROR_BUILTIN_OPERATION_FAILURE: libnvrtc-builtins was not found or does not fit */

struct nvrtc {
  void *library;   /* dlopen handles */
  void *builtins;  /* NULL if there is none beside it: then compiling tells */
  char *path;      /* resolved, malloc */
  int number;      /* 13000 = 13.0 */
#define NVRTC_MEMBER(name, symbol, parameters) int(*name) parameters;
  NVRTC_TABLE(NVRTC_MEMBER)
#undef NVRTC_MEMBER
  const char *(*error_string)(int); /* nvrtcGetErrorString */
};

/* NVRTC knows in-memory headers by exact name and has no notion of the includer's folder. Returns 'text' (malloc; NULL: out of memory), a file
 * of the closure called 'name' ("" for the emitted source), with each quoted include that the closure resolves written as the closure's name.
 * Line numbers stay. */
char *closure_rewrite(const struct closure *closure, const char *name, const char *text);

/* What `--ptxas-options=-v` wrote about one kernel. -1: not mentioned. */
struct ptxas_usage {
  long registers;
  long frame_bytes;  /* stack frame of the kernel itself */
  long shared_bytes; /* static; 0 if the register line is there and does not mention it */
  long spill_bytes;  /* stores + loads, of all functions in the log */
  bool wgmma_serialised;
};
void ptxas_log_read(const char *log, const char *kernel, struct ptxas_usage *out);
/* Copies the first line of 'log' that reports an error, "" if there is none. */
void compiler_log_first_error(const char *log, char *out, size_t space);

#endif
