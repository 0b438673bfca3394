"""Strides of arrays, which decide whether a reshape is a view or a copy.

Strides count elements. The rules are NumPy's, which CuPy and PyTorch follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Ints = tuple[int, ...]


def packed(shape: Sequence[int]) -> Ints:
    """Return the strides of a new C-ordered array."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def as_laid_out(shape: Sequence[int], strides: Sequence[int]) -> Ints:
    """Return the strides of an elementwise function's output: packed, in the input's axis order."""
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    found = [0] * len(shape)
    for axis, stride in zip(order, packed([shape[axis] for axis in order]), strict=True):
        found[axis] = stride
    return tuple(found)


def reshaped(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> Ints | None:
    """Return the strides of a reshaped view; None if the data must be copied.

    Old and new axes are matched in groups of equal products; a view needs each group of old axes to
    be one run of memory.
    """
    if 0 in shape:
        return packed(new)
    old = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    found, place, first = [1] * len(new), 0, 0
    while first < len(old):
        last, end, product = first + 1, place + 1, new[place]
        elements = old[first][0]
        while product != elements:
            if product < elements:
                product *= new[end]
                end += 1
            else:
                elements *= old[last][0]
                last += 1
        group = old[first:last]
        if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(group)):
            return None
        stride = group[-1][1]
        for axis in range(end - 1, place - 1, -1):
            found[axis] = stride
            stride *= new[axis]
        first, place = last, end
    return tuple(found)


def strides_of_view(
    op: str, shape: Ints, strides: Ints, new: Ints, axes: Sequence[int] | None = None
) -> Ints | None:
    """Return the strides of an operator's view; None if the data must be copied.

    Args:
        op: an operator of ONNX that makes views.
        shape, strides: its input's shape and strides.
        new: its output's shape.
        axes: a transposition's axes; None: all in reverse.
    """
    if op == "Transpose":
        return tuple(strides[axis] for axis in axes or tuple(reversed(range(len(new)))))
    if op in ("Slice", "Split"):
        return strides
    if op == "Expand":
        missing = len(new) - len(shape)
        old = zip((1,) * missing + shape, (0,) * missing + strides, new, strict=True)
        return tuple(0 if before == 1 != after else stride for before, stride, after in old)
    return reshaped(shape, strides, new)
