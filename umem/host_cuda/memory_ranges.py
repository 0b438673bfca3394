"""Allocations and byte ranges in them."""

from __future__ import annotations

from typing import NamedTuple

HOST, DEVICE, MANAGED = 1, 2, 3
"""Values of cudaMemoryType, from driver_types.h."""


class Allocation(NamedTuple):
    """An allocation with its address, size, kind, sequence number and device."""

    address: int
    nbytes: int
    kind: int
    number: int
    device: int

    @property
    def is_managed(self) -> bool:
        """Tell whether it is managed memory."""
        return self.kind == MANAGED


class MemoryRange(NamedTuple):
    """A range of bytes in an allocation, by offsets."""

    memory: Allocation
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return self.stop - self.start

    @property
    def low(self) -> int:
        """Return its first address."""
        return self.memory.address + self.start

    @property
    def high(self) -> int:
        """Return the address after the range."""
        return self.memory.address + self.stop
