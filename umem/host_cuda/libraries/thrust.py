"""Sorting with NumPy: the functions of ``cupy.cuda.thrust``, under the same names; all stable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from umem.host_cuda.libraries.cores import cut, side_by_side
from umem.host_cuda.observer import Launch
from umem.host_cuda.runtime import HostRuntime

LEAST = 1 << 18
"""The least number of elements for another thread (a guess)."""
RADIX_BYTES = 2
"""NumPy uses radix sort for items up to this size, and gains nothing from sorted input."""


class HostThrust:
    """Thrust's sorts along the last axis, with NumPy; all are stable."""

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
        runtime, is_whole = self._runtime, written.dtype.kind in "biu"
        reads, writes = runtime.access_of(read), runtime.access_of(written)
        launch = Launch(name, runtime.device_here, reads, writes, flops=20 * read.size)
        runtime.operation(launch, is_whole=is_whole)

    def sort(self, dtype: Any, data: int, keys: int, shape: Sequence[int]) -> None:
        found = self._array(dtype, data, shape)
        self._tell("sort", found, found)
        rows, pieces = _pieces(found)
        side_by_side(lambda piece: rows[piece].sort(kind="stable"), pieces)
        if len(rows) == 1 and len(pieces) > 1:
            found.sort(kind="stable")  # which finds sorted runs, and merges them

    def argsort(self, dtype: Any, indexes: int, data: int, keys: int, shape: Sequence[int]) -> None:
        """Write the indices that sort each row; sorts pieces on all cores, then merges them."""
        values, found = self._array(dtype, data, shape), self._array("intp", indexes, shape)
        self._tell("argsort", values, found)
        rows, pieces = _pieces(values)
        places = found.reshape(rows.shape)

        def sort(piece: tuple[slice, slice]) -> None:
            places[piece] = rows[piece].argsort(kind="stable") + piece[1].start

        side_by_side(sort, pieces)
        if len(rows) == 1 and len(pieces) > 1:
            order = places[0]
            order[...] = order[rows[0, order].argsort(kind="stable")]

    def lexsort(self, dtype: Any, indexes: int, keys: int, count: int, length: int) -> None:
        values = self._array(dtype, keys, (count, length))
        found = self._array("intp", indexes, (length,))
        self._tell("lexsort", values, found)
        found[...] = np.lexsort(values)


def _pieces(values: Any) -> tuple[Any, list[tuple[slice, slice]]]:
    """Return an array's rows, and their pieces, one for each core to sort."""
    length = max(1, values.shape[-1])
    rows = values.reshape(-1, length)
    if len(rows) == 1 and values.itemsize > RADIX_BYTES:
        return rows, [(slice(1), slice(*part)) for part in cut(length, LEAST)]
    parts = cut(len(rows), 1 + LEAST // length)
    return rows, [(slice(*part), slice(0, length)) for part in parts]
