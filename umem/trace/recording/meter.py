"""Meters of memory: bytes held now, at most, and by what runs in between.

A `Meter` is asked around an operation or a block of code. `HostMeter` is the one user of
`tracemalloc`, which sees what NumPy allocates, and Python's own objects. A pool tells its own
bytes, as the software GPU's does.
"""

from __future__ import annotations

import tracemalloc
from typing import Any, NamedTuple, Protocol

import numpy as np


class HeldBytes(NamedTuple):
    """Bytes held now, and at most since the meter's `reset`."""

    live: int
    peak: int

    @property
    def workspace(self) -> int:
        """Bytes held only in between: the peak above what is left."""
        return max(0, self.peak - self.live)


class Meter(Protocol):
    """Tells how much memory is held. For the process: any thread's allocations count."""

    def held(self) -> HeldBytes:
        """Return the bytes now, and at most since `reset`; zero may be anywhere."""

    def reset(self) -> None:
        """Begin the peak anew."""


class HostMeter:
    """The host's memory, by `tracemalloc`, which is on from `start` to `stop`.

    Where somebody else has it on already it stays on, and its peak begins anew. ``with`` measures
    a short block, after which the peak that others follow is what it would have been.

    Attributes:
        is_ours: whether `start` has switched it on.

    Cost: every allocation is slower while it is on.
    """

    __slots__ = ("_peak_before", "is_ours")

    def __init__(self) -> None:
        self.is_ours = False
        self._peak_before = 0

    def start(self) -> None:
        """Measure from here on; a second time begins the peak anew."""
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        else:
            tracemalloc.start(1)
            self.is_ours = True

    def stop(self) -> None:
        """Measure no more; a second time does nothing."""
        if self.is_ours:
            tracemalloc.stop()
            self.is_ours = False

    def __enter__(self) -> HostMeter:
        self._peak_before = self.held().peak
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        missing = 0 if self.is_ours else self._peak_before - self.held().live
        self.stop()
        if missing > 0:
            np.empty(missing, np.uint8)  # nobody touches it: it takes addresses, and no memory

    def held(self) -> HeldBytes:
        """Return the bytes followed now, and at most since `reset`; zeros where it is off."""
        return HeldBytes(*tracemalloc.get_traced_memory())

    def reset(self) -> None:
        """Begin the peak anew."""
        tracemalloc.reset_peak()


def is_host_measured() -> bool:
    """Tell whether anybody follows the host's memory."""
    return tracemalloc.is_tracing()


def was_followed(array: Any) -> bool:
    """Tell whether an array of NumPy was made while the host's memory was followed."""
    return tracemalloc.get_object_traceback(array) is not None


meters: list[Meter] = [HostMeter()]
"""The last one tells the workspace of operations: always, where it is not the first."""
