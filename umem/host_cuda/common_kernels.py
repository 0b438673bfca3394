"""A CuPy program with the most common kernels; running it compiles them in advance."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from umem.host_cuda.installing import open_host_cuda

DTYPES = ("float32", "float64", "int32", "int64", "bool")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_FUNCTIONS = ("negative", "absolute", "square", "sqrt", "exp", "log", "tanh", "isfinite")
_REDUCTIONS = ("sum", "prod", "mean", "max", "min", "argmax", "argmin", "any", "all")


def calls(cupy: Any, dtype: str, others: tuple[str, ...] = DTYPES) -> Iterator[Callable[[], Any]]:
    """Yield functions that compile common kernels of a dtype by running them."""
    x, y = (cupy.arange(1, 7).astype(dtype).reshape(2, 3) for _ in range(2))
    number = True if dtype == "bool" else x.dtype.type(2).item()
    order, mask = cupy.arange(2), cupy.array([True, False])
    for name in (*_ARITHMETIC, *_COMPARISONS):
        function = getattr(operator, name)
        yield partial(function, x, y)
        yield partial(function, x, number)
        yield partial(function, x, y[0])
    for name in ("maximum", "minimum"):
        yield partial(getattr(cupy, name), x, y)
        yield partial(getattr(cupy, name), x, number)
    yield from (partial(getattr(cupy, name), x) for name in _FUNCTIONS)
    for name in _REDUCTIONS:
        yield from (partial(getattr(x, name), axis=axis) for axis in (None, 0, 1))
    yield from (partial(x.astype, other) for other in others)
    yield from (partial(make, (2, 3), dtype) for make in (cupy.zeros, cupy.ones))
    yield partial(cupy.full, (2, 3), number, dtype)
    yield partial(cupy.where, mask[:, None], x, y)
    yield partial(cupy.concatenate, [x, y])
    yield partial(cupy.ascontiguousarray, x.T)
    yield x[:, ::2].copy
    yield from (partial(x.take, order, axis) for axis in (None, 0, 1))
    yield from (partial(operator.getitem, x, index) for index in (order, mask))
    if dtype != "bool":
        yield x.cumsum


def run(part: int, parts: int, dtypes: tuple[str, ...]) -> int:
    """Run one part of the program; returns the number of calls that CuPy refused."""
    warnings.simplefilter("ignore")
    open_host_cuda("t4", force=True)
    import cupy

    refused = 0
    for dtype in dtypes:
        for number, call in enumerate(calls(cupy, dtype)):
            if number % parts == part:
                try:
                    call()
                except TypeError:  # a dtype without such a function
                    refused += 1
    return refused


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), tuple(sys.argv[3:]))
