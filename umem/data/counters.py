"""Counters of a data cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from umem.units import format_bytes, format_seconds


@dataclass(frozen=True)
class DataCounters:
    """Counters of a cache, summed over all processes.

    Attributes:
        request_count: requested items.
        hit_count: requested items found in memory since an earlier request.
        ahead_count: items fetched ahead of their request.
        disk_count: items read from the disk tier.
        load_count: items loaded from the cached dataset.
        hit_bytes, disk_bytes, loaded_bytes: packed bytes of the items from each of these sources.
        content_bytes: bytes of the arrays of loaded items; raw_bytes: the part of them that is
            stored uncompressed.
        memory_bytes: packed bytes in memory now; peak_memory_bytes: the most ever, prefetched items
            included.
        spilled_bytes: bytes in the disk tier now.
        bypass_count: items larger than the limit.
        waited_seconds: time that requests waited for the disk tier and the cached dataset.
        check_count: items in memory that were loaded again, to compare them.
        lost_count: times that the whole cache was dropped, because a process died while it changed
            the tables, or the cached dataset returned something else.
    """

    request_count: int = 0
    hit_count: int = 0
    ahead_count: int = 0
    disk_count: int = 0
    load_count: int = 0
    hit_bytes: int = 0
    disk_bytes: int = 0
    loaded_bytes: int = 0
    content_bytes: int = 0
    raw_bytes: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    spilled_bytes: int = 0
    bypass_count: int = 0
    waited_seconds: float = 0.0
    check_count: int = 0
    lost_count: int = 0

    @classmethod
    def total(cls, several: Iterable[DataCounters]) -> DataCounters:
        """Sum the counters of several caches."""
        each = [astuple(counters) for counters in several]
        return cls(*map(sum, zip(*each, strict=True)))

    @property
    def hit_rate(self) -> float:
        """Return hits divided by requests, 0 to 1."""
        return self.hit_count / max(self.request_count, 1)

    def __str__(self) -> str:
        return (
            f"{self.hit_count} of {self.request_count} items from memory "
            f"({format_bytes(self.memory_bytes)}), {self.ahead_count} fetched ahead, "
            f"{self.disk_count} read from disk, {self.load_count} loaded; "
            f"waited {format_seconds(self.waited_seconds)}"
        )


COUNTED = tuple(field.name for field in fields(DataCounters) if field.name != "waited_seconds")
"""Names of the integer counters, which live in the shared head."""
