"""Estimated floating-point operations and memory traffic of Chainer's functions.

A multiply and an add count as two operations. A function that is not in the table counts one
operation for each element of its first input or output, whichever is larger, and reads and writes
every byte once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

Arrays = list[Any]
Estimate = tuple[int, int | None]
"""Operations, and bytes of device memory traffic (None: the inputs' and outputs' bytes)."""


Estimator = Callable[[Any, Arrays, Arrays], Estimate]
"""A function of a FunctionNode, its input arrays and its output arrays."""


def estimator(cls: type) -> Estimator:
    """Return the estimator for a class of functions; unknown classes get a generic one."""
    known = cls.__module__.startswith(("chainer.", "umem."))
    return _RULES.get(cls.__name__, _largest) if known else _largest


def _largest(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate one operation for each element of the first input or output."""
    made: int = outputs[0].size if outputs else 0
    size = inputs[0].size if inputs and inputs[0] is not None else 0
    return (made if made > size else size), None


def _linear(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    return 2 * outputs[0].size * inputs[0].shape[-1], None


def _linear_gradient(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    return 2 * outputs[0].size * inputs[0].shape[0], None


def _matmul(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    left = inputs[0]
    transposed = getattr(func, "transa", False) and left.ndim > 1
    return 2 * outputs[0].size * left.shape[-2 if transposed else -1], None


def columns_bytes(image: Any, windows: Any, kernel: tuple[int, ...]) -> int:
    """Return the bytes of a convolution's columns (im2col), of all groups.

    Args:
        image: (samples, channels, image...).
        windows: the array with an element for each window, (samples, ..., windows...).
        kernel: (..., ..., kernel...).
    """
    return int(prod(image.shape[:2]) * prod(kernel[2:]) * prod(windows.shape[2:]) * image.itemsize)


def _convolution(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate for each output element a product over kernel and input channels of its group.

    Traffic is the product's: columns, kernel and outputs.
    """
    (x, kernel, *_), y = inputs, outputs[0]
    traffic = columns_bytes(x, y, kernel.shape) + kernel.nbytes + y.nbytes
    return 2 * y.size * prod(kernel.shape[1:]), traffic


def _deconvolution(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate a product that writes the columns."""
    (x, kernel, *_), y = inputs, outputs[0]
    traffic = columns_bytes(y, x, kernel.shape) + kernel.nbytes + x.nbytes
    return 2 * x.size * prod(kernel.shape[1:]), traffic


def _convolution_grad_weight(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate for each output gradient element one product with a kernel."""
    (x, gy), gradient = inputs, outputs[0]
    traffic = columns_bytes(x, gy, gradient.shape) + gradient.nbytes + gy.nbytes
    return 2 * gy.size * prod(gradient.shape[1:]), traffic


def _elementwise(count: int) -> Estimator:
    return lambda func, inputs, outputs: (count * inputs[0].size, None)


def _sparse_matmul(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate for each stored entry a gathered row of the dense operand."""
    matrix, x = func.matrix, inputs[0]
    columns = x.shape[1] if x.ndim > 1 else 1
    entries = int(matrix.nnz)
    gathered = entries * columns * x.itemsize
    index = entries * (matrix.data.itemsize + matrix.indices.itemsize)
    return 2 * entries * columns, gathered + index + outputs[0].nbytes


def _gather(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate one read and one write for each output element; the rest of the table is
    untouched.
    """
    index = inputs[0].nbytes if func.label == "EmbedIDFunction" else 0
    return outputs[0].size, 2 * outputs[0].nbytes + index


def _part_linear(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    weights = inputs[-1]
    return 2 * outputs[0].size * weights.shape[-1], None


def _part_linear_grad(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate two products, for W and for x, the second only if its gradient is needed."""
    weights, gy = inputs[-2:]
    return 2 * gy.size * weights.shape[-1] * len(outputs), None


def _part_aggregation(func: Any, inputs: Arrays, outputs: Arrays) -> Estimate:
    """Estimate for each stored entry a gathered row, own or received."""
    x, entries = inputs[0], func.entry_count
    gathered = entries * x.shape[1] * x.itemsize
    return 2 * entries * x.shape[1], gathered + 8 * entries + outputs[0].nbytes


_RULES: dict[str, Estimator] = {
    "EmbedIDFunction": _gather,
    "GetItem": _gather,
    "SelectItem": _gather,
    "LinearFunction": _linear,
    "LinearGradData": _linear_gradient,
    "LinearGradWeight": _linear_gradient,
    "MatMul": _matmul,
    "Convolution2DFunction": _convolution,
    "ConvolutionND": _convolution,
    "Deconvolution2DFunction": _deconvolution,
    "DeconvolutionND": _deconvolution,
    "Convolution2DGradW": _convolution_grad_weight,
    "ConvolutionNDGradW": _convolution_grad_weight,
    "BatchNormalization": _elementwise(8),
    "BatchNormalizationGrad": _elementwise(12),
    "FixedBatchNormalization": _elementwise(4),
    "Softmax": _elementwise(5),
    "LogSoftmax": _elementwise(5),
    "SoftmaxCrossEntropy": _elementwise(6),
    "LSTM": _elementwise(10),
    "SparseMatMul": _sparse_matmul,
    "PartLinear": _part_linear,
    "PartLinearGrad": _part_linear_grad,
    "PartAggregation": _part_aggregation,
}
