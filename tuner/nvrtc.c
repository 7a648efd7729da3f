/* nvrtc.c - finds and opens NVRTC, CUDA's run-time compiler library.
 *
 * MOEFORGE_NVRTC names the library; then nothing else is tried. Otherwise the places are tried in the order of the table below and the
 * first library that opens and is new enough is taken. Several CUDA installations on one machine are common, so libraries that are too old are
 * remembered for the message and the search goes on.
 *
 * libnvrtc needs libnvrtc-builtins.so of the same version and loads it by its bare name at the first compilation. It is opened here beforehand, by
 * its path beside libnvrtc, so that it is found wherever the two lie; if it is missing, compile.c reports what NVRTC says.
 * Both stay loaded after nvrtc_close(): NVRTC keeps memory that unloading would leak. */
#include "compile_internal.h"
#include "strbuf.h"

#include <dlfcn.h>
#include <glob.h>
#include <link.h>
#include <linux/limits.h> /* PATH_MAX; limits.h is ours */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OLDEST_NVRTC 12030 /* the first one whose wgmma code for sm_90a was tested */
#define INSTALL_HINT                                                                                                               \
  "install the CUDA toolkit or, without root, run `python3 -m pip install --target .local/python nvidia-cuda-nvrtc-cu12` in the "  \
  "project's folder, or set MOEFORGE_NVRTC to the library's path"

/* What a place starts with. */
enum base { BASE_NONE, BASE_ENV, BASE_NVCC, BASE_PROGRAM };

