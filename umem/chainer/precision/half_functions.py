"""Chainer's functions in mixed precision: which compute in float16, and which in float32."""

from __future__ import annotations

from umem.trace import Kernels

PRODUCTS = frozenset((
    "Convolution2DFunction", "ConvolutionND", "Deconvolution2DFunction", "DeconvolutionND",
    "EinSum", "LinearFunction", "LocalConvolution2DFunction", "MatMul", "TensorDot",
))  # fmt: skip
"""Functions that compute in float16."""
SUMS = frozenset((
    "BatchDet", "BatchInv", "BatchL2NormSquared", "BatchMatMul", "BilinearFunction", "Cholesky",
    "Cumprod", "Cumsum", "FFT", "Inv", "LogSoftmax", "LogSumExp", "Mean", "NormalizeL2", "Prod",
    "ROIAverageAlign2D", "ROIMaxAlign2D", "ResizeImages", "Sum",
))  # fmt: skip
"""Functions that compute in float32: sums, and those that NumPy or Chainer has only in float32."""
MOVES = frozenset((
    "AsStrided", "Broadcast", "BroadcastTo", "Concat", "Copy", "Depth2Space", "Diagonal", "Dstack",
    "EmbedIDFunction", "ExpandDims", "Flip", "FlipLR", "FlipUD", "GetItem", "Hstack", "Identity",
    "Moveaxis", "Pad", "PadSequence", "Permutate", "Repeat", "Reshape", "Rollaxis", "SelectItem",
    "Separate", "Shift", "Space2Depth", "SplitAxis", "Squeeze", "Stack", "Swapaxes", "Tile",
    "Transpose", "TransposeSequence", "Vstack", "Where",
))  # fmt: skip
"""Functions that do not compute: their outputs hold their inputs' numbers."""
MASTER_LAUNCHES, MASTER_BYTES = 7, 38
"""Kernels of the update of a float16 parameter with a master, and the bytes an element that they
move beside the update itself: the master is compared with its parameter, in three kernels (18
bytes), the gradient is cast and divided by the scale (14), the parameter rounded from its master
(6). umem/chainer/precision/masters.py, catch_up and update."""


def master_kernels(elements: int) -> Kernels:
    """Return the kernels of the update of a parameter with a master."""
    return Kernels(MASTER_LAUNCHES, MASTER_BYTES * elements)
