// Functions of CUDA's math library that a host's has not, or has by another name.
// A function of floats computes in floats, as its template does for either type.
#pragma once

// -- overloads for floats of what <math.h> has for double --------------------------------------

#define UMEM_FLOAT(name) static inline float name(float x) { return ::name##f(x); }
UMEM_FLOAT(j0) UMEM_FLOAT(j1) UMEM_FLOAT(y0) UMEM_FLOAT(y1) UMEM_FLOAT(exp10)
#undef UMEM_FLOAT
#define UMEM_INTEGER(name)                                                                  \
  template <class T, class = std::enable_if_t<std::is_integral<T>::value>>                  \
  static inline double name(T x) { return ::name((double)x); }
UMEM_INTEGER(j0) UMEM_INTEGER(j1) UMEM_INTEGER(y0) UMEM_INTEGER(y1) UMEM_INTEGER(exp10)
#undef UMEM_INTEGER
static inline float jn(int n, float x) { return ::jnf(n, x); }
static inline float yn(int n, float x) { return ::ynf(n, x); }
static inline void sincos(float x, float* s, float* c) { ::sincosf(x, s, c); }

// -- functions of one number -------------------------------------------------------------------

template <class T> static inline T umem_erfcinv(T y) {
  if (y > 1) return -umem_erfcinv<T>(2 - y);
  if (!(y > 0)) return y == 0 ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::quiet_NaN();
  // Hastings' approximation of a normal distribution's quantile, then Halley's method.
  const T t = std::sqrt(T(-2) * std::log(y / 2));
  T x = T(0.70710678) * (t - (T(2.30753) + t * T(0.27061)) / (1 + t * (T(0.99229) + t * T(0.04481))));
  for (int i = 0; i < 3; i++) {
    const T off = std::erfc(x) - y, slope = T(1.1283791670955126) * std::exp(-x * x);
    if (slope == 0) break;
    x += off / (slope - x * off);
  }
  return x;
}
template <class T> static inline T umem_erfinv(T y) {
  if (!(std::fabs(y) < T(0.5))) return y < 0 ? -umem_erfcinv<T>(1 + y) : umem_erfcinv<T>(1 - y);
  T x = y * T(0.8862269254527580);
  for (int i = 0; i < 4; i++) {
    const T off = std::erf(x) - y, slope = T(1.1283791670955126) * std::exp(-x * x);
    x -= off / (slope + x * off);
  }
  return x;
}
template <class T> static inline T umem_erfcx(T x) {
  if (x < 5) return std::exp(x * x) * std::erfc(x);
  T fraction = 0;  // Laplace's continued fraction
  for (int k = 60; k > 0; k--) fraction = T(k) / 2 / (x + fraction);
  return T(0.5641895835477563) / (x + fraction);
}
template <class T> static inline T umem_bessel_i(int order, T x) {
  const T size = std::fabs(x);
  if (size != size) return x;
  // From 714 on it is beyond the largest double; from millions on libstdc++ throws.
  const T found = size > 800 ? T(INFINITY) : std::cyl_bessel_i(T(order), size);
  return order && x < 0 ? -found : found;
}
// An angle in half turns, brought near zero first: so that sinpi(n) is zero.
template <class T> static inline T umem_sinpi(T x) {
  const T rest = std::remainder(x, T(2)), size = std::fabs(rest);
  const T found = std::sin(T(3.14159265358979323846) * (size > T(0.5) ? 1 - size : size));
  return rest < 0 ? -found : found;
}
template <class T> static inline T umem_cospi(T x) {
  const T size = std::fabs(std::remainder(x, T(2)));
  return umem_sinpi<T>(T(0.5) - size);
}

#define UMEM_MATH(name, expression)                                                         \
  static inline float name(float x) { typedef float T; return expression; }                 \
  static inline double name(double x) { typedef double T; return expression; }              \
  static inline float name##f(float x) { return name(x); }                                  \
  template <class I, class = std::enable_if_t<std::is_integral<I>::value>>                  \
  static inline double name(I x) { return name((double)x); }
UMEM_MATH(rsqrt, 1 / std::sqrt(x))
UMEM_MATH(rcbrt, 1 / std::cbrt(x))
UMEM_MATH(sinpi, umem_sinpi<T>(x))
UMEM_MATH(cospi, umem_cospi<T>(x))
UMEM_MATH(erfinv, umem_erfinv<T>(x))
UMEM_MATH(erfcinv, x > T(0.5) && x < T(1.5) ? umem_erfinv<T>(1 - x) : umem_erfcinv<T>(x))
UMEM_MATH(erfcx, umem_erfcx<T>(x))
UMEM_MATH(normcdf, std::erfc(x * T(-0.70710678118654752)) / 2)
UMEM_MATH(normcdfinv, T(-1.4142135623730951) * erfcinv(2 * x))
UMEM_MATH(cyl_bessel_i0, umem_bessel_i<T>(0, x))
UMEM_MATH(cyl_bessel_i1, umem_bessel_i<T>(1, x))
#undef UMEM_MATH
#define UMEM_MATH(name, expression)                                                         \
  static inline float name(float x, float y) { typedef float T; return (T)(expression); }   \
  static inline double name(double x, double y) { typedef double T; return (T)(expression); } \
  static inline float name##f(float x, float y) { return name(x, y); }
