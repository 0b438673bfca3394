"""Allocations, and ranges of bytes in them."""

from __future__ import annotations

from typing import NamedTuple

HOST, DEVICE, MANAGED = 1, 2, 3
"""Values of cudaMemoryType, from driver_types.h."""


class Allocation(NamedTuple):
    """An allocation: address, size, kind, number in the order of allocation, and device."""

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
        """Return the address behind it."""
        return self.memory.address + self.stop
