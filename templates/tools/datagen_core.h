/* datagen_core.h - the generator of test data, in the common subset of C11 and CUDA C++ and without any include.
 *
 * tuner/datagen.c (CPU) and tools/datagen.cu (GPU) both include this file, and nothing else of either decides a bit. That the two agree is not
 * left to compilers: everything is integer arithmetic, or single-precision operations whose result is exact (an integer of at most 18 bits times
 * a power of two), so that neither rounding modes, nor contraction into fused multiply-adds, nor a C library can matter.
 *
 *   key(seed, stream)  ->  hash(key, index) = mix(key + index * odd constant)       any index at any time, in any order
 *
 *   weights   byte i of a tensor: byte i % 8 (lowest first) of hash(i / 8). Its low 7 bits pick one of 128 magnitudes, its top bit is the sign.
 *             The magnitudes are the half-normal quantiles (i + 0.5) / 128 with the largest at 448, rounded to e4m3; the four smallest are
 *             replaced by 0, the least and the largest subnormal and the least normal number, so that every kind of code occurs (also -0, never NaN).
 *   scales    base * (0.5 + 16 bits / 65536), base a power of two
 *   bias      sum of four 16-bit numbers, centred, times 2^-23: close to normal with a standard deviation of 0.0045, at most 2^-6 */
#ifndef MF_TOOLS_DATAGEN_CORE_H
#define MF_TOOLS_DATAGEN_CORE_H

#ifdef __CUDACC__
#define MF_DATA_FN __device__ __forceinline__
#define MF_DATA_TABLE __device__ __align__(128) unsigned char /* one cache line: 32 different bytes of it are one access */
#else
#define MF_DATA_FN static inline
#define MF_DATA_TABLE static const unsigned char
#endif

/* 64 bits are `unsigned long`, as uint64_t is on the 64-bit systems that we run on: no include, no conversions. */
typedef char mf_data_long_is_64_bits[sizeof(unsigned long) == 8 ? 1 : -1];

/* Root mean square of the weights as numbers (before block scales), for choosing scales. */
#define MF_DATA_WEIGHT_RMS 154

MF_DATA_TABLE mf_data_magnitude[128] = {
  0x00, 0x01, 0x07, 0x08, 0x4E, 0x50, 0x52, 0x53, 0x55, 0x56, 0x58, 0x59, 0x5A, 0x5A, 0x5B, 0x5C,
  0x5D, 0x5D, 0x5E, 0x5F, 0x60, 0x60, 0x61, 0x61, 0x61, 0x62, 0x62, 0x63, 0x63, 0x63, 0x64, 0x64,
  0x65, 0x65, 0x65, 0x66, 0x66, 0x67, 0x67, 0x67, 0x68, 0x68, 0x68, 0x69, 0x69, 0x69, 0x69, 0x69,
  0x6A, 0x6A, 0x6A, 0x6A, 0x6A, 0x6B, 0x6B, 0x6B, 0x6B, 0x6C, 0x6C, 0x6C, 0x6C, 0x6C, 0x6D, 0x6D,
  0x6D, 0x6D, 0x6E, 0x6E, 0x6E, 0x6E, 0x6F, 0x6F, 0x6F, 0x6F, 0x70, 0x70, 0x70, 0x70, 0x70, 0x71,
  0x71, 0x71, 0x71, 0x71, 0x71, 0x71, 0x72, 0x72, 0x72, 0x72, 0x72, 0x72, 0x73, 0x73, 0x73, 0x73,
  0x73, 0x73, 0x74, 0x74, 0x74, 0x74, 0x74, 0x75, 0x75, 0x75, 0x75, 0x76, 0x76, 0x76, 0x76, 0x77,
  0x77, 0x77, 0x78, 0x78, 0x78, 0x78, 0x79, 0x79, 0x79, 0x79, 0x7A, 0x7A, 0x7B, 0x7B, 0x7C, 0x7E,
};

MF_DATA_FN unsigned long mf_data_mix(unsigned long h)
{
  h ^= h >> 32;
  h *= 0x9FB21C651E98DF25ul;
  h ^= h >> 29;
  h *= 0xD6E8FEB86659FD93ul;
  return h ^ h >> 32;
}

MF_DATA_FN unsigned long mf_data_key(unsigned long seed, unsigned stream)
{
  return mf_data_mix(mf_data_mix(seed + 0x632BE59BD9B4E019ul) + stream * 0xA24BAED4963EE407ul);
}

MF_DATA_FN unsigned long mf_data_hash(unsigned long key, unsigned long index)
{
  return mf_data_mix(key + index * 0x9E3779B97F4A7C15ul);
}

/* Eight weight bytes from one hash, 'table' = mf_data_magnitude (or a faster copy of it). */
MF_DATA_FN unsigned long mf_data_weights8(unsigned long hash, const unsigned char *table)
{
  unsigned long bytes = hash & 0x8080808080808080ul;
  for(int shift = 0; shift < 64; shift += 8)
    bytes |= (unsigned long)table[hash >> shift & 127] << shift;
  return bytes;
}

MF_DATA_FN float mf_data_scale(unsigned long hash, float base)
{
  return base * (0.5f + (float)(int)(hash >> 48) * 0x1p-16f);
}

/* Sum of the four 16-bit parts of a hash less its mean, doubled to be an integer: even, |sum| <= 262140, standard deviation 75674. */
MF_DATA_FN int mf_data_normal4(unsigned long hash)
{
  const int sum = (int)(hash & 0xFFFF) + (int)(hash >> 16 & 0xFFFF) + (int)(hash >> 32 & 0xFFFF) + (int)(hash >> 48);
  return 2 * (sum - 2 * 65535);
}

MF_DATA_FN float mf_data_bias(unsigned long hash)
{
  return (float)(mf_data_normal4(hash) / 2) * 0x1p-23f;
}

#endif
