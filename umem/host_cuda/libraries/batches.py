"""Runs a BLAS or LAPACK function on many matrices, by a C loop over SciPy's function."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from umem.host_cuda.libraries.cores import Part, cut, side_by_side
from umem.host_cuda.libraries.handles import TYPES, Array, scipy_module
from umem.host_cuda.linking import capsule_pointer, signature
from umem.host_cuda.toolchain import Toolchain

MOST = 16
"""The most parameters of a function; all are pointers, and extra parameters are ignored."""
_SOURCE = f"""
#include <limits.h>
typedef void routine({", ".join(["char *"] * MOST)});
void umem_each(routine *call, long count, char **starts, const long *steps) {{
  for (long i = 0; i < count; ++i) {{
    char *p[{MOST}];
    for (int k = 0; k < {MOST}; ++k)
      p[k] = steps[k] == LONG_MIN ? ((char **)starts[k])[i] : starts[k] + i * steps[k];
    call({", ".join(f"p[{k}]" for k in range(MOST))});
  }}
}}
"""
_FOLLOWED = -(1 << 63)


class Each(NamedTuple):
    """A parameter that advances by a number of bytes from one matrix to the next."""

    address: int
    step: int


class Pointers(NamedTuple):
    """A parameter given by an array of addresses, one for each matrix."""

    address: int


MANY = 1024
"""The least number of matrices for another thread (a guess)."""
Parameter: TypeAlias = int | bytes | Array | Each | Pointers


def on_each(name: str, dtype: Any, count: int, *given: Parameter) -> None:
    """Call a BLAS or LAPACK function once for each matrix of a batch, on several threads.

    Args:
        name: the function without the letter of its type: "gemm", not "sgemm".
        count: the number of matrices.
        given: the function's arguments. An `Each` is an address and the bytes from one matrix to
            the next; numbers and letters apply to all matrices; arrays are workspace.
    """
    loop = ctypes.CDLL(_library()).umem_each
    function = ctypes.c_void_p(_function(name, dtype))

    def part(bounds: Part) -> None:
        start, end = bounds
        kept = [_parameter(each, start) for each in given]
        starts, steps = (np.zeros(MOST, "i8") for _ in range(2))
        starts[len(kept) :] = 1  # lengths of letters, where it was written in Fortran
        for place, (address, step, _) in enumerate(kept):
            starts[place], steps[place] = address, step
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (starts, steps)]
        loop(function, ctypes.c_long(end - start), *pointers)

    side_by_side(part, cut(count, MANY))


def _parameter(given: Parameter, start: int) -> tuple[int, int, Any]:
    """Return address, step and objects to keep alive."""
    if isinstance(given, Each):
        return given.address + start * given.step, given.step, None
    if isinstance(given, Pointers):
        return given.address + start * 8, _FOLLOWED, None
    kept = np.array(given, "i4") if isinstance(given, int) else np.array(given)
    return kept.ctypes.data, 0, kept


@cache
def _library() -> str:
    return str(Toolchain().shared_object(_SOURCE, "c"))


@cache
def _function(name: str, dtype: Any) -> int:
    """Return the C pointer to a function, from SciPy's Cython capsules."""
    letter = next(letter for letter, kind in TYPES.items() if dtype == kind)
    blas, linear = (scipy_module(f"linalg.cython_{x}").__pyx_capi__ for x in ("blas", "lapack"))
    capsule = blas.get(letter + name) or linear[letter + name]
    if "int *" not in signature(capsule):
        raise NotImplementedError("the software GPU supports LAPACK with 32-bit integers only")
    return capsule_pointer(capsule)
