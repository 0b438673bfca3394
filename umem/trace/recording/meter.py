"""Meters of memory: live bytes, the peak, and the workspace between two readings.

A `Meter` is read around an operation or a block of code. `HostMeter` is the only user of
`tracemalloc`, which counts NumPy's allocations and Python's own objects. CuPy's pools have a meter
of their own bytes, `umem.devices.cuda.pool_meter`.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np


class HeldBytes(NamedTuple):
    """Live bytes, and their peak since the meter's `reset`."""

    live: int
    peak: int

    @property
    def workspace(self) -> int:
        """Return the bytes that were held only temporarily: the peak less the live bytes."""
        return max(0, self.peak - self.live)


class Meter(Protocol):
    """Measures live bytes and their peak, of the process: any thread's allocations count.

    Attributes:
        is_blind: whether peaks, and therefore workspace, cannot be measured.
    """

    @property
    def is_blind(self) -> bool: ...

    def held(self) -> HeldBytes:
        """Return live bytes and the peak since `reset`, from any origin: only differences count."""

    def reset(self) -> None:
        """Set the peak to the live bytes."""


class MeteredPools(Protocol):
    """The pools of a GPU, whose bytes a meter measures."""

    @property
    def is_vram(self) -> bool:
        """True if the current allocator takes VRAM alone."""

    def in_use(self) -> int:
        """Return the bytes that arrays use."""

    def needed(self) -> int:
        """Return the reserved bytes, gaps included, that have been needed since `forget_use`."""

    def spare(self) -> int:
        """Return the most bytes that the pools can have."""

    def reserve(self, nbytes: int) -> None:
        """Let an allocator reserve one piece, up to so many bytes in all if they are available."""

    def give_back(self) -> None:
        """Give free blocks back to the GPU."""

    def forget_use(self) -> None:
        """Forget the bytes needed so far."""


class BlockMeter(Meter, Protocol):
    """A meter that measures between `start` and `stop`, or inside a ``with`` block.

    Attributes:
        pools: the pools that it measures; None for the host's meter.
        is_ours: whether it misses frees of memory allocated before `start`, so that they do not
            lower the live bytes.
    """

    @property
    def is_ours(self) -> bool: ...
    @property
    def pools(self) -> MeteredPools | None: ...
    def start(self) -> None:
        """Begin to measure, and reset the peak."""

    def stop(self) -> None:
        """Stop measuring; a second time does nothing."""

    def __enter__(self) -> BlockMeter: ...
    def __exit__(self, *exception: object) -> None: ...
    def why_not(self) -> str | None:
        """Return why peaks cannot be measured now; None if they can."""


class HostMeter:
    """Measures the host's memory by `tracemalloc`, which is on from `start` to `stop`.

    If tracemalloc is on already, `start` resets its peak and `stop` leaves it on. ``with`` measures
    a short block, and restores the peak for other users of tracemalloc.

    Attributes:
        is_ours: whether `start` has turned tracemalloc on.

    Cost: every allocation is slower while tracemalloc is on.
    """

    __slots__ = ("_peak_before", "is_ours")
    pools = None
    is_blind = False

    def __init__(self) -> None:
        self.is_ours = False
        self._peak_before = 0

    def start(self) -> None:
        """Turn tracemalloc on; if it is on already, reset its peak."""
        if tracemalloc.is_tracing():
            tracemalloc.reset_peak()
        else:
            tracemalloc.start(1)
            self.is_ours = True

    def stop(self) -> None:
        """Turn tracemalloc off if `start` has turned it on; a second time does nothing."""
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
            np.empty(missing, np.uint8)  # untouched: no memory, but the peak is raised

    def why_not(self) -> None:
        """Return None: the host's memory can always be measured."""

    def held(self) -> HeldBytes:
        """Return traced live bytes and their peak since `reset`; zeros if tracemalloc is off."""
        return HeldBytes(*tracemalloc.get_traced_memory())

    def reset(self) -> None:
        """Set the peak to the live bytes."""
        tracemalloc.reset_peak()


HOST: Meter = HostMeter()
"""Measures the workspace of operations on NumPy, while tracemalloc is on."""
of_gpu: list[Meter] = []
"""The meter of CuPy's memory while a recorder is active, if there is any; at most one."""


def running_meter(arrays: Iterable[Any]) -> Meter:
    """Return the running meter of the arrays' memory: CuPy's if the first array is CuPy's.

    Args:
        arrays: arrays, objects that have one as ``array``, or None for a missing one.
    """
    if of_gpu:
        for one in arrays:
            if one is not None:
                kind = type(getattr(one, "array", one))
                return of_gpu[-1] if kind.__module__.startswith("cupy") else HOST
    return HOST
