/* fake_libcuda.c - a scripted stand-in for the CUDA driver, as a shared object; fake_libcuda.h describes the script.
 *
 * What it is for: error paths that a real GPU does not show on demand, and byte-exact tests of what is handed to the driver. Every function of
 * CUDA_API_TABLE (and of the optional one) is here, named fake_<name> in C and exported under the table's symbol (EXPORT), so that the table is the only list.
 *
 *   memory   "device" memory is host memory (malloc, so that AddressSanitizer sees overruns; large pieces are mapped and stay untouched).
 *            Copies and sets outside an allocation fail with CUDA_ERROR_INVALID_VALUE.
 *   streams  each has a clock in microseconds; launches advance it, events read it. Everything runs at once, in call order, except after a
 *            scripted hang (nothing ever completes) or fault (the next synchronisation reports it, as does everything after it).
 *   capture  launches and memsets of a capturing stream become nodes that cuGraphLaunch replays. While any stream captures, allocation and
 *            synchronisation fail as the real driver's do, which is how tests see that a forward call does neither.
 *   context  one primary context per device, and those that a program makes; what needs a current context fails without one. A kernel is launched in its
 *            stream's context, whichever is current, and must be of it; a default stream's is the current one.
 *
 * One mutex guards everything; the context stack is per thread. */
#include "fake_libcuda.h"

#include "cuda_api.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define DECLARE(name, symbol, parameters) CUresult CUDAAPI fake_##name parameters __asm__(symbol);
CUDA_API_TABLE(DECLARE)
CUDA_API_OPTIONAL_TABLE(DECLARE)
/* What programs beside libmoeforge call. */
DECLARE(cuCtxCreate, "cuCtxCreate_v2", (CUcontext *, unsigned int, CUdevice))
DECLARE(cuCtxDestroy, "cuCtxDestroy_v2", (CUcontext))
DECLARE(cuDevicePrimaryCtxGetState, "cuDevicePrimaryCtxGetState", (CUdevice, unsigned int *, int *))
#undef DECLARE

#define MAX_DEVICES 8
#define MAX_STACK 16
#define MAPPED_FROM (1u << 20) /* bytes; larger allocations are mapped instead of malloc'ed */

/* ---- the script ---- */
struct script {
  long no_device, oom, load_fail, map_fail, launch_fail, early_fail, fault, hang, light; /* 0 or 1 */
  long devices, cc, driver, sms, l2, mem, occupancy;
  double time_us; /* < 0: a function of the launch */
  char name[128];
};

static const struct script script_default = {.devices = 1, .cc = 90, .driver = 13000, .sms = 132, .l2 = 62914560, .mem = 150L << 30,
                                             .occupancy = 1, .time_us = -1, .name = "NVIDIA H200"};

static const struct {
  const char *key;
  size_t offset;
  bool flag; /* takes no value */
} script_keys[] = {
#define FLAG(key) {#key, offsetof(struct script, key), true}
#define NUMBER(key) {#key, offsetof(struct script, key), false}
    FLAG(no_device), FLAG(oom),       FLAG(load_fail), FLAG(map_fail), FLAG(launch_fail), FLAG(early_fail), FLAG(fault), FLAG(hang), FLAG(light),
    NUMBER(devices), NUMBER(cc),      NUMBER(driver),  NUMBER(sms),    NUMBER(l2),        NUMBER(mem), NUMBER(occupancy),
#undef FLAG
#undef NUMBER
};

/* ---- the objects; each starts with its kind, so that a wrong handle is noticed ---- */
enum kind { KIND_CONTEXT = 0x46430001, KIND_MODULE, KIND_FUNCTION, KIND_STREAM, KIND_GRAPH, KIND_EXEC, KIND_EVENT };

struct function {
  enum kind kind;
  struct module *module;
  char name[128];
  int nparams;
  size_t sizes[FAKECUDA_MAX_PARAMS];
  int shared_limit;
  struct function *next;
};

struct module {
  enum kind kind;
  CUcontext context; /* the current one when it was loaded */
  unsigned char *image;
  size_t bytes;
  uint64_t hash;
  struct function *functions;
};

/* One recorded piece of work: a launch, or a memset if function is NULL. Owns its parameter bytes. */
struct node {
  struct function *function;
  struct fakecuda_launch launch;
  double us; /* what the launch takes, unless the script says how long launches take */
  unsigned char *bytes;
  void *set_address;
  unsigned char set_value;
  size_t set_bytes;
  struct node *next;
};

struct graph {
  enum kind kind;
  struct node *first, **last;
  int count;
  int users; /* the graph itself, and each executable made from it */
};

struct stream {
  enum kind kind;
  CUcontext context; /* NULL: that of whoever uses it */
  double now_us;
  struct graph *capture;
};

struct exec {
  enum kind kind;
  struct graph *graph;
};

struct event {
  enum kind kind;
  double at_us;
};

struct context {
  enum kind kind;
  int device, users;
};

struct allocation {
  unsigned char *address;
  size_t bytes;
  struct allocation *next;
};

