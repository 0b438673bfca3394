// Rounding to 16-bit floats, of any number: once, whichever type it has.
#pragma once

template <class H> static inline unsigned short umem_bits_of(const H& x) {
  unsigned short bits;
  memcpy(&bits, (const void*)&x, 2);
  return bits;
}
template <class H> static inline H umem_of_bits(unsigned short bits) {
  H x;
  memcpy((void*)&x, &bits, 2);
  return x;
}
// By way of a float whose last bit is set where it is not exact: rounding that again is right.
template <class T> static inline float umem_odd(T x) {
  float found = (float)x;
  if ((long double)found == (long double)x || x != x) return found;
  unsigned int bits = umem_bits<unsigned int>(found);
  if (std::fabs((long double)found) > std::fabs((long double)x)) bits--;
  return umem_bits<float>(bits | 1);
}
template <class H, class T> static inline H umem_nearest(T x) {
  if constexpr (std::is_same_v<T, float>) return H(x);
  else return H(umem_odd(x));
}
// To zero, or up, or down.
template <class H, class T> static inline H umem_toward(T x, int direction) {
  const H near = umem_nearest<H>(x);
  const long double is = (float)near, wanted = x;
  unsigned short bits = umem_bits_of(near);
  if (is == wanted || is != is) return near;
  const bool is_far = is > wanted;  // above what is wanted
  const bool goes = direction > 0 ? !is_far : direction < 0 ? is_far : is_far == (is > 0);
  if (goes) bits += (bits >> 15) == (unsigned)is_far ? 1 : -1;
  return umem_of_bits<H>(bits);
}