/* Folders are patterns of glob(3), in which libnvrtc.so.<number> is looked for, newest first. */
static const struct place {
  enum base base;
  const char *env;    /* BASE_ENV: variable that holds the first part */
  const char *folder; /* the rest */
} places[] = {
    {BASE_ENV, "CUDA_HOME", "/lib64"},
    {BASE_ENV, "CUDA_HOME", "/lib"},
    {BASE_ENV, "CUDA_PATH", "/lib64"},
    {BASE_NVCC, NULL, "/../lib64"},
    {BASE_NVCC, NULL, "/../lib"},
    {BASE_NONE, NULL, "/usr/local/cuda/lib64"},
    {BASE_NONE, NULL, "/usr/local/cuda*/lib64"},
    {BASE_NONE, NULL, ".local/cuda*/lib*"},
    {BASE_NONE, NULL, ".local/nvidia/*/lib"},
    {BASE_NONE, NULL, ".local/*/nvidia/*/lib"},
    {BASE_NONE, NULL, ".local/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_NONE, NULL, ".local/*/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_PROGRAM, NULL, "/../.local/cuda*/lib*"},
    {BASE_PROGRAM, NULL, "/../.local/nvidia/*/lib"},
    {BASE_PROGRAM, NULL, "/../.local/*/nvidia/*/lib"},
    {BASE_PROGRAM, NULL, "/../.local/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_PROGRAM, NULL, "/../.local/*/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_ENV, "VIRTUAL_ENV", "/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_ENV, "HOME", "/.local/lib/python3*/site-packages/nvidia/*/lib"},
    {BASE_NONE, NULL, "/usr/local/lib/python3*/*-packages/nvidia/*/lib"},
    {BASE_NONE, NULL, "/usr/lib/python3*/*-packages/nvidia/*/lib"},
};
/* Found by the dynamic linker: LD_LIBRARY_PATH, ld.so.cache. Tried first. */
static const char *const linker_names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

/* Resolves the functions; names the first one missing in *missing. */
static bool resolve(struct nvrtc *nvrtc, const char **missing)
{
  void *address;
#define NVRTC_RESOLVE(name, symbol, parameters)      \
  address = dlsym(nvrtc->library, symbol);           \
  if(address == NULL) {                              \
    *missing = symbol;                               \
    return false;                                    \
  }                                                  \
  memcpy(&nvrtc->name, &address, sizeof(address));
  NVRTC_TABLE(NVRTC_RESOLVE)
  NVRTC_RESOLVE(error_string, "nvrtcGetErrorString", (int))
#undef NVRTC_RESOLVE
  return true;
}

/* Where the library with 'address' in it lies. */
static char *library_path(void *address, const char *fallback)
{
  Dl_info info;
  char *path = NULL;
  if(dladdr(address, &info) != 0 && info.dli_fname != NULL)
    path = realpath(info.dli_fname, NULL);
  return path != NULL ? path : strdup(fallback);
}

/* Opens the builtins beside the library, if they are there. */
static void *open_builtins(const char *path, int major, int minor)
{
  char file[PATH_MAX];
  const int length = snprintf(file, sizeof(file), "%.*s/libnvrtc-builtins.so.%d.%d", (int)(strrchr(path, '/') - path), path, major, minor);
  return length > 0 && (size_t)length < sizeof(file) ? dlopen(file, RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE) : NULL;
}

/* Opens one library. On failure nothing is kept and err says why this one is not usable. */
static enum mf_status open_library(const char *file, struct nvrtc **out, struct error *err)
{
  struct nvrtc *nvrtc = calloc(1, sizeof(*nvrtc));
  const char *missing = NULL;
  int major = 0, minor = 0;
  void *address;
  enum mf_status rc = MF_OK;
  if(nvrtc == NULL)
    return error_set(err, MF_ERR_NOMEM, "out of memory while opening %s", file);
  nvrtc->library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if(nvrtc->library == NULL) {
    rc = error_set(err, MF_ERR_TOOLKIT, "%s", dlerror());
    goto out;
  }
  if(!resolve(nvrtc, &missing)) {
    rc = error_set(err, MF_ERR_TOOLKIT, "%s has no function %s: it is not NVRTC, or older than 12.3", file, missing);
    goto out;
  }
  if(nvrtc->version(&major, &minor) != 0) {
    rc = error_set(err, MF_ERR_TOOLKIT, "%s does not tell its version", file);
    goto out;
  }
  nvrtc->number = major * 1000 + minor * 10;
  memcpy(&address, &nvrtc->version, sizeof(address));
  nvrtc->path = library_path(address, file);
  if(nvrtc->path == NULL)
    rc = error_set(err, MF_ERR_NOMEM, "out of memory while opening %s", file);
  else if(nvrtc->number < OLDEST_NVRTC)
    rc = error_set(err, MF_ERR_TOOLKIT, "%s is NVRTC %d.%d, too old: 12.3 or newer is needed", nvrtc->path, major, minor);
  else if(strchr(nvrtc->path, '/') != NULL)
    nvrtc->builtins = open_builtins(nvrtc->path, major, minor);
out:
  if(rc != MF_OK) {
    nvrtc_close(nvrtc);
    return rc;
  }
  *out = nvrtc;
  return MF_OK;
}

/* Folder of the nvcc that PATH finds, links resolved; false if there is none. */
static bool nvcc_folder(char folder[PATH_MAX])
{
  const char *path = getenv("PATH");
  char file[PATH_MAX];
  while(path != NULL && *path != '\0') {
    const size_t length = strcspn(path, ":");
    snprintf(file, sizeof(file), "%.*s/nvcc", (int)length, path);
    if(length > 0 && access(file, X_OK) == 0 && realpath(file, folder) != NULL) {
      *strrchr(folder, '/') = '\0';
      return true;
    }
    path += length + (path[length] == ':');
  }
  return false;
}

static bool program_folder(char folder[PATH_MAX])
{
  const ssize_t length = readlink("/proc/self/exe", folder, PATH_MAX - 1);
  if(length <= 0)
    return false;
  folder[length] = '\0';
  *strrchr(folder, '/') = '\0';
  return true;
}

/* The pattern of libraries at 'place'; false if its base does not exist here. */
static bool place_pattern(const struct place *place, char *pattern, size_t space)
{
  char folder[PATH_MAX] = "";
  const char *env = place->base == BASE_ENV ? getenv(place->env) : NULL;
  int length;
  if((place->base == BASE_ENV && (env == NULL || env[0] == '\0')) || (place->base == BASE_NVCC && !nvcc_folder(folder)) ||
     (place->base == BASE_PROGRAM && !program_folder(folder)))
    return false;
  length = snprintf(pattern, space, "%s%s/libnvrtc.so.[0-9]*", env != NULL ? env : folder, place->folder);
  return length > 0 && (size_t)length < space;
}

/* Tries the libraries that match, newest name first. 'refused' collects those that are there but not usable. */
static enum mf_status try_pattern(const char *pattern, struct nvrtc **out, struct strbuf *refused)
{
  enum mf_status rc = MF_ERR_TOOLKIT;
  struct error err = {0};
  glob_t found;
  if(glob(pattern, 0, NULL, &found) != 0)
    return MF_ERR_TOOLKIT;
  for(size_t i = found.gl_pathc; i > 0 && rc == MF_ERR_TOOLKIT; i--) {
    rc = open_library(found.gl_pathv[i - 1], out, &err);
    if(rc != MF_OK && strstr(strbuf_text(refused), err.text) == NULL)
      strbuf_printf(refused, "%s%s", refused->length > 0 ? "; " : "", err.text);
  }
  globfree(&found);
  return rc;
}

static enum mf_status search(struct nvrtc **out, struct strbuf *refused)
{
  enum mf_status rc = MF_ERR_TOOLKIT;
  struct error err = {0};
  char pattern[PATH_MAX];
  void *probe;
  for(size_t i = 0; i < sizeof(linker_names) / sizeof(linker_names[0]); i++) {
    probe = dlopen(linker_names[i], RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE); /* tells "not there" from "there but not usable" */
    if(probe == NULL)
      continue;
    dlclose(probe);
    rc = open_library(linker_names[i], out, &err);
    if(rc != MF_ERR_TOOLKIT)
      return rc;
    strbuf_printf(refused, "%s%s", refused->length > 0 ? "; " : "", err.text);
  }
  for(size_t i = 0; i < sizeof(places) / sizeof(places[0]) && rc == MF_ERR_TOOLKIT; i++)
    if(place_pattern(&places[i], pattern, sizeof(pattern)))
      rc = try_pattern(pattern, out, refused);
  return rc;
}

enum mf_status nvrtc_open(struct nvrtc **out, struct error *err)
{
  const char *named = getenv("MOEFORGE_NVRTC");
  struct strbuf refused;
  enum mf_status rc;
  *out = NULL;
  if(named != NULL && named[0] != '\0') {
    struct error why = {0};
    rc = open_library(named, out, &why);
    if(rc != MF_OK)
      error_set(err, rc, "MOEFORGE_NVRTC=%s: %s; name a libnvrtc.so of CUDA 12.3 or newer, or unset it to search", named, why.text);
    return rc;
  }
  strbuf_init(&refused, 512);
  rc = search(out, &refused);
  if(rc == MF_ERR_TOOLKIT)
    error_set(err, rc,
              "no usable libnvrtc.so (12.3 or newer) in the linker's path, $CUDA_HOME, nvcc's folder, /usr/local/cuda*, "
              "or Python's packages (.local, $VIRTUAL_ENV, ~/.local, system)%s%s; " INSTALL_HINT,
              refused.length > 0 ? "; not usable: " : "", strbuf_text(&refused));
  else if(rc != MF_OK)
    error_set(err, rc, "out of memory while opening NVRTC");
  strbuf_free(&refused);
  return rc;
}

void nvrtc_close(struct nvrtc *nvrtc)
{
  if(nvrtc == NULL)
    return;
  if(nvrtc->builtins != NULL)
    dlclose(nvrtc->builtins);
  if(nvrtc->library != NULL)
    dlclose(nvrtc->library);
  free(nvrtc->path);
  free(nvrtc);
}

int nvrtc_version(const struct nvrtc *nvrtc)
{
  return nvrtc->number;
}

const char *nvrtc_path(const struct nvrtc *nvrtc)
{
  return nvrtc->path;
}

#if defined(__SANITIZE_ADDRESS__)
static int is_nvrtc(struct dl_phdr_info *info, size_t bytes, void *unused)
{
  (void)bytes;
  (void)unused;
  return info->dlpi_name != NULL && strstr(info->dlpi_name, "/libnvrtc.so") != NULL;
}

/* Asked by the leak sanitizer at the end of a process. With NVRTC loaded its tracer follows what look like pointers into the library's thread-local
 * memory and now and then dies of it, and the process with it; so such processes are not looked at. Those that run the same code without NVRTC are. */
__attribute__((visibility("default"))) int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
  return dl_iterate_phdr(is_nvrtc, NULL);
}
#endif