static struct {
  pthread_mutex_t lock;
  bool initialised, hung, faulted;
  struct script script;
  struct context contexts[MAX_DEVICES];
  struct stream default_stream;
  struct allocation *allocations;
  size_t allocated;
  int capturing;
  int alive;
  fakecuda_launch_fn *hook;
  void *hook_context;
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .default_stream = {.kind = KIND_STREAM}};

static _Thread_local struct {
  CUcontext at[MAX_STACK];
  int depth;
} stack;

static void fake_enter(void) { pthread_mutex_lock(&fake.lock); }
static CUresult fake_leave(CUresult rc)
{
  pthread_mutex_unlock(&fake.lock);
  return rc;
}

static bool script_item(struct script *out, const char *item)
{
  const char *value = strchr(item, '=');
  const size_t length = value != NULL ? (size_t)(value - item) : strlen(item);
  if(length == 4 && value != NULL && strncmp(item, "name", 4) == 0) {
    snprintf(out->name, sizeof(out->name), "%s", value + 1);
    return true;
  }
  if(length == 7 && value != NULL && strncmp(item, "time_us", 7) == 0) {
    out->time_us = strtod(value + 1, NULL);
    return true;
  }
  for(size_t i = 0; i < sizeof(script_keys) / sizeof(script_keys[0]); i++)
    if(strlen(script_keys[i].key) == length && strncmp(script_keys[i].key, item, length) == 0 && script_keys[i].flag == (value == NULL)) {
      *(long *)(void *)((char *)out + script_keys[i].offset) = value == NULL ? 1 : strtol(value + 1, NULL, 0);
      return true;
    }
  return false;
}

static bool script_read(struct script *out)
{
  const char *text = getenv("FAKECUDA"), *time_us = getenv("FAKECUDA_TIME_US");
  char copy[1024], *rest = copy, *item;
  bool good = true;
  memcpy(out, &script_default, sizeof(*out)); /* padding, too: scripts are compared as bytes */
  if(time_us != NULL)
    out->time_us = strtod(time_us, NULL);
  snprintf(copy, sizeof(copy), "%s", text != NULL ? text : "");
  while((item = strsep(&rest, ",")) != NULL)
    if(*item != '\0' && !script_item(out, item)) {
      fprintf(stderr, "fake_libcuda: unknown item \"%s\" in FAKECUDA\n", item);
      good = false;
    }
  return good && out->devices >= 0 && out->devices <= MAX_DEVICES;
}

static const char *log_path(void)
{
  return getenv("FAKECUDA_LOG");
}

static void log_line(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void log_line(const char *fmt, ...)
{
  const char *path = log_path();
  FILE *f = path != NULL ? fopen(path, "a") : NULL;
  va_list args;
  if(f == NULL)
    return;
  va_start(args, fmt);
  vfprintf(f, fmt, args);
  va_end(args);
  fclose(f);
}

/* ---- start, devices, contexts ---- */
CUresult fake_cuInit(unsigned int flags)
{
  CUresult rc = CUDA_SUCCESS;
  struct script script;
  (void)flags;
  fake_enter();
  fake.hung = fake.faulted = false;
  memset(&script, 0, sizeof(script));
  fake.initialised = script_read(&script);
  if(memcmp(&script, &fake.script, sizeof(script)) != 0) /* other threads read it without the lock: only tests with one thread change it */
    fake.script = script;
  if(!fake.initialised)
    rc = CUDA_ERROR_INVALID_VALUE;
  else if(fake.script.no_device || fake.script.devices == 0)
    rc = CUDA_ERROR_NO_DEVICE;
  return fake_leave(rc);
}

CUresult fake_cuDriverGetVersion(int *version)
{
  struct script script;
  fake_enter();
  script_read(&script);
  *version = (int)script.driver;
  return fake_leave(CUDA_SUCCESS);
}

static const struct {
  CUresult code;
  const char *name, *text;
} error_names[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

CUresult fake_cuGetErrorName(CUresult code, const char **name)
{
  for(size_t i = 0; i < sizeof(error_names) / sizeof(error_names[0]); i++)
    if(error_names[i].code == code) {
      *name = error_names[i].name;
      return CUDA_SUCCESS;
    }
  *name = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult fake_cuGetErrorString(CUresult code, const char **text)
{
  for(size_t i = 0; i < sizeof(error_names) / sizeof(error_names[0]); i++)
    if(error_names[i].code == code) {
      *text = error_names[i].text;
      return CUDA_SUCCESS;
    }
  *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

static CUresult check_device(CUdevice device)
{
  return !fake.initialised ? CUDA_ERROR_NOT_INITIALIZED : device < 0 || device >= fake.script.devices ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult fake_cuDeviceGetCount(int *count)
{
  if(!fake.initialised)
    return CUDA_ERROR_NOT_INITIALIZED;
  *count = fake.script.no_device ? 0 : (int)fake.script.devices;
  return CUDA_SUCCESS;
}

CUresult fake_cuDeviceGet(CUdevice *device, int ordinal)
{
  *device = ordinal;
  return check_device(ordinal);
}

CUresult fake_cuDeviceGetName(char *name, int space, CUdevice device)
{
  if(space > 0)
    snprintf(name, (size_t)space, "%s", fake.script.name);
  return check_device(device);
}

CUresult fake_cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
  memset(uuid, 0xfa, sizeof(*uuid));
  uuid->bytes[15] = (char)device;
  return check_device(device);
}

CUresult fake_cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
  *bytes = (size_t)fake.script.mem;
  return check_device(device);
}

CUresult fake_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
  const struct script *s = &fake.script;
  switch(attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = (int)(s->cc / 10); break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = (int)(s->cc % 10); break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = (int)s->sms; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = (int)s->l2; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 3201000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 6144; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; break;
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: *value = s->cc >= 60; break;
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED: *value = s->cc >= 90; break;
    default: *value = 0; break;
  }
  return check_device(device);
}

CUresult fake_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
  CUresult rc;
  fake_enter();
  rc = check_device(device);
  if(rc == CUDA_SUCCESS) {
    struct context *c = &fake.contexts[device];
    c->kind = KIND_CONTEXT;
    c->device = device;
    c->users++;
    fake.alive++;
    *context = (CUcontext)(void *)c;
  }
  return fake_leave(rc);
}

CUresult fake_cuDevicePrimaryCtxRelease(CUdevice device)
{
  CUresult rc;
  fake_enter();
  rc = check_device(device);
  if(rc == CUDA_SUCCESS && fake.contexts[device].users == 0)
    rc = CUDA_ERROR_INVALID_CONTEXT;
  if(rc == CUDA_SUCCESS) {
    fake.contexts[device].users--;
    fake.alive--;
  }
  return fake_leave(rc);
}

CUresult fake_cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
  CUresult rc;
  fake_enter();
  rc = check_device(device);
  *flags = 0;
  *active = rc == CUDA_SUCCESS && fake.contexts[device].users > 0;
  return fake_leave(rc);
}

