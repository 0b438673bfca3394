"""Managed memory with the same addresses in each step, and whose free blocks can be discarded.

CuPy's pool reuses freed memory in its own order, so addresses differ between steps. Here they
repeat (`RepeatingPool`), and free blocks are known. A free block is discarded in the order of the
stream that uses it next (`OrderedDiscards`). So the arena serves only that stream's requests;
CuPy's pool serves others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
from cupy.cuda import runtime

from umem._common.locks import safe_lock
from umem.devices.base import Place, Span
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.driver import Driver, Malloc
from umem.devices.cuda.ledger import MemoryOwner, MemoryOwnerRef
from umem.devices.cuda.ranges import CoreHints
from umem.devices.virtual.driver import covered
from umem.devices.virtual.repeating_pool import RepeatingPool
from umem.trace.recording import free_reporters, reporters
from umem.units import BLOCK_BYTES

listeners: list[Callable[[int, int], None]] = []
"""Called with the address and bytes of each allocation here: CuPy's memory hooks are not."""


class _Address(NamedTuple):
    ptr: int
    device_id: int


class Arena:
    """CuPy allocator over managed memory with repeating addresses. Never run on a GPU yet.

    Lives as long as the memory that it allocated. Thread-safety: any thread may allocate and free.
    Cost: a pool in Python, some microseconds an allocation.

    Args:
        driver: the GPU.
        grow: allocates managed memory from the driver.
        fallback: serves requests of other streams.
    """

    def __init__(self, driver: Driver, grow: Malloc, fallback: Malloc) -> None:
        self._driver, self._grow, self._fallback = driver, grow, fallback
        self._lock = safe_lock()
        self._segments: dict[int, Any] = {}
        self._live: set[MemoryOwnerRef] = set()
        self._dead: deque[MemoryOwnerRef] = deque()
        self._pool = RepeatingPool(self, grain=BLOCK_BYTES)
        self._order = OrderedDiscards()
        self.stream = 0

    @property
    def is_open(self) -> bool:
        """Tell whether it serves allocations."""
        return self._pool.repeats

    def open(self) -> None:
        """Serve allocations of the current stream."""
        with self._lock:
            self.stream = self._driver.stream_address(None)
            self._pool.repeats = True
        free_reporters.append(self._free_queued)

    def close(self) -> None:
        """Stop serving, and free unused memory; `tidy` frees the rest later."""
        if self._free_queued in free_reporters:
            free_reporters.remove(self._free_queued)
        with self._lock:
            self._pool.repeats = False
            self.free_all_blocks()

    def tidy(self) -> None:
        """Free memory that no array uses, if the arena is closed."""
        if self._dead and not self.is_open:
            self.free_all_blocks()

    def free_all_blocks(self) -> None:
        """Free segments without arrays; none while a stream is captured."""
        with self._lock:
            self._free_dead()
            if self._driver.may_free(waits=False):  # `give_back` waits for what is freed
                self._pool.free_all_blocks()

    def used_bytes(self) -> int:
        """Return the bytes that arrays use."""
        with self._lock:
            self._free_dead()
            return self._pool.used_bytes

    def next_step(self) -> None:
        """End a step."""
        with self._lock:
            self._pool.restart()

    def malloc(self, nbytes: int) -> Any:
        """Allocate by CuPy's interface; raises what ``grow`` raises."""
        if not (nbytes and self.is_open and self._serves()):
            return self._fallback(nbytes)
        with self._lock:
            self._free_dead()
            span = self._pool.malloc(nbytes)
            held = MemoryOwner(self)
            ref = MemoryOwnerRef(held, self._dead.append)
            ref.ticket = span
            self._live.add(ref)
            for reporter in reporters:
                reporter.begun(span.address, nbytes)
            for listener in listeners:
                listener(span.address, nbytes)
        return cuda_driver.borrowed(_Address(span.address, self._driver.ordinal), nbytes, held)

    def _serves(self) -> bool:
        # The default stream has the same number on every GPU.
        return self._driver.stream_address(None) == self.stream and self._driver.is_current()

    def prefetch(self, hints: CoreHints, spans: Sequence[Span], to: Place, stream: int) -> int:
        """Move ranges of any managed memory, ordered with discards; returns the bytes."""
        if not self.is_open:
            return hints.prefetch(spans, to, stream)
        with self._lock:
            return self._order.prefetch(hints, spans, to, stream)

    def make_ready(self, hints: CoreHints, blocks: Iterable[int], stream: int) -> int:
        """Make free blocks resident; returns the bytes."""
        with self._lock:
            spans = self.free_spans(blocks)
            return self._order.prefetch(hints, spans, self._driver.ordinal, stream)

    def discard_free(self, hints: CoreHints, blocks: Iterable[int]) -> int:
        """Discard the contents of free blocks; returns the bytes.

        Does nothing while the served stream is captured: a capture cannot contain a discard.
        """
        with self._lock:  # nobody gets a block before the stream has been told to wait
            if self._driver.capturing(self.stream):
                return 0
            return self._order.discard(hints, self.free_spans(blocks), self.stream)

    def free_spans(self, blocks: Iterable[int]) -> list[Span]:
        """List the free parts of blocks, as ranges that are each within one segment."""
        self._free_dead()
        spans: list[Span] = []
        before = None
        for block in sorted(blocks):
            low, high = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            segment = self._segment(low, high)
            if segment is not None and self._pool.is_free(low, high):
                # The driver may hand out neighbours, and refuses a range over two of them.
                if spans and sum(spans[-1]) == low and segment == before:
                    low = spans.pop().address
                spans.append(Span(low, high - low))
                before = segment
        return spans

    def reserve(self, nbytes: int) -> int:
        """Get more memory; see `RepeatingPool`."""
        pointer = self._grow(nbytes)
        self._segments[pointer.ptr] = pointer
        return int(pointer.ptr)

    def give_back(self, address: int, nbytes: int) -> None:
        """Return memory to the driver once no queued work can use it."""
        self._driver.synchronize()  # cudaFree promises no wait
        self._order.forget()
        del self._segments[address]

    def _free_dead(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            self._live.discard(ref)
            self._pool.free(ref.ticket)
            for reporter in reporters:
                reporter.ended(ref.ticket.address)

    def _free_queued(self) -> None:
        """Free dead memory, so that recorders are notified before the next operation."""
        if self._dead:
            with self._lock:
                self._free_dead()

    def _segment(self, low: int, high: int) -> int | None:
        """Return the segment that contains the whole range; the driver refuses other ranges."""
        for address, pointer in self._segments.items():
            if address <= low and high <= address + int(pointer.mem.size):
                return address
        return None


class OrderedDiscards:
    """Discards of a GPU's managed memory, ordered with prefetches by events.

    CUDA refuses discards on the legacy default stream. Reads, writes and prefetches of a range are
    undefined while its discard runs (cuMemDiscardBatchAsync). So discards have their own
    non-blocking stream. It waits for the work queued so far on the operations' stream, and for
    prefetches of the same blocks on any stream; the operations' stream, and later prefetches of
    these blocks, wait for it.

    Cost: an event a prefetch, two events a discard, and the waits of the operations' stream, which
    were never timed on a GPU. umem never makes the host wait here; whether the driver's call does
    is unknown. One thread at a time, while the GPU is current.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._prefetches: dict[int, dict[int, Any]] = {}  # events, by block and stream
        self._discards: dict[int, Any] = {}  # events, by block

    def prefetch(self, hints: CoreHints, spans: Sequence[Span], to: Place, stream: int) -> int:
        """Move ranges in stream order, after discards of their blocks; returns their bytes."""
        blocks = [*_blocks(spans)]
        for event in _several(self._discards.get(block) for block in blocks):
            _wait(stream, event)
        try:
            return hints.prefetch(spans, to, stream)
        finally:  # some of it may be under way where the rest is refused
            event = _record(stream)
            for block in blocks:
                self._prefetches.setdefault(block, {})[stream] = event

    def discard(self, hints: CoreHints, spans: Sequence[Span], operations: int) -> int:
        """Discard ranges that a stream's earlier operations used; later ones may reuse them."""
        if not spans:
            return 0
        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        stream = int(self._stream.ptr)
        blocks = [*_blocks(spans)]
        earlier = (self._prefetches.get(block, {}) for block in blocks)
        _wait(stream, _record(operations))
        for event in _several(event for events in earlier for event in events.values()):
            _wait(stream, event)
        forgotten = hints.discard(spans, stream)
        event = _record(stream)
        _wait(operations, event)
        for block in blocks:
            self._prefetches.pop(block, None)
            self._discards[block] = event
        return forgotten

    def forget(self) -> None:
        """Drop all events, because their work has finished."""
        self._prefetches.clear()
        self._discards.clear()


def _blocks(spans: Iterable[Span]) -> Iterator[int]:
    for span in spans:
        yield from range(*covered(span))


def _record(stream: int) -> Any:
    """Make an event that completes when the work queued so far on a stream does."""
    event = cupy.cuda.Event(disable_timing=True)
    runtime.eventRecord(event.ptr, stream)
    return event


def _wait(stream: int, event: Any) -> None:
    """Make later work of a stream wait for an event."""
    runtime.streamWaitEvent(stream, event.ptr)


def _several(events: Iterable[Any]) -> list[Any]:
    """Return the events without duplicates."""
    return [*{id(event): event for event in events if event is not None}.values()]
