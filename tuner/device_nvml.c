/* device_nvml.c - see device_nvml.h. NVML's own header is not needed: its functions return an int (0 = success) and a device is an opaque pointer.
 * Each question is one function of the table 'questions'; one that fails adds nothing. */
#include "device_nvml.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CLOCK_SM 1
#define CLOCK_MEMORY 2
#define MAX_PROCESSES 64

struct nvml_process { /* nvmlProcessInfo_t */
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};

struct nvml_utilization { /* nvmlUtilization_t */
  unsigned gpu, memory;
};

#define NVML_TABLE(X)                                                                                      \
  X(init, "nvmlInit_v2", (void))                                                                           \
  X(shutdown, "nvmlShutdown", (void))                                                                      \
  X(driver_version, "nvmlSystemGetDriverVersion", (char *, unsigned))                                      \
  X(by_uuid, "nvmlDeviceGetHandleByUUID", (const char *, void **))                                         \
  X(processes, "nvmlDeviceGetComputeRunningProcesses_v3", (void *, unsigned *, struct nvml_process *))     \
  X(utilization, "nvmlDeviceGetUtilizationRates", (void *, struct nvml_utilization *))                     \
  X(clock, "nvmlDeviceGetClockInfo", (void *, int, unsigned *))                                            \
  X(max_clock, "nvmlDeviceGetMaxClockInfo", (void *, int, unsigned *))                                     \
  X(throttle, "nvmlDeviceGetCurrentClocksThrottleReasons", (void *, unsigned long long *))                 \
  X(mig_mode, "nvmlDeviceGetMigMode", (void *, unsigned *, unsigned *))

struct nvml {
#define NVML_MEMBER(name, symbol, parameters) int(*name) parameters;
  NVML_TABLE(NVML_MEMBER)
#undef NVML_MEMBER
};

static const struct {
  const char *symbol;
  size_t offset;
} functions[] = {
#define NVML_ROW(name, symbol, parameters) {symbol, offsetof(struct nvml, name)},
    NVML_TABLE(NVML_ROW)
#undef NVML_ROW
};

/* Reasons for lower clocks that disturb timing; idle (bit 0) and application clocks set by the user (bit 1) do not. */
static const struct {
  unsigned long long bit;
  const char *name;
} throttle_reasons[] = {
    {0x04, "power cap"},        {0x08, "hardware slowdown"},          {0x10, "sync boost"},
    {0x20, "software thermal"}, {0x40, "hardware thermal slowdown"},  {0x80, "hardware power brake"},
};

static void ask_driver(const struct nvml *nvml, void *device, json_t *out)
{
  char version[96];
  (void)device;
  if(nvml->driver_version != NULL && nvml->driver_version(version, sizeof(version)) == 0)
    json_object_set_new(out, "driver", json_string(version));
}

static void ask_processes(const struct nvml *nvml, void *device, json_t *out)
{
  struct nvml_process process[MAX_PROCESSES];
  unsigned count = MAX_PROCESSES;
  json_t *list;
  if(nvml->processes == NULL || nvml->processes(device, &count, process) != 0)
    return;
  list = json_array();
  for(unsigned i = 0; i < count && i < MAX_PROCESSES; i++)
    if(process[i].pid != (unsigned)getpid())
      json_array_append_new(list, json_pack("{s:i, s:I}", "pid", (int)process[i].pid, "bytes", (json_int_t)process[i].bytes));
  json_object_set_new(out, "processes", list);
}

static void ask_utilization(const struct nvml *nvml, void *device, json_t *out)
{
  struct nvml_utilization used;
  if(nvml->utilization != NULL && nvml->utilization(device, &used) == 0)
    json_object_set_new(out, "utilization_percent", json_integer(used.gpu));
}

static void ask_clocks(const struct nvml *nvml, void *device, json_t *out)
{
  static const struct {
    const char *now, *most;
    int type;
  } clocks[] = {{"sm_mhz", "sm_max_mhz", CLOCK_SM}, {"memory_mhz", "memory_max_mhz", CLOCK_MEMORY}};
  for(size_t i = 0; i < sizeof(clocks) / sizeof(clocks[0]); i++) {
    unsigned mhz;
    if(nvml->clock != NULL && nvml->clock(device, clocks[i].type, &mhz) == 0)
      json_object_set_new(out, clocks[i].now, json_integer(mhz));
    if(nvml->max_clock != NULL && nvml->max_clock(device, clocks[i].type, &mhz) == 0)
      json_object_set_new(out, clocks[i].most, json_integer(mhz));
  }
}

static void ask_throttle(const struct nvml *nvml, void *device, json_t *out)
{
  unsigned long long bits;
  json_t *list;
  if(nvml->throttle == NULL || nvml->throttle(device, &bits) != 0)
    return;
  list = json_array();
  for(size_t i = 0; i < sizeof(throttle_reasons) / sizeof(throttle_reasons[0]); i++)
    if((bits & throttle_reasons[i].bit) != 0)
      json_array_append_new(list, json_string(throttle_reasons[i].name));
  json_object_set_new(out, "throttle", list);
}

static void ask_mig(const struct nvml *nvml, void *device, json_t *out)
{
  unsigned current, pending;
  if(nvml->mig_mode != NULL && nvml->mig_mode(device, &current, &pending) == 0)
    json_object_set_new(out, "mig", json_boolean(current != 0));
}

static void (*const questions[])(const struct nvml *, void *, json_t *) = {ask_driver, ask_processes, ask_utilization, ask_clocks, ask_throttle, ask_mig};

json_t *nvml_ask(nvml_find_fn *find, void *context, const char *library_name, const char *uuid)
{
  json_t *out = json_object();
  void *device = NULL;
  struct nvml nvml;
  for(size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
    void *address = find(context, functions[i].symbol);
    memcpy((char *)&nvml + functions[i].offset, &address, sizeof(address)); /* POSIX: object and function pointers have one representation */
  }
  if(nvml.init == NULL || nvml.shutdown == NULL || nvml.by_uuid == NULL || nvml.init() != 0) {
    json_object_set_new(out, "missing", json_sprintf("%s does not start", library_name));
    return out;
  }
  if(nvml.by_uuid(uuid, &device) != 0)
    json_object_set_new(out, "missing", json_sprintf("%s does not know GPU %s", library_name, uuid));
  else
    for(size_t i = 0; i < sizeof(questions) / sizeof(questions[0]); i++)
      questions[i](&nvml, device, out);
  nvml.shutdown();
  return out;
}

static void *find_in_library(void *library, const char *symbol)
{
  return dlsym(library, symbol);
}

json_t *nvml_probe(const char *uuid)
{
  const char *given = getenv("MOEFORGE_NVML"), *name = given != NULL && given[0] != '\0' ? given : "libnvidia-ml.so.1";
  void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  json_t *out;
  if(library == NULL)
    return json_pack("{s:o}", "missing", json_sprintf("%s cannot be loaded", name));
  out = nvml_ask(find_in_library, library, name, uuid);
  dlclose(library);
  return out;
}
