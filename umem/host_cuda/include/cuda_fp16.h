// Halves on the host: CUDA's header of this name. The type is CuPy's.
#pragma once
#if __has_include(<cupy/float16.cuh>)
#include <cupy/float16.cuh>
#else  // CuPy 13
#include <cupy/carray.cuh>
#endif
#include "umem_nearest.h"

struct alignas(4) half2 {
  half x, y;
  half2() = default;
  half2(const half& x, const half& y) : x(x), y(y) {}
};
typedef half __half, __nv_half, nv_half;
typedef half2 __half2, __nv_half2, nv_half2;
#define __float2half_rn(x) half((float)(x))  // of umem_cuda.h by its bits
#define __double2half(x) umem_nearest<half>((double)(x))
#define UMEM_H half
#define UMEM_H2 half2
#define UMEM_N(before, after) before##half##after
#define __half_as_ushort umem_half_as_ushort  // there already
#include "umem_narrow.h"
#undef __half_as_ushort
static inline half2 __half2half2(half x) { return {x, x}; }
static inline float2 __half22float2(half2 x) { return {x.x, x.y}; }
