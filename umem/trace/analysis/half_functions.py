"""Chainer's functions in mixed precision: which compute in float16, and which in float32.

`umem.chainer.half_precision` and its prediction from a float32 trace follow the same lists.
"""

from __future__ import annotations

PRODUCTS = frozenset((
    "Convolution2DFunction", "ConvolutionND", "Deconvolution2DFunction", "DeconvolutionND",
    "EinSum", "LinearFunction", "LocalConvolution2DFunction", "MatMul", "TensorDot",
    "Conv", "ConvTranspose", "Einsum", "Gemm",
))  # fmt: skip
"""Functions that compute in float16, by Chainer's and ONNX's names."""
SUMS = frozenset((
    "BatchDet", "BatchInv", "BatchL2NormSquared", "BatchMatMul", "BilinearFunction", "Cholesky",
    "Cumprod", "Cumsum", "FFT", "Inv", "LogSoftmax", "LogSumExp", "Mean", "NormalizeL2", "Prod",
    "ROIAverageAlign2D", "ROIMaxAlign2D", "ResizeImages", "Sum",
))  # fmt: skip
"""Functions that compute in float32: sums, and those that NumPy or Chainer has in float32 only."""
MOVES = frozenset((
    "AsStrided", "Broadcast", "BroadcastTo", "Concat", "Copy", "Depth2Space", "Diagonal", "Dstack",
    "EmbedIDFunction", "ExpandDims", "Flip", "FlipLR", "FlipUD", "GetItem", "Hstack", "Identity",
    "Moveaxis", "Pad", "PadSequence", "Permutate", "Repeat", "Reshape", "Rollaxis", "SelectItem",
    "Separate", "Shift", "Space2Depth", "SplitAxis", "Squeeze", "Stack", "Swapaxes", "Tile",
    "Transpose", "TransposeSequence", "Vstack", "Where",
))  # fmt: skip
"""Functions that compute nothing: their outputs hold their inputs' numbers."""
