// Complex numbers on the host: the names of CUDA's header of this name.
#pragma once

typedef float2 cuFloatComplex;
typedef double2 cuDoubleComplex;
typedef cuFloatComplex cuComplex;
static inline cuComplex make_cuComplex(float x, float y) { return {x, y}; }
static inline cuDoubleComplex cuComplexFloatToDouble(cuFloatComplex a) { return {a.x, a.y}; }
static inline cuFloatComplex cuComplexDoubleToFloat(cuDoubleComplex a) { return {(float)a.x, (float)a.y}; }

#define UMEM_COMPLEX(C, T, f, make)                                                          \
  static inline C make(T x, T y) { return {x, y}; }                                          \
  static inline T cuCreal##f(C a) { return a.x; }                                            \
  static inline T cuCimag##f(C a) { return a.y; }                                            \
  static inline C cuConj##f(C a) { return {a.x, -a.y}; }                                     \
  static inline T cuCabs##f(C a) { return std::hypot(a.x, a.y); }                            \
  static inline C cuCadd##f(C a, C b) { return {a.x + b.x, a.y + b.y}; }                     \
  static inline C cuCsub##f(C a, C b) { return {a.x - b.x, a.y - b.y}; }                     \
  static inline C cuCmul##f(C a, C b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; } \
  static inline C cuCfma##f(C a, C b, C c) { return cuCadd##f(cuCmul##f(a, b), c); }         \
  static inline C cuCdiv##f(C a, C b) {                                                      \
    const T size = std::fabs(b.x) + std::fabs(b.y), x = b.x / size, y = b.y / size;          \
    const T square = (x * x + y * y) * size;                                                 \
    return {(a.x * x + a.y * y) / square, (a.y * x - a.x * y) / square};                     \
  }
UMEM_COMPLEX(cuFloatComplex, float, f, make_cuFloatComplex)
UMEM_COMPLEX(cuDoubleComplex, double, , make_cuDoubleComplex)
#undef UMEM_COMPLEX
