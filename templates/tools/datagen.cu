// datagen.cu - the test data of datagen_core.h, made on the GPU: weights of many layers would take long to make and upload.
//
// Each kernel fills out[0 .. count) with the elements first, first + 1, ... of one stream of one seed; any one-dimensional grid and block will
// do. Nothing is read, nothing is shared between threads. tests/test_datagen.c runs these very functions on the CPU against datagen.c.
#include "tools/datagen_core.h"

#ifndef MF_DATA_KERNEL
#define MF_DATA_KERNEL extern "C" __global__ void
#endif
#define MF_DATA_THREAD (blockIdx.x * (unsigned long)blockDim.x + threadIdx.x)
#define MF_DATA_THREADS (gridDim.x * (unsigned long)blockDim.x)

// Weight bytes. `first` is a multiple of 8, `out` 8-byte aligned; `count` is free.
MF_DATA_KERNEL mf_gen_weights(unsigned char *out, unsigned long first, unsigned long count, unsigned long seed, unsigned stream)
{
  const unsigned long key = mf_data_key(seed, stream);
  const unsigned long words = count / 8;
  for(unsigned long i = MF_DATA_THREAD; i <= words; i += MF_DATA_THREADS) {
    const unsigned long bytes = mf_data_weights8(mf_data_hash(key, first / 8 + i), mf_data_magnitude);
    if(i < words)
      ((unsigned long *)out)[i] = bytes;
    else
      for(unsigned j = 0; j < count % 8; ++j)
        out[words * 8 + j] = (unsigned char)(bytes >> 8 * j);
  }
}

// Block scales. `base` is data_scale_base() of the stream.
MF_DATA_KERNEL mf_gen_scales(float *out, unsigned long first, unsigned long count, unsigned long seed, unsigned stream, float base)
{
  const unsigned long key = mf_data_key(seed, stream);
  for(unsigned long i = MF_DATA_THREAD; i < count; i += MF_DATA_THREADS)
    out[i] = mf_data_scale(mf_data_hash(key, first + i), base);
}

// Selection bias.
MF_DATA_KERNEL mf_gen_bias(float *out, unsigned long first, unsigned long count, unsigned long seed, unsigned stream)
{
  const unsigned long key = mf_data_key(seed, stream);
  for(unsigned long i = MF_DATA_THREAD; i < count; i += MF_DATA_THREADS)
    out[i] = mf_data_bias(mf_data_hash(key, first + i));
}
