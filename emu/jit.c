/* jit.c - see jit.h. One kernel is up to three files in the cache folder, <hash> in hex:
 *
 *   kernel-<hash>.cc    what is compiled: a macro, the emitted text, an entry that unpacks the arguments
 *   kernel-<hash>.so    the object; its presence under this name says that it is whole
 *   kernel-<hash>.<pid>.{o,so,log}   while it is made; renamed or removed
 *
 * The hash is no cryptographic one: it keeps apart what one person's edits make. Compiling and linking are two steps, because the hooks of
 * -fsanitize=thread are ours: its runtime library must not be linked.
 *
 * The compiler is a child that dies with this process. Its output goes to the log; the first error in it becomes the message. */
#include "jit.h"

#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATH_BYTES 1024
#define MAX_ARGUMENTS 40
#define ENTRY "mf_emu_entry"
#define META "mf_meta"

static enum emu_jit_status fail(enum emu_jit_status status, char *why, size_t space, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static enum emu_jit_status fail(enum emu_jit_status status, char *why, size_t space, const char *fmt, ...)
{
  va_list args;
  va_start(args, fmt);
  vsnprintf(why, space, fmt, args);
  va_end(args);
  return status;
}

/* False if it does not fit. */
static bool path_set(char path[PATH_BYTES], const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static bool path_set(char path[PATH_BYTES], const char *fmt, ...)
{
  va_list args;
  int length;
  va_start(args, fmt);
  length = vsnprintf(path, PATH_BYTES, fmt, args);
  va_end(args);
  return length >= 0 && length < PATH_BYTES;
}

/* ---- hashes ---- */
struct hash {
  uint64_t a, b;
};

static void hash_add(struct hash *h, const void *bytes, size_t count)
{
  const unsigned char *p = bytes;
  for(size_t i = 0; i < count; i++) {
    h->a = (h->a ^ p[i]) * 0x100000001b3u;
    h->b = (h->b + p[i] + 1) * 0x9E3779B97F4A7C15u;
    h->b ^= h->b >> 29;
  }
}

/* With the NUL, so that neighbours cannot be taken for each other. */
static void hash_text(struct hash *h, const char *text)
{
  hash_add(h, text, strlen(text) + 1);
}

static bool hash_file(struct hash *h, const char *path)
{
  char buffer[4096];
  size_t n;
  bool good;
  FILE *f = fopen(path, "rb");
  if(f == NULL)
    return false;
  while((n = fread(buffer, 1, sizeof(buffer), f)) > 0)
    hash_add(h, buffer, n);
  good = ferror(f) == 0;
  fclose(f);
  hash_add(h, "", 1);
  return good;
}

static bool is_header(const char *name)
{
  const char *dot = strrchr(name, '.');
  return dot != NULL && (strcmp(dot, ".h") == 0 || strcmp(dot, ".cuh") == 0);
}

/* One entry of an include folder: a header, or a folder of headers. */
static bool hash_entry(struct hash *h, const char *folder, const char *name, int depth);

/* Names and bytes of all headers below 'folder', in the order of their names. */
static bool hash_headers(struct hash *h, const char *folder, int depth)
{
  struct dirent **entries = NULL;
  const int count = scandir(folder, &entries, NULL, alphasort);
  bool good = count >= 0;
  for(int i = 0; i < count; i++) {
    good = good && (entries[i]->d_name[0] == '.' || hash_entry(h, folder, entries[i]->d_name, depth));
    free(entries[i]);
  }
  free(entries);
  return good;
}

static bool hash_entry(struct hash *h, const char *folder, const char *name, int depth)
{
  char path[PATH_BYTES];
  struct stat info;
  if(!path_set(path, "%s/%s", folder, name) || stat(path, &info) != 0)
    return false;
  if(S_ISDIR(info.st_mode))
    return depth == 0 || hash_headers(h, path, depth - 1);
  if(!is_header(name) || !S_ISREG(info.st_mode))
    return true;
  hash_text(h, name);
  return hash_file(h, path);
}

/* ---- running the compiler ---- */
/* Becomes the program; on failure its errno goes into the pipe. */
static void become(char *const *argv, int log, int report)
{
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  ssize_t sent;
  int reason;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  dup2(nothing, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execvp(argv[0], argv);
  reason = errno;
  sent = write(report, &reason, sizeof(reason));
  _exit(sent == (ssize_t)sizeof(reason) ? 127 : 126);
}

/* Waits for the child; *reason is why it could not become the program, 0 if it did. Returns the exit code, -1 if it was killed. */
static int await(pid_t pid, int report, int *reason)
{
  int status = 0;
  ssize_t n;
  do
    n = read(report, reason, sizeof(*reason));
  while(n < 0 && errno == EINTR);
  if(n != (ssize_t)sizeof(*reason))
    *reason = 0;
  while(waitpid(pid, &status, 0) < 0)
    if(errno != EINTR)
      return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Runs a program with its output in the file 'log_path'. Returns its exit code, or -1 with *reason: the errno of what failed, 0: it was killed. */
static int run_program(char *const *argv, const char *log_path, int *reason)
{
  int ends[2], code;
  const int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  pid_t pid;
  *reason = errno;
  if(log < 0)
    return -1;
  if(pipe2(ends, O_CLOEXEC) != 0) {
    *reason = errno;
    close(log);
    return -1;
  }
  pid = fork();
  if(pid == 0)
    become(argv, log, ends[1]);
  *reason = errno;
  close(log);
  close(ends[1]);
  code = pid > 0 ? await(pid, ends[0], reason) : -1;
  close(ends[0]);
  return *reason != 0 ? -1 : code;
}

/* The first line of a file that has 'mark' in it, or its first line. False if there is none. */
static bool find_line(const char *path, const char *mark, char *out, size_t space)
{
  char line[1024];
  bool any = false, found = false;
  FILE *f = fopen(path, "r");
  if(f == NULL)
    return false;
  while(!found && fgets(line, sizeof(line), f) != NULL) {
    line[strcspn(line, "\r\n")] = '\0';
    found = strstr(line, mark) != NULL;
    if(found || !any)
      snprintf(out, space, "%s", line);
    any = true;
  }
  fclose(f);
  return any;
}

static enum emu_jit_status no_compiler(const struct emu_jit_config *config, const char *reason, char *why, size_t space)
{
  return fail(EMU_JIT_NO_COMPILER, why, space,
              "the emulated device compiles kernels with a C++ compiler, and \"%s\" does not run (%s): install one (apt-get install g++), or name it "
              "in MOEFORGE_CXX",
              config->compiler, reason);
}

/* The compiler's name for itself: the first line that it prints. Asked once per process and compiler. */
static enum emu_jit_status compiler_version(const struct emu_jit_config *config, char *out, size_t room, char *why, size_t space)
{
  static char known[PATH_BYTES], version[256];
  char *argv[] = {(char *)(uintptr_t)config->compiler, (char *)(uintptr_t) "--version", NULL};
  char log[PATH_BYTES], line[256] = "";
  int reason = 0, code;
  if(known[0] == '\0' || strcmp(known, config->compiler) != 0) {
    if(!path_set(log, "%s/compiler.%ld.log", config->cache_dir, (long)getpid()))
      return fail(EMU_JIT_IO, why, space, "%s: the path is too long", config->cache_dir);
    if(access(config->cache_dir, W_OK | X_OK) != 0)
      return fail(EMU_JIT_IO, why, space, "%s: kernels for the emulated device cannot be kept there: %s", config->cache_dir, strerror(errno));
    code = run_program(argv, log, &reason);
    find_line(log, "", line, sizeof(line));
    unlink(log);
    if(code != 0 || line[0] == '\0')
      return no_compiler(config, reason != 0 ? strerror(reason) : "it fails to tell its version", why, space);
    snprintf(known, sizeof(known), "%s", config->compiler);
    snprintf(version, sizeof(version), "%s", line);
  }
  snprintf(out, room, "%s", version);
  return EMU_JIT_OK;
}

/* ---- what to compile, and how ---- */
struct job {
  const struct emu_jit_config *config;
  char version[256];
  char cc[PATH_BYTES], so[PATH_BYTES];                  /* in the cache */
  char object[PATH_BYTES], linked[PATH_BYTES], log[PATH_BYTES]; /* of this process */
  char template_flag[PATH_BYTES], emu_flag[PATH_BYTES];
};

static int add_flags(const char **out, int count, const char *const *flags)
{
  for(; *flags != NULL; flags++)
    out[count++] = *flags;
  return count;
}

/* The compiler's arguments without files; returns their number. */
static int compile_flags(const struct job *job, const char **out)
{
  static const char *const always[] = {"-std=c++17", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-optimize-sibling-calls", "-fno-exceptions",
                                       "-fvisibility=hidden", "-w", NULL};
  /* gcc: no symbols that are one for the whole process, since kernels have the same names; no remarks on how large arguments are passed */
  static const char *const gcc[] = {"-fno-gnu-unique", "-Wno-psabi", NULL};
  /* the hooks for function calls are of no use to us; without -fno-builtin clang makes loops into memset, which no hook sees */
  static const char *const gcc_hooks[] = {"-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0", NULL};
  static const char *const clang_hooks[] = {"-fsanitize=thread", "-fno-builtin", "-mllvm", "-tsan-instrument-func-entry-exit=0", NULL};
  static const char *const sanitizers[] = {"-fsanitize=undefined", "-fno-sanitize-recover=all", NULL};
  const bool clang = strstr(job->version, "clang") != NULL;
  int count = add_flags(out, 0, always);
  if(!clang)
    count = add_flags(out, count, gcc);
  if(job->config->sanitize)
    count = add_flags(out, count, sanitizers);
  return add_flags(out, count, clang ? clang_hooks : gcc_hooks);
}

static void add_lines(FILE *to, const char *source, const char *kernel)
{
  fprintf(to, "#define MF_HOST_EMULATION 1\n%s\n"
              "extern \"C\" __attribute__((visibility(\"default\"))) void " ENTRY "(void **params) { hw::call_kernel(%s, params); }\n", source, kernel);
}

static enum emu_jit_status hash_job(const struct job *job, const char *source, const char *kernel, char hex[33], char *why, size_t space)
{
  const char *flags[MAX_ARGUMENTS];
  const int count = compile_flags(job, flags);
  struct hash h = {0xcbf29ce484222325u, 0x6D6F65666F726765u};
  hash_text(&h, "jit 1");
  hash_text(&h, source);
  hash_text(&h, kernel);
  hash_text(&h, job->version);
  for(int i = 0; i < count; i++)
    hash_text(&h, flags[i]);
  if(!hash_headers(&h, job->config->template_dir, 4))
    return fail(EMU_JIT_IO, why, space, "%s: the templates cannot be read: %s", job->config->template_dir, strerror(errno));
  if(!hash_headers(&h, job->config->emu_dir, 0))
    return fail(EMU_JIT_IO, why, space, "%s: the headers of the emulated device cannot be read: %s", job->config->emu_dir, strerror(errno));
  snprintf(hex, 33, "%016llx%016llx", (unsigned long long)h.a, (unsigned long long)h.b);
  return EMU_JIT_OK;
}

static enum emu_jit_status name_files(struct job *job, const char *hex, char *why, size_t space)
{
  const char *dir = job->config->cache_dir;
  const long pid = (long)getpid();
  if(path_set(job->cc, "%s/kernel-%s.cc", dir, hex) && path_set(job->so, "%s/kernel-%s.so", dir, hex) &&
     path_set(job->object, "%s/kernel-%s.%ld.o", dir, hex, pid) && path_set(job->linked, "%s/kernel-%s.%ld.so", dir, hex, pid) &&
     path_set(job->log, "%s/kernel-%s.%ld.log", dir, hex, pid) && path_set(job->template_flag, "-I%s", job->config->template_dir) &&
     path_set(job->emu_flag, "-I%s", job->config->emu_dir))
    return EMU_JIT_OK;
  return fail(EMU_JIT_IO, why, space, "%s: the path is too long", dir);
}

/* ---- making the object ---- */
static enum emu_jit_status write_source(const struct job *job, const char *source, const char *kernel, char *why, size_t space)
{
  char temporary[PATH_BYTES + 32];
  bool good;
  FILE *f;
  snprintf(temporary, sizeof(temporary), "%s.%ld", job->cc, (long)getpid());
  f = fopen(temporary, "wb");
  if(f == NULL)
    return fail(EMU_JIT_IO, why, space, "%s: cannot be written: %s", temporary, strerror(errno));
  add_lines(f, source, kernel);
  good = ferror(f) == 0;
  good = fclose(f) == 0 && good;
  if(good && rename(temporary, job->cc) == 0)
    return EMU_JIT_OK;
  unlink(temporary);
  return fail(EMU_JIT_IO, why, space, "%s: cannot be written: %s", job->cc, strerror(errno));
}

/* One step: its program ran and was content, or why not. */
static enum emu_jit_status run_step(const struct job *job, const char *const *arguments, char *why, size_t space)
{
  char line[1024] = "it said nothing";
  int reason = 0;
  const int code = run_program((char *const *)(uintptr_t)arguments, job->log, &reason);
  if(code == 0)
    return EMU_JIT_OK;
  if(reason != 0)
    return no_compiler(job->config, strerror(reason), why, space);
  if(code < 0)
    return fail(EMU_JIT_NO_MEMORY, why, space, "%s was killed while it compiled a kernel for the emulated device: too little memory?",
                job->config->compiler);
  find_line(job->log, "rror:", line, sizeof(line));
  if(strstr(line, "No space left") != NULL || strstr(line, "Disk quota") != NULL)
    return fail(EMU_JIT_IO, why, space, "%s: %s", job->config->cache_dir, line);
  return fail(EMU_JIT_FAILED, why, space, "%s does not compile the kernel for the emulated device: %s", job->config->compiler, line);
}

static enum emu_jit_status compile(const struct job *job, char *why, size_t space)
{
  const char *argv[MAX_ARGUMENTS] = {job->config->compiler};
  int count = 1 + compile_flags(job, argv + 1);
  argv[count++] = job->template_flag;
  argv[count++] = job->emu_flag;
  argv[count++] = "-c";
  argv[count++] = job->cc;
  argv[count++] = "-o";
  argv[count++] = job->object;
  argv[count] = NULL;
  return run_step(job, argv, why, space);
}

static enum emu_jit_status link_object(const struct job *job, char *why, size_t space)
{
  const char *argv[] = {job->config->compiler, "-shared", "-o", job->linked, job->object, NULL};
  enum emu_jit_status rc = run_step(job, argv, why, space);
  if(rc == EMU_JIT_OK && rename(job->linked, job->so) != 0)
    rc = fail(EMU_JIT_IO, why, space, "%s: cannot be written: %s", job->so, strerror(errno));
  return rc;
}

static enum emu_jit_status make(const struct job *job, const char *source, const char *kernel, char *why, size_t space)
{
  enum emu_jit_status rc = write_source(job, source, kernel, why, space);
  if(rc == EMU_JIT_OK)
    rc = compile(job, why, space);
  if(rc == EMU_JIT_OK)
    rc = link_object(job, why, space);
  unlink(job->object);
  unlink(job->linked);
  unlink(job->log);
  return rc;
}

/* ---- loading it ---- */
struct image {
  const char *at;     /* an address in it */
  const char *begin, *end;
};

/* For dl_iterate_phdr(): is this the object that image->at lies in? */
static int find_image(struct dl_phdr_info *info, size_t bytes, void *context)
{
  struct image *image = context;
  uintptr_t low = UINTPTR_MAX, high = 0;
  (void)bytes;
  for(int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + segment->p_vaddr;
    if(segment->p_type != PT_LOAD)
      continue;
    low = begin < low ? begin : low;
    high = begin + segment->p_memsz > high ? begin + segment->p_memsz : high;
  }
  if((uintptr_t)image->at < low || (uintptr_t)image->at >= high)
    return 0;
  image->begin = (const char *)low;
  image->end = (const char *)high;
  return 1;
}

/* Address and size of a data symbol of the library; NULL if it has none. */
static const void *data_symbol(void *library, const char *name, size_t *bytes)
{
  void *address = dlsym(library, name);
  ElfW(Sym) *symbol = NULL;
  Dl_info info;
  *bytes = 0;
  if(address == NULL || dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) == 0 || symbol == NULL)
    return NULL;
  *bytes = symbol->st_size;
  return address;
}

static enum emu_jit_status load(const struct job *job, struct emu_kernel *out, char *why, size_t space)
{
  struct image image = {NULL, NULL, NULL};
  const char *reason;
  void *entry;
  snprintf(out->object, sizeof(out->object), "%s", job->so);
  out->library = dlopen(job->so, RTLD_NOW | RTLD_LOCAL);
  if(out->library == NULL) {
    reason = dlerror();
    unlink(job->so); /* a damaged one is made anew the next time */
    return fail(EMU_JIT_UNUSABLE, why, space, "the kernel for the emulated device cannot be loaded: %s", reason != NULL ? reason : job->so);
  }
  entry = dlsym(out->library, ENTRY);
  if(entry == NULL)
    return fail(EMU_JIT_UNUSABLE, why, space, "%s: has no " ENTRY, job->so);
  memcpy(&out->entry, &entry, sizeof(entry)); /* POSIX: object and function pointers have one representation */
  image.at = entry;
  if(dl_iterate_phdr(find_image, &image) == 0)
    return fail(EMU_JIT_UNUSABLE, why, space, "%s: is not among the loaded objects", job->so);
  out->code = image.begin;
  out->code_bytes = (size_t)(image.end - image.begin);
  out->meta = data_symbol(out->library, META, &out->meta_bytes);
  return EMU_JIT_OK;
}

/* ---- the functions of jit.h ---- */
static enum emu_jit_status begin(struct job *job, const struct emu_jit_config *config, char *why, size_t space)
{
  char header[PATH_BYTES];
  memset(job, 0, sizeof(*job));
  job->config = config;
  if(!path_set(header, "%s/hw_host.h", config->emu_dir) || access(header, R_OK) != 0)
    return fail(EMU_JIT_IO, why, space, "%s: cannot be read: the emulated device needs it; is the installation complete?", header);
  return compiler_version(config, job->version, sizeof(job->version), why, space);
}

enum emu_jit_status emu_jit_check(const struct emu_jit_config *config, char *why, size_t space)
{
  struct job job;
  return begin(&job, config, why, space);
}

enum emu_jit_status emu_jit_load(const struct emu_jit_config *config, const char *source, const char *kernel, struct emu_kernel *out, char *why,
                                 size_t space)
{
  struct job job;
  char hex[33];
  enum emu_jit_status rc = begin(&job, config, why, space);
  memset(out, 0, sizeof(*out));
  if(rc == EMU_JIT_OK)
    rc = hash_job(&job, source, kernel, hex, why, space);
  if(rc == EMU_JIT_OK)
    rc = name_files(&job, hex, why, space);
  if(rc == EMU_JIT_OK && access(job.so, R_OK) != 0)
    rc = make(&job, source, kernel, why, space);
  if(rc == EMU_JIT_OK)
    rc = load(&job, out, why, space);
  if(rc != EMU_JIT_OK)
    emu_jit_unload(out);
  return rc;
}

void emu_jit_unload(struct emu_kernel *kernel)
{
  if(kernel->library != NULL)
    dlclose(kernel->library);
  memset(kernel, 0, sizeof(*kernel));
}
