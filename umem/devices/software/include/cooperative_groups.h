// Groups of threads on the host: what kernels use of CUDA's header of this name.
// A barrier of the whole grid is there where one thread does a kernel's work, in CUPY_FOR; kernels.py
// refuses it elsewhere, for blocks run one after another.
#pragma once

namespace cooperative_groups {
struct thread_block {
  void sync() const { __syncthreads(); }
  unsigned int thread_rank() const { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
  unsigned int size() const { return blockDim.x * blockDim.y * blockDim.z; }
  unsigned int num_threads() const { return size(); }
  dim3 thread_index() const { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
  dim3 group_index() const { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
};
struct grid_group {
  void sync() const {}
  bool is_valid() const { return true; }
  unsigned long long thread_rank() const {
    const unsigned long long block = blockIdx.x + gridDim.x * (blockIdx.y + (unsigned long long)gridDim.y * blockIdx.z);
    return block * thread_block().size() + thread_block().thread_rank();
  }
  unsigned long long size() const { return (unsigned long long)gridDim.x * gridDim.y * gridDim.z * thread_block().size(); }
};
template <unsigned int n> struct thread_block_tile {
  static_assert(n == 32, "the software GPU has tiles of a warp only");
  void sync() const { __syncwarp(); }
  unsigned int thread_rank() const { return umem_lane(); }
  unsigned int size() const { return n; }
  unsigned int num_threads() const { return n; }
  unsigned int meta_group_rank() const { return umem_warp(); }
  unsigned int meta_group_size() const { return (thread_block().size() + 31) / 32; }
  template <class T> T shfl(T x, int from) const { return __shfl_sync(0xffffffffu, x, from); }
  template <class T> T shfl_up(T x, unsigned int by) const { return __shfl_up_sync(0xffffffffu, x, by); }
  template <class T> T shfl_down(T x, unsigned int by) const { return __shfl_down_sync(0xffffffffu, x, by); }
  template <class T> T shfl_xor(T x, int by) const { return __shfl_xor_sync(0xffffffffu, x, by); }
  int any(int x) const { return __any_sync(0xffffffffu, x); }
  int all(int x) const { return __all_sync(0xffffffffu, x); }
  unsigned int ballot(int x) const { return __ballot_sync(0xffffffffu, x); }
};
static inline thread_block this_thread_block() { return {}; }
static inline grid_group this_grid() { return {}; }
template <unsigned int n> static inline thread_block_tile<n> tiled_partition(const thread_block&) { return {}; }
template <class Group> static inline void sync(const Group& group) { group.sync(); }
}  // namespace cooperative_groups
