/* device_nvml.h - what the CUDA driver does not tell: other processes, clocks, throttling. From NVML, if it is installed: it is opened at run time
 * (MOEFORGE_NVML, else libnvidia-ml.so.1), and whatever it lacks or refuses is left out. Lives in worker processes. */
#ifndef MOEFORGE_TUNER_DEVICE_NVML_H
#define MOEFORGE_TUNER_DEVICE_NVML_H

#include <jansson.h>

/* {"missing": why}, or any of
 *   "driver": "580.1"   "processes": [{"pid": n, "bytes": n}]   "utilization_percent": n   "sm_mhz": n   "sm_max_mhz": n
 *   "memory_mhz": n   "memory_max_mhz": n   "throttle": ["power cap", ...]   "mig": bool   for the GPU with that UUID. */
json_t *nvml_probe(const char *uuid);

/* The same for a library that is open already: 'find' returns a function of it by name, NULL if it has none. */
typedef void *nvml_find_fn(void *context, const char *symbol);
json_t *nvml_ask(nvml_find_fn *find, void *context, const char *library_name, const char *uuid);

#endif
