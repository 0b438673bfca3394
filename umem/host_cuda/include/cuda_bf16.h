// bfloat16 on the host, by its bits: CUDA's header of this name.
#pragma once
#include "umem_nearest.h"

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    const unsigned int all = umem_bits<unsigned int>(x);
    bits = x != x ? 0x7fffu : (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
  }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> __nv_bfloat16(T x) : __nv_bfloat16(umem_odd(x)) {}
  operator float() const { return umem_bits<float>((unsigned int)bits << 16); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  __nv_bfloat162(const __nv_bfloat16& x, const __nv_bfloat16& y) : x(x), y(y) {}
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return umem_of_bits<__nv_bfloat16>(bits); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline __nv_bfloat16 __double2bfloat16(double x) { return x; }
#define UMEM_H __nv_bfloat16
#define UMEM_H2 __nv_bfloat162
#define UMEM_N(before, after) before##bfloat16##after
#include "umem_narrow.h"
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