static bool context_good(CUcontext context)
{
  const struct context *c = (const void *)context;
  return c != NULL && c->kind == KIND_CONTEXT && c->users > 0;
}

CUresult fake_cuCtxPushCurrent(CUcontext context)
{
  if(!context_good(context) || stack.depth == MAX_STACK)
    return CUDA_ERROR_INVALID_CONTEXT;
  stack.at[stack.depth++] = context;
  return CUDA_SUCCESS;
}

CUresult fake_cuCtxPopCurrent(CUcontext *context)
{
  if(stack.depth == 0)
    return CUDA_ERROR_INVALID_CONTEXT;
  stack.depth--;
  if(context != NULL)
    *context = stack.at[stack.depth];
  return CUDA_SUCCESS;
}

CUresult fake_cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device)
{
  CUresult rc;
  (void)flags;
  fake_enter();
  rc = check_device(device);
  if(rc == CUDA_SUCCESS) {
    struct context *c = calloc(1, sizeof(*c));
    *c = (struct context){KIND_CONTEXT, device, 1};
    fake.alive++;
    *out = (CUcontext)(void *)c;
  }
  fake_leave(rc);
  return rc == CUDA_SUCCESS ? fake_cuCtxPushCurrent(*out) : rc;
}

CUresult fake_cuCtxDestroy(CUcontext context)
{
  if(!context_good(context))
    return CUDA_ERROR_INVALID_CONTEXT;
  if(stack.depth > 0 && stack.at[stack.depth - 1] == context)
    stack.depth--;
  fake_enter();
  fake.alive--;
  free(context);
  return fake_leave(CUDA_SUCCESS);
}

CUresult fake_cuCtxSetCurrent(CUcontext context)
{
  if(context != NULL && !context_good(context))
    return CUDA_ERROR_INVALID_CONTEXT;
  stack.depth = stack.depth > 0 ? stack.depth - 1 : 0;
  if(context != NULL)
    stack.at[stack.depth++] = context;
  return CUDA_SUCCESS;
}

/* NULL if there is none. */
static CUcontext current_context(void)
{
  return stack.depth > 0 && context_good(stack.at[stack.depth - 1]) ? stack.at[stack.depth - 1] : NULL;
}

/* Needs a current context and no fault so far; call with the lock held. */
static CUresult usable(void)
{
  if(current_context() == NULL)
    return CUDA_ERROR_INVALID_CONTEXT;
  return fake.faulted ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

/* What synchronising calls do: refuse during capture, wait for ever after a hang. Call with the lock held; it is held again on return. */
static CUresult synchronise(void)
{
  CUresult rc = usable();
  if(rc == CUDA_SUCCESS && fake.capturing > 0)
    rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  while(rc == CUDA_SUCCESS && fake.hung) {
    pthread_mutex_unlock(&fake.lock);
    usleep(10000);
    pthread_mutex_lock(&fake.lock);
  }
  return rc;
}

CUresult fake_cuCtxSynchronize(void)
{
  fake_enter();
  return fake_leave(synchronise());
}

/* The other parts. One translation unit, because the build makes the library of one file. */
#include "fake_libcuda_objects.h"
#include "fake_libcuda_work.h"