UMEM_MATH(rhypot, 1 / std::hypot(x, y))
UMEM_MATH(fdivide, x / y)
#undef UMEM_MATH
static inline void sincospi(float x, float* s, float* c) { *s = sinpi(x); *c = cospi(x); }
static inline void sincospi(double x, double* s, double* c) { *s = sinpi(x); *c = cospi(x); }
static inline void sincospif(float x, float* s, float* c) { sincospi(x, s, c); }
static inline float norm3df(float x, float y, float z) { return std::hypot(x, y, z); }
static inline double norm3d(double x, double y, double z) { return std::hypot(x, y, z); }
using std::fdim;
using std::lround;
using std::llround;
using std::nearbyint;
using std::remquo;
using std::scalbln;

// -- intrinsics: fast on a GPU, and here as exact as their function --------------------------------

// Macros, for the host's library keeps functions of these names.
#define __sinf(x) std::sin((float)(x))
#define __cosf(x) std::cos((float)(x))
#define __tanf(x) std::tan((float)(x))
#define __exp10f(x) ::exp10f((float)(x))
#define __log2f(x) std::log2((float)(x))
#define __log10f(x) std::log10((float)(x))
#define __powf(x, y) std::pow((float)(x), (float)(y))
#define __sincosf(x, s, c) ::sincosf((float)(x), s, c)
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __frsqrt_rn(float x) { return 1 / std::sqrt(x); }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline double __dsqrt_rn(double x) { return std::sqrt(x); }
static inline double __drcp_rn(double x) { return 1 / x; }
static inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }

// -- integers --------------------------------------------------------------------------------------

static inline int __mulhi(int a, int b) { return (int)(((long long)a * b) >> 32); }
static inline long long __mul64hi(long long a, long long b) { return (long long)(((__int128)a * b) >> 64); }
static inline int __mul24(int a, int b) { return (int)((unsigned int)((a << 8) >> 8) * (unsigned int)((b << 8) >> 8)); }
static inline unsigned int __umul24(unsigned int a, unsigned int b) { return (a & 0xffffffu) * (b & 0xffffffu); }
static inline unsigned int __sad(int a, int b, unsigned int c) { return c + (a > b ? (unsigned int)a - b : (unsigned int)b - a); }
static inline unsigned int __usad(unsigned int a, unsigned int b, unsigned int c) { return c + (a > b ? a - b : b - a); }
static inline int __rhadd(int a, int b) { return (int)(((long long)a + b + 1) >> 1); }
static inline int __hadd(int a, int b) { return (int)(((long long)a + b) >> 1); }
static inline unsigned int __urhadd(unsigned int a, unsigned int b) { return (unsigned int)(((unsigned long long)a + b + 1) >> 1); }
static inline unsigned int __uhadd(unsigned int a, unsigned int b) { return (unsigned int)(((unsigned long long)a + b) >> 1); }
static inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned int)x) << 32 | __brev((unsigned int)(x >> 32));
}
static inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int which) {
  const unsigned long long all = (unsigned long long)y << 32 | x;
  unsigned int found = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned int from = which >> (4 * i) & 15u, byte = (unsigned int)(all >> (8 * (from & 7u))) & 255u;
    found |= (from & 8u ? (byte & 128u ? 255u : 0u) : byte) << (8 * i);
  }
  return found;
}
static inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int by) {
  return (unsigned int)((((unsigned long long)high << 32 | low) << (by & 31u)) >> 32);
}
static inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int by) {
  return (unsigned int)(((unsigned long long)high << 32 | low) >> (by & 31u));
}
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
  return c;
}

static inline unsigned int umin(unsigned int a, unsigned int b) { return b < a ? b : a; }
static inline unsigned int umax(unsigned int a, unsigned int b) { return b > a ? b : a; }
static inline long long llmin(long long a, long long b) { return b < a ? b : a; }
static inline long long llmax(long long a, long long b) { return b > a ? b : a; }
static inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return b < a ? b : a; }
static inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return b > a ? b : a; }

// -- conversions, which saturate: rn to the nearest, rz to zero, ru up, rd down ----------------

