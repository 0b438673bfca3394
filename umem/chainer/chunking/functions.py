"""Chainer's functions that work on columns, and how each is computed in parts.

Convolutions and deconvolutions are found by the methods that Chainer calls when cuDNN and iDeep are
not used; poolings by the methods for NumPy.
If a rule returns None, Chainer's own method does the work, or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from chainer import backend
from chainer.functions.connection import (
    convolution_2d,
    convolution_nd,
    deconvolution_2d,
    deconvolution_nd,
)
from chainer.functions.pooling import average_pooling_2d, average_pooling_nd, max_pooling_nd
from chainer.utils.conv import get_conv_outsize

from umem.chainer.chunking.convolving import (
    ConvolutionCall,
    convolve,
    convolve_back,
    kernel_gradient,
)
from umem.chainer.chunking.pieces import Cap
from umem.chainer.chunking.pooling import (
    Planes,
    largest,
    select,
    select_back,
    sum_back,
    sum_windows,
)
from umem.chainer.chunking.windows import Sizes, Windows

Array = Any
Compute = Callable[..., Array | None]
"""A function of a cap, a function node and the method's arguments; returns the one result."""


class Rule(NamedTuple):
    """The methods of a class of functions that compute, and their replacements."""

    methods: tuple[str, ...]
    compute: Compute


# -- convolutions --------------------------------------------------------------------------------


def _convolution(cap: Cap, func: Any, x: Array, kernel: Array, bias: Any, *_: Any) -> Array | None:
    windows = windows_of(func, x.shape[2:], kernel.shape[2:])
    fits = x.shape[1] == kernel.shape[1] * func.groups and not len(kernel) % func.groups
    if min(windows.outs) < 1 or not fits or _is_left(cap, func, x):
        return None
    positions = len(x) * prod(windows.outs)
    if _is_whole(cap, x, positions * (2 * func.groups * kernel[0].size + len(kernel))):
        return None
    return convolve(_call(cap, func, x, windows), x, kernel, bias)


def _deconvolution(
    cap: Cap, func: Any, y: Array, kernel: Array, bias: Any, *_: Any
) -> Array | None:
    """Compute a deconvolution in parts; None leaves it to Chainer."""
    image = func.outs if hasattr(func, "outs") else (func.outh, func.outw)
    windows = windows_of(func, tuple(image), kernel.shape[2:])._replace(outs=y.shape[2:])
    if len(kernel) % func.groups or _is_left(cap, func, y):
        return None
    positions = len(y) * prod(windows.outs)
    if _is_whole(cap, y, positions * func.groups * kernel[0].size + y.size):
        return None
    return convolve_back(_call(cap, func, y, windows), y, kernel, bias)


def _kernel_gradient(cap: Cap, func: Any, x: Array, y: Array, *_: Any) -> Array | None:
    if _is_left(cap, func, x):
        return None
    kernel = func.ksize if hasattr(func, "ksize") else (func.kh, func.kw)
    windows = windows_of(func, x.shape[2:], kernel)._replace(outs=y.shape[2:])
    positions = len(y) * prod(windows.outs)
    if _is_whole(cap, y, 2 * positions * x.shape[1] * prod(windows.kernel) + y.size):
        return None
    return kernel_gradient(_call(cap, func, x, windows), x, y, func.W_dtype)


def _is_left(cap: Cap, func: Any, array: Array) -> bool:
    """Tell whether Chainer's own code must run: with iDeep, or for sums of float16 that must be
    exact.
    """
    is_chance = cap.exact and array.dtype == "float16" and isinstance(array, np.ndarray)
    return is_chance or bool(getattr(func, "_use_ideep", False))


def _is_whole(cap: Cap, array: Array, elements: int) -> bool:
    """Tell whether Chainer computes a call on a GPU itself, because its workspace fits the cap.

    On a GPU each part costs launches. On NumPy parts are as fast, because their columns stay in the
    processor's cache.

    Args:
        cap: the cap in force.
        array: an input.
        elements: the number of elements in the columns, their copies and a copy of the outputs.
    """
    return not isinstance(array, np.ndarray) and elements * array.itemsize <= cap.nbytes


def _call(cap: Cap, func: Any, array: Array, windows: Windows) -> ConvolutionCall:
    return ConvolutionCall(backend.get_array_module(array), windows, func.groups, cap, func.label)


def windows_of(func: Any, image: Sizes, kernel: Sizes, cover_all: bool | None = None) -> Windows:
    """Return the windows of a two-dimensional or n-dimensional function."""
    if hasattr(func, "stride"):
        stride, pad = func.stride, func.pad
        dilate = getattr(func, "dilate", (1,) * len(image))
    else:
        stride, pad = (func.sy, func.sx), (func.ph, func.pw)
        dilate = (getattr(func, "dy", 1), getattr(func, "dx", 1))
    if cover_all is None:
        cover_all = bool(func.cover_all)
    outs = tuple(
        get_conv_outsize(size, k, s, p, cover_all=cover_all, d=d)
        for size, k, s, p, d in zip(image, kernel, stride, pad, dilate, strict=True)
    )
    return Windows(tuple(image), outs, tuple(kernel), tuple(stride), tuple(pad), tuple(dilate))


