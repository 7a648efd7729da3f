/* cuda_api.h - the CUDA driver functions that moeforge calls, resolved at run time, so that one binary starts on machines without a GPU.
 *
 * The library is MOEFORGE_LIBCUDA if set (tests put a scripted one there), else libcuda.so.1. */
#ifndef MOEFORGE_RUNTIME_CUDA_API_H
#define MOEFORGE_RUNTIME_CUDA_API_H

#include <cuda.h>
#include <stddef.h>

/* Return type, name as declared in cuda.h without version suffix, exported symbol, parameters. */
#define CUDA_API_TABLE(X)                                                                                                                 \
  X(cuInit, "cuInit", (unsigned int))                                                                                                     \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int *))                                                                                    \
  X(cuGetErrorName, "cuGetErrorName", (CUresult, const char **))                                                                          \
  X(cuGetErrorString, "cuGetErrorString", (CUresult, const char **))                                                                      \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int *))                                                                                        \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice *, int))                                                                                        \
  X(cuDeviceGetName, "cuDeviceGetName", (char *, int, CUdevice))                                                                          \
  X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid *, CUdevice))                                                                          \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, CUdevice_attribute, CUdevice))                                                  \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                                                                        \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                                                        \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                                                \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext))                                                                                 \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext *))                                                                                 \
  X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                                                                      \
  X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                                                         \
  X(cuModuleLoadData, "cuModuleLoadData", (CUmodule *, const void *))                                                                     \
  X(cuModuleUnload, "cuModuleUnload", (CUmodule))                                                                                         \
  X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                                                   \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, int))                                                    \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int *, CUfunction, int, size_t))         \
  X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                                                 \
  X(cuMemFree, "cuMemFree_v2", (CUdeviceptr))                                                                                             \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                                                                \
  X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t))                                                                 \
  X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))                                                                       \
  X(cuMemcpyDtoD, "cuMemcpyDtoD_v2", (CUdeviceptr, CUdeviceptr, size_t))                                                                  \
  X(cuMemsetD8, "cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t))                                                                    \
  X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, CUstream))                                                   \
  X(cuStreamCreate, "cuStreamCreate", (CUstream *, unsigned int))                                                                         \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                                    \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                                                                               \
  X(cuStreamQuery, "cuStreamQuery", (CUstream))                                                                                           \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream, CUstreamCaptureMode))                                                     \
  X(cuStreamEndCapture, "cuStreamEndCapture", (CUstream, CUgraph *))                                                                      \
  X(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", (CUgraphExec *, CUgraph, unsigned long long))                             \
  X(cuGraphLaunch, "cuGraphLaunch", (CUgraphExec, CUstream))                                                                              \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", (CUgraphExec))                                                                              \
  X(cuGraphDestroy, "cuGraphDestroy", (CUgraph))                                                                                          \
  X(cuEventCreate, "cuEventCreate", (CUevent *, unsigned int))                                                                            \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                                                                       \
  X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                                                                  \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent))                                                                                  \
  X(cuEventElapsedTime, "cuEventElapsedTime", (float *, CUevent, CUevent))                                                                \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", (const CUlaunchConfig *, CUfunction, void **, void **))                                         \
  X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                                                     \
    (CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,                  \
     const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill))

/* The same for functions that only newer drivers have: the member is NULL where there is none. */
#define CUDA_API_OPTIONAL_TABLE(X) X(cuFuncGetParamInfo, "cuFuncGetParamInfo", (CUfunction, size_t, size_t *, size_t *)) /* 12.4 */

/* cuda.h maps unversioned names to versioned ones by macros; inside the struct the members carry a p_ prefix to stay clear of them. */
struct cuda_api {
  void *library; /* dlopen handle */
#define CUDA_API_MEMBER(name, symbol, parameters) CUresult(CUDAAPI *p_##name) parameters;
  CUDA_API_TABLE(CUDA_API_MEMBER)
  CUDA_API_OPTIONAL_TABLE(CUDA_API_MEMBER)
#undef CUDA_API_MEMBER
};

/* Opens libcuda and resolves every function that it must have. 0, or -1 with one line in 'why' (missing library, missing symbol = driver too old). */
int cuda_api_open(struct cuda_api *api, char *why, unsigned long why_bytes);
void cuda_api_close(struct cuda_api *api);

#endif
