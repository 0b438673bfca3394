// Collectives of a block and of a warp: what kernels of users use of the CUB headers, in a GPU's order of
// ranks. Whatever else they name is not in the namespace, and the compiler says so.
#pragma once
#include <algorithm>

namespace cub {
struct NullType {};
#define UMEM_OPERATION(name, expression)                                                       \
  struct name {                                                                                \
    template <class T> T operator()(const T& a, const T& b) const { return expression; }       \
  };
UMEM_OPERATION(Sum, a + b) UMEM_OPERATION(Max, b > a ? b : a) UMEM_OPERATION(Min, b < a ? b : a)
template <class K, class V> struct KeyValuePair {
  typedef K Key;
  typedef V Value;
  K key;
  V value;
};
UMEM_OPERATION(ArgMax, b.value > a.value || (b.value == a.value && b.key < a.key) ? b : a)
UMEM_OPERATION(ArgMin, b.value < a.value || (b.value == a.value && b.key < a.key) ? b : a)
#undef UMEM_OPERATION
enum BlockReduceAlgorithm { BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, BLOCK_REDUCE_RAKING, BLOCK_REDUCE_WARP_REDUCTIONS };
enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };
enum BlockLoadAlgorithm {
  BLOCK_LOAD_DIRECT, BLOCK_LOAD_STRIPED, BLOCK_LOAD_VECTORIZE, BLOCK_LOAD_TRANSPOSE,
  BLOCK_LOAD_WARP_TRANSPOSE, BLOCK_LOAD_WARP_TRANSPOSE_TIMESLICED
};
enum BlockStoreAlgorithm {
  BLOCK_STORE_DIRECT, BLOCK_STORE_STRIPED, BLOCK_STORE_VECTORIZE, BLOCK_STORE_TRANSPOSE,
  BLOCK_STORE_WARP_TRANSPOSE, BLOCK_STORE_WARP_TRANSPOSE_TIMESLICED
};

// A place in shared memory for something of each thread, or of each item.
template <class T, int n> struct UmemPlaces {
  alignas(T) char bytes[n * sizeof(T)];
  T get(int i) const { return reinterpret_cast<const T*>(bytes)[i]; }
  void put(int i, const T& x) { new (bytes + i * sizeof(T)) T(x); }
};
static inline int umem_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
template <class Places> struct UmemStored {
  struct TempStorage : Places {};
  Places& places;
  UmemStored() : places(own()) {}
  explicit UmemStored(TempStorage& given) : places(given) {}
  static Places& own() {
    static Places memory;
    return memory;
  }
};

// -- reductions and scans of a block -----------------------------------------------------------

// The result is thread 0's; the others keep what they brought.
template <class T, int X, BlockReduceAlgorithm = BLOCK_REDUCE_WARP_REDUCTIONS, int Y = 1, int Z = 1, int = 0>
struct BlockReduce : UmemStored<UmemPlaces<T, X * Y * Z>> {
  using UmemStored<UmemPlaces<T, X * Y * Z>>::UmemStored;
  template <class Op> T Reduce(T x, Op op, int count) {
    const int rank = umem_rank();
    this->places.put(rank, x);
    __syncthreads();
    for (int i = 1; !rank && i < count; i++) x = op(x, this->places.get(i));
    __syncthreads();
    return x;
  }
  template <class Op> T Reduce(T x, Op op) { return Reduce(x, op, X * Y * Z); }
  template <int n, class Op> T Reduce(T (&items)[n], Op op) {
    T x = items[0];
    for (int i = 1; i < n; i++) x = op(x, items[i]);
    return Reduce(x, op);
  }
  T Sum(T x) { return Reduce(x, cub::Sum()); }
  T Sum(T x, int count) { return Reduce(x, cub::Sum(), count); }
  template <int n> T Sum(T (&items)[n]) { return Reduce(items, cub::Sum()); }
};

// Of what lies before a rank, and of all: scans of one item, on which those of several are built.
template <class T, class Get, class Op> static T umem_before(int rank, Get get, Op op) {
  T found = get(0);
  for (int i = 1; i < rank; i++) found = op(found, get(i));
  return found;
}
template <class T, int X, BlockScanAlgorithm = BLOCK_SCAN_RAKING, int Y = 1, int Z = 1, int = 0>
struct BlockScan : UmemStored<UmemPlaces<T, X * Y * Z>> {
  using UmemStored<UmemPlaces<T, X * Y * Z>>::UmemStored;

