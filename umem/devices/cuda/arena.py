"""Managed memory that each step finds in the same places, and whose free blocks can be forgotten.

CuPy's pool hands out what was freed in an order of its own, so that no step has the places of the
one before. Here they repeat (`RepeatingPool`), and what nobody has is known. Discarding is safe in
the order of one stream: a block is discarded while nobody has it, on the stream of those who get
it next. So only that stream's requests are served here; others go to CuPy's pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from umem.devices.base import Span
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.driver import Driver, Malloc
from umem.devices.cuda.held import Held, HeldRef
from umem.devices.virtual.repeating_pool import RepeatingPool
from umem.locks import safe_lock
from umem.trace.recording.storage import tellers
from umem.units import BLOCK_BYTES


class _Address(NamedTuple):
    ptr: int
    device_id: int


class Arena:
    """An allocator for CuPy over managed memory. Never run on a GPU yet.

    Lives as long as the memory that it handed out. Thread-safety: any thread may allocate and free.
    Cost: that of a pool in Python, some microseconds an allocation.

    Args:
        driver: the GPU.
        grow: gets managed memory from the driver.
        otherwise: serves what comes from another stream.
    """

    def __init__(self, driver: Driver, grow: Malloc, otherwise: Malloc) -> None:
        self._driver, self._grow, self._otherwise = driver, grow, otherwise
        self._lock = safe_lock()
        self._segments: dict[int, Any] = {}
        self._live: set[HeldRef] = set()
        self._dead: deque[HeldRef] = deque()
        self._pool = RepeatingPool(self, grain=BLOCK_BYTES)
        self.stream = 0

    @property
    def is_open(self) -> bool:
        """Whether it serves anybody."""
        return self._pool.repeats

    def open(self) -> None:
        """Serve the stream that is current now."""
        with self._lock:
            self.stream = self._driver.stream_address(None)
            self._pool.repeats = True

    def close(self) -> None:
        """Serve nobody any more, and give back what nobody has."""
        with self._lock:
            self._settle()
            self._pool.repeats = False
            self._pool.free_all_blocks()

    def next_step(self) -> None:
        """A step is over."""
        with self._lock:
            self._pool.restart()

    def malloc(self, nbytes: int) -> Any:
        """CuPy's allocator interface; raises what ``grow`` does."""
        if not nbytes or not self.is_open or self._driver.stream_address(None) != self.stream:
            return self._otherwise(nbytes)
        with self._lock:
            self._settle()
            span = self._pool.malloc(nbytes)
            held = Held(self)
            ref = HeldRef(held, self._dead.append)
            ref.ticket = span
            self._live.add(ref)
            for teller in tellers:
                teller.begun(span.address, nbytes, span.nbytes)
        return cuda_driver.borrowed(_Address(span.address, self._driver.ordinal), nbytes, held)

    def free_spans(self, blocks: Iterable[int]) -> list[Span]:
        """What of the blocks lies in memory of which nobody has a part; hold `held_still`."""
        self._settle()
        spans: list[Span] = []
        for block in sorted(blocks):
            low, high = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
            if self._pool.is_free(low, high) and self._is_mine(low, high):
                if spans and sum(spans[-1]) == low:
                    low = spans.pop().address
                spans.append(Span(low, high - low))
        return spans

    @property
    def held_still(self) -> Any:
        """A lock: as long as it is held, nobody gets memory, and nobody's is free again."""
        return self._lock

    def reserve(self, nbytes: int) -> int:
        """Have more memory; see `RepeatingPool`."""
        pointer = self._grow(nbytes)
        self._segments[pointer.ptr] = pointer
        return int(pointer.ptr)

    def give_back(self, address: int, nbytes: int) -> None:
        """Give memory back to the driver, for which it waits until the GPU is done."""
        del self._segments[address]

    def _settle(self) -> None:
        while self._dead:
            ref = self._dead.popleft()
            self._live.discard(ref)
            self._pool.free(ref.ticket)
            for teller in tellers:
                teller.ended(*ref.ticket)

    def _is_mine(self, low: int, high: int) -> bool:
        """Tell whether a segment covers all of it: a driver refuses what nobody reserved."""
        for address, pointer in self._segments.items():
            if address <= low and high <= address + int(pointer.mem.size):
                return True
        return False
