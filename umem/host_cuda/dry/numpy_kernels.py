"""Runs CuPy's simple kernels with NumPy, so that a dry run compiles nothing for small arrays.

Models: element-wise functions with one result, and reductions whose reduced axes come first in the
kernel's input. Other kernels are compiled.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umem.host_cuda.kernels import POINTER, WRITTEN, parts_of, use_of
from umem.host_cuda.runtime import HostRuntime

_CARRAY = re.compile(r"\bCArray<\s*(.+?)\s*,\s*(\d+)\s*(?:,[^<>]*)?>\s*\w*\s*$")
_WORD = ctypes.c_uint64
_KINDS = {
    "bool": "?", "char": "i1", "signed char": "i1", "unsigned char": "u1", "short": "i2",
    "unsigned short": "u2", "float16": "f2", "int": "i4", "unsigned int": "u4", "float": "f4",
    "long": "i8", "unsigned long": "u8", "long long": "i8", "unsigned long long": "u8",
    "double": "f8", "ptrdiff_t": "i8", "size_t": "u8", "complex<float>": "c8",
    "complex<double>": "c16", "thrust::complex<float>": "c8", "thrust::complex<double>": "c16",
    "__half": "f2", "__nv_bfloat16": "V2", "int8_t": "i1", "uint8_t": "u1", "int16_t": "i2",
    "uint16_t": "u2", "int32_t": "i4", "uint32_t": "u4", "int64_t": "i8", "uint64_t": "u8",
}  # fmt: skip
"""Dtypes of the CUDA types in CuPy's kernels."""


class Parameter(NamedTuple):
    """A parameter of a kernel.

    Attributes:
        number: its position in the list.
        use: "r", "w" or "rw" for memory, empty for a value.
        ndim: dimensions of a CArray; -1 for a plain pointer or value.
        dtype: None if the type is unknown.
    """

    number: int
    use: str
    ndim: int
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Return the bytes of an item, 0 if unknown."""
        return 0 if self.dtype is None else int(self.dtype.itemsize)

    @property
    def is_whole(self) -> bool:
        """Tell whether items are whole numbers or flags."""
        return self.dtype is not None and self.dtype.kind in "biu"


def parameters_in(text: str) -> list[Parameter]:
    """Read a kernel's parameter list, without CuPy's indexers."""
    found = []
    for number, part in enumerate(map(str.strip, parts_of(text))):
        plain = part.removeprefix(WRITTEN)
        if "CIndexer" in plain:
            continue
        use, ndim = use_of(part) if POINTER.search(plain) else "", -1
        if array := _CARRAY.search(plain):
            kind, ndim = array[1], int(array[2])
        elif use:
            kind = plain.partition("*")[0].replace("const", "").strip()
        else:
            kind = plain.removeprefix("const ").rpartition(" ")[0]
        dtype = np.dtype(_KINDS[kind]) if kind in _KINDS else None
        found.append(Parameter(number, use, ndim, dtype))
    return found


class NumpyKernel:
    """A CuPy kernel that NumPy computes.

    Args:
        parameters: its arrays and values, of which exactly one array is written only.
        function: called with the inputs' arrays and values and the output's array.
    """

    def __init__(self, parameters: Sequence[Parameter], function: Callable[..., None]) -> None:
        self._parameters, self._function = parameters, function

    def run(self, runtime: HostRuntime, given: int) -> None:
        """Compute the kernel; ``given`` points to the addresses of its arguments."""
        places = ctypes.cast(given, ctypes.POINTER(_WORD))
        inputs: list[Any] = []
        output: Any = None
        for parameter in self._parameters:
            place = places[parameter.number]
            if parameter.ndim < 0:
                value = ctypes.string_at(place, parameter.itemsize)
                inputs.append(np.frombuffer(value, parameter.dtype)[0])
                continue
            start, _, shape, strides = carray(place, parameter.ndim)
            found = runtime.view(start, parameter.dtype, shape, strides)
            if "w" in parameter.use:
                output = found
            else:
                inputs.append(found)
        with np.errstate(all="ignore"):
            self._function(inputs, output)


def carray(place: int, ndim: int) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return a CArray's address, size, shape and strides, as carray.cuh lays them out."""
    words = (ctypes.c_int64 * (2 + 2 * ndim)).from_address(place)
    return words[0], words[1], tuple(words[2 : 2 + ndim]), tuple(words[2 + ndim :])


def numpy_kernel(name: str, parameters: Sequence[Parameter]) -> NumpyKernel | None:
    """Return the NumPy version of a CuPy kernel, None if there is none."""
    if not name.startswith("cupy_") or any(each.dtype is None for each in parameters):
        return None
    arrays = [each for each in parameters if each.ndim >= 0]
    if sum("w" in each.use for each in arrays) != 1 or any(
        each.use and each.ndim < 0 for each in parameters
    ):
        return None
    base, _, types = name.removeprefix("cupy_").partition("__")
    if base in _REDUCTIONS and not types and len(arrays) == 2:
        return NumpyKernel(arrays, partial(_reduced, _REDUCTIONS[base]))
    if base == "arange":
        return NumpyKernel(parameters, _ranged)
    function = _ELEMENTS.get(base) or (getattr(np, base, None) if types else None)
    if base in _ELEMENTS or isinstance(function, np.ufunc):
        return NumpyKernel(parameters, partial(_assigned, function))
    return None


def _assigned(function: Any, inputs: Sequence[Any], output: NDArray[Any]) -> None:
    output[...] = function(*inputs)


def _ranged(inputs: Sequence[Any], output: NDArray[Any]) -> None:
    output[...] = (inputs[0] + np.arange(output.size) * inputs[1]).reshape(output.shape)


def _reduced(function: Any, inputs: Sequence[Any], output: NDArray[Any]) -> None:
    rows = inputs[0].reshape(-1, max(1, output.size))
    output[...] = function(rows, axis=0).reshape(output.shape)


_ELEMENTS: dict[str, Any] = {
    "copy": lambda x: x, "fill": lambda x: x, "rsqrt": lambda x: 1 / np.sqrt(x),
    "subtract": np.subtract, "where": np.where, "clip": np.clip,
}  # fmt: skip
_REDUCTIONS: dict[str, Any] = {
    "sum": np.sum, "sum_with_dtype": np.sum, "prod": np.prod, "max": np.max, "min": np.min,
    "amax": np.max, "amin": np.min, "all": np.all, "any": np.any, "argmax": np.argmax,
    "argmin": np.argmin, "mean": np.mean, "count_nonzero": np.count_nonzero,
}  # fmt: skip
