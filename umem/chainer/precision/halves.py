"""How Chainer's functions compute with halves on NumPy: as float32, in parts, rounded at the end.

NumPy has no fast arithmetic of halves: an addition takes 58 times that of float32, a product of
matrices ten times. A function that goes element by element, or sample by sample, is computed a part
at a time, whose float32 copies stay in the processor's cache; any other is computed at once, with
float32 copies of all it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import chainer
import numpy as np

from umem.chainer.precision.floats import (
    HALF,
    SINGLE,
    layer_norm_back,
    product,
    quiet,
    rectified,
    to_half,
    to_single,
    where_positive,
)
from umem.predict.techniques.half_copies import MOVES, PART_BYTES
from umem.trace.analysis.capping import CONVOLUTIONS

# -- parts ----------------------------------------------------------------------------------------


def at_once(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute on float32 copies of all inputs; what the function keeps on itself stays float32."""
    return tuple(map(_half, proceed(func, tuple(map(_single, inputs)))))


def elementwise(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute a part of the elements at a time where all inputs have one shape."""
    shape = inputs[0].shape
    arrays = [*inputs, *_held(func).values()]
    if any(x.shape != shape or not x.flags.c_contiguous for x in arrays):
        return by_rows(proceed, func, inputs)
    with _holding(func, lambda array: array.reshape(-1)):
        flat = by_rows(proceed, func, tuple([x.reshape(-1) for x in inputs]))
    return tuple([y.reshape(shape) for y in flat])


def by_rows(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute some of the rows, along the first axis, at a time.

    Inputs of fewer axes, or with one row, are the same for every part. Arrays that the function
    holds, such as a mask, are as the first input.
    """
    ndim = max(x.ndim for x in inputs)
    count = max((x.shape[0] for x in inputs if x.ndim == ndim), default=1) if ndim else 1
    row = max(4 * x.size // max(count, 1) for x in inputs)
    step = max(1, PART_BYTES // max(row, 1))
    if step >= count or any(x.shape != inputs[0].shape for x in _held(func).values()):
        return at_once(proceed, func, inputs)
    is_split = [x.ndim == ndim and x.shape[0] == count for x in inputs]
    whole = [x if split else _single(x) for x, split in zip(inputs, is_split, strict=True)]
    made: list[Any] = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        given = [x[rows] if split else x for x, split in zip(whole, is_split, strict=True)]
        with _holding(func, partial(_rows_of, rows)):
            part = proceed(func, tuple(map(_single, given)))
        if not made:
            made = [np.empty((count, *y.shape[1:]), HALF) for y in part]
        for y, of_part in zip(made, part, strict=True):
            to_half(of_part, out=y[rows])
        del part, given, of_part  # before the next ones are there
    return tuple(made)


def _rows_of(rows: slice, array: Any) -> Any:
    return _single(array[rows])


def _held(func: Any) -> dict[str, Any]:
    """The arrays of NumPy that a function holds as its attributes, but for single numbers."""
    return {
        name: value
        for name, value in vars(func).items()
        if isinstance(value, np.ndarray) and value.ndim
    }


@contextmanager
def _holding(func: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have a function hold other arrays for as long as it computes a part."""
    held = _held(func)
    try:
        for name, array in held.items():
            setattr(func, name, change(array))
        yield
    finally:
        for name, array in held.items():
            setattr(func, name, array)


def _single(x: Any) -> Any:
    return to_single(x) if getattr(x, "dtype", None) == HALF else x


def _half(y: Any) -> Any:
    return to_half(y) if getattr(y, "dtype", None) == SINGLE else y


def convolve(proceed: Proceed, func: Any, x: Any, kernel: Any, bias: Any, *more: Any) -> Any:
    """Convolve, forward or transposed, some samples at a time."""
    kernel, bias = _single(kernel), _single(bias)
    y: Any = None
    for rows in _samples(x):
        (part,) = proceed(func, to_single(x[rows]), kernel, bias, *more)
        if y is None:
            y = np.empty((len(x), *part.shape[1:]), HALF)
        to_half(part, out=y[rows])
        del part  # before the next one is there
    return (y,)


def kernel_gradient(proceed: Proceed, func: Any, x: Any, y: Any, *more: Any) -> Any:
    """Sum a convolution's kernel gradient over some samples at a time, in float32."""
    kind, func.W_dtype = func.W_dtype, SINGLE
    total: Any = None
    try:
        for rows in _samples(x):
            (part,) = proceed(func, to_single(x[rows]), to_single(y[rows]), *more)
            total = part if total is None else np.add(total, part, out=total)
    finally:
        func.W_dtype = kind
    return (total.astype(kind),)


def _samples(x: Any) -> list[slice]:
    """Parts of a batch; one at least, so that an empty batch is Chainer's to judge."""
    step = max(1, 4 * PART_BYTES // max(1, 4 * x.size // max(1, len(x))))
    return [slice(start, start + step) for start in range(0, max(1, len(x)), step)]


# -- which way ------------------------------------------------------------------------------------

Proceed = Callable[..., Any]
Rule = Callable[..., tuple[Any, ...]]


def evaluate(proceed: Proceed, func: Any, inputs: Any) -> Any:
    """Compute a function that `umem.chainer.tap` tells of, by its rule where it reads halves."""
    kinds, name = kinds_of(inputs), type(func).__name__
    if name == "Cast" and {*kinds, np.dtype(func.type)} == {HALF, SINGLE}:
        return _cast(func, inputs[0])
    if HALF not in kinds or name == "Cast":
        return proceed(func, inputs)
    with quiet():
        if kinds == {HALF}:
            return _rule_of(func, inputs)(proceed, func, inputs)
        if name.removesuffix("Grad") in TAKE_BOTH:
            return _normalization(proceed, func, inputs)
        if name == "_SoftmaxCrossEntropyGrad_NoDoubleBackprop" and inputs[0].dtype == HALF:
            return _cross_entropy_gradient(proceed, func, inputs)
        return proceed(func, inputs)


def kinds_of(inputs: Any) -> set[Any]:
    """The types of the floating-point arrays of NumPy among some inputs."""
    return {x.dtype for x in inputs if type(x) is np.ndarray and x.dtype.kind == "f"}


def from_columns(proceed: Proceed, func: Any, *arrays: Any) -> Any:
    """As `evaluate`, for convolutions and poolings; theirs are other arguments."""
    is_pooling = isinstance(arrays[0], tuple)
    if kinds_of(arrays[0] if is_pooling else arrays) != {HALF}:
        return proceed(func, *arrays)
    with quiet():
        if is_pooling:
            return at_once(proceed, func, arrays[0])
        return (kernel_gradient if hasattr(func, "W_dtype") else convolve)(proceed, func, *arrays)


def layer_norm_gradients(proceed: Proceed, func: Any, indexes: Any, gradients: Any) -> Any:
    """Go backward through a layer normalisation at once, which Chainer does in 30 functions."""
    arrays = [func.inputs[0].data, gradients[0].array]
    if chainer.config.enable_backprop or kinds_of(arrays) != {HALF}:
        return proceed(func, indexes, gradients)
    gamma = to_single(func.inputs[1].data)
    with quiet():
        found = layer_norm_back(arrays[0], gamma, arrays[1], func.eps)
    return tuple([chainer.Variable(_half(found[index])) for index in indexes])


def _rule_of(func: Any, inputs: tuple[Any, ...]) -> Rule:
    name = type(func).__name__
    if name in MOVES:
        return _as_they_are
    if name in _OWN:
        return _OWN[name]
    if func.is_elementwise or name in ELEMENTWISE:
        return elementwise
    if name in SAMPLEWISE and getattr(func, "axis", 1) not in (0, -inputs[0].ndim):
        return by_rows
    return at_once


def _as_they_are(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    return proceed(func, inputs)


def _linear(_: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    func._config_use_ideep = chainer.config.use_ideep  # as Chainer's forward leaves it
    func.retain_inputs((0, 1))
    return (_PRODUCTS[type(func).__name__](*inputs),)


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "LinearFunction": lambda x, kernel, bias=None: product(x, kernel.T, bias),
    "LinearGradData": lambda kernel, gy: product(gy, kernel),
    "LinearGradWeight": lambda x, gy: product(gy.T, x),
}


def _matmul(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    a, b = inputs
    if a.ndim == b.ndim == 2 and not func.transc:
        func.retain_inputs((0, 1))
        return (product(a.T if func.transa else a, b.T if func.transb else b),)
    if a.ndim == b.ndim > 2 and len(a) == len(b):
        return by_rows(proceed, func, inputs)
    return at_once(proceed, func, inputs)


def _cross_entropy(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    """The loss in float32, of scores that stay halves: some samples at a time."""
    x, t = inputs
    whole, func.reduce = func.reduce, "no"
    try:
        parts = [proceed(func, (to_single(x[rows]), t[rows]))[0] for rows in _samples(x)]
    finally:
        func.reduce = whole
    loss = np.concatenate(parts)
    if whole == "no":
        return (loss,)
    count = (t != func.ignore_label).sum() if func.normalize else len(x)
    func._coeff = 1.0 / max(count, 1)  # as Chainer's forward leaves it
    return (np.asarray(loss.sum(dtype=float) * func._coeff, SINGLE),)


def _cross_entropy_gradient(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    x, t, gy = inputs
    gx = np.empty(x.shape, HALF)
    for rows in _samples(x):
        of_rows = gy if gy.ndim == 0 else gy[rows]
        to_half(proceed(func, (to_single(x[rows]), t[rows], of_rows))[0], out=gx[rows])
    return (gx,)


def _sum(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    (x,) = inputs
    if func.axis is not None and not {0, -x.ndim} & {*func.axis}:
        return by_rows(proceed, func, inputs)
    count = len(x) if x.ndim else 1
    step = max(1, PART_BYTES * count // max(1, 4 * x.size))
    if step >= count:
        return at_once(proceed, func, inputs)
    parts = (to_single(x[start : start + step]) for start in range(0, count, step))
    total = sum(part.sum(axis=func.axis, keepdims=func.keepdims) for part in parts)
    return (to_half(np.asarray(total)),)


def _normalization(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    y, *of_parameters = proceed(func, tuple(map(_single, inputs)))
    return (to_half(y), *of_parameters)  # parameters and their gradients are float32


def _cast(func: Any, x: Any) -> Any:
    func._in_type = x.dtype.type  # as Chainer's forward leaves it
    return (to_half(x) if np.dtype(func.type) == HALF else to_single(x),)


def _dropout(proceed: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    (x,) = inputs
    if func.mask is None:
        kept = np.random.rand(*x.shape) >= func.dropout_ratio  # as Chainer draws
        func.mask = kept * HALF.type(1 / (1 - func.dropout_ratio))
    return elementwise(proceed, func, inputs)


def _relu(_: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    func.retain_outputs((0,))
    return (rectified(inputs[0]),)


def _relu_gradient(_: Proceed, func: Any, inputs: tuple[Any, ...]) -> Any:
    return (where_positive(func.b, inputs[0]),)


_OWN: dict[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, _linear),
    **dict.fromkeys(CONVOLUTIONS, _as_they_are),  # as from columns
    "Dropout": _dropout,
    "MatMul": _matmul,
    "SoftmaxCrossEntropy": _cross_entropy,
    "ReLU": _relu,
    "ReLUGrad2": _relu_gradient,
    "Sum": _sum,
}


ELEMENTWISE = frozenset((
    "ClippedReLU", "ClippedReLUGrad2", "Clip", "ClipGrad", "Cos", "DropoutGrad",
    "ELU", "ELUGrad",
    "Erf", "Exp", "HardSigmoid", "HardSigmoidGrad", "LeakyReLU", "Log", "Log1p", "ReLUGrad2",
    "Sigmoid", "SigmoidGrad", "Sin", "Softplus", "SoftplusGrad", "Sqrt", "Square", "Tanh",
    "TanhGrad", "_LeakyReLUGrad",
))  # fmt: skip
"""Functions beside Chainer's own list that go element by element and keep nothing of it."""
SAMPLEWISE = frozenset(("LayerNormalization", "LogSoftmax", "Softmax", "_SoftmaxGrad"))
"""Functions of which each row goes by itself, unless they go along the first axis."""
TAKE_BOTH = frozenset((
    "BatchNormalization", "DecorrelatedBatchNormalization", "FixedBatchNormalization",
    "FixedDecorrelatedBatchNormalization",
))  # fmt: skip
"""Normalisations of Chainer that compute halves in the type of their parameters, by themselves."""
