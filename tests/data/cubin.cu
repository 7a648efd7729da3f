// cubin.cu - the source of cubin_12.4.bin and cubin_13.0.bin, which NVRTC 12.4 and 13.0 made with
// --gpu-architecture=sm_90a --std=c++17: the input of test_cubin.c and of fake_nvrtc.c.
struct Meta {
  int a, b;
  long long c;
};
extern "C" __device__ const Meta mf_meta = {7, 8, 9};
extern "C" __constant__ const Meta mf_const = {17, 18, 19};
extern "C" __device__ int mf_zero;
__device__ int mf_zero;

extern "C" __global__ void __launch_bounds__(256) mf_moe(float *o)
{
  __shared__ float s[300];
  s[threadIdx.x] = o[threadIdx.x];
  __syncthreads();
  o[threadIdx.x] = s[(threadIdx.x * 7) & 255] + mf_const.a + mf_zero;
}
