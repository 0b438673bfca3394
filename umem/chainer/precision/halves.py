"""What goes on while any model is in half precision: types suited to functions, and their values.

There is one subscriber for all models. It acts on what reads a half and nothing else: a model in
float32 beside one in half precision computes as ever.
"""

from __future__ import annotations

import threading
from typing import Any

import chainer
from chainer.function import FunctionAdapter

from umem.chainer.precision import parts
from umem.chainer.precision.floats import HALF, SINGLE, constant_to_half, quiet
from umem.chainer.precision.masters import Masters
from umem.chainer.tap import Proceed, Subscriber, subscribe, unsubscribe

_RUNS_FORWARD = ("Forget", "Checkpoint")
"""Functions whose backward runs a program's forward again, in which types are suited as in it."""


class _InHalves(Subscriber):
    """Suits types in forward, and computes halves on NumPy as float32."""

    place = -2

    def __init__(self) -> None:
        self._here = threading.local()
        self._holders: list[Masters] = []

    def hold(self, masters: Masters) -> None:
        """Be on for a model, whose masters are shown every function's inputs first."""
        self._holders = [*self._holders, masters]
        subscribe(self)

    def let_go(self, masters: Masters) -> None:
        """Be off with the last one."""
        self._holders = [one for one in self._holders if one is not masters]
        if not self._holders:
            unsubscribe(self)
        if self._holders:  # another thread came in between
            subscribe(self)

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Give a function the types that suit it; in backward they are right already."""
        if getattr(self._here, "is_backward", False):
            return proceed(func, inputs)
        for masters in self._holders:
            masters.adopt(inputs)
        given = suited(func, inputs)
        if given is inputs and not any(x.dtype == HALF for x in inputs):
            return proceed(func, inputs)
        with quiet():
            return proceed(func, given)

    def backprop_step(self, proceed: Proceed, func: Any, *args: Any) -> None:
        """Leave types alone while a function computes its gradients."""
        before = getattr(self._here, "is_backward", False)
        self._here.is_backward = type(func).__name__ not in _RUNS_FORWARD
        try:
            proceed(func, *args)
        finally:
            self._here.is_backward = before

    def backward(self, proceed: Proceed, *args: Any, **kwargs: Any) -> None:
        """Let gradients overflow without a warning."""
        with quiet():
            proceed(*args, **kwargs)

    def evaluate(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Compute halves on NumPy as float32."""
        return parts.evaluate(proceed, func, inputs)

    def compute(self, proceed: Proceed, func: Any, *arrays: Any) -> Any:
        """The same for what computes from columns."""
        if isinstance(arrays[0], tuple):  # a pooling
            if not parts.are_halves(arrays[0]):
                return proceed(func, *arrays)
            with quiet():
                return parts.at_once(proceed, func, arrays[0])
        if not parts.are_halves(arrays):
            return proceed(func, *arrays)
        computes = parts.kernel_gradient if hasattr(func, "W_dtype") else parts.convolve
        with quiet():
            return computes(proceed, func, *arrays)


halves = _InHalves()


# -- types ----------------------------------------------------------------------------------------

HALVES = frozenset((
    "BilinearFunction", "Convolution2DFunction", "ConvolutionND", "Deconvolution2DFunction",
    "DeconvolutionND", "EinSum", "LinearFunction", "LocalConvolution2DFunction", "MatMul",
    "TensorDot",
))  # fmt: skip
"""Products: what they are given becomes half."""
SINGLES = frozenset((
    "BatchDet", "BatchInv", "BatchL2NormSquared", "BatchMatMul", "Cholesky", "Cumprod", "Cumsum",
    "FFT", "Inv", "LogSoftmax", "LogSumExp", "Mean", "NormalizeL2", "Prod", "Sum",
))  # fmt: skip
"""Sums, and what NumPy or Chainer has in float32 only; beside losses and evaluations."""
SINGLE_MODULES = ("chainer.functions.loss.", "chainer.functions.evaluation.")
TAKE_BOTH = frozenset((
    "BatchNormalization", "DecorrelatedBatchNormalization", "FixedBatchNormalization",
    "FixedDecorrelatedBatchNormalization",
))  # fmt: skip
"""Normalisations of Chainer that compute halves in the type of their parameters, by themselves."""
LIKE_FIRST = frozenset(("GroupNormalization", "LayerNormalization", "LocalResponseNormalization"))
"""Normalisations that want their parameters in the type of what they normalise."""


def suited(func: Any, inputs: Any) -> Any:
    """The inputs of a function in the types that it is to have; casts are part of the graph.

    Only what reads a half, and is Chainer's own, is given anything but what it was given.
    """
    kinds = [x.dtype for x in inputs]
    kind = type(func)
    if HALF not in kinds or not kind.__module__.startswith("chainer."):
        return inputs
    name = kind.__name__
    if name in SINGLES or kind.__module__.startswith(SINGLE_MODULES):
        if name == "SoftmaxCrossEntropy":
            func.cache_score = False  # it would keep a second float32 array as large as its input
        return tuple([_as_single(x) for x in inputs])
    if kind is FunctionAdapter or name in TAKE_BOTH:
        return inputs
    if name in HALVES or (name in LIKE_FIRST and kinds[0] == HALF):
        return tuple([_as_half(x) for x in inputs])
    return _alike(inputs)


def _alike(inputs: Any) -> Any:
    """All in one type: constants as halves, then float32 where one is left that is not half."""
    if all(x.dtype == HALF or x.dtype.kind != "f" for x in inputs):
        return inputs
    inputs = tuple([_as_half(x) if _is_constant(x) else x for x in inputs])
    if all(x.dtype == HALF or x.dtype.kind != "f" for x in inputs):
        return inputs
    return tuple([_as_single(x) for x in inputs])


def _is_constant(x: Any) -> bool:
    return not isinstance(x, chainer.Variable) or not x.requires_grad


def _as_half(x: Any) -> Any:
    if x.dtype == HALF or x.dtype.kind != "f":
        return x
    if not isinstance(x, chainer.Variable):
        return constant_to_half(x)
    if not x.requires_grad:
        return chainer.Variable(constant_to_half(x.array), name=x.name, requires_grad=False)
    return chainer.functions.cast(x, HALF)


def _as_single(x: Any) -> Any:
    return chainer.functions.cast(x, SINGLE) if x.dtype == HALF else x
