"""A caching pool that behaves as CuPy's: best fit, split, merge, and return memory only on request.

Source for the behaviour: CuPy's cupy/cuda/memory.pyx (SingleDeviceMemoryPool), versions 13 and 14.
Differs: one stream; of chunks of the same size it takes the one freed last.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from umem.devices.base import Span
from umem.errors import LimitError, OutOfMemoryError, SpanError
from umem.units import format_bytes

UNIT_BYTES = 512
"""Sizes are rounded up to this, as in CuPy's pool (``ALLOCATION_UNIT_SIZE`` of
cupy/cuda/memory.pyx)."""


class Upstream(Protocol):
    """The source of a pool's memory."""

    def reserve(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of memory, or raise OutOfMemoryError."""

    def give_back(self, address: int, nbytes: int) -> None:
        """Take back memory from `reserve`."""


class Chunk:
    """A piece of a reservation, in use or free; neighbours in address order."""

    __slots__ = ("address", "after", "before", "free", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.before: Chunk | None = None
        self.after: Chunk | None = None
        self.free = False


class Pool:
    """Allocates spans in units of 512 bytes from memory that ``source`` reserves.

    A limit applies to the total that the pools in ``together`` reserve; each joins that list.

    Not thread-safe: its device holds the lock. Cost: a few microseconds an allocation.
    """

    def __init__(self, source: Upstream, together: list[Pool] | None = None) -> None:
        self._source = source
        self._together = [] if together is None else together
        self._together.append(self)
        self._sizes: list[int] = []
        self._free: dict[int, dict[Chunk, None]] = {}
        self._used: dict[int, Chunk] = {}
        self.used_bytes = 0
        self.reserved_bytes = 0

    def malloc(self, nbytes: int, limit_bytes: int | None = None) -> Span:
        """Allocate a span of at least ``nbytes``, rounded up to 512.

        Raises:
            OutOfMemoryError: the source has no space, even after the pool returned every free
                reservation; LimitError if ``limit_bytes``, the most that the pool may reserve in
                all, is the reason. Nothing else has changed.
        """
        nbytes = -(-max(nbytes, 1) // UNIT_BYTES) * UNIT_BYTES
        chunk = self._take(nbytes) or self._reserve(nbytes, limit_bytes)
        chunk.free = False
        self._used[chunk.address] = chunk
        self.used_bytes += nbytes
        return Span(chunk.address, nbytes)

    def free(self, span: Span) -> None:
        """Return a span to the pool.

        Raises:
            SpanError: it was freed before, or is not from this pool; the pool is unchanged.
        """
        chunk = self._used.get(span.address)
        if chunk is None or chunk.nbytes != span.nbytes:
            raise SpanError(
                f"the span at {span.address:#x} of {span.nbytes} bytes was freed before, or is "
                "not from this pool"
            )
        del self._used[span.address]
        self.used_bytes -= span.nbytes
        chunk = self._merge(chunk.before, chunk) if _is_free(chunk.before) else chunk
        chunk = self._merge(chunk, chunk.after) if _is_free(chunk.after) else chunk
        self._put(chunk)

    def free_all_blocks(self) -> int:
        """Return every unused reservation to the source; returns the bytes."""
        whole = [
            chunk
            for chunks in self._free.values()
            for chunk in chunks
            if chunk.before is None and chunk.after is None
        ]
        for chunk in whole:
            self._unlist(chunk)
            self.reserved_bytes -= chunk.nbytes
            self._source.give_back(chunk.address, chunk.nbytes)
        return sum(chunk.nbytes for chunk in whole)

    # -- inside ----------------------------------------------------------------------------

    def _reserve(self, nbytes: int, limit_bytes: int | None) -> Chunk:
        """Reserve a chunk from the source; if that fails, free free blocks and retry.

        Raises:
            LimitError, OutOfMemoryError: it still does not fit; nothing was reserved.
        """
        if limit_bytes is not None and self._reserved_together() + nbytes > limit_bytes:
            for pool in self._together:
                pool.free_all_blocks()
            if self._reserved_together() + nbytes > limit_bytes:
                raise LimitError(
                    f"needs {format_bytes(nbytes)} more; "
                    f"{format_bytes(self._reserved_together())} of the limit of "
                    f"{format_bytes(limit_bytes)} reserved"
                )
        try:
            address = self._source.reserve(nbytes)
        except OutOfMemoryError:
            if not self.free_all_blocks():
                raise
            address = self._source.reserve(nbytes)
        self.reserved_bytes += nbytes
        return Chunk(address, nbytes)

    def _reserved_together(self) -> int:
        return sum(pool.reserved_bytes for pool in self._together)

    def _take(self, nbytes: int) -> Chunk | None:
        """Take the best-fitting free chunk, split to size; None if no chunk fits."""
        index = bisect_left(self._sizes, nbytes)
        if index == len(self._sizes):
            return None
        size = self._sizes[index]
        chunks = self._free[size]
        chunk = chunks.popitem()[0]  # the last; to find it by its key leaves ever more gaps
        chunk.free = False
        if not chunks:
            del self._free[size], self._sizes[index]
        self._forget(chunk)
        if chunk.nbytes > nbytes:
            self._put(self._split(chunk, nbytes))
        return chunk

    def _split(self, chunk: Chunk, nbytes: int) -> Chunk:
        rest = Chunk(chunk.address + nbytes, chunk.nbytes - nbytes)
        rest.before, rest.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after, chunk.nbytes = rest, nbytes
        return rest

    def _merge(self, low: Chunk | None, high: Chunk | None) -> Chunk:
        """Merge two neighbouring chunks into the lower one."""
        assert low is not None and high is not None
        for chunk in (low, high):
            if chunk.free:
                self._unlist(chunk)
        low.nbytes += high.nbytes
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        return low

    def _put(self, chunk: Chunk) -> None:
        chunk.free = True
        if chunk.nbytes not in self._free:
            self._free[chunk.nbytes] = {}
            insort(self._sizes, chunk.nbytes)
        self._free[chunk.nbytes][chunk] = None

    def _unlist(self, chunk: Chunk) -> None:
        chunk.free = False
        chunks = self._free[chunk.nbytes]
        del chunks[chunk]
        if not chunks:
            del self._free[chunk.nbytes]
            del self._sizes[bisect_left(self._sizes, chunk.nbytes)]
        self._forget(chunk)

    def _forget(self, chunk: Chunk) -> None:
        """Remove a chunk from the free list."""


def _is_free(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.free


class UncachedPool(Pool):
    """A pool without a cache: every span is a reservation."""

    def free(self, span: Span) -> None:
        """Return a span's memory to the source at once; see `Pool.free`."""
        super().free(span)
        self.free_all_blocks()