# -- poolings ------------------------------------------------------------------------------------


def _pooled(func: Any, image: Sizes, cover_all: bool | None = None) -> Windows:
    kernel = func.ksize if hasattr(func, "ksize") else (func.kh, func.kw)
    return windows_of(func, image, kernel, cover_all)


def _max(cap: Cap, func: Any, inputs: tuple[Array]) -> Array | None:
    (x,) = inputs
    windows = _pooled(func, x.shape[2:])
    if min(windows.outs) < 1:
        return None
    func._in_shape, func._in_dtype = x.shape, x.dtype  # as Chainer's forward leaves them
    y, func.indexes = largest(Planes(windows, cap), x)
    return y


def _max_gradient(cap: Cap, node: Any, inputs: tuple[Array]) -> Array:
    (y,), func = inputs, node.func
    windows = _pooled(func, func._in_shape[2:])._replace(outs=y.shape[2:])
    places = backend.from_chx(func.indexes)
    return select_back(Planes(windows, cap), y, places, func._in_dtype)


def _max_again(cap: Cap, node: Any, inputs: tuple[Array]) -> Array:
    (x,), func = inputs, node.func
    windows = _pooled(func, x.shape[2:])
    places = backend.from_chx(func.indexes)
    return select(Planes(windows, cap), x, places, -float("inf"))


def _average(cap: Cap, func: Any, inputs: tuple[Array]) -> Array | None:
    """Compute an average pooling in parts; None leaves it to Chainer, which words the error."""
    (x,) = inputs
    is_nd = hasattr(func, "ksize")
    windows = _pooled(func, x.shape[2:], cover_all=bool(func.cover_all) if is_nd else False)
    if min(windows.outs) < 1:
        return None
    planes = Planes(windows, cap)
    divisor: Any = prod(windows.kernel)
    if is_nd:
        func.width = None
        if func.pad_value is None:
            # Chainer's own numbers, so that the quotients have its bits.
            divisor = func.width = func._get_pooling_width(np, x.shape[2:], x.dtype)
    # Privates that Chainer's forward sets, and its backward reads.
    func._in_shape, func._in_dtype = x.shape, x.dtype
    return sum_windows(planes, x, divisor)


def _average_gradient(cap: Cap, node: Any, inputs: tuple[Array]) -> Array | None:
    (y,), func = inputs, getattr(node, "func", node)
    windows = _pooled(func, func._in_shape[2:], cover_all=False)._replace(outs=y.shape[2:])
    divisor = getattr(func, "width", None)
    if divisor is None:
        divisor = prod(windows.kernel)
    elif cap.exact:
        return None  # Chainer divides the given gradient in place, which others may read
    return sum_back(Planes(windows, cap), y, y.dtype, divisor)


# -- the replaced methods ------------------------------------------------------------------------

_CORES = ("_forward_cpu_core", "_forward_gpu_core", "_forward_grouped_convolution")
_ND, _CPU = ("_forward_xp",), ("forward_cpu",)
# `tap.py` replaces the methods named here by its event ``compute``, to which half precision also
# subscribes. `umem.trace.analysis.capping` names the same functions; a test checks that they agree.
RULES: dict[type, Rule] = {
    convolution_2d.Convolution2DFunction: Rule(_CORES, _convolution),
    convolution_2d.Convolution2DGradW: Rule(_CORES, _kernel_gradient),
    deconvolution_2d.Deconvolution2DFunction: Rule(_CORES, _deconvolution),
    convolution_nd.ConvolutionND: Rule(_ND, _convolution),
    convolution_nd.ConvolutionNDGradW: Rule(_ND, _kernel_gradient),
    deconvolution_nd.DeconvolutionND: Rule(_ND, _deconvolution),
    max_pooling_nd.MaxPoolingND: Rule(_CPU, _max),
    max_pooling_nd.MaxPoolingNDGrad: Rule(_CPU, _max_gradient),
    max_pooling_nd.MaxPoolingNDWithIndexes: Rule(_CPU, _max_again),
    average_pooling_2d.AveragePooling2D: Rule(_CPU, _average),
    average_pooling_2d.AveragePooling2DGrad: Rule(_CPU, _average_gradient),
    average_pooling_nd.AveragePoolingND: Rule(_CPU, _average),
    average_pooling_nd.AveragePoolingNDGrad: Rule(_CPU, _average_gradient),
}
"""Replacements by class of function."""
