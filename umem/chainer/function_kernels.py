"""The kernels that Chainer's functions launch on CuPy, read in Chainer's and CuPy's source.

`launches` gives a rule for a function's class: how many kernels it launches, and the traffic of
those beside the main one (`umem.trace.events.Kernels`). A function without a rule launches one. All
files are Chainer 7.8's unless another is named; CuPy 14 has no cuDNN, so convolutions use im2col:

    forward    im2col writes the columns; ``tensordot`` copies them with the axes of the sum first,
               if more than one sample is between; one product; the bias is added in place
    kernel's   im2col and the copy again, and one of the gradient of the outputs
    gradient
    adjoint    one product writes the columns; col2im sums them into the image

Models: launches and traffic of float32 on CuPy. Does not model: kernels of a reduction in two
passes, casts in half precision, and the copies of transposed operands of convolutions in groups by
``cupy.matmul``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from umem.chainer.flops import columns_bytes
from umem.trace import Kernels
from umem.trace.recording import root_of

Arrays = list[Any]
Rule = Callable[[Any, Arrays, Arrays], Kernels | None]
"""A function of a FunctionNode, its input arrays and its output arrays; None: one kernel."""
NO_KERNEL = Kernels(0)
VIEWS = frozenset((
    "BroadcastTo", "Diagonal", "ExpandDims", "GetItem", "Moveaxis", "Reshape", "Rollaxis",
    "Separate", "SplitAxis", "Squeeze", "Swapaxes", "Transpose",
))  # fmt: skip
"""Functions whose outputs are views of their input, or copies if no view is possible."""


def launches(cls: type) -> Rule | None:
    """Return the rule for a class of functions; None: its functions launch one kernel."""
    known = cls.__module__.startswith(("chainer.", "umem."))
    return _RULES.get(cls.__name__) if known else None


# -- convolutions: functions/connection/{convolution_2d,deconvolution_2d}.py, utils/conv.py -------


def _convolution(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels:
    x, y = inputs[0], outputs[0]
    columns = columns_bytes(x, y, inputs[1].shape)
    copies = _is_copied(y)
    bias = len(inputs) > 2 and inputs[2] is not None
    moved = x.nbytes + columns + copies * 2 * columns + bias * 2 * y.nbytes
    return Kernels(2 + copies + bias, moved, columns)


def _kernel_gradient(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels:
    x, gy = inputs
    columns = columns_bytes(x, gy, outputs[0].shape)
    copies = _is_copied(gy)
    by_position = gy.transpose(0, *range(2, gy.ndim), 1).flags.c_contiguous
    turned = copies and not by_position
    moved = x.nbytes + columns + copies * 2 * columns + turned * 2 * gy.nbytes
    return Kernels(2 + copies + turned, moved, columns)


def _deconvolution(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels:
    x, y = inputs[0], outputs[0]
    columns = columns_bytes(y, x, inputs[1].shape)
    turned = _is_copied(x)
    bias = len(inputs) > 2 and inputs[2] is not None
    moved = columns + y.nbytes + turned * 2 * x.nbytes + bias * 2 * y.nbytes
    return Kernels(2 + turned + bias, moved, columns)


def _is_copied(outputs: Any) -> bool:
    """Tell whether ``tensordot`` copies its operand, between several samples' positions.

    cupy/linalg/_product.py: the axes of the sum are moved, and then reshaped to one.
    """
    return len(outputs) > 1 and prod(outputs.shape[2:]) > 1


# -- products -------------------------------------------------------------------------------------


def _linear(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels | None:
    """Count a product and, with a bias, the addition in place: functions/connection/linear.py."""
    has_bias = len(inputs) > 2 and inputs[2] is not None
    return Kernels(2, 2 * outputs[0].nbytes) if has_bias else None


def _matmul(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels | None:
    """Count the copies that ``cupy.matmul`` takes of stacks of transposed matrices."""
    copied = 0
    count = 1
    turns = getattr(func, "transa", False), getattr(func, "transb", False)
    for array, turned in zip(inputs, turns, strict=True):
        if array.ndim > 2:
            given = array.swapaxes(-1, -2) if turned else array
            if not given.flags.c_contiguous:
                count, copied = count + 1, copied + 2 * array.nbytes
    return Kernels(count, copied)


# -- normalisations, losses, activations ----------------------------------------------------------


def _fixed(launch_count: int, passes: float) -> Rule:
    """Return the rule of ``launch_count`` kernels, which move the first input ``passes`` times
    beside the main one.
    """
    return lambda func, inputs, outputs: Kernels(launch_count, round(passes * inputs[0].nbytes))


def _one_an_input(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels:
    return Kernels(len(inputs))


def _view(func: Any, inputs: Arrays, outputs: Arrays) -> Kernels | None:
    """Count nothing if the outputs are on the input's memory."""
    root = root_of(inputs[0])
    return NO_KERNEL if all(root_of(y) is root for y in outputs) else None


_RULES: dict[str, Rule] = {
    "Convolution2DFunction": _convolution,
    "ConvolutionND": _convolution,
    "Convolution2DGradW": _kernel_gradient,
    "ConvolutionNDGradW": _kernel_gradient,
    "Deconvolution2DFunction": _deconvolution,
    "DeconvolutionND": _deconvolution,
    "LinearFunction": _linear,
    "MatMul": _matmul,
    "BatchNormalization": _fixed(9, 3),  # normalization/batch_normalization.py: mean, var twice
    "BatchNormalizationGrad": _fixed(6, 9),  # x_hat in two kernels, its product with gy, two sums
    "LayerNormalization": _fixed(10, 10),  # normalization/layer_normalization.py, array by array
    "Softmax": _fixed(5, 6),  # activation/softmax.py: max, subtract, exp, sum, divide
    "_SoftmaxGrad": _fixed(4, 6),
    "LogSoftmax": _fixed(7, 6),  # activation/log_softmax.py, with logsumexp
    "LogSoftmaxGrad": _fixed(4, 5),
    "SoftmaxCrossEntropy": _fixed(13, 9),  # loss/softmax_cross_entropy.py: log_softmax, exp, count
    "Dropout": _fixed(3, 5),  # noise/dropout.py: random numbers, drawn and then taken modulo 1
    "SparseMatMul": _fixed(2, 0),  # cupyx/cusparse.py, spmm: zeros first
    "EmbedIDGrad": _fixed(2, 0),
    "Concat": _one_an_input,
    "Stack": _one_an_input,
    **dict.fromkeys(VIEWS, _view),
}
