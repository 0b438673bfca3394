// PTX's special registers, which kernels read by inline assembly: dialect.py.
#pragma once

static inline unsigned int umem_flat_thread() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}
static inline unsigned int umem_register_laneid() { return umem_flat_thread() % 32; }
static inline unsigned int umem_register_warpid() { return umem_flat_thread() / 32; }
static inline unsigned int umem_register_lanemask_eq() { return 1u << umem_register_laneid(); }
static inline unsigned int umem_register_lanemask_lt() { return umem_register_lanemask_eq() - 1; }
static inline unsigned int umem_register_lanemask_le() { return umem_register_lanemask_lt() | umem_register_lanemask_eq(); }
static inline unsigned int umem_register_lanemask_gt() { return ~umem_register_lanemask_le(); }
static inline unsigned int umem_register_lanemask_ge() { return ~umem_register_lanemask_lt(); }
static inline unsigned int umem_register_clock() { return (unsigned int)clock64(); }
static inline unsigned long long umem_register_clock64() { return (unsigned long long)clock64(); }
static inline unsigned long long umem_register_globaltimer() { return (unsigned long long)clock64(); }
