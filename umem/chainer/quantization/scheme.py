"""Quantisation of numbers: weights symmetric by channel in 8 or 4 bits, inputs by tensor.

Weights: a row's largest magnitude is the largest code, 127 or 7, zero is zero, and the codes are
symmetric: as Krishnamoorthi (2018, section 3.1) recommends, one scale a row (a channel). In 4 bits
a row may have groups, each with an integer from 1 to 18 by which its codes are multiplied (Dai et
al. 2021, VS-Quant), so that products stay integers of at most 7 * 18 = 126.

Inputs: one scale a tensor and a zero point, so that the range need not be symmetric: after a relu
nothing is below zero, and a symmetric code would waste one bit of eight (Jacob et al. 2018, section
2.1, equation 1). The range contains zero, and zero is a code, so that padding is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from chainer.backend import get_array_module

from umem.errors import QuantizationError

CHUNK = 1 << 18
"""Weights converted at once: 1 MiB of float32, which fits a core's cache. A guess, not
measured."""
MOST_OF_GROUP = 18
"""Largest multiplier of a group: with 19, a code of 7 would exceed 127."""
_GROUPS = (8, 16, 32, 64, 128, 256, 512)
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Scheme:
    """The parameters of a quantisation.

    Attributes:
        bits: of a weight, 8 or 4.
        activation_bits: of an input, 8 or 4.
        group: columns of a row that share a multiplier, in 4 bits; None if a row has only its
            scale.

    Raises:
        QuantizationError: another value.
    """

    bits: int = 8
    activation_bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        """Check the values, and convert them to int for JSON."""
        for name, allowed in (("bits", (8, 4)), ("activation_bits", (8, 4)), ("group", _GROUPS)):
            value = getattr(self, name)
            if name == "group" and value is None:
                continue
            is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not is_whole or value not in allowed:
                raise QuantizationError(f"{name} is {_either(name, allowed)}, not {value!r}")
            object.__setattr__(self, name, int(value))  # JSON has no integers of NumPy
        if self.group is not None and self.bits == 8:
            raise QuantizationError("groups are for weights of 4 bits: leave out group, or bits=4")

    @property
    def largest(self) -> int:
        """Return the largest code of a weight."""
        return 127 if self.bits == 8 else 7

    @property
    def levels(self) -> int:
        """Return the largest code of an input, one less than the number of its codes."""
        return int(2**self.activation_bits) - 1


def _either(name: str, allowed: tuple[int, ...]) -> str:
    if name == "group":
        return f"None or one of {', '.join(map(str, allowed))}"
    return " or ".join(map(str, allowed))


# -- weights -----------------------------------------------------------------------------------


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Split rows into runs of at most `CHUNK` numbers, or one row."""
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def column_chunks(columns: int) -> Iterator[slice]:
    """Split a row longer than `CHUNK` into runs of at most that; groups are not split."""
    for start in range(0, columns, CHUNK):
        yield slice(start, min(start + CHUNK, columns))


def encode_rows(weight: Any, scheme: Scheme) -> tuple[Any, Any, Any]:
    """Quantise the rows of a weight to codes and scales.

    A row of zeros, or of numbers too small for a float32 scale, has the scale 1 and codes of 0.

    Args:
        weight: floats of shape (n, k), finite in float32.

    Returns:
        codes: int8 (n, k). multipliers: uint8 (n, ceil(k / group)), None without groups.
        scales: float32 (n,).
    """
    xp, pieces = get_array_module(weight), list(column_chunks(weight.shape[1]))
    largest = [_largest(weight[:, piece], scheme.group) for piece in pieces]
    wanted = xp.concatenate(largest, axis=1) / np.float32(scheme.largest)
    codes = xp.empty(weight.shape, np.int8)
    if scheme.group is None:
        scales, multipliers = _scales(xp, wanted.max(axis=1)), None
    else:
        scales = _scales(xp, wanted.max(axis=1) / np.float32(MOST_OF_GROUP))
        whole = xp.rint(wanted / scales[:, None]).clip(1, MOST_OF_GROUP)
        multipliers = whole.astype(np.uint8)
    for piece in pieces:
        steps = scales[:, None]
        if scheme.group is not None:
            part = whole[:, piece.start // scheme.group : -(-piece.stop // scheme.group)]
            steps = spread(part * steps, scheme.group, piece.stop - piece.start)
        found = weight[:, piece].astype(np.float32, copy=False) / steps
        codes[:, piece] = xp.rint(found, out=found).clip(-scheme.largest, scheme.largest)
    return codes, multipliers, scales


def decode_rows(codes: Any, multipliers: Any, scales: Any, scheme: Scheme) -> Any:
    """Dequantise codes: float32 (n, k)."""
    whole = codes.astype(np.float32)
    if multipliers is not None:
        whole *= spread(multipliers, scheme.group, codes.shape[1])
    whole *= scales[:, None]
    return whole


def spread(by_group: Any, group: int | None, columns: int) -> Any:
    """Repeat each group's value for each of its columns."""
    assert group is not None
    return get_array_module(by_group).repeat(by_group, group, axis=1)[:, :columns]


def _largest(weight: Any, group: int | None) -> Any:
    """Return the largest magnitude of each row, or of each group: float32 (n, groups)."""
    xp = get_array_module(weight)
    magnitudes = xp.abs(weight.astype(np.float32, copy=False))
    if group is None:
        return magnitudes.max(axis=1, keepdims=True)
    rows, columns = weight.shape
    padded = xp.zeros((rows, -(-columns // group) * group), np.float32)
    padded[:, :columns] = magnitudes
    return padded.reshape(rows, -1, group).max(axis=2)


def _scales(xp: Any, found: Any) -> Any:
    return xp.where(found < _SMALLEST, np.float32(1), found).astype(np.float32)


# -- inputs ------------------------------------------------------------------------------------


def input_step(low: Any, high: Any, scheme: Scheme) -> Any:
    """Compute scale and zero point of a range (Jacob et al. 2018, section 3).

    Args:
        low, high: arrays without axes, or numbers; the range is extended to contain zero.

    Returns:
        float32 of shape (2,), on the device of ``low``; both 0 if the range is empty, or too small
        for its scale in float32; the scale is infinite if the range is too large.
    """
    xp = get_array_module(low)
    low = xp.minimum(xp.asarray(low, np.float64), 0.0)
    high = xp.maximum(xp.asarray(high, np.float64), 0.0)
    with np.errstate(over="ignore"):
        scale = ((high - low) / scheme.levels).astype(np.float32)
    is_range = scale >= _SMALLEST
    safe = xp.where(is_range, scale, np.float32(1))
    zero = xp.rint(-low / safe).clip(0, scheme.levels)
    return xp.where(is_range, xp.stack([scale, zero.astype(np.float32)]), np.float32(0))


def encode_input(x: Any, step: Any, scheme: Scheme) -> Any:
    """Quantise an input to codes less the zero point: integers in float32, NaN stays NaN.

    Args:
        x: floats of any shape.
        step: scale and zero point, from `input_step`.
    """
    xp = get_array_module(x)
    scale, zero = step[0], step[1]
    with np.errstate(over="ignore"):  # infinite numbers are clipped, too
        codes = x.astype(np.float32) if x.dtype != np.float32 else x
        codes = codes / scale
    xp.rint(codes, out=codes)
    xp.clip(codes, -zero, scheme.levels - zero, out=codes)
    return codes
