/* compile.c - one emitted source to one cubin, in this process; and the key that says when two compilations are the same.
 *
 * Everything that decides the cubin goes into the key: the source, the closure's names and bytes, NVRTC's version, the options, the
 * architecture. What a kernel uses is read twice, from the ELF's attributes (cubin.c) and from ptxas' log (ptxas_log.c): the two must agree,
 * because candidates are dropped by these numbers. Spills and wgmma serialisation are in the log only. */
#include "compile_internal.h"
#include "sha256.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KEY_FORMAT "moeforge compile key 1"
#define MAX_OPTIONS 8
#define LOG_MAX_BYTES (16u << 20)
#define CUBIN_MAX_BYTES (256u << 20)

/* What every compilation gets beside the architecture. */
static const char *const common_options[] = {"--std=c++17", "--ptxas-options=-v"};
/* And what each build gets beside that; NULL: nothing more. */
static const char *const build_options[][2] = {
    [COMPILE_PLAIN] = {"", NULL},
    [COMPILE_DEBUG] = {"-DMF_WATCHDOG=1", NULL},
    [COMPILE_LINE_INFO] = {"--generate-line-info", NULL},
    [COMPILE_SYNCCHECK] = {"--generate-line-info", "-DMF_UNALIGNED_BARRIERS=1"},
};
/* From 12.9 on NVRTC keeps results for later processes, in the driver's cache (~/.nv/ComputeCache), but not their logs; older ones refuse the option.
 * It changes no code and is no part of the key. */
static const char no_cache_option[] = "--no-cache";
#define FIRST_NVRTC_WITH_CACHE 12090

const char *compile_arch(int cc_major, int cc_minor)
{
  return cc_major == 9 && cc_minor == 0 ? "sm_90a" : NULL; /* wgmma and TMA as used here exist on this architecture alone */
}

/* ---- key ---- */
static void hash_text(struct sha256 *ctx, const char *text)
{
  const uint64_t length = strlen(text);
  unsigned char prefix[8];
  for(int i = 0; i < 8; i++)
    prefix[i] = (unsigned char)(length >> (8 * i));
  sha256_add(ctx, prefix, sizeof(prefix));
  sha256_add(ctx, text, length);
}

void compile_key(struct artifact *art, const struct closure *closure, int nvrtc_number, const char *arch, enum compile_build build)
{
  struct sha256 ctx;
  unsigned char digest[32];
  char number[16];
  snprintf(number, sizeof(number), "%d", nvrtc_number);
  sha256_init(&ctx);
  hash_text(&ctx, KEY_FORMAT);
  hash_text(&ctx, number);
  hash_text(&ctx, arch);
  for(size_t i = 0; i < sizeof(common_options) / sizeof(common_options[0]); i++)
    hash_text(&ctx, common_options[i]);
  for(int i = 0; i < 2 && build_options[build][i] != NULL; i++)
    hash_text(&ctx, build_options[build][i]);
  hash_text(&ctx, art->source);
  for(int i = 0; i < closure->count; i++) {
    hash_text(&ctx, closure->name[i]);
    hash_text(&ctx, closure->text[i]);
  }
  sha256_end(&ctx, digest);
  sha256_hex(digest, art->compile_key);
}

/* ---- one NVRTC program ---- */
/* The copies with rewritten includes that NVRTC gets; [count] is the source. */
struct program_text {
  int count;
  char *text[CLOSURE_MAX_FILES + 1];
};

static void program_text_free(struct program_text *program)
{
  for(int i = 0; i <= program->count; i++)
    free(program->text[i]);
}

static enum mf_status program_text_make(const struct closure *closure, const char *source, struct program_text *out, struct error *err)
{
  memset(out, 0, sizeof(*out));
  out->count = closure->count;
  for(int i = 0; i <= closure->count; i++) {
    const bool is_source = i == closure->count;
    out->text[i] = closure_rewrite(closure, is_source ? "" : closure->name[i], is_source ? source : closure->text[i]);
    if(out->text[i] == NULL) {
      program_text_free(out);
      return error_set(err, MF_ERR_NOMEM, "out of memory for the templates");
    }
  }
  return MF_OK;
}

