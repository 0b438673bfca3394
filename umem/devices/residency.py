"""Which 2 MiB blocks of managed memory are in VRAM: the model of the driver's bookkeeping.

Source: NVIDIA's open kernel driver 595.45, kernel-open/nvidia-uvm (uvm_va_block.c, uvm_pmm_gpu.c);
Allen and Ge, "In-depth analyses of unified virtual memory system for GPU accelerated computing",
SC 2021.

Models: whole blocks; populate, migrate, evict, prefetch, discard, release; first-in-first-out
eviction by last migration, which hits do not refresh; advice; reading over the bus.
Does not model: contents; pages inside a block (64 KiB faults and the tree prefetcher show only
in the cost of a fault); a dirty bit, because the driver has none.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

READ_MOSTLY = 1
PREFER_HOST = 2
PREFER_GPU = 4
ACCESSED_BY_GPU = 8


@dataclass
class Moves:
    """Blocks that moved, were made or were given up; what a clock turns into time."""

    hit: int = 0
    migrated_in: int = 0
    populated: int = 0
    migrated_out: int = 0
    dropped: int = 0
    prefetched_out: int = 0
    discarded: int = 0
    released: int = 0
    remote: int = 0

    def add(self, other: Moves) -> None:
        """Add another's counts to these."""
        self.hit += other.hit
        self.migrated_in += other.migrated_in
        self.populated += other.populated
        self.migrated_out += other.migrated_out
        self.dropped += other.dropped
        self.prefetched_out += other.prefetched_out
        self.discarded += other.discarded
        self.released += other.released
        self.remote += other.remote


