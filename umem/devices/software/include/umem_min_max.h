// Sums of CuPy's ``min_max_st``: values and indices apart, and chosen without branches, so that
// vector instructions can do it.
template <class T> struct UmemSums<min_max_st<T>> {
  T values[UMEM_SUMS];
  IndexT indices[UMEM_SUMS];
  UMEM_INLINE min_max_st<T> get(ptrdiff_t i) const { return min_max_st<T>(values[i], indices[i]); }
  UMEM_INLINE void put(ptrdiff_t i, const min_max_st<T>& sum) {
    values[i] = sum.value;
    indices[i] = sum.index;
  }
};

// CuPy's ``my_argmin``, ``my_argmax_float`` and their kin: of equal values the first, and NaN wins.
template <class T, class Keeps> UMEM_INLINE min_max_st<T> umem_arg(const min_max_st<T>& a, const min_max_st<T>& b, Keeps keeps) {
  const bool later = (a.value == b.value) & (b.index < a.index);
  const bool less = (a.value == a.value) & !keeps(a.value, b.value);
  const bool other = (a.index == -1) | ((b.index != -1) & (later | less));
  return min_max_st<T>(other ? b.value : a.value, other ? b.index : a.index);
}
