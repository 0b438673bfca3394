// Sums of CuPy's ``min_max_st``: values and indices apart, and chosen without branches, so that
// vector instructions can do it.
template <class T> struct UmemSums<min_max_st<T>> {
  alignas(64) T values[UMEM_SUMS];
  alignas(64) IndexT indices[UMEM_SUMS];
  UMEM_INLINE min_max_st<T> get(ptrdiff_t i) const { return min_max_st<T>(values[i], indices[i]); }
  UMEM_INLINE void put(ptrdiff_t i, const min_max_st<T>& sum) {
    values[i] = sum.value;
    indices[i] = sum.index;
  }
};

// Where nothing was chosen from yet: the value that every other one beats, and the last index.
template <class T, class Keeps> UMEM_INLINE min_max_st<T> umem_nothing(Keeps keeps) {
  using Limits = std::numeric_limits<T>;
  const T low = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  const T high = Limits::has_infinity ? Limits::infinity() : Limits::max();
  return min_max_st<T>(keeps(high, low) ? low : high, -1);
}
// CuPy's ``my_argmin``, ``my_argmax_float`` and their kin: of equal values the first, and NaN wins.
template <class T, class Keeps> UMEM_INLINE min_max_st<T> umem_arg(const min_max_st<T>& a, const min_max_st<T>& b, Keeps keeps) {
  using Index = std::make_unsigned_t<IndexT>;
  const bool later = (a.value == b.value) & ((Index)b.index < (Index)a.index);
  const bool other = later | ((a.value == a.value) & !keeps(a.value, b.value));
  return min_max_st<T>(other ? b.value : a.value, other ? b.index : a.index);
}
// The same where b comes after all that a was chosen from; b is nothing where its index is -1, which
// nanargmin and nanargmax make of NaN.
template <class T, class Keeps> UMEM_INLINE min_max_st<T> umem_next(const min_max_st<T>& a, const min_max_st<T>& b, Keeps keeps) {
  const bool less = (a.value == a.value) & !keeps(a.value, b.value);
  const bool other = (b.index != -1) & ((a.index == -1) | less);
  return min_max_st<T>(other ? b.value : a.value, other ? b.index : a.index);
}

// CuPy's ``my_max``, ``my_min_float`` and their kin, whose index is 0 or, where there is nothing, -1.
template <class T, class Takes> UMEM_INLINE min_max_st<T> umem_extreme(const min_max_st<T>& a, const min_max_st<T>& b, Takes takes) {
  const bool other = (a.index == -1) | ((b.index != -1) & takes(a.value, b.value));
  return min_max_st<T>(other ? b.value : a.value, a.index & b.index);
}
