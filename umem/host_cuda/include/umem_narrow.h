// The functions of CUDA's headers of 16-bit floats, which have them twice: cuda_fp16.h and cuda_bf16.h include
// this with UMEM_H and UMEM_H2, a number and a pair, and UMEM_N, which puts the type into a name. Sums and
// products are rounded once, as float has more than twice the digits; functions compute in float.

#define UMEM_F static inline
UMEM_F UMEM_H UMEM_N(__float2, )(float x) { return umem_nearest<UMEM_H>(x); }
UMEM_F float UMEM_N(__, 2float)(UMEM_H x) { return x; }
UMEM_F unsigned short UMEM_N(__, _as_ushort)(const UMEM_H& x) { return umem_bits_of(x); }
UMEM_F short UMEM_N(__, _as_short)(UMEM_H x) { return (short)umem_bits_of(x); }
UMEM_F UMEM_H UMEM_N(__short_as_, )(short bits) { return umem_of_bits<UMEM_H>((unsigned short)bits); }

// -- integers, and directions of rounding --
#define UMEM_DIRECTED(from, From)                                                                        \
  UMEM_F UMEM_H UMEM_N(__##from##2, _rz)(From x) { return umem_toward<UMEM_H>(x, 0); }                    \
  UMEM_F UMEM_H UMEM_N(__##from##2, _ru)(From x) { return umem_toward<UMEM_H>(x, 1); }                    \
  UMEM_F UMEM_H UMEM_N(__##from##2, _rd)(From x) { return umem_toward<UMEM_H>(x, -1); }
#define UMEM_WHOLE(name, T)                                                                               \
  UMEM_DIRECTED(name, T)                                                                                  \
  UMEM_F UMEM_H UMEM_N(__##name##2, _rn)(T x) { return umem_nearest<UMEM_H>(x); }                         \
  UMEM_F T UMEM_N(__, 2##name##_rn)(UMEM_H x) { return umem_whole<T>(std::nearbyint((float)x)); }         \
  UMEM_F T UMEM_N(__, 2##name##_rz)(UMEM_H x) { return umem_whole<T>(std::trunc((float)x)); }             \
  UMEM_F T UMEM_N(__, 2##name##_ru)(UMEM_H x) { return umem_whole<T>(std::ceil((float)x)); }              \
  UMEM_F T UMEM_N(__, 2##name##_rd)(UMEM_H x) { return umem_whole<T>(std::floor((float)x)); }
UMEM_DIRECTED(float, float)
UMEM_WHOLE(short, short) UMEM_WHOLE(ushort, unsigned short) UMEM_WHOLE(int, int) UMEM_WHOLE(uint, unsigned int)
UMEM_WHOLE(ll, long long) UMEM_WHOLE(ull, unsigned long long)
UMEM_F signed char UMEM_N(__, 2char_rz)(UMEM_H x) { return umem_whole<signed char>((float)x); }
UMEM_F unsigned char UMEM_N(__, 2uchar_rz)(UMEM_H x) { return umem_whole<unsigned char>((float)x); }
#undef UMEM_WHOLE
#undef UMEM_DIRECTED

// -- pairs --
UMEM_F UMEM_H2 UMEM_N(make_, 2)(UMEM_H x, UMEM_H y) { return {x, y}; }
UMEM_F UMEM_H2 UMEM_N(__halves2, 2)(UMEM_H x, UMEM_H y) { return {x, y}; }
UMEM_F UMEM_H2 UMEM_N(__float2, 2_rn)(float x) { return {umem_nearest<UMEM_H>(x), umem_nearest<UMEM_H>(x)}; }
UMEM_F UMEM_H2 UMEM_N(__floats2, 2_rn)(float x, float y) { return {umem_nearest<UMEM_H>(x), umem_nearest<UMEM_H>(y)}; }
UMEM_F UMEM_H2 UMEM_N(__float22, 2_rn)(float2 x) { return UMEM_N(__floats2, 2_rn)(x.x, x.y); }
UMEM_F UMEM_H UMEM_N(__low2, )(UMEM_H2 x) { return x.x; }
UMEM_F UMEM_H UMEM_N(__high2, )(UMEM_H2 x) { return x.y; }
UMEM_F UMEM_H2 UMEM_N(__low2, 2)(UMEM_H2 x) { return {x.x, x.x}; }
UMEM_F UMEM_H2 UMEM_N(__high2, 2)(UMEM_H2 x) { return {x.y, x.y}; }
UMEM_F UMEM_H2 UMEM_N(__lows2, 2)(UMEM_H2 a, UMEM_H2 b) { return {a.x, b.x}; }
UMEM_F UMEM_H2 UMEM_N(__highs2, 2)(UMEM_H2 a, UMEM_H2 b) { return {a.y, b.y}; }
UMEM_F float __low2float(UMEM_H2 x) { return x.x; }
UMEM_F float __high2float(UMEM_H2 x) { return x.y; }
UMEM_F UMEM_H2 __lowhigh2highlow(UMEM_H2 x) { return {x.y, x.x}; }

// -- arithmetic: of numbers, and of pairs by number --
#define UMEM_TWO(name, pair, ...)                                                                         \
  UMEM_F UMEM_H name(UMEM_H a, UMEM_H b) { const float x = a, y = b; return umem_nearest<UMEM_H>(__VA_ARGS__); } \
  UMEM_F UMEM_H2 pair(UMEM_H2 a, UMEM_H2 b) { return {name(a.x, b.x), name(a.y, b.y)}; }
UMEM_TWO(__hadd, __hadd2, x + y) UMEM_TWO(__hsub, __hsub2, x - y) UMEM_TWO(__hmul, __hmul2, x * y)
UMEM_TWO(__hadd_rn, __hadd2_rn, x + y) UMEM_TWO(__hsub_rn, __hsub2_rn, x - y) UMEM_TWO(__hmul_rn, __hmul2_rn, x * y)
UMEM_TWO(__hadd_sat, __hadd2_sat, __saturatef(x + y)) UMEM_TWO(__hsub_sat, __hsub2_sat, __saturatef(x - y))
UMEM_TWO(__hmul_sat, __hmul2_sat, __saturatef(x * y)) UMEM_TWO(__hdiv, __h2div, x / y)
UMEM_TWO(__hmax, __hmax2, max(x, y)) UMEM_TWO(__hmin, __hmin2, min(x, y))
UMEM_TWO(__hmax_nan, __hmax2_nan, x != x ? x : y != y ? y : max(x, y))
UMEM_TWO(__hmin_nan, __hmin2_nan, x != x ? x : y != y ? y : min(x, y))
#undef UMEM_TWO
#define UMEM_THREE(name, pair, ...)                                                                       \
  UMEM_F UMEM_H name(UMEM_H a, UMEM_H b, UMEM_H c) {                                                      \
    const long double x = (long double)(float)a * (float)b + (float)c;                                    \
    return umem_nearest<UMEM_H>(__VA_ARGS__);                                                             \
  }                                                                                                       \
  UMEM_F UMEM_H2 pair(UMEM_H2 a, UMEM_H2 b, UMEM_H2 c) { return {name(a.x, b.x, c.x), name(a.y, b.y, c.y)}; }
UMEM_THREE(__hfma, __hfma2, x) UMEM_THREE(__hfma_sat, __hfma2_sat, x > 0 ? (x < 1 ? x : 1) : 0)
UMEM_THREE(__hfma_relu, __hfma2_relu, x < 0 ? 0 : x)
#undef UMEM_THREE
UMEM_F UMEM_H2 __hcmadd(UMEM_H2 a, UMEM_H2 b, UMEM_H2 c) {  // of complex numbers, in two steps
  const UMEM_H x = __hfma(a.x, b.x, c.x), y = __hfma(a.x, b.y, c.y);
  return {__hfma(umem_nearest<UMEM_H>(-(float)a.y), b.y, x), __hfma(a.y, b.x, y)};
}
#define UMEM_ONE(name, pair, ...)                                                                         \
  UMEM_F UMEM_H name(UMEM_H a) { const float x = a; return umem_nearest<UMEM_H>(__VA_ARGS__); }           \
  UMEM_F UMEM_H2 pair(UMEM_H2 a) { return {name(a.x), name(a.y)}; }
UMEM_ONE(__hneg, __hneg2, -x) UMEM_ONE(__habs, __habs2, std::fabs(x))
UMEM_ONE(hceil, h2ceil, std::ceil(x)) UMEM_ONE(hfloor, h2floor, std::floor(x)) UMEM_ONE(htrunc, h2trunc, std::trunc(x))
UMEM_ONE(hrint, h2rint, std::rint(x)) UMEM_ONE(hsqrt, h2sqrt, std::sqrt(x)) UMEM_ONE(hrsqrt, h2rsqrt, 1 / std::sqrt(x))
UMEM_ONE(hrcp, h2rcp, 1 / x) UMEM_ONE(hexp, h2exp, std::exp(x)) UMEM_ONE(hexp2, h2exp2, std::exp2(x))
UMEM_ONE(hexp10, h2exp10, ::exp10f(x)) UMEM_ONE(hlog, h2log, std::log(x)) UMEM_ONE(hlog2, h2log2, std::log2(x))
UMEM_ONE(hlog10, h2log10, std::log10(x)) UMEM_ONE(hsin, h2sin, std::sin(x)) UMEM_ONE(hcos, h2cos, std::cos(x))
UMEM_ONE(htanh, h2tanh, std::tanh(x)) UMEM_ONE(htanh_approx, h2tanh_approx, std::tanh(x))
#undef UMEM_ONE
UMEM_F bool __hisnan(UMEM_H a) { const float x = a; return x != x; }
UMEM_F int __hisinf(UMEM_H a) { const float x = a; return std::isinf(x) ? (x < 0 ? -1 : 1) : 0; }
UMEM_F UMEM_H2 __hisnan2(UMEM_H2 a) { return UMEM_N(__floats2, 2_rn)(__hisnan(a.x), __hisnan(a.y)); }

// -- comparisons: those with u are true of a NaN --
#define UMEM_COMPARED(name, ...)                                                                          \
  UMEM_F bool __h##name(UMEM_H a, UMEM_H b) { const float x = a, y = b; return __VA_ARGS__; }             \
  UMEM_F UMEM_H2 __h##name##2(UMEM_H2 a, UMEM_H2 b) { return UMEM_N(__floats2, 2_rn)(__h##name(a.x, b.x), __h##name(a.y, b.y)); } \
  UMEM_F bool __hb##name##2(UMEM_H2 a, UMEM_H2 b) { return __h##name(a.x, b.x) && __h##name(a.y, b.y); }  \
  UMEM_F unsigned int __h##name##2_mask(UMEM_H2 a, UMEM_H2 b) {                                           \
    return (__h##name(a.x, b.x) ? 0xffffu : 0u) | (__h##name(a.y, b.y) ? 0xffff0000u : 0u);               \
  }
UMEM_COMPARED(eq, x == y) UMEM_COMPARED(ne, x < y || x > y) UMEM_COMPARED(lt, x < y)
UMEM_COMPARED(le, x <= y) UMEM_COMPARED(gt, x > y) UMEM_COMPARED(ge, x >= y)
UMEM_COMPARED(equ, !(x < y || x > y)) UMEM_COMPARED(neu, x != y) UMEM_COMPARED(ltu, !(x >= y))
UMEM_COMPARED(leu, !(x > y)) UMEM_COMPARED(gtu, !(x <= y)) UMEM_COMPARED(geu, !(x < y))
#undef UMEM_COMPARED

// -- operators: between numbers of this type only, for the others C++ goes by float --
#define UMEM_OPERATOR(op, name, pair)                                                                     \
  template <class T> UMEM_F std::enable_if_t<std::is_same_v<T, UMEM_H>, T> operator op(const T& a, const T& b) { return name(a, b); } \
  UMEM_F UMEM_H2 operator op(const UMEM_H2& a, const UMEM_H2& b) { return pair(a, b); }                   \
  UMEM_F UMEM_H2& operator op##=(UMEM_H2& a, const UMEM_H2& b) { return a = pair(a, b); }                 \
  template <class T> UMEM_F UMEM_H& operator op##=(UMEM_H& a, const T& b) { return a = umem_nearest<UMEM_H>((float)a op (float)b); }
UMEM_OPERATOR(+, __hadd, __hadd2) UMEM_OPERATOR(-, __hsub, __hsub2) UMEM_OPERATOR(*, __hmul, __hmul2)
UMEM_OPERATOR(/, __hdiv, __h2div)
#undef UMEM_OPERATOR
template <class T> UMEM_F std::enable_if_t<std::is_same_v<T, UMEM_H>, T> operator-(const T& a) { return __hneg(a); }
UMEM_F UMEM_H2 operator-(const UMEM_H2& a) { return __hneg2(a); }
#define UMEM_OPERATOR(op, name) \
  UMEM_F bool operator op(const UMEM_H2& a, const UMEM_H2& b) { return __hb##name##2(a, b); }
UMEM_OPERATOR(==, eq) UMEM_OPERATOR(!=, neu) UMEM_OPERATOR(<, lt) UMEM_OPERATOR(<=, le) UMEM_OPERATOR(>, gt) UMEM_OPERATOR(>=, ge)
#undef UMEM_OPERATOR
UMEM_F UMEM_H atomicAdd(UMEM_H* place, UMEM_H x) {
  return umem_atomic(place, x, [](UMEM_H old, UMEM_H v) { return __hadd(old, v); });
}
UMEM_F UMEM_H2 atomicAdd(UMEM_H2* place, UMEM_H2 x) {
  return umem_atomic(place, x, [](UMEM_H2 old, UMEM_H2 v) { return __hadd2(old, v); });
}
#undef UMEM_F
#undef UMEM_H
#undef UMEM_H2
#undef UMEM_N
