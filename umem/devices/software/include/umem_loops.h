// The loops that CuPy's elementwise and reduction kernels run as, in the order of memory: an index
// of several dimensions goes along one of them by steps, where a GPU divides for each element.
#pragma once
#include <cupy/carray.cuh>

#define UMEM_INLINE inline __attribute__((always_inline))
// A GPU runs elements in any order, and so may vector instructions.
#define UMEM_ANY_ORDER _Pragma("GCC ivdep")

// Elements in a row: where the first is, and how far along which dimension each next one.
template <int n> struct UmemRow {
  static const int last = n ? n - 1 : 0;
  ptrdiff_t size, shape[last + 1], index[last + 1];
  int along = last;
  ptrdiff_t step = 1;

  // CIndexer keeps its shape to itself; CuPy hands it over as numbers: size, shape, index.
  template <class Indexer> UMEM_INLINE explicit UmemRow(const Indexer& indexer) : size(indexer.size()) {
    static_assert(sizeof indexer == sizeof size * (1 + 2 * n), "size, shape, index");
    shape[0] = size;
    memcpy(shape, (const char*)&indexer + sizeof size, n * sizeof size);
    for (ptrdiff_t& i : index) i = 0;
  }
  UMEM_INLINE void set(ptrdiff_t flat) {
    for (int d = last; d > 0; flat /= shape[d--]) index[d] = flat % shape[d];
    index[0] = flat;
  }
};

// Whether neighbours in the last dimension lie farther apart than those in the one before.
template <class T, int n, bool c, bool i> UMEM_INLINE bool umem_is_across(const CArray<T, n, c, i>& array) {
  if constexpr (n < 2 || c) return false;
  else return array.strides()[n - 2] && std::abs(array.strides()[n - 1]) > std::abs(array.strides()[n - 2]);
}

// All elements, a row of the last dimension after the other: whole ones, or where an array lies
// across, as a transposed one does, parts of neighbouring rows before the rest of them.
template <int n> struct UmemRows : UmemRow<n> {
  static const int before = n < 2 ? 0 : n - 2;
  const ptrdiff_t whole;
  ptrdiff_t part, from = 0, start = 0, stop;  // of rows, how much at once, and what is done now
  template <class Indexer, class... Arrays>
  UMEM_INLINE explicit UmemRows(const Indexer& indexer, const Arrays&... arrays)
      : UmemRow<n>(indexer), whole(this->shape[this->last]) {
    part = (umem_is_across(arrays) || ... || false) ? 32 : whole;
    stop = std::min(part, whole);
  }
  UMEM_INLINE operator bool() const { return start < this->size; }
  UMEM_INLINE void next() {
    start += whole;
    if (n > 1 && ++this->index[before] == this->shape[before]) {
      this->index[before] = 0;
      from += part;
      if (from < whole) {
        start += part - whole * this->shape[before];
      } else {
        start -= from - part;
        from = 0;
        for (int d = before; --d >= 0; this->index[d] = 0)
          if (++this->index[d] < this->shape[d]) break;
      }
      this->index[this->last] = from;
    }
    stop = start + std::min(part, whole - from);
  }
};

// An array's element at a place of a row; ``flat`` is its number among all.
template <class T, int n, bool c, bool i, class Row>
UMEM_INLINE const T& umem_at(const CArray<T, n, c, i>& array, const Row& row, ptrdiff_t place, ptrdiff_t flat) {
  if (c) return array[flat];
  const char* address = (const char*)&array[(ptrdiff_t)0];
  for (int d = 0; d < n; d++) address += array.strides()[d] * row.index[d];
  return *(const T*)(address + place * (array.strides()[row.along] * row.step));
}
template <class T, int n, bool c, bool i, class Row>
UMEM_INLINE T& umem_at(CArray<T, n, c, i>& array, const Row& row, ptrdiff_t place, ptrdiff_t flat) {
  return const_cast<T&>(umem_at(const_cast<const CArray<T, n, c, i>&>(array), row, place, flat));
}
template <class T, bool i, class Row>
UMEM_INLINE T& umem_at(const CArray<T, 0, true, i>& array, const Row&, ptrdiff_t, ptrdiff_t) {
  return const_cast<CArray<T, 0, true, i>&>(array)[0];
}

// What each thread of a reduction has added up.
enum { UMEM_SUMS = 8192 };
template <class T> struct UmemSums {
  alignas(64) char memory[UMEM_SUMS * sizeof(T)];
  UMEM_INLINE T get(ptrdiff_t i) const { return reinterpret_cast<const T*>(memory)[i]; }
  UMEM_INLINE void put(ptrdiff_t i, const T& sum) { new (memory + i * sizeof(T)) T(sum); }
};

// A reduction's elements in runs. On a GPU a block has some outputs, and each output some of the
// block's threads, which take its elements in turn. Here one output is done after another, along
// its elements, or many at once, each run along the outputs: whatever is more.
template <int n> struct UmemRuns : UmemRow<n> {
  const ptrdiff_t outputs, elements, threads, width;  // elements and threads of an output
  ptrdiff_t first = 0, stop = 0;                      // the outputs that are done at once
  ptrdiff_t output = 0, number = 0;                   // whose which element a run begins with
  ptrdiff_t length = 0, flat = 0, sum = 0;            // elements, number among all, thread's sum
  ptrdiff_t flat_step = 1;
  bool is_one_dimension = true;

  template <class Indexer>
  UMEM_INLINE UmemRuns(const Indexer& in, ptrdiff_t outputs, int block_size, int block_outputs)
      : UmemRow<n>(in),
        outputs(outputs),
        elements(outputs ? in.size() / outputs : 0),
        threads(block_size / block_outputs),
        width(threads > block_outputs ? 1 : std::min<ptrdiff_t>(outputs, UMEM_SUMS / threads)) {
    if (width > 1 || !in.size()) return;
    this->step = flat_step = outputs;
    while (this->along > 0 && this->step % this->shape[this->along] == 0)
      this->step /= this->shape[this->along--];
    is_one_dimension = this->shape[this->along] % this->step == 0;
  }
  UMEM_INLINE void begin(ptrdiff_t at) {
    first = output = at;
    stop = std::min(outputs, first + width);
    number = 0;
    find();
  }
  UMEM_INLINE operator bool() const { return number < elements; }
  UMEM_INLINE void next() {
    if (width == 1) {
      number += length;
    } else if ((output += length) == stop) {
      output = first;
      number++;
    }
    find();
  }
  UMEM_INLINE void find() {
    if (!*this) return;
    flat = number * outputs + output;
    this->set(flat);
    const ptrdiff_t turn = number & (threads - 1);
    const ptrdiff_t left = (this->shape[this->along] - this->index[this->along] - 1) / this->step + 1;
    sum = turn * width + output - first;
    length = width > 1 ? std::min(left, stop - output)
                       : std::min(is_one_dimension ? left : 1, std::min(threads - turn, elements - number));
  }
};

// An index as from 0, of so many.
UMEM_INLINE ptrdiff_t umem_wrap(ptrdiff_t index, ptrdiff_t count) {
  if ((size_t)index < (size_t)count) return index;
  index %= count;
  return index < 0 ? index + count : index;
}
