/* compile.h - emitted source to cubin with NVRTC, its key, and what the result uses.
 *
 * NVRTC is opened at run time (nvrtc_open): MOEFORGE_NVRTC names the library, else the toolkit's usual places are searched. The
 * templates are handed over in memory: the *closure* of an emitted file is every template it includes, directly or not, in order of first use.
 * The compile key hashes the emitted text, the closure's names and bytes, NVRTC's version, the options and the architecture, so that an
 * artifact with an equal key is the same artifact. Compilation itself runs in worker processes (worker.h). */
#ifndef MOEFORGE_TUNER_COMPILE_H
#define MOEFORGE_TUNER_COMPILE_H

#include "error.h"
#include "types.h"

struct nvrtc; /* the opened library */

enum mf_status nvrtc_open(struct nvrtc **out, struct error *err);
void nvrtc_close(struct nvrtc *nvrtc);
/* 13000 = 13.0 */
int nvrtc_version(const struct nvrtc *nvrtc);
/* Path of the library that was opened. */
const char *nvrtc_path(const struct nvrtc *nvrtc);

#define CLOSURE_MAX_FILES 64
/* Templates that a source includes. Owns its strings. */
struct closure {
  int count;
  char *name[CLOSURE_MAX_FILES]; /* path below templates/: "hw/ints.h", however the includer wrote it */
  char *text[CLOSURE_MAX_FILES];
};
/* Follows #include "..." from 'source' through 'template_dir': relative to the includer's folder, else to template_dir. Includes under
 * MF_HOST_EMULATION do not count. A missing file is MF_ERR_IO naming file and includer. */
enum mf_status closure_collect(const char *template_dir, const char *source, struct closure *out, struct error *err);
void closure_free(struct closure *closure);

/* Architecture name for NVRTC of a compute capability: 9.0 -> "sm_90a". NULL if the kernels cannot run there. */
const char *compile_arch(int cc_major, int cc_minor);
enum compile_build {
  COMPILE_PLAIN,     /* what serves */
  COMPILE_DEBUG,     /* with the watchdog */
  COMPILE_LINE_INFO, /* the same code with line information, which puts paths into the cubin */
  COMPILE_SYNCCHECK, /* likewise, with CTA barriers in the form that compute-sanitizer's synccheck can follow */
};
/* Fills in art->compile_key from art->source. */
void compile_key(struct artifact *art, const struct closure *closure, int nvrtc_version, const char *arch, enum compile_build build);
/* Compiles art->source in this process; fills in cubin, log and the resource fields (the largest over its kernels, if there are several; spills of
 * all). MF_ERR_COMPILE: err has the compiler's first error, the log all of them. MF_ERR_CORRUPT: cubin and log disagree. MF_ERR_TOOLKIT: NVRTC itself
 * does not work. */
enum mf_status compile_artifact(struct nvrtc *nvrtc, const struct closure *closure, const char *arch, enum compile_build build, struct artifact *art,
                                struct error *err);
void artifact_free(struct artifact *art);

/* Reads a cubin (ELF): registers, stack, static shared memory of 'kernel', from its attributes (spills are in the log only); and the bytes of a
 * symbol's initial value (the metadata), whose size must be out_bytes (cubin_symbol_bytes tells it). MF_ERR_CORRUPT if it is no such ELF,
 * MF_ERR_NOT_FOUND without such a symbol. */
enum mf_status cubin_read_resources(const unsigned char *cubin, size_t bytes, const char *kernel, struct artifact *out, struct error *err);
enum mf_status cubin_read_symbol(const unsigned char *cubin, size_t bytes, const char *symbol, void *out, size_t out_bytes, struct error *err);
enum mf_status cubin_symbol_bytes(const unsigned char *cubin, size_t bytes, const char *symbol, size_t *out, struct error *err);
/* Name of kernel 'index', from 0; MF_ERR_NOT_FOUND past the last one. */
enum mf_status cubin_kernel_at(const unsigned char *cubin, size_t bytes, int index, char *name, size_t space, struct error *err);
/* Stack frame of the kernel without its callees. */
enum mf_status cubin_frame_bytes(const unsigned char *cubin, size_t bytes, const char *kernel, long *frame_bytes, struct error *err);
/* SHA-256 over the code sections (.text.*) and constants, which is equal for equal code whatever the process. */
enum mf_status cubin_code_hash(const unsigned char *cubin, size_t bytes, char key[KEY_LEN], struct error *err);

#endif
