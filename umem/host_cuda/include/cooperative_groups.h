// Groups of threads on the host: what kernels use of CUDA's headers cooperative_groups.h and
// cooperative_groups/reduce.h.
// A barrier of the whole grid is there for a grid of one block, and where one thread does a kernel's
// work, in CUPY_FOR; it ends other kernels, for blocks run one after another.
#pragma once

namespace cooperative_groups {
struct thread_block {
  static void sync() { __syncthreads(); }
  static unsigned int thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
  static unsigned int size() { return blockDim.x * blockDim.y * blockDim.z; }
  static unsigned int num_threads() { return size(); }
  static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
  static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
  static dim3 group_dim() { return blockDim; }
  static dim3 dim_threads() { return blockDim; }
};
struct grid_group {
  void sync() const {
    if (size() == thread_block::size()) return __syncthreads();
    snprintf(umem_process->message, sizeof umem_process->message,
             "the software GPU has no barrier of a whole grid of several blocks");
    _longjmp(umem_exit, 1);
  }
  bool is_valid() const { return true; }
  unsigned long long thread_rank() const {
    const unsigned long long block = blockIdx.x + gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    return block * thread_block().size() + thread_block().thread_rank();
  }
  unsigned long long size() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z * thread_block().size(); }
};

// Threads of a warp, by the mask of their lanes; ranks go along the lanes.
class coalesced_group {
 protected:
  unsigned int mask, groups_before, groups;
  unsigned int lane_of(unsigned int rank) const {
    unsigned int left = mask;
    while (rank--) left &= left - 1;
    return left ? __builtin_ctz(left) : umem_lane();
  }
  unsigned int ranks_of(unsigned int lanes) const {  // the mask of these lanes' ranks
    unsigned int found = 0, rank = 0;
    for (unsigned int left = mask; left; left &= left - 1, rank++)
      found |= (lanes >> __builtin_ctz(left) & 1u) << rank;
    return found;
  }
  template <class T> T from(const T& x, unsigned int rank) const {
    const auto all = umem_lanes(mask, x);
    return rank < num_threads() ? all[lane_of(rank)] : x;
  }

 public:
  explicit coalesced_group(unsigned int mask, unsigned int before = 0, unsigned int groups = 1)
      : mask(mask), groups_before(before), groups(groups) {}
  unsigned int umem_mask() const { return mask; }
  void sync() const { __syncwarp(mask); }
  unsigned int thread_rank() const { return __builtin_popcount(mask & ((1u << umem_lane()) - 1)); }
  unsigned int num_threads() const { return __builtin_popcount(mask); }
  unsigned int size() const { return num_threads(); }
  unsigned int meta_group_rank() const { return groups_before; }
  unsigned int meta_group_size() const { return groups; }
  template <class T> T shfl(const T& x, unsigned int rank) const { return from(x, rank); }
  template <class T> T shfl_up(const T& x, unsigned int by) const { return from(x, thread_rank() - by); }
  template <class T> T shfl_down(const T& x, unsigned int by) const { return from(x, thread_rank() + by); }
  int any(int x) const { return __any_sync(mask, x); }
  int all(int x) const { return __all_sync(mask, x); }
  unsigned int ballot(int x) const { return ranks_of(__ballot_sync(mask, x)); }
  template <class T> unsigned int match_any(const T& x) const { return ranks_of(__match_any_sync(mask, x)); }
  template <class T> unsigned int match_all(const T& x, int& predicate) const {
    return ranks_of(__match_all_sync(mask, x, &predicate));
  }
};
template <unsigned int n, class Parent = void> struct thread_block_tile : coalesced_group {
  static_assert(n && n <= 32 && !(n & (n - 1)), "the software GPU has tiles of 1, 2, 4, 8, 16 and 32 threads");
  thread_block_tile(unsigned int before, unsigned int groups)
      : coalesced_group((unsigned int)((1ull << n) - 1) << umem_lane() / n * n, before, groups) {}
  static unsigned int thread_rank() { return umem_lane() % n; }
  static constexpr unsigned int num_threads() { return n; }
  static constexpr unsigned int size() { return n; }
  template <class T> T shfl(const T& x, unsigned int rank) const { return from(x, rank % n); }
  template <class T> T shfl_up(const T& x, unsigned int by) const { return from(x, thread_rank() - by); }
  template <class T> T shfl_down(const T& x, unsigned int by) const { return from(x, thread_rank() + by); }
  template <class T> T shfl_xor(const T& x, unsigned int by) const { return from(x, thread_rank() ^ by); }
};