static enum mf_status nvrtc_failed(const struct nvrtc *nvrtc, const char *what, int result, struct error *err)
{
  const char *text = nvrtc->error_string(result);
  if(result == NVRTC_BUILTIN_FAILURE)
    return error_set(err, MF_ERR_TOOLKIT,
                     "%s: NVRTC cannot load its builtins library: libnvrtc-builtins.so of the same version must lie next to %s; reinstall the package "
                     "that it came from, or set MOEFORGE_NVRTC to a complete installation",
                     what, nvrtc->path);
  return error_set(err, MF_ERR_TOOLKIT, "%s: %s failed: %s", nvrtc->path, what, text != NULL ? text : "unknown error");
}

/* Fetches the program log into art->log. */
static enum mf_status fetch_log(struct nvrtc *nvrtc, void *program, struct artifact *art, struct error *err)
{
  size_t bytes = 0;
  int result = nvrtc->log_size(program, &bytes);
  if(result != 0)
    return nvrtc_failed(nvrtc, "nvrtcGetProgramLogSize", result, err);
  if(bytes > LOG_MAX_BYTES)
    return error_set(err, MF_ERR_COMPILE, "%s: the compiler's log has %zu bytes, more than %u", art->name, bytes, LOG_MAX_BYTES);
  art->log = calloc(bytes + 1, 1);
  if(art->log == NULL)
    return error_set(err, MF_ERR_NOMEM, "%s: out of memory for the compiler's log", art->name);
  result = nvrtc->log(program, art->log);
  return result == 0 ? MF_OK : nvrtc_failed(nvrtc, "nvrtcGetProgramLog", result, err);
}

static enum mf_status fetch_cubin(struct nvrtc *nvrtc, void *program, struct artifact *art, struct error *err)
{
  size_t bytes = 0;
  int result = nvrtc->cubin_size(program, &bytes);
  if(result != 0)
    return nvrtc_failed(nvrtc, "nvrtcGetCUBINSize", result, err);
  if(bytes == 0 || bytes > CUBIN_MAX_BYTES)
    return error_set(err, MF_ERR_COMPILE, "%s: NVRTC made a cubin of %zu bytes, expected 1 to %u", art->name, bytes, CUBIN_MAX_BYTES);
  art->cubin = malloc(bytes);
  if(art->cubin == NULL)
    return error_set(err, MF_ERR_NOMEM, "%s: out of memory for the cubin", art->name);
  art->cubin_bytes = bytes;
  result = nvrtc->cubin(program, (char *)art->cubin);
  return result == 0 ? MF_OK : nvrtc_failed(nvrtc, "nvrtcGetCUBIN", result, err);
}

/* Runs the compiler and fetches log and cubin. */
static enum mf_status run_compiler(struct nvrtc *nvrtc, void *program, const char *arch, enum compile_build build, struct artifact *art,
                                   struct error *err)
{
  char arch_option[64], first[ERROR_TEXT_MAX / 2];
  const char *options[MAX_OPTIONS] = {arch_option};
  int noptions = 1, result;
  enum mf_status rc;
  snprintf(arch_option, sizeof(arch_option), "--gpu-architecture=%s", arch);
  for(size_t i = 0; i < sizeof(common_options) / sizeof(common_options[0]); i++)
    options[noptions++] = common_options[i];
  for(int i = 0; i < 2 && build != COMPILE_PLAIN && build_options[build][i] != NULL; i++)
    options[noptions++] = build_options[build][i];
  if(nvrtc->number >= FIRST_NVRTC_WITH_CACHE)
    options[noptions++] = no_cache_option;
  result = nvrtc->compile(program, noptions, options);
  rc = fetch_log(nvrtc, program, art, err);
  if(rc != MF_OK)
    return rc;
  if(result == NVRTC_BUILTIN_FAILURE)
    return nvrtc_failed(nvrtc, art->name, result, err);
  if(result != 0) {
    const char *text = nvrtc->error_string(result);
    compiler_log_first_error(art->log, first, sizeof(first));
    return error_set(err, MF_ERR_COMPILE, "%s does not compile: %s", art->name, first[0] != '\0' ? first : text != NULL ? text : "no reason given");
  }
  return fetch_cubin(nvrtc, program, art, err);
}

/* ---- what the kernel uses ---- */
static enum mf_status disagree(const struct artifact *art, const char *what, long log, long elf, struct error *err)
{
  return error_set(err, MF_ERR_CORRUPT, "%s: ptxas' log says %ld %s, the cubin's attributes %ld: this NVRTC writes one of them in an unknown form",
                   art->name, log, what, elf);
}

