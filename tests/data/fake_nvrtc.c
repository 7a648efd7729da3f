/* fake_nvrtc.c - a scripted libnvrtc.so for test_compile.c, which builds it: what the source says is what happens.
 *
 *   FAKE_CRASH          the process is killed              FAKE_CRASH_ONCE <path>  only if <path> exists; it is removed
 *   FAKE_HANG           never returns                      FAKE_BUILTIN            the builtins library is missing
 *   FAKE_NO_USAGE       a log without ptxas lines          FAKE_REGISTERS          a log with another register count than the cubin's
 *   anything else       succeeds with the cubin and the log in the folder that FAKE_NVRTC_DATA names
 * FAKE_NVRTC_VERSION is its version, FAKE_DEFAULT_VERSION by default. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define BUILTIN_FAILURE 7
#ifndef FAKE_DEFAULT_VERSION
#define FAKE_DEFAULT_VERSION 13000
#endif

static char source[1 << 16], log_text[1 << 12], cubin[1 << 16];
static size_t cubin_bytes;

static size_t load(const char *name, char *out, size_t space)
{
  char path[1024];
  FILE *file;
  size_t length;
  snprintf(path, sizeof(path), "%s/%s", getenv("FAKE_NVRTC_DATA"), name);
  file = fopen(path, "rb");
  if(file == NULL)
    abort();
  length = fread(out, 1, space - 1, file);
  out[length] = '\0';
  fclose(file);
  return length;
}

EXPORT int nvrtcVersion(int *major, int *minor)
{
  const char *number = getenv("FAKE_NVRTC_VERSION");
  const int version = number != NULL ? atoi(number) : FAKE_DEFAULT_VERSION;
  *major = version / 1000;
  *minor = version % 1000 / 10;
  return 0;
}

EXPORT int nvrtcCreateProgram(void **program, const char *text, const char *name, int count, const char *const *headers, const char *const *names)
{
  (void)name;
  (void)count;
  (void)headers;
  (void)names;
  snprintf(source, sizeof(source), "%s", text);
  *program = source;
  return 0;
}

EXPORT int nvrtcDestroyProgram(void **program)
{
  *program = NULL;
  return 0;
}

/* Kills the process if the file that follows 'word' exists. */
static void crash_once(const char *word)
{
  char path[1024];
  if(word != NULL && sscanf(word, "FAKE_CRASH_ONCE %1023s", path) == 1 && unlink(path) == 0)
    kill(getpid(), 9);
}

EXPORT int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
  (void)program;
  (void)count;
  (void)options;
  log_text[0] = '\0';
  crash_once(strstr(source, "FAKE_CRASH_ONCE"));
  if(strstr(source, "FAKE_CRASH") != NULL && strstr(source, "FAKE_CRASH_ONCE") == NULL)
    kill(getpid(), 9);
  while(strstr(source, "FAKE_HANG") != NULL)
    pause();
  if(strstr(source, "FAKE_BUILTIN") != NULL)
    return BUILTIN_FAILURE;
  cubin_bytes = load("cubin_13.0.bin", cubin, sizeof(cubin));
  load("cubin.log", log_text, sizeof(log_text));
  if(strstr(source, "FAKE_NO_USAGE") != NULL)
    log_text[0] = '\0';
  if(strstr(source, "FAKE_REGISTERS") != NULL)
    memcpy(strstr(log_text, "Used 12"), "Used 13", 7);
  return 0;
}

EXPORT int nvrtcGetProgramLogSize(void *program, size_t *bytes)
{
  (void)program;
  *bytes = strlen(log_text) + 1;
  return 0;
}

EXPORT int nvrtcGetProgramLog(void *program, char *out)
{
  (void)program;
  memcpy(out, log_text, strlen(log_text) + 1);
  return 0;
}

EXPORT int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
  (void)program;
  *bytes = cubin_bytes;
  return 0;
}

EXPORT int nvrtcGetCUBIN(void *program, char *out)
{
  (void)program;
  memcpy(out, cubin, cubin_bytes);
  return 0;
}

EXPORT const char *nvrtcGetErrorString(int result)
{
  return result == BUILTIN_FAILURE ? "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE" : "NVRTC_ERROR";
}
