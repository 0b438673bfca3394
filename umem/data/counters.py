"""Counters of a data cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from umem.units import format_bytes, format_seconds


@dataclass(frozen=True)
class DataCounters:
    """Counters of a cache, summed over all processes.

    Attributes:
        request_count: items asked for.
        hit_count: of these, found in memory, and kept there since an earlier request.
        ahead_count: of the others, fetched ahead of their request.
        disk_count: read from the disk tier.
        load_count: made by the dataset below.
        hit_bytes, disk_bytes, loaded_bytes: of items packed, by where they came from.
        content_bytes: bytes of the arrays of loaded items; raw_bytes: of these, kept as they are.
        memory_bytes: of items in memory now, packed; peak_memory_bytes: the most ever, with what is
            held until a request that is about to come.
        spilled_bytes: in the disk tier now.
        bypass_count: items that were larger than the limit.
        waited_seconds: how long requests waited for the disk tier and for the dataset below.
        check_count: items in memory that were loaded again, to see that they are the same.
        lost_count: how often all was dropped, as a process died while it changed the tables, or
            the dataset below gave something else.
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
