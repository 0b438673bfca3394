"""Columns of windows on a GPU: im2col and its adjoint col2im, each in one kernel.

Copies and sums are those of `umem.chainer.chunking.windows`, in the same order, so that results
have the same bits. That module makes a copy for each place of the window, each of which would be a
launch on a GPU. Never run on a real GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from chainer.backend import get_array_module

from umem.chainer.chunking.windows import Range, Windows


def fill(columns: Any, image: Any, windows: Windows, band: tuple[Range, ...]) -> None:
    """Write the columns of a band of windows, as `windows.fill` does."""
    numbers = [
        (size, kernel, stride, pad, dilate, start, stop - start)
        for size, kernel, stride, pad, dilate, (start, stop) in _axes(windows, band)
    ]
    kernel = _fill(get_array_module(image), len(band), _index(columns, image))
    kernel(image, *(number for axis in numbers for number in axis), columns)


def spread(image: Any, columns: Any, windows: Windows, band: tuple[Range, ...]) -> None:
    """Add columns to the image positions that they were taken from, as `windows.spread` does."""
    numbers, seen = [], []
    for size, kernel, stride, pad, dilate, (start, stop) in _axes(windows, band):
        low = max(0, start * stride - pad)
        high = min(size, (stop - 1) * stride - pad + (kernel - 1) * dilate + 1)
        if low >= high:  # the whole band is padding
            return
        seen.append(slice(low, high))
        numbers.append((high - low, kernel, stride, pad + low, dilate, start, stop - start))
    kernel = _spread(get_array_module(image), len(band), _index(columns, image))
    kernel(columns, *(number for axis in numbers for number in axis), image[(..., *seen)])


def _index(*arrays: Any) -> str:
    """Return the type of indexes: divisions of 32 bits are several times faster on a GPU."""
    return "int32" if max(array.size for array in arrays) < 2**31 else "int64"


def _axes(windows: Windows, band: tuple[Range, ...]) -> Any:
    fields = windows.image, windows.kernel, windows.stride, windows.pad, windows.dilate
    return zip(*fields, band, strict=True)


_INDEXES = {"int32": "int", "int64": "long long"}
_NUMBERS = ("size", "kernel", "stride", "pad", "dilate", "start", "length")


def _parameters(axes: int, index: str) -> str:
    return ", ".join(f"{index} {name}{axis}" for axis in range(axes) for name in _NUMBERS)


def _decomposed(name: str, lengths: str, axes: int) -> list[str]:
    """Return code that splits the last axes off the flat index ``rest``."""
    return [
        f"const Index {name}{axis} = rest % {lengths}{axis}; rest /= {lengths}{axis};"
        for axis in reversed(range(axes))
    ]


def _flat(*terms: tuple[str, str]) -> str:
    """Return the flat index, in memory order, of ``rest`` and pairs of a length and a place."""
    flat = "rest"
    for length, place in terms:
        flat = f"({flat} * {length} + {place})"
    return flat


@lru_cache
def _fill(xp: Any, axes: int, index: str) -> Any:
    """Make the kernel of `fill` for a number of axes and a type of indexes."""
    every = range(axes)
    code = ["Index rest = i;", *_decomposed("out", "length", axes)]
    code += _decomposed("at", "kernel", axes)
    code += [
        f"const Index x{a} = (start{a} + out{a}) * stride{a} - pad{a} + at{a} * dilate{a};"
        for a in every
    ]
    inside = " && ".join(f"x{a} >= 0 && x{a} < size{a}" for a in every)
    place = _flat(*((f"size{a}", f"x{a}") for a in every))
    code.append(f"column = {inside} ? image[{place}] : T(0);")
    taken = f"raw T image, {_parameters(axes, index)}"
    return _kernel(xp, "umem_fill", taken, "T column", code, index)


@lru_cache
def _spread(xp: Any, axes: int, index: str) -> Any:
    """Make the kernel of `spread` for a number of axes and a type of indexes."""
    every = range(axes)
    code = ["Index rest = i;", *_decomposed("x", "size", axes), "T sum = image;"]
    for a in every:
        code += [
            f"for (Index at{a} = 0; at{a} < kernel{a}; ++at{a}) {{",
            f"Index from{a} = x{a} + pad{a} - at{a} * dilate{a};",
            f"if (from{a} < 0 || from{a} % stride{a}) continue;",
            f"from{a} = from{a} / stride{a} - start{a};",
            f"if (from{a} < 0 || from{a} >= length{a}) continue;",
        ]
    places = ((f"kernel{a}", f"at{a}") for a in every)
    place = _flat(*places, *((f"length{a}", f"from{a}") for a in every))
    code += [f"sum = T(sum + column[{place}]);", "}" * axes, "image = sum;"]
    taken = f"raw T column, {_parameters(axes, index)}"
    return _kernel(xp, "umem_spread", taken, "T image", code, index)


def _kernel(xp: Any, name: str, taken: str, made: str, code: list[str], index: str) -> Any:
    types = f"typedef {_INDEXES[index]} Index;"
    return xp.ElementwiseKernel(taken, made, "\n".join(code), name, preamble=types)
