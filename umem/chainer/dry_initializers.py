"""Parameters in a dry run: large ones are zeros on the host, which cost no time and no memory.

A dry GPU does not copy them, so that their values are never needed.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import chainer
import numpy as np

from umem.chainer.tap import Proceed, Subscriber, subscribe
from umem.devices import is_dry

LIMIT_BYTES = 1 << 20
"""Arrays up to this size are drawn, which takes milliseconds: a guess, not measured."""


class LeftOutInitializers(Subscriber):
    """Makes Chainer's initializers fill only small arrays of NumPy; larger ones are zeros."""

    def __init__(self) -> None:
        self._zeros: dict[int, weakref.ref[Any]] = {}

    def generate(
        self,
        proceed: Proceed,
        initializer: Any,
        shape: Any,
        xp: Any,
        dtype: Any = None,
        device: Any = None,
    ) -> Any:
        """Make a large array by `numpy.zeros`, which no initializer of Chainer's fills."""
        own = getattr(initializer, "dtype", None)
        found = chainer.get_dtype(own if dtype is None else dtype)
        size = shape if isinstance(shape, int) else prod(shape)
        is_refused = own is not None and found != own
        is_chainers = type(initializer).__module__.startswith("chainer.initializers.")
        is_large = size * found.itemsize > LIMIT_BYTES
        if xp is not np or is_refused or not (is_large and is_chainers):
            return proceed(initializer, shape, xp, dtype, device)
        return self._made(shape, found)

    def _made(self, shape: Any, dtype: Any) -> Any:
        array = np.zeros(shape, dtype)
        key = id(array)
        self._zeros[key] = weakref.ref(array, lambda _: self._zeros.pop(key, None))
        return array

    def initialize(self, proceed: Proceed, initializer: Any, array: Any) -> None:
        """Make a large array zero; one from `generate`, such as an LSTM's, is filled in parts."""
        if not isinstance(array, np.ndarray) or array.nbytes <= LIMIT_BYTES:
            proceed(initializer, array)
            return
        root = array if array.base is None else array.base
        known = self._zeros.get(id(root))
        if known is None or known() is not root:
            array[...] = 0

    def make_parameter(self, proceed: Proceed, parameter: Any, *args: Any, **kwargs: Any) -> None:
        """Free the memory of a large gradient, which Chainer fills with NaN."""
        proceed(parameter, *args, **kwargs)
        # Chainer's private: a parameter without a shape yet raises when its gradient is read.
        grad = parameter.grad if parameter._grad_valid else None
        if isinstance(grad, np.ndarray) and grad.nbytes > LIMIT_BYTES:
            parameter.grad = self._made(grad.shape, grad.dtype)


def leave_out_initializers() -> None:
    """Fill no large parameters on the host from now on, if the process has a dry GPU."""
    if is_dry():
        subscribe(LeftOutInitializers())
