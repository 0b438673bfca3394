"""Checks that gradients keep 8-bit states finite, on NumPy and CuPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from chainer.backends import cuda

LARGEST = 1.8446743e19
"""Squares of larger values overflow float32."""
CHUNK = 256 << 10
Named = tuple[str, Any]


def first_unsafe(gradients: Iterable[Named], largest: float = LARGEST) -> Named | None:
    """Find the first named array with a value not finite or too large; None if there is none.

    Reads each array once, and synchronises once for all arrays of CuPy.

    Args:
        gradients: arrays with their names.
        largest: the largest absolute value that is allowed.
    """
    named = list(gradients)
    is_on_gpu = any(not isinstance(grad, np.ndarray) for _, grad in named)
    flags = cuda.cupy.zeros(len(named), dtype=bool) if is_on_gpu else None
    unsafe = np.zeros(len(named), dtype=bool)
    for index, (_, grad) in enumerate(named):
        if isinstance(grad, np.ndarray):
            unsafe[index] = _is_unsafe(grad, largest)
        elif flags is not None and grad.size:
            _unsafe()(grad, np.float64(largest), flags[index : index + 1].reshape(()))
    if flags is not None:
        unsafe |= cuda.cupy.asnumpy(flags)
    return named[int(unsafe.argmax())] if unsafe.any() else None


def why(grad: Any, largest: float = LARGEST) -> str:
    """Describe what is wrong with a gradient: how many values, and where the first is."""
    values = np.asarray(cuda.to_cpu(grad), np.float64)
    finite = np.isfinite(values)
    wrong = ~(np.abs(values) <= largest)
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    what = "NaN or infinity" if not finite.all() else f"beyond {largest:.1e} in size"
    return f"{int(wrong.sum())} of {values.size} values are {what}, the first at {where}"


def _is_unsafe(grad: np.ndarray[Any, Any], largest: float) -> bool:
    """Check an array chunk by chunk, without temporaries larger than the cache."""
    flat = grad.reshape(-1) if grad.flags.c_contiguous else grad.flat
    for start in range(0, grad.size, CHUNK):
        part = flat[start : start + CHUNK]
        if not (_is_clearly_safe(part, largest) or _is_within(part, largest)):
            return True
    return False


def _is_clearly_safe(part: np.ndarray[Any, Any], largest: float) -> bool:
    """Tell whether a float32 sum of squares is finite, which proves in one pass that each square
    is.
    """
    if part.dtype != np.float32 or largest < LARGEST:
        return False
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(part, part)))


def _is_within(part: np.ndarray[Any, Any], largest: float) -> bool:
    # As floats of Python: infinity is what LARGEST is in 16 bits.
    return float(part.max()) <= largest and float(part.min()) >= -largest


def _unsafe() -> Any:
    return cuda.reduce(
        "T x, float64 largest", "bool y", "!(abs((double)x) <= largest)", "a || b", "y = a",
        "false", "umem_unsafe_gradient",
    )  # fmt: skip
