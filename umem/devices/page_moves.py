"""Moves of managed memory's pages, as a model or the driver's counters report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Way = Literal["in", "out", "new", ""]
Cause = Literal["fault", "prefetch", "eviction", "copy", "driver", "unknown"]


class PageMove(NamedTuple):
    """Neighbouring pages that moved together, or a fault.

    Attributes:
        seconds: when, on the clock that `Device.watch_pages` returns.
        address, stop: where the program's memory in these pages begins, and ends; both are 0 where
            that is unknown.
        nbytes: the size of the pages, which may be more; 0 of a fault that is reported apart from
            its pages.
        way: "in" to VRAM, "out" of it, "new" there (written for the first time, nothing was
            copied), or "" of a fault.
        cause: "fault" of the GPU or the host, "prefetch" (the program's), "eviction", "copy" (by
            the program, of managed memory), "driver" (its own guesses and access counters).
        gpu_faults: faults of the GPU: blocks in the model, groups of faults in CUPTI's counters.
        host_faults: faults of the host.
    """

    seconds: float
    address: int
    stop: int
    nbytes: int
    way: Way
    cause: Cause
    gpu_faults: int = 0
    host_faults: int = 0


MoveListener = Callable[[PageMove], None]
Now = Callable[[], float]
ALREADY_WATCHED = "pages are watched by another umem.paging() block already: leave that first"
