// CuPy's complex numbers for functions of its headers cupy/xsf, which on a host take the standard
// library's. Included behind each of these headers.
#pragma once
#include <complex>

namespace xsf {
template <class T> using UmemComplex = thrust::complex<T>;
template <class T> static inline std::complex<T> umem_standard(const UmemComplex<T>& z) { return {z.real(), z.imag()}; }
template <class T> static inline UmemComplex<T> umem_cupys(const std::complex<T>& z) { return {z.real(), z.imag()}; }

template <class T> static inline UmemComplex<T> digamma(const UmemComplex<T>& z) {
  return umem_cupys<T>(digamma(umem_standard(z)));
}
template <class T> static inline UmemComplex<T> lambertw(const UmemComplex<T>& z, long long k, double tolerance) {
  return umem_cupys<T>(lambertw(umem_standard(z), (long)k, (T)tolerance));
}
#define UMEM_PAIR(name)                                                                       \
  template <class T> static inline int name(const UmemComplex<T>& z, UmemComplex<T>& one, UmemComplex<T>& other) { \
    std::complex<T> first, second;                                                            \
    const int found = name(umem_standard(z), first, second);                                  \
    one = umem_cupys(first);                                                                  \
    other = umem_cupys(second);                                                               \
    return found;                                                                             \
  }
UMEM_PAIR(sici) UMEM_PAIR(shichi)
#undef UMEM_PAIR
}  // namespace xsf
