"""Updates of CuPy arrays with 8-bit states: one kernel a parameter, a warp of threads a block."""

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
WARP = 32
THREADS = 256
"""Threads of a block of the launch: eight warps, each of which updates a block of the state.
Without shared memory the software GPU need not run threads in step, most of the time otherwise."""
SOURCE = """
#include <cuda_fp16.h>

#define EACH 8  // values of a thread: a warp has the 256 that share a scale

__device__ float largest(const float* values) {  // absolute value of the warp's
  float found = 0;
  for (int k = 0; k < EACH; ++k) found = fmaxf(found, fabsf(values[k]));
  for (int by = 16; by > 0; by /= 2) {
    found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, by));
  }
  return found;
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
  long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  long long first = warp * 32 * EACH + threadIdx.x % 32;
  if (warp * 32 * EACH >= size) return;  // the whole warp
  float m[EACH];
  float v[EACH];
  float old_m = m_scales[warp], old_v = v_scales[warp];
  for (int k = 0; k < EACH; ++k) {
    long long i = first + 32 * k;
    m[k] = v[k] = 0;
    if (i >= size) continue;
    float g = (float)grad[i];
    m[k] = m_map[m_codes[i]] * old_m;
    v[k] = v_map[v_codes[i]] * old_v;
    m[k] += first_rate * (g - m[k]);
    v[k] += second_rate * (g * g - v[k]);
    x[i] = (PARAMETER)(decay * (WIDE)x[i] + (WIDE)(scale * (rate / (sqrtf(v[k]) + eps) * m[k])));
  }
  float m_scale = largest(m), v_scale = largest(v);
  for (int k = 0; k < EACH; ++k) {
    long long i = first + 32 * k;
    if (i >= size) break;
    m_codes[i] = nearest(m[k], m_scale, m_table);
    v_codes[i] = nearest(v[k], v_scale, v_table);
  }
  if (threadIdx.x % 32 == 0) {
    m_scales[warp] = m_scale;
    v_scales[warp] = v_scale;
  }
}

extern "C" __global__ void momentum_8bit(
    PARAMETER* x, const PARAMETER* grad, unsigned char* codes, float* scales, const float* map,
    const unsigned int* table, long long size, float momentum, float rate) {
  long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  long long first = warp * 32 * EACH + threadIdx.x % 32;
  if (warp * 32 * EACH >= size) return;
  float v[EACH];
  float old = scales[warp];
  for (int k = 0; k < EACH; ++k) {
    long long i = first + 32 * k;
    v[k] = 0;
    if (i >= size) continue;
    v[k] = momentum * (map[codes[i]] * old) - rate * (float)grad[i];
    x[i] = (PARAMETER)((WIDE)x[i] + (WIDE)v[k]);
  }
  float scale = largest(v);
  for (int k = 0; k < EACH; ++k) {
    long long i = first + 32 * k;
    if (i < size) codes[i] = nearest(v[k], scale, table);
  }
  if (threadIdx.x % 32 == 0) scales[warp] = scale;
}
"""
"""The kernel's source; a warp reads a scale before its shuffles, and writes it after them."""


def update(step: Step, x: Any, grad: Any, states: Sequence[QuantizedState]) -> None:
    """Update a CuPy parameter that has elements, on its device and the current stream."""
    flat = cuda.cupy.ascontiguousarray(x)
    numbers: list[Any] = [np.float32(number) for number in step]
    if isinstance(step, AdamStep) and x.dtype == np.float64:
        numbers[-1] = step.decay
    arrays = [part for state in states for part in (state.codes, state.scales)]
    maps = [part for state in states for part in _on_device(state.map.signed)]
    slope = cuda.cupy.ascontiguousarray(grad, dtype=x.dtype)
    blocks = -(-x.size // (THREADS * BLOCK // WARP))
    kernel = _kernel(type(step).__name__, x.dtype.name)
    kernel((blocks,), (THREADS,), (flat, slope, *arrays, *maps, np.int64(x.size), *numbers))
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