template <class To, class From> static inline To umem_whole(From x) {
  if (x != x) return sizeof(To) == 8 || sizeof(From) == 8 ? (To)1 << (8 * sizeof(To) - 1) : (To)0;
  if (x >= (From)std::numeric_limits<To>::max()) return std::numeric_limits<To>::max();
  if (x <= (From)std::numeric_limits<To>::min()) return std::numeric_limits<To>::min();
  return (To)x;
}
// As nvcc converts: narrow types by way of 32 bits.
template <class To, class From> static inline auto umem_to(const From& x) {
  if constexpr (!std::is_integral_v<To> || std::is_same_v<To, bool>) {
    return x;
  } else if constexpr (std::is_floating_point_v<From>) {
    using Wide = std::conditional_t<std::is_signed_v<To>, int, unsigned int>;
    return (To)umem_whole<std::conditional_t<(sizeof(To) < 4), Wide, To>>(x);
  } else if constexpr (std::is_class_v<From> && sizeof(From) == 2 && std::is_convertible_v<From, float>) {
    return umem_to<To>((float)x);  // float16 and bfloat16
  } else {
    return x;
  }
}
template <class To, class From> static inline void umem_store(To& to, const From& from) {
  to = umem_to<To>(from);
}
#define UMEM_WHOLE(from, From, to, To)                                                            \
  static inline To __##from##2##to##_rn(From x) { return umem_whole<To>(std::nearbyint(x)); }     \
  static inline To __##from##2##to##_rz(From x) { return umem_whole<To>(std::trunc(x)); }         \
  static inline To __##from##2##to##_ru(From x) { return umem_whole<To>(std::ceil(x)); }          \
  static inline To __##from##2##to##_rd(From x) { return umem_whole<To>(std::floor(x)); }
UMEM_WHOLE(float, float, int, int) UMEM_WHOLE(float, float, uint, unsigned int)
UMEM_WHOLE(float, float, ll, long long) UMEM_WHOLE(float, float, ull, unsigned long long)
UMEM_WHOLE(double, double, int, int) UMEM_WHOLE(double, double, uint, unsigned int)
UMEM_WHOLE(double, double, ll, long long) UMEM_WHOLE(double, double, ull, unsigned long long)
#undef UMEM_WHOLE
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned int x) { return (float)x; }
static inline float __ll2float_rn(long long x) { return (float)x; }
static inline float __ull2float_rn(unsigned long long x) { return (float)x; }
static inline double __int2double_rn(int x) { return x; }
static inline double __uint2double_rn(unsigned int x) { return x; }
static inline double __ll2double_rn(long long x) { return (double)x; }
static inline double __ull2double_rn(unsigned long long x) { return (double)x; }
static inline float __double2float_rn(double x) { return (float)x; }
static inline float __double2float_ru(double x) {
  const float near = (float)x;
  return near < x ? std::nextafter(near, __builtin_inff()) : near;
}
static inline float __double2float_rd(double x) { return -__double2float_ru(-x); }
static inline float __double2float_rz(double x) { return x < 0 ? __double2float_ru(x) : __double2float_rd(x); }
static inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
static inline int __double2loint(double x) { return (int)__double_as_longlong(x); }
static inline double __hiloint2double(int high, int low) {
  return __longlong_as_double((long long)((unsigned long long)(unsigned int)high << 32 | (unsigned int)low));
}

// -- the end of a kernel, and time ---------------------------------------------------------------

#define __trap() umem_assert_fail("that no __trap is reached", "", 0, "")
static inline void __nanosleep(unsigned int time) { umem_ahead += time; }

// -- memory ------------------------------------------------------------------------------------

#define UMEM_LOAD(name) \
  template <class T> static inline T name(const T* p) { return *p; }
UMEM_LOAD(__ldg) UMEM_LOAD(__ldcg) UMEM_LOAD(__ldca) UMEM_LOAD(__ldcs) UMEM_LOAD(__ldlu) UMEM_LOAD(__ldcv)
#undef UMEM_LOAD
#define UMEM_STORE(name) \
  template <class T> static inline void name(T* p, T x) { *p = x; }
UMEM_STORE(__stwb) UMEM_STORE(__stcg) UMEM_STORE(__stcs) UMEM_STORE(__stwt)
#undef UMEM_STORE

// -- vectors -------------------------------------------------------------------------------------

#define UMEM_VECTORS(name, T)                                                               \
  struct name##3 { T x, y, z; };                                                            \
  UMEM_OTHER_VECTORS(name, T)
#define UMEM_OTHER_VECTORS(name, T)                                                         \
  struct name##1 { T x; };                                                                  \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                        \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };        \
  static inline name##1 make_##name##1(T x) { return {x}; }                                 \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
UMEM_VECTORS(char, signed char) UMEM_VECTORS(uchar, unsigned char) UMEM_VECTORS(short, short)
UMEM_VECTORS(ushort, unsigned short) UMEM_VECTORS(int, int) UMEM_OTHER_VECTORS(uint, unsigned int)
UMEM_VECTORS(long, long) UMEM_VECTORS(ulong, unsigned long) UMEM_VECTORS(longlong, long long)
UMEM_VECTORS(ulonglong, unsigned long long) UMEM_VECTORS(float, float) UMEM_VECTORS(double, double)
#undef UMEM_VECTORS
#undef UMEM_OTHER_VECTORS
