"""Sorting by NumPy: the functions of ``cupy.cuda.thrust``, by their names there; all are stable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from umem.devices.software.runtime import HostRuntime


class HostThrust:
    """Sorts memory along the last axis of a shape."""

    available = True

    def __init__(self, runtime: HostRuntime) -> None:
        self._runtime = runtime

    def _array(self, dtype: Any, address: int, shape: Sequence[int]) -> Any:
        kind = np.dtype(dtype)
        steps = [kind.itemsize]
        for length in reversed(shape[1:]):
            steps.insert(0, steps[0] * length)
        return self._runtime.view(address, kind, tuple(shape), tuple(steps[-len(shape) :]))

    def _tell(self, name: str, read: Any, written: Any) -> None:
        access = self._runtime.access_of
        self._runtime.operation(name, access(read), access(written), 20 * read.size)

    def sort(self, dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
        found = self._array(dtype, data, shape)
        self._tell("sort", found, found)
        found.sort(axis=-1, kind="stable")

    def argsort(self, dtype: Any, indexes: int, data: int, keys: int, shape: Sequence[int]) -> None:
        values, found = self._array(dtype, data, shape), self._array("intp", indexes, shape)
        self._tell("argsort", values, found)
        found[...] = values.argsort(axis=-1, kind="stable")

    def lexsort(self, dtype: Any, indexes: int, keys: int, count: int, length: int) -> None:
        values = self._array(dtype, keys, (count, length))
        found = self._array("intp", indexes, (length,))
        self._tell("lexsort", values, found)
        found[...] = np.lexsort(values)
