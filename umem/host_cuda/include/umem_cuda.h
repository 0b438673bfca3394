// What kernels use of CUDA C++, on the host: included before a kernel's own source.
// A thread is a fiber where a kernel waits for others; otherwise threads run one after another.
#pragma once
#include <array>
#include <cassert>
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <ucontext.h>
#include "umem_process.h"

#ifdef UMEM_IN_STEP  // threads of a warp run in step: umem_steps.h, whose own code has none of its calls
#define UMEM_QUIET __attribute__((no_sanitize("thread"), no_sanitize_coverage))
#define UMEM_UNSEEN UMEM_QUIET __attribute__((noinline, noclone)) static
#define UMEM_CHANGING UMEM_UNSEEN __attribute__((section("umem_changing")))
#define UMEM_PIECE __attribute__((always_inline))
#define UMEM_WITHIN static inline UMEM_PIECE
#define UMEM_OF_THREADS __attribute__((section(".data")))  // and not where shared memory is
#define __global__
#else
#ifdef __SANITIZE_THREAD__  // all addresses are looked at: umem_addresses.h
#define UMEM_QUIET __attribute__((no_sanitize("thread")))
#else
#define UMEM_QUIET
#endif
#define UMEM_UNSEEN UMEM_QUIET static inline
#define UMEM_PIECE
#define UMEM_WITHIN static inline
#define UMEM_CHANGING static inline
#define UMEM_OF_THREADS
#define __global__
#endif
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __maxnreg__(...)
#ifndef __clang__
#define __builtin_assume(x) ((void)0)
#endif
#define __align__(n) __attribute__((aligned(n)))

