"""Pinned host memory, taken in few large pieces: pinning takes milliseconds each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from umem.chainer.offload.extents import PAGE, Extent, Extents
from umem.devices.host import HOST_SHARE, available_bytes
from umem.errors import OffloadWarning, warn_at_program
from umem.units import MIB, format_bytes

FIRST_BYTES = 64 * MIB
"""The first slab has this, and each further one as much as all before it."""


class PinnedPlace(NamedTuple):
    """Bytes of a slab, free once nobody holds this."""

    memory: Any
    extent: Extent

    @property
    def address(self) -> int:
        """Where they begin."""
        return int(self.memory.ptr) + self.extent.start


class Slab(NamedTuple):
    """One piece of pinned memory, and the places in it."""

    memory: Any
    nbytes: int
    extents: Extents

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Return a place of at least this size; None where there is none."""
        extents, most = self.extents, self.nbytes
        extent = extents.take(nbytes, lambda more: extents.end_bytes + more <= most)
        return None if extent is None else PinnedPlace(self.memory, extent)


class Slabs:
    """Pinned memory by the place; grows while the limit, the host and the driver let it.

    Args:
        pin: pins so many bytes, and returns what has their address as ``ptr``.
        refused: what it raises where the driver does not pin so much.
        limit_bytes: the most; None: what the host has available, less a tenth.

    Not thread-safe. Where it may grow no more for another reason than the limit, an
    `OffloadWarning` says so, once.
    """

    def __init__(
        self,
        pin: Callable[[int], Any],
        refused: tuple[type[Exception], ...],
        limit_bytes: int | None = None,
    ) -> None:
        self._pin, self._refused, self._limit = pin, refused, limit_bytes
        self._slabs: list[Slab] = []
        self._may_grow = True

    @property
    def held_bytes(self) -> int:
        """What is pinned."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, nbytes: int) -> PinnedPlace | None:
        """Return a place of at least this size; None where there is no room for it."""
        for slab in self._slabs:
            place = slab.take(nbytes)
            if place is not None:
                return place
        return self._slabs[-1].take(nbytes) if self._grow(nbytes) else None

    def clear(self) -> None:
        """Hold nothing more; a slab goes when the last place in it does."""
        self._slabs.clear()

    def _grow(self, nbytes: int) -> bool:
        """Add a slab that has room for so many bytes; tell whether there is one."""
        least = -(-nbytes // PAGE) * PAGE
        room = None if self._limit is None else self._limit - self.held_bytes
        if not self._may_grow or (room is not None and room < least):
            return False
        available = available_bytes()
        size = max(least, self.held_bytes, FIRST_BYTES)
        for most in (room, None if available is None else int(HOST_SHARE * available)):
            size = size if most is None else min(size, most)
        while size >= least:
            try:
                self._slabs.append(Slab(self._pin(size), size, Extents()))
                return True
            except self._refused:
                size //= 2
        self._may_grow = False
        has = "" if available is None else f", of {format_bytes(available)} that are available"
        warn_at_program(
            f"the host gives no {format_bytes(least)} more of pinned memory{has}; "
            f"{format_bytes(self.held_bytes)} are pinned: what has no room there stays on the GPU. "
            "Free host memory, or raise what the system lets a process lock",
            OffloadWarning,
        )
        return False