  template <int n, class Op> void InclusiveScan(T (&in)[n], T (&out)[n], Op op, T& all) {
    scan(in, out, op, all, nullptr, true);
  }
  template <int n, class Op> void InclusiveScan(T (&in)[n], T (&out)[n], Op op) {
    T all;
    InclusiveScan(in, out, op, all);
  }
  template <int n, class Op> void ExclusiveScan(T (&in)[n], T (&out)[n], T first, Op op, T& all) {
    scan(in, out, op, all, &first, false);
  }
  template <int n, class Op> void ExclusiveScan(T (&in)[n], T (&out)[n], T first, Op op) {
    T all;
    ExclusiveScan(in, out, first, op, all);
  }
  template <class Op, class... All> void InclusiveScan(T in, T& out, Op op, All&... all) {
    T items[1] = {in}, results[1];
    InclusiveScan(items, results, op, all...);
    out = results[0];
  }
  template <class Op, class... All> void ExclusiveScan(T in, T& out, T first, Op op, All&... all) {
    T items[1] = {in}, results[1];
    ExclusiveScan(items, results, first, op, all...);
    out = results[0];
  }
  template <class In, class Out, class... All> void InclusiveSum(In&& in, Out& out, All&... all) {
    InclusiveScan(in, out, cub::Sum(), all...);
  }
  template <class In, class Out, class... All> void ExclusiveSum(In&& in, Out& out, All&... all) {
    ExclusiveScan(in, out, T(0), cub::Sum(), all...);
  }

 private:
  template <int n, class Op> void scan(T (&in)[n], T (&out)[n], Op op, T& all, const T* first, bool is_inclusive) {
    const int rank = umem_rank();
    const auto get = [&](int i) { return this->places.get(i); };
    T x = in[0];
    for (int i = 1; i < n; i++) x = op(x, in[i]);
    this->places.put(rank, x);
    __syncthreads();
    bool has_sum = first || rank;  // of what came before
    T sum = rank ? umem_before<T>(rank, get, op) : first ? *first : x;
    if (first && rank) sum = op(*first, sum);
    all = umem_before<T>(X * Y * Z, get, op);
    for (int i = 0; i < n; i++) {
      const T item = in[i], next = has_sum ? op(sum, item) : item;
      out[i] = is_inclusive ? next : sum;
      sum = next;
      has_sum = true;
    }
    __syncthreads();
  }
};

// -- of a warp, or of groups of as many threads in it -------------------------------------------

struct UmemNothing {};
template <int n> struct UmemWarp : UmemStored<UmemNothing> {
  static_assert(n && n <= 32 && !(n & (n - 1)), "the software GPU has groups of 1, 2, 4, 8, 16 and 32 threads of a warp");
  using UmemStored<UmemNothing>::UmemStored;
  static unsigned int first() { return umem_lane() / n * n; }
  static unsigned int place() { return umem_lane() % n; }
  static unsigned int mask() { return (unsigned int)((1ull << n) - 1) << first(); }
};
template <class T, int n = 32, int = 0> struct WarpReduce : UmemWarp<n> {
  using UmemWarp<n>::UmemWarp;
  template <class Op> T Reduce(T x, Op op, int count) {
    const auto all = umem_lanes(this->mask(), x);
    for (int i = 1; !this->place() && i < count; i++)
      if (all.mask >> (this->first() + i) & 1u) x = op(x, all[this->first() + i]);
    return x;
  }
  template <class Op> T Reduce(T x, Op op) { return Reduce(x, op, n); }
  T Sum(T x) { return Reduce(x, cub::Sum()); }
  T Sum(T x, int count) { return Reduce(x, cub::Sum(), count); }
};
template <class T, int n = 32, int = 0> struct WarpScan : UmemWarp<n> {
  using UmemWarp<n>::UmemWarp;
  template <class Op> void InclusiveScan(T in, T& out, Op op, T& all) {
    const auto of = umem_lanes(this->mask(), in);
    const auto get = [&](int i) { return of[this->first() + i]; };
    out = umem_before<T>(this->place() + 1, get, op);
    all = umem_before<T>(__builtin_popcount(of.mask), get, op);
  }
  template <class Op> void InclusiveScan(T in, T& out, Op op) {
    T all;
    InclusiveScan(in, out, op, all);
  }
  template <class Op> void ExclusiveScan(T in, T& out, T first, Op op, T& all) {
    const auto of = umem_lanes(this->mask(), in);
    const auto get = [&](int i) { return of[this->first() + i]; };
    out = this->place() ? op(first, umem_before<T>(this->place(), get, op)) : first;
    all = umem_before<T>(__builtin_popcount(of.mask), get, op);
  }
  template <class Op> void ExclusiveScan(T in, T& out, T first, Op op) {
    T all;
    ExclusiveScan(in, out, first, op, all);
  }
  template <class... All> void InclusiveSum(T in, T& out, All&... all) { InclusiveScan(in, out, cub::Sum(), all...); }
  template <class... All> void ExclusiveSum(T in, T& out, All&... all) { ExclusiveScan(in, out, T(0), cub::Sum(), all...); }
  T Broadcast(T x, unsigned int from) { return umem_lanes(this->mask(), x)[this->first() + from]; }
};

// -- items of memory: each thread has some in a row, or as far apart as there are threads -------

