"""Moves of managed memory's pages, as a model or the driver's counters report them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

Way = Literal["in", "out", "new", ""]
Cause = Literal["fault", "prefetch", "eviction", "copy", "driver", "unknown"]


class PageMove(NamedTuple):
    """Neighbouring pages that moved together, or a fault.

    Attributes:
        seconds: the time, on the clock that `Device.watch_pages` returns.
        address, stop: begin and end of the program's memory in these pages; both 0 if unknown.
        nbytes: the size of the pages, which may be larger; 0 for a fault that is reported without
            its pages.
        way: "in" to VRAM, "out" of it, "new" in VRAM (first written, without a copy), or "" for a
            fault.
        cause: "fault" of the GPU or the host, "prefetch" (by the program), "eviction", "copy" (by
            the program, of managed memory), "driver" (its own prefetches and access counters).
        gpu_faults: faults of the GPU, counted in blocks by the model, in groups of faults by CUPTI.
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
