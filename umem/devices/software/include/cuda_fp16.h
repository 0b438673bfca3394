// Halves on the host: what kernels use of CUDA's header of this name. The type is CuPy's.
#pragma once
#if __has_include(<cupy/float16.cuh>)
#include <cupy/float16.cuh>
#else  // CuPy 13
#include <cupy/carray.cuh>
#endif

typedef half __half;
struct half2 { half x, y; };
typedef half2 __half2;

#define UMEM_CHANGE(op) \
  template <class T> static inline half& operator op##=(half& a, const T& b) { return a = half((float)a op (float)b); }
UMEM_CHANGE(+) UMEM_CHANGE(-) UMEM_CHANGE(*) UMEM_CHANGE(/)
#undef UMEM_CHANGE
static inline float __half2float(half x) { return x; }
static inline half __float2half(float x) { return x; }
#define __float2half_rn(x) half((float)(x))
#define __double2half(x) half((double)(x))
static inline half __int2half_rn(int x) { return half(x); }
static inline int __half2int_rn(half x) { return (int)std::lrint((float)x); }
static inline int __half2int_rz(half x) { return (int)(float)x; }

#define UMEM_HALF(name, expression) \
  static inline half name(half a, half b) { const float x = a, y = b; return expression; }
UMEM_HALF(__hadd, x + y) UMEM_HALF(__hsub, x - y) UMEM_HALF(__hmul, x * y) UMEM_HALF(__hdiv, x / y)
UMEM_HALF(__hmax, max(x, y)) UMEM_HALF(__hmin, min(x, y))
UMEM_HALF(__hmax_nan, x != x ? x : y != y ? y : max(x, y)) UMEM_HALF(__hmin_nan, x != x ? x : y != y ? y : min(x, y))
#undef UMEM_HALF
#define UMEM_HALF(name, expression) \
  static inline bool name(half a, half b) { const float x = a, y = b; return expression; }
UMEM_HALF(__heq, x == y) UMEM_HALF(__hne, x < y || x > y) UMEM_HALF(__hlt, x < y)
UMEM_HALF(__hle, x <= y) UMEM_HALF(__hgt, x > y) UMEM_HALF(__hge, x >= y)
#undef UMEM_HALF
#define UMEM_HALF(name, expression) \
  static inline half name(half a) { const float x = a; return expression; }
UMEM_HALF(__hneg, -x) UMEM_HALF(__habs, std::fabs(x)) UMEM_HALF(hexp, std::exp(x))
UMEM_HALF(hlog, std::log(x)) UMEM_HALF(hsqrt, std::sqrt(x)) UMEM_HALF(hsin, std::sin(x))
UMEM_HALF(hcos, std::cos(x)) UMEM_HALF(hrcp, 1 / x) UMEM_HALF(hrsqrt, 1 / std::sqrt(x))
UMEM_HALF(hfloor, std::floor(x)) UMEM_HALF(hceil, std::ceil(x)) UMEM_HALF(hrint, std::rint(x))
#undef UMEM_HALF
static inline half __hfma(half a, half b, half c) { return (float)((double)a * b + c); }
static inline bool __hisnan(half x) { return std::isnan((float)x); }
static inline int __hisinf(half x) { return std::isinf((float)x) ? ((float)x < 0 ? -1 : 1) : 0; }

static inline half2 __halves2half2(half x, half y) { return {x, y}; }
static inline half2 __float2half2_rn(float x) { return {x, x}; }
static inline half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline half __low2half(half2 x) { return x.x; }
static inline half __high2half(half2 x) { return x.y; }
static inline float __low2float(half2 x) { return x.x; }
static inline float __high2float(half2 x) { return x.y; }
static inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
static inline half2 __hsub2(half2 a, half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
static inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
static inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
static inline half2 __hmax2(half2 a, half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
static inline half2 __hmin2(half2 a, half2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }
static inline half atomicAdd(half* place, half x) {
  return umem_atomic(place, x, [](half old, half v) { return __hadd(old, v); });
}
