/* ints.h - the fixed-width integer types, for C, for nvcc and for NVRTC (which has no stdint.h). */
#ifndef MF_HW_INTS_H
#define MF_HW_INTS_H

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

#endif