struct uint3 { unsigned int x, y, z; };
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 of) : x(of.x), y(of.y), z(of.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
#ifdef UMEM_IN_STEP  // constants for a thread, whose accesses g++ does not look at
#define UMEM_INDEX(T, name, own, ...)                                                     \
  extern "C" __attribute__((visibility("hidden"))) T own; T own = __VA_ARGS__;            \
  extern "C" __attribute__((visibility("hidden"))) const T name __asm__(#own);
#else
#define UMEM_INDEX(T, name, own, ...) static T name = __VA_ARGS__;
#define umem_thread_index threadIdx
#define umem_block_index blockIdx
#define umem_block_size blockDim
#define umem_grid_size gridDim
#endif
UMEM_INDEX(uint3, threadIdx, umem_thread_index, {0, 0, 0})
UMEM_INDEX(uint3, blockIdx, umem_block_index, {0, 0, 0})
UMEM_INDEX(dim3, blockDim, umem_block_size, {1, 1, 1})
UMEM_INDEX(dim3, gridDim, umem_grid_size, {1, 1, 1})
static const int warpSize = 32;
typedef unsigned long long cudaTextureObject_t, cudaSurfaceObject_t;  // a handle: nothing here reads by it

#ifdef UMEM_CHECKED
#include "umem_checked.h"
#endif
#include "umem_threads.h"

// One clock for all threads of a kernel, of nanoseconds. A thread that asks it in a loop waits by it, and
// would wait here after all others instead of beside them: from the ninth question that follows at once on
// another the clock is put forward, each time twice as far.
static unsigned long long umem_ahead = 0;
UMEM_UNSEEN long long clock64() {
  static unsigned long long last = 0, asked = 0;
  static uint3 thread, block;
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const unsigned long long now = 1000000000ull * time.tv_sec + time.tv_nsec;
  const bool same = !memcmp(&thread, &umem_thread_index, sizeof thread) && !memcmp(&block, &umem_block_index, sizeof block);
  asked = same && now - last < 1000 ? asked + 1 : 0;
  memcpy(&thread, &umem_thread_index, sizeof thread);
  memcpy(&block, &umem_block_index, sizeof block);
  last = now;
  if (asked > 8) umem_ahead += 32ull << (asked < 38 ? asked - 8 : 30);
  return (long long)(now + umem_ahead);
}
static inline long umem_clock() { return (long)clock64(); }
#define clock() umem_clock()  // and not the C library's

// -- the threads of a warp ---------------------------------------------------------------------

template <class T> UMEM_UNSEEN T umem_exchange(unsigned int mask, T value, unsigned int from) {
  static_assert(sizeof(T) <= 8, "at most eight bytes");
  if (!umem_fiber) return value;
  unsigned long long* slots = umem_slots[umem_warp()];
  memcpy(&slots[umem_lane()], &value, sizeof value);
  __syncwarp(mask);
  T found;
  memcpy(&found, &slots[from % 32], sizeof found);
  __syncwarp(mask);
  return found;
}
template <class T> static inline T __shfl_sync(unsigned int mask, T value, int from, int width = 32) {
  const unsigned int first = umem_lane() / width * width;
  return umem_exchange(mask, value, first + (from & (width - 1)));
}
template <class T> static inline T __shfl_up_sync(unsigned int mask, T value, unsigned int by, int width = 32) {
  const unsigned int lane = umem_lane(), place = lane % width;
  return umem_exchange(mask, value, by > place ? lane : lane - by);
}
template <class T> static inline T __shfl_down_sync(unsigned int mask, T value, unsigned int by, int width = 32) {
  const unsigned int lane = umem_lane(), place = lane % width;
  return umem_exchange(mask, value, place + by >= (unsigned int)width ? lane : lane + by);
}
template <class T> static inline T __shfl_xor_sync(unsigned int mask, T value, int by, int width = 32) {
  const unsigned int lane = umem_lane(), other = lane ^ by;
  return umem_exchange(mask, value, other / width > lane / width ? lane : other);
}
UMEM_UNSEEN unsigned int __ballot_sync(unsigned int mask, int predicate) {
  if (!umem_fiber) return predicate != 0;
  unsigned long long* slots = umem_slots[umem_warp()];
  slots[umem_lane()] = predicate != 0;
  __syncwarp(mask);
  unsigned int found = 0;
  const unsigned int alive = mask & umem_warp_alive[umem_warp()];
  for (unsigned int lane = 0; lane < 32; lane++)
    if (alive >> lane & 1u) found |= (unsigned int)slots[lane] << lane;
  __syncwarp(mask);
  return found;
}
static inline int __any_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
static inline int __all_sync(unsigned int mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// What the threads of a mask hold, by lane, once all of them have come; whoever has ended holds nothing.
enum { UMEM_WIDEST = 64 };
alignas(16) static char umem_held[UMEM_WARPS][32][UMEM_WIDEST];
template <class T> struct UmemLanes {
  alignas(T) char of[32][sizeof(T)];
  unsigned int mask;  // of the lanes that hold something
  T operator[](unsigned int lane) const {
    T found;
    memcpy((void*)&found, of[lane % 32], sizeof found);
    return found;
  }
};
template <class T> UMEM_UNSEEN UmemLanes<T> umem_lanes(unsigned int mask, const T& value) {
  static_assert(sizeof(T) <= UMEM_WIDEST, "threads of a warp exchange at most 64 bytes here");
  const unsigned int warp = umem_warp();
  memcpy(umem_held[warp][umem_lane()], (const void*)&value, sizeof value);
  __syncwarp(mask);
  UmemLanes<T> found;
  found.mask = umem_fiber ? mask & umem_warp_alive[warp] : 1;
  for (unsigned int lane = 0; lane < 32; lane++)
    if (found.mask >> lane & 1u) memcpy(found.of[lane], umem_held[warp][lane], sizeof value);
  __syncwarp(mask);
  return found;
}
template <class T, class Op> static T umem_reduce(unsigned int mask, const T& value, Op op) {
  const UmemLanes<T> all = umem_lanes(mask, value);
  unsigned int left = all.mask;
  T found = all[__builtin_ctz(left)];
  while (left &= left - 1) found = op(found, all[__builtin_ctz(left)]);
  return found;
}
template <class T> static inline unsigned int __match_any_sync(unsigned int mask, T value) {
  const UmemLanes<T> all = umem_lanes(mask, value);
  unsigned int found = 0;
  for (unsigned int lane = 0; lane < 32; lane++)
    if (all.mask >> lane & 1u) found |= (unsigned int)(memcmp(all.of[lane], &value, sizeof value) == 0) << lane;
  return found;
}
template <class T> static inline unsigned int __match_all_sync(unsigned int mask, T value, int* predicate) {
  const UmemLanes<T> all = umem_lanes(mask, value);
  *predicate = 1;
  for (unsigned int lane = 0; lane < 32; lane++)
    if (all.mask >> lane & 1u) *predicate &= memcmp(all.of[lane], &value, sizeof value) == 0;
  return *predicate ? all.mask : 0;
}
#define UMEM_REDUCE(name, T, expression)                                      \
  static inline T __reduce_##name##_sync(unsigned int mask, T value) {         \
    return umem_reduce(mask, value, [](T a, T b) -> T { return expression; }); \
  }
#define UMEM_REDUCES(name, expression) UMEM_REDUCE(name, int, expression) UMEM_REDUCE(name, unsigned int, expression)
UMEM_REDUCES(add, (int)((unsigned int)a + (unsigned int)b))
UMEM_REDUCES(min, b < a ? b : a) UMEM_REDUCES(max, b > a ? b : a)
UMEM_REDUCES(and, a & b) UMEM_REDUCES(or, a | b) UMEM_REDUCES(xor, a ^ b)
#undef UMEM_REDUCES
#undef UMEM_REDUCE

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// -- integers and bits -------------------------------------------------------------------------

static inline int __popc(unsigned int x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned int)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline unsigned int __brev(unsigned int x) {
  unsigned int y = 0;
  for (int i = 0; i < 32; i++) y |= ((x >> i) & 1u) << (31 - i);
  return y;
}
static inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return (unsigned int)(((unsigned long long)a * b) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
template <class To, class From> static inline To umem_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static inline float __int_as_float(int x) { return umem_bits<float>(x); }
static inline int __float_as_int(float x) { return umem_bits<int>(x); }
static inline float __uint_as_float(unsigned int x) { return umem_bits<float>(x); }
static inline unsigned int __float_as_uint(float x) { return umem_bits<unsigned int>(x); }
static inline double __longlong_as_double(long long x) { return umem_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return umem_bits<long long>(x); }

// -- floating point ----------------------------------------------------------------------------
// A float function never computes in double: the overloads of <cmath>, for every name, but for
// three of our own.

#include "umem_math.h"

using std::isfinite;
using std::isinf;
using std::isnan;
// CUDA's min and max: of the type that both operands have in arithmetic, and of a NaN and a number the number.
template <class T> using UmemNumber = std::enable_if_t<std::is_arithmetic_v<T> || std::is_enum_v<T>, T>;
template <class A, class B> using UmemCommon = decltype(UmemNumber<A>() + UmemNumber<B>());
#define UMEM_CHOICE(name, op)                                                                           \
  template <class A, class B> static inline UmemCommon<A, B> name(A one, B other) {                     \
    const UmemCommon<A, B> a = one, b = other;                                                          \
    return b op a || a != a ? b : a;                                                                    \
  }
UMEM_CHOICE(min, <) UMEM_CHOICE(max, >)
#undef UMEM_CHOICE
using std::signbit;
#define UMEM_ONE(name) \
  using std::name;
UMEM_ONE(abs) UMEM_ONE(acos) UMEM_ONE(acosh) UMEM_ONE(asin) UMEM_ONE(asinh) UMEM_ONE(atan)
UMEM_ONE(atan2) UMEM_ONE(atanh) UMEM_ONE(cbrt) UMEM_ONE(ceil) UMEM_ONE(copysign) UMEM_ONE(cos)
UMEM_ONE(cosh) UMEM_ONE(erf) UMEM_ONE(erfc) UMEM_ONE(exp2) UMEM_ONE(expm1)
UMEM_ONE(fabs) UMEM_ONE(floor) UMEM_ONE(fma) UMEM_ONE(fmax) UMEM_ONE(fmin) UMEM_ONE(fmod)
UMEM_ONE(frexp) UMEM_ONE(hypot) UMEM_ONE(ilogb) UMEM_ONE(ldexp) UMEM_ONE(lgamma) UMEM_ONE(llrint)
UMEM_ONE(log10) UMEM_ONE(log1p) UMEM_ONE(log2) UMEM_ONE(logb) UMEM_ONE(lrint)
UMEM_ONE(modf) UMEM_ONE(nextafter) UMEM_ONE(pow) UMEM_ONE(remainder) UMEM_ONE(rint)
UMEM_ONE(round) UMEM_ONE(scalbn) UMEM_ONE(sin) UMEM_ONE(sinh) UMEM_ONE(sqrt) UMEM_ONE(tan)
UMEM_ONE(tgamma) UMEM_ONE(trunc) UMEM_ONE(fpclassify) UMEM_ONE(isnormal) UMEM_ONE(isgreater)
UMEM_ONE(isgreaterequal) UMEM_ONE(isless) UMEM_ONE(islessequal) UMEM_ONE(islessgreater) UMEM_ONE(isunordered)
#undef UMEM_ONE
#define _GLIBCXX_MATH_H 1  // <math.h> of C++ would bring the standard's three besides
#define UMEM_OWN(name)                                                         \
  static inline float name(float x) { return umem_##name(x); }                 \
  template <class T> static inline std::enable_if_t<std::is_integral_v<T>, double> name(T x) { \
    return std::name((double)x);                                               \
  }
UMEM_OWN(exp) UMEM_OWN(log) UMEM_OWN(tanh)
#undef UMEM_OWN
#define __expf(x) umem_exp((float)(x))
#define __logf(x) umem_log((float)(x))
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fsqrt_rn(float x) { return std::sqrt(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }

#include "umem_functions.h"

// -- half, by its bits -------------------------------------------------------------------------

static inline unsigned short __float2half_rn(float x) { return umem_bits<unsigned short>((_Float16)x); }
static inline unsigned short __double2half(double x) { return umem_bits<unsigned short>((_Float16)x); }
static inline float __half2float(unsigned short x) { return (float)umem_bits<_Float16>(x); }
template <class H> static inline unsigned short __half_as_ushort(H x) {
  static_assert(sizeof(H) == 2, "a half");
  unsigned short bits;
  memcpy(&bits, &x, 2);
  return bits;
}
struct UmemHalfBits {
  unsigned short bits;
  template <class H> operator H() const {
    H x;
    memcpy((void*)&x, &bits, 2);
    return x;
  }
};
static inline UmemHalfBits __ushort_as_half(unsigned short bits) { return UmemHalfBits{bits}; }

// -- atomics: one thread runs at a time --------------------------------------------------------

#ifdef UMEM_IN_STEP
#include "umem_steps.h"
#else
#define UMEM_CHANGES(place, size) asm volatile("" ::: "memory")  // no vector instructions: places may be the same
#define UMEM_CHANGED(is_changed) ((void)0)
#ifdef __SANITIZE_THREAD__
#include "umem_addresses.h"
#endif
#endif
template <class T, class U, class F> UMEM_CHANGING T umem_atomic(T* place, U value, F change) {
  UMEM_CHANGES(place, sizeof(T));
  const T old = *place, now = (T)change(old, (T)value);
  UMEM_CHANGED(memcmp(&now, &old, sizeof now) != 0);
  *place = now;
  return old;
}
#define UMEM_ATOMIC(name, expression)                                          \
  template <class T, class U> UMEM_WITHIN T name(T* place, U value) {          \
    return umem_atomic(place, value, [](T old, T v) UMEM_PIECE { return expression; });   \
  }
#define UMEM_ATOMIC_OF(T, name, expression)                                    \
  UMEM_WITHIN T name(T* place, T value) {                                      \
    return umem_atomic(place, value, [](T old, T v) UMEM_PIECE { return (T)(expression); }); \
  }
#define UMEM_INTEGERS(name, expression)                                        \
  UMEM_ATOMIC_OF(int, name, expression)                                        \
  UMEM_ATOMIC_OF(unsigned int, name, expression)                               \
  UMEM_ATOMIC_OF(unsigned long long, name, expression)
UMEM_INTEGERS(atomicAdd, old + v)
UMEM_ATOMIC_OF(float, atomicAdd, old + v)
UMEM_ATOMIC_OF(double, atomicAdd, old + v)
UMEM_INTEGERS(atomicExch, v)
UMEM_ATOMIC_OF(unsigned int, atomicInc, old >= v ? 0 : old + 1)
UMEM_ATOMIC_OF(unsigned int, atomicDec, old == 0 || old > v ? v : old - 1)
UMEM_ATOMIC_OF(long long, atomicMin, v < old ? v : old)
UMEM_ATOMIC_OF(long long, atomicMax, v > old ? v : old)
UMEM_ATOMIC_OF(float, atomicExch, v)
UMEM_INTEGERS(atomicMin, v < old ? v : old)
UMEM_INTEGERS(atomicMax, v > old ? v : old)
UMEM_INTEGERS(atomicAnd, old & v)
UMEM_INTEGERS(atomicOr, old | v)
UMEM_INTEGERS(atomicXor, old ^ v)
UMEM_ATOMIC_OF(long long, atomicAnd, old & v)
UMEM_ATOMIC_OF(long long, atomicOr, old | v)
UMEM_ATOMIC_OF(long long, atomicXor, old ^ v)
UMEM_ATOMIC_OF(int, atomicSub, old - v)
UMEM_ATOMIC_OF(unsigned int, atomicSub, old - v)
#undef UMEM_INTEGERS
#undef UMEM_ATOMIC_OF
#undef UMEM_ATOMIC
template <class T> UMEM_CHANGING T umem_swap_if(T* place, T wanted, T value) {
  UMEM_CHANGES(place, sizeof(T));
  const T old = *place;
  UMEM_CHANGED(old == wanted && old != value);
  if (old == wanted) *place = value;
  return old;
}
UMEM_WITHIN int atomicCAS(int* p, int c, int v) { return umem_swap_if(p, c, v); }
UMEM_WITHIN unsigned int atomicCAS(unsigned int* p, unsigned int c, unsigned int v) { return umem_swap_if(p, c, v); }
UMEM_WITHIN unsigned long long atomicCAS(unsigned long long* p, unsigned long long c, unsigned long long v) { return umem_swap_if(p, c, v); }
UMEM_WITHIN unsigned short atomicCAS(unsigned short* p, unsigned short c, unsigned short v) { return umem_swap_if(p, c, v); }
// The threads of a block, of a GPU and of a system are the same here.
#define UMEM_SCOPES(name)                                                                                   \
  template <class... T> static inline auto name##_block(T... x) { return name(x...); }                      \
  template <class... T> static inline auto name##_system(T... x) { return name(x...); }
UMEM_SCOPES(atomicAdd) UMEM_SCOPES(atomicSub) UMEM_SCOPES(atomicExch) UMEM_SCOPES(atomicMin) UMEM_SCOPES(atomicMax)
UMEM_SCOPES(atomicInc) UMEM_SCOPES(atomicDec) UMEM_SCOPES(atomicCAS) UMEM_SCOPES(atomicAnd) UMEM_SCOPES(atomicOr)
UMEM_SCOPES(atomicXor)
#undef UMEM_SCOPES