template <class T, int X, int n, bool is_striped, int Y, int Z> struct UmemItems : UmemStored<UmemNothing> {
  using UmemStored<UmemNothing>::UmemStored;
  static int place(int i) { return is_striped ? umem_rank() + i * X * Y * Z : umem_rank() * n + i; }
};
template <class T, int X, int n, BlockLoadAlgorithm how = BLOCK_LOAD_DIRECT, int Y = 1, int Z = 1, int = 0>
struct BlockLoad : UmemItems<T, X, n, how == BLOCK_LOAD_STRIPED, Y, Z> {
  using UmemItems<T, X, n, how == BLOCK_LOAD_STRIPED, Y, Z>::UmemItems;
  template <class From> void Load(From from, T (&items)[n], int count = X * Y * Z * n) {
    for (int i = 0; i < n; i++)
      if (this->place(i) < count) items[i] = from[this->place(i)];
  }
  template <class From, class Default> void Load(From from, T (&items)[n], int count, Default other) {
    for (int i = 0; i < n; i++) items[i] = other;
    Load(from, items, count);
  }
};
template <class T, int X, int n, BlockStoreAlgorithm how = BLOCK_STORE_DIRECT, int Y = 1, int Z = 1, int = 0>
struct BlockStore : UmemItems<T, X, n, how == BLOCK_STORE_STRIPED, Y, Z> {
  using UmemItems<T, X, n, how == BLOCK_STORE_STRIPED, Y, Z>::UmemItems;
  template <class To> void Store(To to, T (&items)[n], int count = X * Y * Z * n) {
    for (int i = 0; i < n; i++)
      if (this->place(i) < count) to[this->place(i)] = items[i];
  }
};

// -- sorting -----------------------------------------------------------------------------------

// Bits in whose order keys are sorted; -0.0 and 0.0 are equal.
template <class K> static unsigned long long umem_order_of(K key) {
  static_assert(std::is_arithmetic_v<K>, "the software GPU sorts numbers");
  constexpr unsigned long long sign = 1ull << (8 * sizeof(K) - 1);
  if (std::is_floating_point_v<K> && key == K(0)) key = K(0);
  unsigned long long bits = 0;
  memcpy(&bits, &key, sizeof key);
  if constexpr (std::is_floating_point_v<K>) return bits & sign ? ~bits & (sign | (sign - 1)) : bits | sign;
  return std::is_signed_v<K> ? bits ^ sign : bits;
}
template <class K, class V, int n> struct UmemSorted {
  UmemPlaces<K, n> keys;
  UmemPlaces<V, n> values;
  int order[n];
};
template <class K, int X, int n, class V = NullType, int = 4, bool = true, BlockScanAlgorithm = BLOCK_SCAN_WARP_SCANS, int = 0, int Y = 1, int Z = 1, int = 0>
struct BlockRadixSort : UmemStored<UmemSorted<K, V, X * Y * Z * n>> {
  using UmemStored<UmemSorted<K, V, X * Y * Z * n>>::UmemStored;
  static constexpr int bits = 8 * sizeof(K);
#define UMEM_SORT(name, is_descending, is_striped)                                                           \
  void name(K (&keys)[n], int begin = 0, int end = bits) {                                                   \
    V nothing[n];                                                                                            \
    sort(keys, nothing, begin, end, is_descending, is_striped);                                              \
  }                                                                                                          \
  template <class W> void name(K (&keys)[n], W (&values)[n], int begin = 0, int end = bits) {                \
    static_assert(std::is_same_v<V, W>, "values of the type that BlockRadixSort was given");                 \
    sort(keys, values, begin, end, is_descending, is_striped);                                               \
  }
  UMEM_SORT(Sort, false, false) UMEM_SORT(SortDescending, true, false)
  UMEM_SORT(SortBlockedToStriped, false, true) UMEM_SORT(SortDescendingBlockedToStriped, true, true)
#undef UMEM_SORT

 private:
  void sort(K (&keys)[n], V (&values)[n], int begin, int end, bool is_descending, bool is_striped) {
    constexpr int count = X * Y * Z * n;
    const int rank = umem_rank();
    for (int i = 0; i < n; i++) {
      this->places.keys.put(rank * n + i, keys[i]);
      this->places.values.put(rank * n + i, values[i]);
    }
    __syncthreads();
    if (!rank) {
      int* order = this->places.order;
      const unsigned long long mask = end - begin >= 64 ? ~0ull : (1ull << (end - begin)) - 1;
      const auto digits = [&](int i) { return umem_order_of(this->places.keys.get(i)) >> begin & mask; };
      for (int i = 0; i < count; i++) order[i] = i;
      std::stable_sort(order, order + count, [&](int a, int b) {
        return is_descending ? digits(b) < digits(a) : digits(a) < digits(b);
      });
    }
    __syncthreads();
    for (int i = 0; i < n; i++) {
      const int from = this->places.order[is_striped ? rank + i * X * Y * Z : rank * n + i];
      keys[i] = this->places.keys.get(from);
      values[i] = this->places.values.get(from);
    }
    __syncthreads();
  }
};
}  // namespace cub
