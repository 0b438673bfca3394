"""Keeps GPU tests and benchmarks small: the machine may be somebody else's too.

The rule, in code: all managed memory together stays under 4 GiB and under half of what is free,
on the GPU and on the host; it is never oversubscribed. Pressure is made by a pool's limit, or by
moving pages to the host first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from umem.devices.cuda import CudaDevice
from umem.errors import LimitError
from umem.units import GIB, format_bytes

CEILING_BYTES = 4 * GIB


class Guard:
    """The budget of managed memory on one device, for as long as the process lives.

    Pools are held to it where they grow. `raw` is for memory beside the pools; while that is
    alive, the pools get less.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.budget_bytes = self._budget()
        self._raw_bytes = 0
        device.cap_managed(self.budget_bytes)

    def _budget(self) -> int:
        host = self.device.host_available_bytes()
        free = [self.device.free_bytes, *([] if host is None else [host])]
        # What is there already counts too, so take it off; one byte less keeps it "under".
        return max(0, min(CEILING_BYTES, min(free) // 2) - 1 - self.device.usage().managed_bytes)

    def check(self, nbytes: int) -> int:
        """``nbytes``, if that much managed memory in all may be used.

        Raises:
            LimitError: it may not.
        """
        if nbytes > self.budget_bytes:
            raise LimitError(
                f"{format_bytes(nbytes)} of managed memory; this machine allows a test or a "
                f"benchmark {format_bytes(self.budget_bytes)}"
            )
        return nbytes

    @contextlib.contextmanager
    def raw(self, nbytes: int) -> Iterator[Any]:
        """Managed memory straight from the driver, freed at the end: for first touches.

        Raises:
            LimitError: with what the pools have reserved it would pass the budget.
        """
        import cupy

        self.check(nbytes + self._raw_bytes + self.device.usage().managed_bytes)
        self._hold(nbytes)
        try:
            yield cupy.cuda.malloc_managed(nbytes)
        finally:
            self._hold(-nbytes)

    def _hold(self, nbytes: int) -> None:
        self._raw_bytes += nbytes
        self.device.cap_managed(self.budget_bytes - self._raw_bytes)


_guards: dict[int, Guard] = {}


def guard(device: CudaDevice) -> Guard:
    """The guard of a device: one, made at the first call, so that the budget is taken once."""
    if device.ordinal not in _guards:
        _guards[device.ordinal] = Guard(device)
    return _guards[device.ordinal]
