/* device_cuda_driver.c - the CUDA driver and the devices that it shows: errors in words, what a GPU is, what state it is in. */
#include "device_cuda.h"

#include <stdio.h>
#include <string.h>

#define DEFAULT_LAUNCH_US 1.8

/* ---- errors ---- */
static enum mf_status status_of(CUresult result)
{
  switch(result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return MF_ERR_NOMEM;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE: return MF_ERR_NO_DEVICE;
    default: return MF_ERR_DEVICE;
  }
}

enum mf_status cuda_failed(const struct cuda_api *api, CUresult result, struct error *err, const char *what)
{
  const char *name = NULL, *text = NULL;
  if(api->p_cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
    name = "unknown error";
  if(api->p_cuGetErrorString(result, &text) != CUDA_SUCCESS || text == NULL)
    text = "no description";
  return error_set(err, status_of(result), "%s: %s (%d): %s%s", what, name, (int)result, text,
                   status_of(result) == MF_ERR_NOMEM ? " (end other processes on the GPU)" : "");
}

enum mf_status recipe_failed(const struct device *dev, enum mf_status status, CUresult result, const char *what, struct error *err)
{
  if(result == CUDA_SUCCESS)
    return error_set(err, status, "%s: %s", what, mf_status_string(status));
  cuda_failed(&dev->api, result, err, what);
  if(err != NULL)
    err->status = status;
  return status;
}

/* ---- the driver and its devices ---- */
enum mf_status cuda_driver_open(struct cuda_api *api, struct error *err)
{
  char why[512];
  CUresult result;
  memset(api, 0, sizeof(*api));
  if(cuda_api_open(api, why, sizeof(why)) != 0)
    return error_set(err, MF_ERR_NO_DEVICE, "%s, or use --device none to go on without a GPU", why);
  result = api->p_cuInit(0);
  if(result == CUDA_SUCCESS)
    return MF_OK;
  cuda_failed(api, result, err, "the NVIDIA driver does not start");
  if(err != NULL)
    err->status = MF_ERR_NO_DEVICE;
  cuda_api_close(api);
  return MF_ERR_NO_DEVICE;
}

enum mf_status cuda_count(int *out, struct error *err)
{
  struct cuda_api api;
  CUresult result;
  enum mf_status rc = cuda_driver_open(&api, err);
  if(rc != MF_OK)
    return rc;
  result = api.p_cuDeviceGetCount(out);
  if(result != CUDA_SUCCESS)
    rc = cuda_failed(&api, result, err, "counting GPUs");
  else if(*out == 0)
    rc = error_set(err, MF_ERR_NO_DEVICE, "the driver is there but shows no GPU (CUDA_VISIBLE_DEVICES hides them, or the container was started without)");
  cuda_api_close(&api);
  return rc;
}

static long attribute(const struct cuda_api *api, CUdevice handle, CUdevice_attribute which)
{
  int value = 0;
  return api->p_cuDeviceGetAttribute(&value, which, handle) == CUDA_SUCCESS ? value : 0;
}

/* The UUID as nvidia-smi prints it; of a MIG slice it is the slice's. */
static void format_uuid(const struct cuda_api *api, CUdevice handle, bool mig, char *out, size_t space)
{
  CUuuid uuid;
  size_t length;
  memset(&uuid, 0, sizeof(uuid));
  if(api->p_cuDeviceGetUuid(&uuid, handle) != CUDA_SUCCESS) {
    snprintf(out, space, "unknown");
    return;
  }
  snprintf(out, space, "%s", mig ? "MIG" : "GPU");
  for(int i = 0; i < 16; i++) {
    length = strlen(out);
    snprintf(out + length, space - length, "%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned)(unsigned char)uuid.bytes[i]);
  }
}

enum mf_status cuda_describe(const struct cuda_api *api, int ordinal, CUdevice *handle, struct device_info *out, struct error *err)
{
  size_t total = 0;
  char what[64];
  CUresult result;
  snprintf(what, sizeof(what), "GPU %d", ordinal);
  memset(out, 0, sizeof(*out));
  result = api->p_cuDeviceGet(handle, ordinal);
  if(result == CUDA_SUCCESS)
    result = api->p_cuDeviceGetName(out->name, (int)sizeof(out->name), *handle);
  if(result == CUDA_SUCCESS)
    result = api->p_cuDeviceTotalMem(&total, *handle);
  if(result == CUDA_SUCCESS)
    result = api->p_cuDriverGetVersion(&out->driver_version);
  if(result != CUDA_SUCCESS)
    return cuda_failed(api, result, err, what);
  out->cc_major = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  out->cc_minor = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  out->sms = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  out->shared_bytes_per_cta = attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  out->shared_bytes_per_sm = attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  out->registers_per_sm = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  out->max_threads_per_cta = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  out->l2_bytes = attribute(api, *handle, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  out->memory_bus_bits = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  out->memory_clock_khz = (int)attribute(api, *handle, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
  out->bandwidth_gbps = out->memory_bus_bits / 8.0 * out->memory_clock_khz * 2 / 1e6; /* two transfers per clock */
  out->launch_us = DEFAULT_LAUNCH_US;
  out->memory_bytes = (double)total;
  out->mig = strstr(out->name, "MIG ") != NULL;
  format_uuid(api, *handle, out->mig, out->uuid, sizeof(out->uuid));
  return MF_OK;
}

enum mf_status cuda_info(int ordinal, struct device_info *out, struct error *err)
{
  struct cuda_api api;
  CUdevice handle;
  enum mf_status rc = cuda_driver_open(&api, err);
  if(rc != MF_OK)
    return rc;
  rc = cuda_describe(&api, ordinal, &handle, out, err);
  cuda_api_close(&api);
  return rc;
}

enum mf_status cuda_state(int ordinal, struct device_state *out, struct error *err)
{
  struct cuda_api api;
  struct device_info info;
  CUdevice handle = 0;
  CUcontext context = NULL;
  size_t free_bytes = 0, total_bytes = 0;
  CUresult result;
  enum mf_status rc = cuda_driver_open(&api, err);
  if(rc != MF_OK)
    return rc;
  memset(out, 0, sizeof(*out));
  rc = cuda_describe(&api, ordinal, &handle, &info, err);
  if(rc != MF_OK)
    goto out;
  out->cooperative_launch = attribute(&api, handle, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH) != 0;
  out->shared_context = attribute(&api, handle, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) != CU_COMPUTEMODE_DEFAULT;
  result = api.p_cuDevicePrimaryCtxRetain(&context, handle);
  if(result != CUDA_SUCCESS) {
    rc = cuda_failed(&api, result, err, "no context can be made on the GPU (is another process holding it exclusively?)");
    goto out;
  }
  result = api.p_cuCtxSetCurrent(context);
  if(result == CUDA_SUCCESS)
    result = api.p_cuMemGetInfo(&free_bytes, &total_bytes);
  if(result != CUDA_SUCCESS)
    rc = cuda_failed(&api, result, err, "asking for free memory");
  out->memory_free_bytes = (double)free_bytes;
  out->memory_total_bytes = (double)total_bytes;
  api.p_cuCtxSetCurrent(NULL);
  api.p_cuDevicePrimaryCtxRelease(handle);
out:
  cuda_api_close(&api);
  return rc;
}
