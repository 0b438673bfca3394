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
// across, as a transposed one does, parts of neighbouring rows before the rest of them. Of a kernel
// that cores share a thread has some indexes of one dimension.
template <int n> struct UmemRows : UmemRow<n> {
  static const int before = n < 2 ? 0 : n - 2;
  int shared = 0;  // the dimension, and which of it
  ptrdiff_t low = 0, high;
  ptrdiff_t part, from, start, stop;  // of rows, how much at once, and what is done now
  bool is_left;
  template <class Indexer, class... Arrays>
  UMEM_INLINE explicit UmemRows(const Indexer& indexer, const Arrays&... arrays) : UmemRow<n>(indexer) {
    part = (umem_is_across(arrays) || ... || false) ? 32 : this->shape[this->last];
    choose();
    for (int d = 0; d <= this->last; d++) this->index[d] = begin(d);
    from = begin(this->last);
    is_left = this->size && low < high;
    place();
  }
  UMEM_INLINE void choose() {  // the outermost dimension with enough, or else the longest
    const ptrdiff_t* shape = this->shape;
    for (int d = this->last; d >= 0 && umem_share.count > 1; d--)
      if (shape[d] >= std::min<ptrdiff_t>(64, shape[shared])) shared = d;
    high = umem_share.end(shape[shared], n < 2 ? 64 : 1);
    low = umem_share.begin(shape[shared], n < 2 ? 64 : 1);
  }
  UMEM_INLINE ptrdiff_t begin(int d) const { return d == shared ? low : 0; }
  UMEM_INLINE ptrdiff_t end(int d) const { return d == shared ? high : this->shape[d]; }
  UMEM_INLINE void place() {
    this->index[this->last] = from;
    start = this->index[0];
    for (int d = 1; d <= this->last; d++) start = start * this->shape[d] + this->index[d];
    stop = start + std::min(part, end(this->last) - from);
  }
  UMEM_INLINE operator bool() const { return is_left; }
  UMEM_INLINE void next() {
    const ptrdiff_t whole = this->shape[this->last];
    if (n > 1 && ++this->index[before] < end(before)) {
      start += whole;
      stop += whole;
      return;
    }
    this->index[before] = begin(before);
    from += part;
    if (from >= end(this->last)) {
      from = begin(this->last);
      int d = before;
      while (--d >= 0 && ++this->index[d] >= end(d)) this->index[d] = begin(d);
      is_left = d >= 0;
    }
    place();
  }
};

// Where an array's element is at a place of a row; ``flat`` is its number among all.
template <class T, int n, bool c, bool i, class Row>
UMEM_INLINE T* umem_place(const CArray<T, n, c, i>& array, const Row& row, ptrdiff_t place, ptrdiff_t flat) {
  CArray<T, n, c, i>& own = const_cast<CArray<T, n, c, i>&>(array);
  if constexpr (n == 0) return &own[0];
  else if constexpr (c) return &own[flat];
  else {
    char* address = (char*)&own[(ptrdiff_t)0];
    for (int d = 0; d < n; d++) address += array.strides()[d] * row.index[d];
    return (T*)(address + place * (array.strides()[row.along] * row.step));
  }
}
// A truth value is read as a number: by those vector instructions choose.
template <class T> using UmemValue = std::conditional_t<std::is_same_v<T, bool>, bool, const T&>;
template <class T> UMEM_INLINE UmemValue<T> umem_value(const T* place) {
  if constexpr (std::is_same_v<T, bool>) return *(const unsigned char*)place != 0;
  else return *place;
}
template <class T, int n, bool c, bool i, class Row>
UMEM_INLINE UmemValue<T> umem_at(const CArray<T, n, c, i>& array, const Row& row, ptrdiff_t place, ptrdiff_t flat) {
  return umem_value<T>(umem_place(array, row, place, flat));
}
template <class T, int n, bool c, bool i, class Row>
UMEM_INLINE T& umem_at(CArray<T, n, c, i>& array, const Row& row, ptrdiff_t place, ptrdiff_t flat) {
  return *umem_place(array, row, place, flat);
}

// What each thread of a reduction has added up.
enum { UMEM_SUMS = 4096, UMEM_LONGEST = 1024 };
template <class T> struct UmemSums {
  alignas(64) char memory[UMEM_SUMS * sizeof(T)];
  UMEM_INLINE T get(ptrdiff_t i) const { return reinterpret_cast<const T*>(memory)[i]; }
  UMEM_INLINE void put(ptrdiff_t i, const T& sum) { new (memory + i * sizeof(T)) T(sum); }
};

