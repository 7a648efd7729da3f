/* cuda_api.c - see cuda_api.h.
 *
 * The driver stays loaded once it was opened (RTLD_NODELETE): it starts threads of its own and does not support being unloaded. So open and close are
 * cheap after the first time, and every package may open it on its own. */
#include "cuda_api.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Oldest driver whose libcuda has every function that is not optional (cuLaunchKernelEx, cuTensorMapEncodeTiled). */
#define CUDA_API_OLDEST "12.0"

static const struct {
  const char *symbol;
  size_t offset; /* of the member in struct cuda_api */
  int optional;
} functions[] = {
#define FUNCTION_ROW(name, symbol, parameters) {symbol, offsetof(struct cuda_api, p_##name), 0},
#define OPTIONAL_ROW(name, symbol, parameters) {symbol, offsetof(struct cuda_api, p_##name), 1},
    CUDA_API_TABLE(FUNCTION_ROW) CUDA_API_OPTIONAL_TABLE(OPTIONAL_ROW)
#undef FUNCTION_ROW
#undef OPTIONAL_ROW
};

static const char *library_name(void)
{
  const char *given = getenv("MOEFORGE_LIBCUDA");
  return given != NULL && given[0] != '\0' ? given : "libcuda.so.1";
}

int cuda_api_open(struct cuda_api *api, char *why, unsigned long why_bytes)
{
  const char *name = library_name();
  memset(api, 0, sizeof(*api));
  api->library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if(api->library == NULL) {
    const char *reason = dlerror();
    snprintf(why, why_bytes, "cannot load the CUDA driver library (%s): install the NVIDIA driver, or name the library in MOEFORGE_LIBCUDA",
             reason != NULL ? reason : name);
    return -1;
  }
  for(size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
    void *address = dlsym(api->library, functions[i].symbol);
    if(address == NULL && functions[i].optional)
      continue;
    if(address == NULL) {
      snprintf(why, why_bytes, "the CUDA driver library %s lacks %s: it is older than CUDA " CUDA_API_OLDEST ", update the NVIDIA driver", name,
               functions[i].symbol);
      cuda_api_close(api);
      return -1;
    }
    memcpy((char *)api + functions[i].offset, &address, sizeof(address)); /* POSIX: object and function pointers have one representation */
  }
  return 0;
}

void cuda_api_close(struct cuda_api *api)
{
  if(api->library != NULL)
    dlclose(api->library);
  memset(api, 0, sizeof(*api));
}
