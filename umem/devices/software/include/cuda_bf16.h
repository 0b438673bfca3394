// bfloat16 on the host, by its bits: what kernels use of CUDA's header of this name.
#pragma once

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) {
    const unsigned int all = umem_bits<unsigned int>(x);
    bits = x != x ? 0x7fc0u | (all >> 16 & 0x8000u) : (all + 0x7fffu + (all >> 16 & 1u)) >> 16;
  }
  operator float() const { return umem_bits<float>((unsigned int)bits << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return umem_bits<__nv_bfloat16>(bits); }
static inline float __bfloat162float(__nv_bfloat16 x) { return x; }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline __nv_bfloat16 __double2bfloat16(double x) { return (float)x; }
static inline bool __hisnan(__nv_bfloat16 x) { return (x.bits & 0x7fffu) > 0x7f80u; }
static inline int __hisinf(__nv_bfloat16 x) { return (x.bits & 0x7fffu) == 0x7f80u ? (x.bits >> 15 ? -1 : 1) : 0; }
static inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) { return max((float)a, (float)b); }
static inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) { return min((float)a, (float)b); }
