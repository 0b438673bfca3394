"""A pool that repeats its addresses in each step, and knows its free ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter

from umem.devices.base import Span
from umem.devices.virtual.pool import UNIT_BYTES, Chunk, Pool, Upstream


class RepeatingPool(Pool):
    """A pool that can repeat its addresses in every iteration of a loop.

    While `repeats` is on, the n-th request of a size since `restart` gets the address of the
    previous iteration's n-th request of that size, if free; otherwise an address of `Pool`. A step
    that allocates and frees in the same order has the same layout from its third run on.

    Cost while `repeats` is on: a binary search among the free chunks.

    Args:
        source, together: see `Pool`.
        grain: reservations are multiples of this; the rest is free.
    """

    def __init__(
        self, source: Upstream, together: list[Pool] | None = None, grain: int = UNIT_BYTES
    ) -> None:
        super().__init__(source, together)
        self._grain = grain
        self._places: dict[tuple[int, int], int] = {}
        self._counts: Counter[int] = Counter()
        self._starts: list[int] | None = None  # of free chunks
        self._at: dict[int, Chunk] = {}
        self._used_starts: list[int] = []

    @property
    def repeats(self) -> bool:
        """Tell whether addresses repeat in each step; False at first."""
        return self._starts is not None

    @repeats.setter
    def repeats(self, on: bool) -> None:
        free = [chunk for chunks in self._free.values() for chunk in chunks] if on else []
        self._at = {chunk.address: chunk for chunk in free}
        self._starts = sorted(self._at) if on else None
        self._used_starts = sorted(self._used) if on else []
        self._places.clear()
        self._counts.clear()

    def restart(self) -> None:
        """Start the next iteration."""
        self._counts.clear()

    def is_free(self, low: int, high: int) -> bool:
        """Tell whether no address of the range is in use, and some belong to the pool.

        Valid only while it repeats.
        """
        if self._starts is None:
            return False
        used = bisect_left(self._used_starts, high) - 1
        if used >= 0:
            address = self._used_starts[used]
            if address + self._used[address].nbytes > low:
                return False
        free = bisect_left(self._starts, high) - 1
        if free < 0:
            return False
        address = self._starts[free]
        return address + self._at[address].nbytes > low

    def malloc(self, nbytes: int, limit_bytes: int | None = None) -> Span:
        """Allocate a span; see `Pool.malloc`."""
        if self._starts is None:
            return super().malloc(nbytes, limit_bytes)
        nbytes = -(-max(nbytes, 1) // UNIT_BYTES) * UNIT_BYTES
        key = nbytes, self._counts[nbytes]
        chunk = self._cut_out(self._places.get(key, -1), nbytes)
        if chunk is None:
            span = super().malloc(nbytes, limit_bytes)
        else:
            self._used[chunk.address] = chunk
            self.used_bytes += nbytes
            chunk.free = False
            span = Span(chunk.address, nbytes)
        insort(self._used_starts, span.address)
        self._counts[nbytes] += 1
        self._places[key] = span.address
        return span

    def free(self, span: Span) -> None:
        """Return a span; see `Pool.free`."""
        super().free(span)
        if self._starts is not None:
            del self._used_starts[bisect_left(self._used_starts, span.address)]

    def _reserve(self, nbytes: int, limit_bytes: int | None) -> Chunk:
        chunk = super()._reserve(-(-nbytes // self._grain) * self._grain, limit_bytes)
        if chunk.nbytes > nbytes:
            self._put(self._split(chunk, nbytes))
        return chunk

    def _cut_out(self, address: int, nbytes: int) -> Chunk | None:
        """Take a range out of the free chunk that contains it; None if none does.

        The rest of the chunk on either side stays free.
        """
        assert self._starts is not None
        index = bisect_right(self._starts, address) - 1
        chunk = None if index < 0 else self._at[self._starts[index]]
        if chunk is None or address + nbytes > chunk.address + chunk.nbytes:
            return None
        self._unlist(chunk)
        if chunk.address < address:
            before, chunk = chunk, self._split(chunk, address - chunk.address)
            self._put(before)
        if chunk.nbytes > nbytes:
            self._put(self._split(chunk, nbytes))
        return chunk

    def _put(self, chunk: Chunk) -> None:
        super()._put(chunk)
        if self._starts is not None:
            insort(self._starts, chunk.address)
            self._at[chunk.address] = chunk

    def _forget(self, chunk: Chunk) -> None:
        if self._starts is not None:
            del self._starts[bisect_left(self._starts, chunk.address)]
            del self._at[chunk.address]