class Residency:
    """Managed blocks by number, and which of them are in ``capacity`` blocks of VRAM.

    A block is resident, or has a valid copy on the host, or both (read-mostly), or neither
    (never written). The queue holds extents ``(start, stop, stamp)`` in the order of their last
    migration; an extent's block counts only while ``stamps`` still says so.

    Not thread-safe: its device holds the lock. Cost: a range that is resident is one memory scan;
    a migration some tens of nanoseconds a block (bench/residency.py).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.resident = bytearray()
        self.host = bytearray()
        self.advice = bytearray()
        self._advised = False
        self._stamps = array("q")
        self._stamp = 0
        self._queue: deque[tuple[int, int, int]] = deque()

    def grow(self, block_count: int) -> None:
        """Make room for block numbers below ``block_count``."""
        more = block_count - len(self.resident)
        if more > 0:
            for table in (self.resident, self.host, self.advice):
                table.extend(bytes(more))
            self._stamps.extend(array("q", bytes(8 * more)))

    def shrink(self, capacity: int) -> Moves:
        """Change the capacity, evicting what no longer fits."""
        self.capacity = capacity
        moves = Moves()
        if self.count > capacity:
            self._evict(self.count - capacity, moves)
        return moves

    # -- what happens to a range of blocks -------------------------------------------------

    def touch(self, start: int, stop: int, *, write: bool) -> Moves:
        """The GPU reads or writes the blocks ``start`` to ``stop``, in order."""
        moves = Moves()
        if not self._advised:
            self._bring_in(start, stop, moves, keep_host=False)
            return moves
        for low, high, advice in self._runs(start, stop):
            self._touch_run(low, high, advice, write, moves)
        return moves

    def prefetch(self, start: int, stop: int) -> Moves:
        """Bring the blocks to VRAM without faults, evicting as it goes."""
        moves = Moves()
        for low, high, advice in self._runs(start, stop):
            self._bring_in(low, high, moves, keep_host=bool(advice & READ_MOSTLY))
        return moves

    def prefetch_out(self, start: int, stop: int) -> Moves:
        """Send the blocks to the host and leave their VRAM free; the host populates the rest."""
        moves = Moves()
        for low, high in _stretches(self.resident, 1, start, stop):
            moves.prefetched_out += high - low - self.host.count(1, low, high)
            moves.dropped += self.host.count(1, low, high)
            self._leave(low, high)
        _fill(self.host, start, stop, 1)
        return moves

    def discard(self, start: int, stop: int) -> Moves:
        """Forget the contents: the blocks are as never written, and nothing is copied."""
        moves = Moves(discarded=self._leave_all(start, stop))
        _fill(self.host, start, stop, 0)
        return moves

    def release(self, start: int, stop: int) -> Moves:
        """The blocks' address space is given back to the driver; advice goes with it."""
        moves = Moves(released=self._leave_all(start, stop))
        _fill(self.host, start, stop, 0)
        _fill(self.advice, start, stop, 0)
        return moves

    def advise(self, start: int, stop: int, flag: int, *, unset: bool) -> None:
        """Set or take back one advice flag; moves nothing.

        Taking back ``READ_MOSTLY`` drops the host's duplicates of resident blocks. The two
        preferred locations exclude each other.
        """
        both = PREFER_HOST | PREFER_GPU
        clear = both if flag & both and not unset else flag
        for low, high, advice in list(self._runs(start, stop)):
            _fill(self.advice, low, high, advice & ~clear | (0 if unset else flag))
        if flag == READ_MOSTLY and unset:
            for low, high in _stretches(self.resident, 1, start, stop):
                _fill(self.host, low, high, 0)
        self._advised = self._advised or not unset

    # -- inside ----------------------------------------------------------------------------

    def _touch_run(self, low: int, high: int, advice: int, write: bool, moves: Moves) -> None:
        remote = bool(advice & PREFER_HOST)
        if remote or advice & ACCESSED_BY_GPU:
            moves.hit += self.resident.count(1, low, high)
            for first, last in _stretches(self.resident, 0, low, high):
                on_host = self.host.count(1, first, last)
                if remote or on_host == last - first:
                    moves.remote += last - first
                    _fill(self.host, first, last, 1)
                else:
                    self._touch_mapped(first, last, moves)
        else:
            self._bring_in(low, high, moves, keep_host=bool(advice & READ_MOSTLY) and not write)
        if write and advice & READ_MOSTLY:
            for first, last in _stretches(self.resident, 1, low, high):
                _fill(self.host, first, last, 0)

    def _touch_mapped(self, low: int, high: int, moves: Moves) -> None:
        """Accessed-by without a preferred location: what is on the host is read there."""
        on_host = self.host.count(1, low, high)
        for first, last in list(_stretches(self.host, 0, low, high)):
            self._bring_in(first, last, moves, keep_host=False)
        moves.remote += on_host

    def _bring_in(self, start: int, stop: int, moves: Moves, *, keep_host: bool) -> None:
        """Make a range resident in ascending order, as faults and prefetches do."""
        resident, host = self.resident, self.host
        cursor = start
        while True:
            low = resident.find(0, cursor, stop)
            if low < 0:
                moves.hit += stop - cursor
                return
            moves.hit += low - cursor
            high = resident.find(1, low, stop)
            high = min(stop if high < 0 else high, low + self.capacity)
            if high == low:  # no VRAM left for managed memory: the bus serves it
                moves.remote += stop - low
                _fill(host, low, stop, 1)
                return
            missing = self.count + high - low - self.capacity
            if missing > 0:
                self._evict(missing, moves)
            copies = host.count(1, low, high)
            moves.migrated_in += copies
            moves.populated += high - low - copies
            if not keep_host:
                _fill(host, low, high, 0)
            self._enter(low, high)
            cursor = high

    def _enter(self, low: int, high: int) -> None:
        self._stamp += 1
        _fill(self.resident, low, high, 1)
        self._stamps[low:high] = array("q", [self._stamp]) * (high - low)
        self._queue.append((low, high, self._stamp))
        self.count += high - low
        if len(self._queue) > 2 * self.count + 1000:
            self._forget_stale()

    def _leave(self, low: int, high: int) -> None:
        _fill(self.resident, low, high, 0)
        self._stamps[low:high] = array("q", bytes(8 * (high - low)))
        self.count -= high - low

    def _leave_all(self, start: int, stop: int) -> int:
        count = self.resident.count(1, start, stop)
        if count:
            for low, high in list(_stretches(self.resident, 1, start, stop)):
                self._leave(low, high)
        return count

    def _evict(self, wanted: int, moves: Moves) -> None:
        """Copy the blocks that came in longest ago back to the host; duplicates are dropped."""
        queue, stamps, host = self._queue, self._stamps, self.host
        while wanted > 0:
            low, stop, stamp = queue.popleft()
            while low < stop and wanted > 0:
                if stamps[low] != stamp:
                    low += 1
                    continue
                high = low + 1
                end = min(stop, low + wanted)
                while high < end and stamps[high] == stamp:
                    high += 1
                valid = host.count(1, low, high)
                moves.dropped += valid
                moves.migrated_out += high - low - valid
                _fill(host, low, high, 1)
                self._leave(low, high)
                wanted -= high - low
                low = high
            if low < stop:
                queue.appendleft((low, stop, stamp))

    def _forget_stale(self) -> None:
        """Drop the extents of which no block counts any more; the order stays."""
        self._queue = deque(
            (low, high, stamp)
            for low, high, stamp in self._queue
            if stamp in self._stamps[low:high]
        )

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Maximal runs of equal advice."""
        low = start
        while low < stop:
            value = self.advice[low]
            if not self._advised:
                high = stop
            else:
                rest = bytes(self.advice[low:stop])
                high = low + len(rest) - len(rest.lstrip(bytes((value,))))
            yield low, high, value
            low = high


def _stretches(table: bytearray, value: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Maximal runs of ``value`` (0 or 1), looked up while the table may change behind them."""
    cursor = start
    while True:
        low = table.find(value, cursor, stop)
        if low < 0:
            return
        high = table.find(1 - value, low, stop)
        cursor = stop if high < 0 else high
        yield low, cursor


def _fill(table: bytearray, low: int, high: int, value: int) -> None:
    if high - low == 1:
        table[low] = value
    else:
        table[low:high] = (b"\x00" if value == 0 else bytes((value,))) * (high - low)
