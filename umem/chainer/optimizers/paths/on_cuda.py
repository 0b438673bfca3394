"""Updates of CuPy arrays with 8-bit states: one kernel a parameter, a block of threads a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from chainer.backends import cuda

from umem.chainer.optimizers.dynamic_map import DynamicMap, dynamic_map
from umem.chainer.optimizers.quantized_state import BLOCK, QuantizedState
from umem.chainer.optimizers.steps import AdamStep, Step

OPTIONS = ("--fmad=false",)
"""Without fused multiply-add, products are rounded before they are added, as on a CPU."""
TYPES = {"float16": ("__half", "float"), "float32": ("float", "float"), "float64": ("double",) * 2}
"""Types of parameter, gradient, and of the arithmetic on the parameter."""
SOURCE = """
#include <cuda_fp16.h>

__device__ float largest(float value, float* of_warps) {  // absolute value of the block's threads
  value = fabsf(value);
  for (int by = 16; by > 0; by /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, by));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < 8; ++warp) value = fmaxf(value, of_warps[warp]);
  return value;
}

__device__ unsigned char nearest(float value, float scale, const unsigned int* table) {
  unsigned int bits = __float_as_uint(value / (scale == 0 ? 1.0f : scale));
  unsigned int low = bits & 0xffffu;
  if (bits >> 31) low ^= 0xffffu;
  return (unsigned char)((table[bits >> 16] + low) >> 16);
}

extern "C" __global__ void adam_8bit(
    PARAMETER* x, const PARAMETER* grad, unsigned char* m_codes, float* m_scales,
    unsigned char* v_codes, float* v_scales, const float* m_map, const unsigned int* m_table,
    const float* v_map, const unsigned int* v_table, long long size, float first_rate,
    float second_rate, float rate, float eps, float scale, WIDE decay) {
  __shared__ float m_of_warps[8];
  __shared__ float v_of_warps[8];
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float m = 0, v = 0;
  if (i < size) {
    float g = (float)grad[i];
    m = m_map[m_codes[i]] * m_scales[blockIdx.x];
    v = v_map[v_codes[i]] * v_scales[blockIdx.x];
    m += first_rate * (g - m);
    v += second_rate * (g * g - v);
    x[i] = (PARAMETER)(decay * (WIDE)x[i] + (WIDE)(scale * (rate / (sqrtf(v) + eps) * m)));
  }
  float m_scale = largest(m, m_of_warps), v_scale = largest(v, v_of_warps);
  if (i < size) {
    m_codes[i] = nearest(m, m_scale, m_table);
    v_codes[i] = nearest(v, v_scale, v_table);
  }
  if (threadIdx.x == 0) {
    m_scales[blockIdx.x] = m_scale;
    v_scales[blockIdx.x] = v_scale;
  }
}

extern "C" __global__ void momentum_8bit(
    PARAMETER* x, const PARAMETER* grad, unsigned char* codes, float* scales, const float* map,
    const unsigned int* table, long long size, float momentum, float rate) {
  __shared__ float of_warps[8];
  long long i = (long long)blockIdx.x * 256 + threadIdx.x;
  float v = 0;
  if (i < size) {
    v = momentum * (map[codes[i]] * scales[blockIdx.x]) - rate * (float)grad[i];
    x[i] = (PARAMETER)((WIDE)x[i] + (WIDE)v);
  }
  float scale = largest(v, of_warps);
  if (i < size) codes[i] = nearest(v, scale, table);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}
"""
"""The kernel's source; each scale is read before the barrier in `largest`, and written after it."""


def update(step: Step, x: Any, grad: Any, states: Sequence[QuantizedState]) -> None:
    """Update a CuPy parameter that has elements, on its device and the current stream."""
    flat = cuda.cupy.ascontiguousarray(x)
    numbers: list[Any] = [np.float32(number) for number in step]
    if isinstance(step, AdamStep) and x.dtype == np.float64:
        numbers[-1] = step.decay
    arrays = [part for state in states for part in (state.codes, state.scales)]
    maps = [part for state in states for part in _on_device(state.map.signed)]
    slope = cuda.cupy.ascontiguousarray(grad, dtype=x.dtype)
    blocks = len(states[0].scales)
    kernel = _kernel(type(step).__name__, x.dtype.name)
    kernel((blocks,), (BLOCK,), (flat, slope, *arrays, *maps, np.int64(x.size), *numbers))
    if flat is not x:
        x[...] = flat


def compiler_options(dtype: str) -> tuple[str, ...]:
    """Return the compiler's options for a parameter's type."""
    parameter, wide = TYPES[dtype]
    return (*OPTIONS, f"-DPARAMETER={parameter}", f"-DWIDE={wide}")


def _compiled(step: str, dtype: str) -> Any:
    name = {"AdamStep": "adam_8bit", "MomentumStep": "momentum_8bit"}[step]
    return cuda.cupy.RawKernel(SOURCE, name, compiler_options(dtype))


def _copied(signed: bool) -> tuple[Any, Any]:
    """Copy a map to the current device, once."""
    found: DynamicMap = dynamic_map(signed)
    return cuda.cupy.asarray(found.values), cuda.cupy.asarray(found.table)


_kernel = cuda.memoize(for_each_device=True)(_compiled)
_on_device = cuda.memoize(for_each_device=True)(_copied)