static inline thread_block this_thread_block() { return {}; }
static inline grid_group this_grid() { return {}; }
static inline coalesced_group umem_coalesced(unsigned int mask) { return coalesced_group(mask); }
#define coalesced_threads() umem_coalesced(__activemask())
template <unsigned int n> static inline thread_block_tile<n> tiled_partition(const thread_block& block) {
  return {block.thread_rank() / n, (block.size() + n - 1) / n};
}
template <unsigned int n, unsigned int m, class P>
static inline thread_block_tile<n, thread_block_tile<m, P>> tiled_partition(const thread_block_tile<m, P>& tile) {
  static_assert(n <= m, "a tile is a part of its parent");
  return {tile.thread_rank() / n, m / n};
}
template <class Label> static inline coalesced_group labeled_partition(const coalesced_group& group, Label label) {
  const UmemLanes<Label> all = umem_lanes(group.umem_mask(), label);
  unsigned int mask = 0, before = 0, groups = 0;
  for (unsigned int left = all.mask; left; left &= left - 1) {
    const unsigned int lane = __builtin_ctz(left);
    bool is_first = true;  // of its label
    for (unsigned int other = 0; other < lane; other++)
      if (all.mask >> other & 1u) is_first &= !(all[other] == all[lane]);
    groups += is_first;
    before += is_first && all[lane] < label;
    if (all[lane] == label) mask |= 1u << lane;
  }
  return coalesced_group(mask, before, groups);
}
static inline coalesced_group binary_partition(const coalesced_group& group, bool is_in) {
  return labeled_partition(group, is_in);
}
template <class Group> static inline void sync(const Group& group) { group.sync(); }

#define UMEM_OPERATION(name, expression)                                                     \
  template <class T = void> struct name {                                                    \
    template <class U> U operator()(const U& a, const U& b) const { return expression; }     \
  };
UMEM_OPERATION(plus, a + b) UMEM_OPERATION(less, b < a ? b : a) UMEM_OPERATION(greater, a < b ? b : a)
UMEM_OPERATION(bit_and, a & b) UMEM_OPERATION(bit_or, a | b) UMEM_OPERATION(bit_xor, a ^ b)
#undef UMEM_OPERATION
template <class T, class Op> static inline T reduce(const coalesced_group& group, const T& x, Op op) {
  return umem_reduce(group.umem_mask(), x, op);
}
#define UMEM_SCAN(name, is_inclusive)                                                          \
  template <class T, class Op = plus<T>> static inline T name(const coalesced_group& group, const T& x, Op op = Op()) { \
    const UmemLanes<T> all = umem_lanes(group.umem_mask(), x);                                 \
    T found = T();                                                                             \
    bool is_first = true;                                                                      \
    for (unsigned int lane = 0; lane < umem_lane() + is_inclusive; lane++)                     \
      if (all.mask >> lane & 1u) {                                                             \
        found = is_first ? all[lane] : op(found, all[lane]);                                   \
        is_first = false;                                                                      \
      }                                                                                        \
    return found;                                                                              \
  }
UMEM_SCAN(inclusive_scan, 1) UMEM_SCAN(exclusive_scan, 0)
#undef UMEM_SCAN
}  // namespace cooperative_groups
