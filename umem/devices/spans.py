"""The address ranges that arrays cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from umem.devices.base import Span


def byte_ranges(
    address: int, shape: Iterable[int], strides: Iterable[int], itemsize: int, page: int = 4096
) -> list[Span]:
    """Return the address ranges that a strided array covers, in ascending order.

    Exact for any strides, including negative and zero ones, except that it also covers gaps smaller
    than ``page``: hints round to the driver's pages anyway.

    >>> byte_ranges(0, (2, 4), (8192, 4), 4)
    [Span(address=0, nbytes=16), Span(address=8192, nbytes=16)]
    """
    dims = sorted((abs(st), n, st) for n, st in zip(shape, strides, strict=True) if n != 1)
    if any(n == 0 for _, n, _ in dims):
        return []
    address += sum((n - 1) * st for _, n, st in dims if st < 0)
    extent = itemsize
    outer: list[tuple[int, int]] = []
    for step, count, _ in dims:
        if not outer and step - extent < page:
            extent += (count - 1) * step
        elif step:
            outer.append((step, count))
    starts = np.array([address], dtype=np.int64)
    for step, count in outer:
        starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * step).ravel()
    starts.sort()
    return _merge(starts, extent, page)


def _merge(starts: Any, extent: int, page: int) -> list[Span]:
    gaps = np.flatnonzero(np.diff(starts) - extent >= page)
    first = starts[np.concatenate(([0], gaps + 1))]
    last = starts[np.concatenate((gaps, [len(starts) - 1]))]
    return [Span(int(a), int(b) + extent - int(a)) for a, b in zip(first, last, strict=True)]
