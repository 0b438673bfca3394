// Shifts of integers as PTX has them (PTX ISA, shl and shr): the amount is 32 bits without a sign, and
// one of the width or more gives zero, or the sign. `x << n` is written `x << umem_shift << n`: shifts.py.
#pragma once

#define UMEM_SHIFTS constexpr static inline __attribute__((always_inline))
struct UmemShift {};
static constexpr UmemShift umem_shift{};
template <class T> constexpr bool umem_shiftable = std::is_integral_v<T> || std::is_convertible_v<T, int> && std::is_enum_v<T>;
// What is left of a shift: a number, or whatever else has the operator.
template <class T> struct UmemLeft { T of; };
template <class T> struct UmemBy { T by; };

template <bool left, class A, class B> UMEM_SHIFTS auto umem_shifted(A a, B b) {
  const auto x = +a;
  typedef std::remove_const_t<decltype(x)> X;
  constexpr unsigned int width = 8 * sizeof(X);
  const unsigned int n = (unsigned int)b;
  if constexpr (left) return n < width ? (X)((std::make_unsigned_t<X>)x << n) : X(0);
  else if constexpr (std::is_signed_v<X>) return (X)(x >> (n < width ? n : width - 1));
  else return n < width ? (X)(x >> n) : X(0);
}
#define UMEM_SHIFT(op, left)                                                                                  \
  template <class T> UMEM_SHIFTS auto operator op(T&& a, UmemShift) {                                          \
    if constexpr (umem_shiftable<std::remove_cv_t<std::remove_reference_t<T>>>)                                \
      return UmemLeft<std::remove_cv_t<std::remove_reference_t<T>>>{a};                                        \
    else return UmemLeft<T&&>{static_cast<T&&>(a)};                                                            \
  }                                                                                                            \
  template <class A, class B> UMEM_SHIFTS decltype(auto) operator op(const UmemLeft<A>& a, B&& b) {            \
    if constexpr (umem_shiftable<A> && umem_shiftable<std::remove_cv_t<std::remove_reference_t<B>>>)           \
      return umem_shifted<left>(a.of, b);                                                                      \
    else return static_cast<A>(a.of) op static_cast<B&&>(b);                                                   \
  }                                                                                                            \
  template <class B> UMEM_SHIFTS auto operator op##=(UmemShift, const B& b) { return UmemBy<B>{b}; }           \
  template <class A, class B> UMEM_SHIFTS A& operator op##=(A& a, UmemBy<B> b) {                               \
    if constexpr (umem_shiftable<std::remove_cv_t<A>> && umem_shiftable<B>)                                    \
      a = (std::remove_cv_t<A>)umem_shifted<left>((std::remove_cv_t<A>)a, b.by);                               \
    else a op##= b.by;                                                                                         \
    return a;                                                                                                  \
  }
UMEM_SHIFT(<<, true) UMEM_SHIFT(>>, false)
#undef UMEM_SHIFT
#undef UMEM_SHIFTS
