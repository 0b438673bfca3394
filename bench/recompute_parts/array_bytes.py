"""The bytes of NumPy's arrays and their peak, counted by NumPy's own allocator (NEP 49).

tracemalloc knows the peak of arrays and of Python's objects together only. The objects of a graph
of thousands of small functions, its nodes and gradients, take more than its arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_SET_HANDLER, _GET_HANDLER = 304, 305
"""The places of PyDataMem_SetHandler and PyDataMem_GetHandler in NumPy's C API, from 1.22 on; they
are in numpy/__multiarray_api.h.
"""
_Size, _Pointer = ctypes.c_size_t, ctypes.c_void_p


_SIGNATURES = {
    "malloc": (_Pointer, _Pointer, _Size),
    "calloc": (_Pointer, _Pointer, _Size, _Size),
    "realloc": (_Pointer, _Pointer, _Pointer, _Size),
    "free": (None, _Pointer, _Pointer, _Size),
}


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h, version 1."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", _Pointer),
        *((name, _Pointer) for name in _SIGNATURES),
    )


class ArrayBytes:
    """Counts the arrays that are made while it is entered, in the thread that enters it.

    Attributes:
        live, peak: their bytes, now and at most since `reset`.
    """

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._is_paused = False
        self._before: Any = None

    def __enter__(self) -> ArrayBytes:
        _METERS.append(self)
        _count(bool(_METERS))
        self._before = _numpys(_SET_HANDLER, _CAPSULE)
        return self

    def __exit__(self, *exception: object) -> None:
        _numpys(_SET_HANDLER, self._before)
        _METERS.remove(self)
        _count(bool(_METERS))

    def reset(self) -> None:
        """Let the peak begin again at what is live."""
        self.peak = self.live

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the arrays that are made inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def made(self, address: int | None, nbytes: int) -> None:
        if address and not self._is_paused:
            self._sizes[address] = nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def freed(self, address: int | None) -> None:
        self.live -= self._sizes.pop(address or 0, 0)


_METERS: list[ArrayBytes] = []


def _made(address: int | None, nbytes: int) -> int | None:
    for meter in _METERS:
        meter.made(address, nbytes)
    return address


def _freed(address: int | None) -> None:
    for meter in _METERS:
        meter.freed(address)


def _malloc(context: object, nbytes: int) -> int | None:
    return _made(_NUMPYS_OWN["malloc"](None, nbytes), nbytes)


def _calloc(context: object, count: int, nbytes: int) -> int | None:
    return _made(_NUMPYS_OWN["calloc"](None, count, nbytes), count * nbytes)


def _realloc(context: object, address: int | None, nbytes: int) -> int | None:
    found = _NUMPYS_OWN["realloc"](None, address, nbytes)
    if found:
        _freed(address)
    return _made(found, nbytes)


def _free(context: object, address: int | None, nbytes: int) -> None:
    _freed(address)
    _NUMPYS_OWN["free"](None, address, nbytes)


def _count(counts: bool) -> None:
    """Count what the handler does, or let it do as NumPy's own: no Python runs at the very end."""
    for name, counting in _COUNTING.items():
        address = ctypes.cast(counting, _Pointer).value if counts else getattr(_NUMPYS, name)
        setattr(_HANDLER, name, address)


def _capsule(handler: _Handler) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [_Pointer, ctypes.c_char_p, _Pointer]
    return new(ctypes.addressof(handler), b"mem_handler", None)


def _pointer(capsule: Any, name: bytes | None) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _Pointer, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, name))


def _numpys(place: int, *handler: Any) -> Any:
    """Call a function of NumPy's C API that takes and returns handlers."""
    core = getattr(np, "_core", None) or np.core  # NumPy 1 has the second alone
    table = _pointer(core._multiarray_umath._ARRAY_API, None)
    address = ctypes.cast(table, ctypes.POINTER(_Pointer))[place]
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, *(ctypes.py_object for _ in handler))
    return kind(address or 0)(*handler)


_COUNTING = {
    name: ctypes.CFUNCTYPE(*_SIGNATURES[name])(function)
    for name, function in (
        ("malloc", _malloc), ("calloc", _calloc), ("realloc", _realloc), ("free", _free)
    )
}  # fmt: skip
_HANDLER = _Handler(b"bench", 1)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_HANDLER))  # arrays may be freed after this module
_CAPSULE = _capsule(_HANDLER)
_NUMPYS = _Handler.from_address(_pointer(_numpys(_GET_HANDLER), b"mem_handler"))
_NUMPYS_OWN = {
    name: ctypes.PYFUNCTYPE(*types)(getattr(_NUMPYS, name))  # with the GIL, which they release
    for name, types in _SIGNATURES.items()
}