/* Reads what 'kernel' uses from cubin and log, and raises the fields of 'art' to it. */
static enum mf_status add_usage(const char *kernel, struct artifact *art, struct error *err)
{
  struct artifact elf = {0};
  struct ptxas_usage log;
  long frame_bytes = 0;
  enum mf_status rc = cubin_read_resources(art->cubin, art->cubin_bytes, kernel, &elf, err);
  if(rc == MF_OK)
    rc = cubin_frame_bytes(art->cubin, art->cubin_bytes, kernel, &frame_bytes, err);
  if(rc != MF_OK)
    return error_prefix(err, "%s", art->name);
  ptxas_log_read(art->log, kernel, &log);
  if(log.registers < 0 || log.frame_bytes < 0 || log.spill_bytes < 0)
    return error_set(err, MF_ERR_CORRUPT, "%s: the compiler's log has no ptxas -v lines for kernel '%s', so its spills are unknown", art->name, kernel);
  if(log.registers != elf.registers)
    return disagree(art, "registers", log.registers, elf.registers, err);
  if(log.frame_bytes != frame_bytes)
    return disagree(art, "bytes of stack frame", log.frame_bytes, frame_bytes, err);
  if(log.shared_bytes != elf.static_shared_bytes)
    return disagree(art, "bytes of static shared memory", log.shared_bytes, elf.static_shared_bytes, err);
  art->registers = elf.registers > art->registers ? elf.registers : art->registers;
  art->stack_bytes = elf.stack_bytes > art->stack_bytes ? elf.stack_bytes : art->stack_bytes;
  art->static_shared_bytes = elf.static_shared_bytes > art->static_shared_bytes ? elf.static_shared_bytes : art->static_shared_bytes;
  art->spill_bytes = log.spill_bytes; /* of the whole log */
  art->wgmma_serialised = log.wgmma_serialised;
  return MF_OK;
}

static enum mf_status read_usage(struct artifact *art, struct error *err)
{
  char kernel[256];
  for(int i = 0;; i++) {
    enum mf_status rc = cubin_kernel_at(art->cubin, art->cubin_bytes, i, kernel, sizeof(kernel), err);
    if(rc == MF_ERR_NOT_FOUND)
      return i > 0 ? MF_OK : error_set(err, MF_ERR_COMPILE, "%s has no kernel: expected an extern \"C\" __global__ function", art->name);
    if(rc == MF_OK)
      rc = add_usage(kernel, art, err);
    if(rc != MF_OK)
      return rc;
  }
}

static double seconds_now(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Drops what an earlier compilation left in 'art'. */
static void forget_result(struct artifact *art)
{
  free(art->cubin);
  free(art->log);
  art->cubin = NULL;
  art->log = NULL;
  art->cubin_bytes = 0;
  art->registers = 0;
  art->spill_bytes = art->stack_bytes = art->static_shared_bytes = 0;
  art->wgmma_serialised = false;
}

enum mf_status compile_artifact(struct nvrtc *nvrtc, const struct closure *closure, const char *arch, enum compile_build build, struct artifact *art,
                                struct error *err)
{
  const double start = seconds_now();
  struct program_text texts;
  char file[NAME_MAX_LEN + 8];
  void *program = NULL;
  enum mf_status rc = program_text_make(closure, art->source, &texts, err);
  int result;
  if(rc != MF_OK)
    return rc;
  forget_result(art);
  snprintf(file, sizeof(file), "%s.cu", art->name[0] != '\0' ? art->name : "kernel");
  result = nvrtc->create(&program, texts.text[texts.count], file, closure->count, (const char *const *)texts.text, (const char *const *)closure->name);
  if(result != 0) {
    rc = nvrtc_failed(nvrtc, "nvrtcCreateProgram", result, err);
    goto out;
  }
  rc = run_compiler(nvrtc, program, arch, build, art, err);
  if(rc == MF_OK)
    rc = read_usage(art, err);
  art->compile_seconds = seconds_now() - start;
out:
  if(program != NULL)
    nvrtc->destroy(&program);
  program_text_free(&texts);
  return rc;
}

void artifact_free(struct artifact *art)
{
  free(art->source);
  free(art->cubin);
  free(art->log);
  memset(art, 0, sizeof(*art));
}