// A reduction's elements in runs. On a GPU a block has some outputs, and each output some of the
// block's threads, which take its elements in turn. Here one output is done after another, along
// its elements, or many at once, each run along the outputs: whatever is more. Cores share the
// outputs, not what is added up for one: each core would read a part of every line of memory.
template <int n> struct UmemRuns : UmemRow<n> {
  const ptrdiff_t outputs, threads;          // threads of an output
  ptrdiff_t elements, width;                 // of an output, and the outputs that are done at once
  ptrdiff_t from, to;                        // the outputs that are this core's
  ptrdiff_t first = 0, stop = 0;             // the outputs that are done now
  ptrdiff_t output = 0, number = 0;          // whose which element a run begins with
  ptrdiff_t length = 0, flat = 0, sum = 0;   // elements, number among all, thread's sum
  ptrdiff_t flat_step = 1;
  bool is_one_dimension = true;

  template <class Indexer, class... Arrays>
  UMEM_INLINE UmemRuns(const Indexer& in, ptrdiff_t outputs, int block_size, int block_outputs, const Arrays&... arrays)
      : UmemRow<n>(in),
        outputs(outputs),
        threads(block_size / block_outputs),
        elements(outputs ? in.size() / outputs : 0),
        width(threads > block_outputs ? 1 : std::min<ptrdiff_t>({outputs, UMEM_SUMS / threads, UMEM_LONGEST})),
        from(umem_share.begin(outputs, width > 1 ? 64 : 1)),
        to(umem_share.end(outputs, width > 1 ? 64 : 1)) {
    if ((umem_is_across(arrays) || ... || false)) width = std::min<ptrdiff_t>(width, 32);
    if (width > 1 || !in.size()) return;
    this->step = flat_step = outputs;
    while (this->along > 0 && this->step % this->shape[this->along] == 0)
      this->step /= this->shape[this->along--];
    is_one_dimension = this->shape[this->along] % this->step == 0;
  }
  UMEM_INLINE void begin(ptrdiff_t at) {
    first = output = at;
    stop = std::min(to, first + width);
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
  // The first sum to which nothing is added.
  UMEM_INLINE ptrdiff_t untouched() const { return std::min(threads, elements) * width; }
};

// The elements of an array in a run, side by side: where they are, or a copy.
template <class Array> struct UmemRun;
template <class T, int n, bool c, bool i> struct UmemRun<const CArray<T, n, c, i>> {
  alignas(64) char copies[UMEM_LONGEST * sizeof(T)];
  ptrdiff_t number = 0, output = 0, rows = 0;  // with what the copies begin, and of how many runs they are
  template <class Runs> UMEM_INLINE const T* of(const CArray<T, n, c, i>& array, const Runs& run) {
    const T* first = umem_place(array, run, 0, run.flat);
    ptrdiff_t step = 0;
    if constexpr (n > 0) step = c ? run.flat_step * (ptrdiff_t)sizeof(T) : array.strides()[run.along] * run.step;
    if (step == sizeof(T) || run.length == 1) return first;
    if constexpr (n == 2 && !c)
      if (run.width > 1 && run.outputs == run.shape[1] && umem_is_across(array)) return across(first, step, array.strides()[0], run);
    umem_process->gather(copies, (const char*)first, step, sizeof(T), run.length);
    return (const T*)copies;
  }
  // Where neighbours in memory are of runs that follow each other: copied for several of these at once.
  template <class Runs> UMEM_INLINE const T* across(const T* first, ptrdiff_t step, ptrdiff_t down, const Runs& run) {
    T* const all = (T*)copies;
    if (output != run.output || run.number < number || run.number >= number + rows) {
      output = run.output;
      number = run.number;
      rows = std::min(UMEM_LONGEST / run.width, run.elements - number);
      for (ptrdiff_t k = 0; k < run.length; k++)
        for (ptrdiff_t r = 0; r < rows; r++) all[r * run.length + k] = *(const T*)((const char*)first + k * step + r * down);
    }
    return all + (run.number - number) * run.length;
  }
};
template <class Array> struct UmemRun : UmemRun<const Array> {};

// An index as from 0, of so many.
UMEM_INLINE ptrdiff_t umem_wrap(ptrdiff_t index, ptrdiff_t count) {
  if ((size_t)index < (size_t)count) return index;
  index %= count;
  return index < 0 ? index + count : index;
}

// A place in an array of two dimensions.
struct UmemCell { const ptrdiff_t at[2]; };
