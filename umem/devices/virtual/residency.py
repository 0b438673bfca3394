"""Residency of managed 2 MiB blocks in VRAM: a model of the driver's bookkeeping.

Source: NVIDIA's open kernel driver 595.45, kernel-open/nvidia-uvm (uvm_va_block.c, uvm_pmm_gpu.c);
Allen and Ge, "In-depth analyses of unified virtual memory system for GPU accelerated computing",
SC 2021.

Models: whole blocks; populate, migrate, evict, prefetch, discard, release; first-in-first-out
eviction by last migration, which hits do not refresh; advice; reading over the bus.
Does not model: contents; pages inside a block (64 KiB faults and the tree prefetcher show only
in the cost of a fault); a dirty bit, because the driver has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from umem.devices.page_moves import Cause, Way
from umem.devices.virtual import runs
from umem.devices.virtual.advice import ACCESSED_BY_GPU, PREFER_GPU, PREFER_HOST, READ_MOSTLY
from umem.devices.virtual.clock import BlockMoves

FEW = 6
"""Ranges up to this length are handled block by block; measured with bench/residency.py."""
TO_GPU, TO_HOST = 1, 2
Moved = Callable[[int, int, Way, Cause], None]
"""Called with the blocks ``start`` to ``stop`` that moved."""


class Residency:
    """Residency of managed blocks in ``capacity`` blocks of VRAM.

    A block is resident, or has a valid copy on the host, or both (read-mostly), or neither (never
    written). The queue holds extents ``(start, stop, stamp)`` in the order of their last migration;
    an extent's block is valid only while its entry in ``stamps`` matches.

    Not thread-safe: its device holds the lock. Cost: a memory scan a range (bench/residency.py).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.count = capacity, 0
        self.resident, self.host = bytearray(), bytearray()
        self.advice = bytearray()
        self.last_prefetch = bytearray()  # 0, TO_GPU or TO_HOST
        self._tables = (self.resident, self.host, self.advice, self.last_prefetch)
        self._advised = False
        self._stamps: list[int] = []
        self._stamp = 0
        self._queue: deque[tuple[int, int, int]] = deque()
        self.listener: Moved | None = None
        self._cause: Cause = "fault"

    def grow(self, block_count: int) -> None:
        """Extend the tables to block numbers below ``block_count``."""
        more = block_count - len(self.resident)
        if more > 0:
            for table in self._tables:
                table.extend(bytes(more))
            self._stamps.extend([0] * more)

    def forget(self) -> None:
        """Free the tables, which take 50 MB for 8 TiB of blocks.

        A device is in a reference cycle: without this the tables stay until garbage collection.
        """
        for table in (*self._tables, self._stamps, self._queue):
            table.clear()
        self.count = 0

    def shrink(self, capacity: int) -> BlockMoves:
        """Change the capacity, evicting blocks that do not fit."""
        self.capacity, moves = capacity, BlockMoves()
        if self.count > capacity:
            self._evict(self.count - capacity, moves)
        return moves

    # -- what happens to a range of blocks -------------------------------------------------

    def touch(
        self, start: int, stop: int, *, write: bool, moves: BlockMoves | None = None
    ) -> BlockMoves:
        """Access the blocks ``start`` to ``stop`` on the GPU in order, migrating by faults.

        Returns the moves, added to ``moves`` if given.
        """
        moves = moves or BlockMoves()
        advised = self._advised
        collapses = write and advised and self.host.find(1, start, stop) >= 0
        if self.resident.find(0, start, stop) < 0 and not collapses:
            moves.hit += stop - start
        elif not advised:
            self._bring_in(start, stop, moves, False)
        else:
            while start < stop:  # no generator: this is the busiest loop where there is advice
                end = runs.end_of_run(self.advice, start, stop)
                self._touch_run(start, end, self.advice[start], write, moves)
                start = end
        return moves

    def copy(self, start: int, stop: int, *, write: bool) -> BlockMoves:
        """Access blocks as `touch`, by a copy."""
        self._cause = "copy"
        moves = self.touch(start, stop, write=write)
        self._cause = "fault"
        return moves

    def prefetch(self, start: int, stop: int) -> BlockMoves:
        """Make blocks resident without faults, evicting others.

        Resident blocks count as moved last. Preferred locations do not prevent it.
        """
        moves = BlockMoves()
        runs.fill(self.last_prefetch, start, stop, TO_GPU)
        if not self.capacity:
            return moves
        self._cause = "prefetch"
        for low, high, advice in self._runs(start, stop):
            self._bring_in(low, high, moves, bool(advice & READ_MOSTLY), refresh=True)
        self._cause = "fault"
        return moves

    def prefetch_out(self, start: int, stop: int) -> BlockMoves:
        """Move blocks to the host and free their VRAM; the host populates the rest."""
        moves = BlockMoves()
        runs.fill(self.last_prefetch, start, stop, TO_HOST)
        for low, high in runs.stretches(self.resident, 1, start, stop):
            self._report_moves(0, low, high, "out", "prefetch")
            moves.prefetched_out += high - low - self.host.count(1, low, high)
            moves.dropped += self.host.count(1, low, high)
            self._remove(low, high)
        runs.fill(self.host, start, stop, 1)
        return moves

    def find_on_host(self, start: int, stop: int) -> None:
        """Mark blocks that are not resident as having contents on the host."""
        for low, high in runs.stretches(self.resident, 0, start, stop):
            runs.fill(self.host, low, high, 1)

    def discard(self, start: int, stop: int) -> BlockMoves:
        """Discard contents without copies: blocks become as never written."""
        return BlockMoves(discarded=self._empty(start, stop))

    def release(self, start: int, stop: int) -> BlockMoves:
        """Free the blocks' address space, with all their state."""
        if self.advice.count(0, start, stop) < stop - start:
            runs.fill(self.advice, start, stop, 0)
        runs.fill(self.last_prefetch, start, stop, 0)
        return BlockMoves(released=self._empty(start, stop))

    def advise(self, start: int, stop: int, flag: int, *, unset: bool) -> None:
        """Set or unset an advice flag; moves nothing.

        Unsetting ``READ_MOSTLY`` drops the host's duplicates of resident blocks. The two preferred
        locations exclude each other, and unsetting either unsets both.
        """
        clear = PREFER_HOST | PREFER_GPU if flag & (PREFER_HOST | PREFER_GPU) else flag
        for low, high, advice in list(self._runs(start, stop)):
            runs.fill(self.advice, low, high, advice & ~clear | (0 if unset else flag))
        if flag == READ_MOSTLY and unset:
            for low, high in runs.stretches(self.resident, 1, start, stop):
                runs.fill(self.host, low, high, 0)
        self._advised = self._advised or not unset

    # -- inside ----------------------------------------------------------------------------

    def _touch_run(self, low: int, high: int, advice: int, write: bool, moves: BlockMoves) -> None:
        if advice & READ_MOSTLY:  # overrides the rest (CUDA's cudaMemAdvise says so)
            self._bring_in(low, high, moves, not write)
        elif advice & (PREFER_HOST | ACCESSED_BY_GPU):
            self._touch_mapped(low, high, bool(advice & PREFER_HOST), moves)
        else:
            self._bring_in(low, high, moves, False)

    def _touch_mapped(self, start: int, stop: int, to_host: bool, moves: BlockMoves) -> None:
        """Access blocks in place; new blocks are populated in VRAM or on the host."""
        low, end = start, runs.end_of_flags
        while low < stop:
            if self.resident[low]:
                high = end(self.resident, low, stop)
                moves.hit += high - low
            elif to_host or self.host[low]:
                high = stop if to_host else end(self.host, low, stop)
                high = min(high, end(self.resident, low, stop))
                moves.remote += high - low
                runs.fill(self.host, low, high, 1)
            else:  # up to what is there: that may be pushed out by now
                high = min(end(self.resident, low, stop), end(self.host, low, stop))
                self._bring_in(low, high, moves, False)
            low = high

    def _bring_in(
        self, start: int, stop: int, moves: BlockMoves, keep_host: bool, refresh: bool = False
    ) -> None:
        """Make a range resident in ascending order, as for faults and prefetches.

        Without ``keep_host`` the host's copies are dropped, even of blocks already resident.
        """
        if stop - start <= FEW <= self.capacity and not refresh and self.listener is None:
            self._bring_in_few(start, stop, moves, keep_host)
            return
        resident, capacity = self.resident, self.capacity
        cursor = start
        while cursor < stop:
            low = resident.find(0, cursor, stop)
            if low != cursor:
                low = stop if low < 0 else low
                self._hit(cursor, low, moves, keep_host, refresh)
                if low == stop:
                    return
            if not capacity:  # no VRAM left for managed memory: the bus serves it
                moves.remote += stop - low
                runs.fill(self.host, low, stop, 1)
                return
            high = resident.find(1, low, stop)
            high = min(stop if high < 0 else high, low + capacity)
            missing = self.count + high - low - capacity
            if missing > 0:
                self._evict(missing, moves)
            self._enter(low, high, moves, keep_host)
            cursor = high
            if high - low == capacity < stop - high:  # nothing else is there any more
                self._stream(high, stop, moves, keep_host)
                return

    def _stream(self, start: int, stop: int, moves: BlockMoves, keep_host: bool) -> None:
        """Make a range resident that is larger than VRAM, and of which no block is resident.

        Equals a pass piece by piece: each block evicts an earlier one, so only the end of the range
        stays.
        """
        host, last = self.host, stop - self.capacity
        self._evict(self.count, moves)
        self._report_entry(start, last)
        self._report_moves(0, start, last, "out", "eviction")
        if not keep_host:
            self._report_moves(1, start, last, "out", "eviction")
        every = host.find(0, start, last) < 0  # as a rule, and a quarter of the time of counting
        copies = last - start if every else host.count(1, start, last)
        moves.migrated_in += copies
        moves.populated += last - start - copies
        if keep_host:
            moves.dropped += copies
        moves.migrated_out += last - start - (copies if keep_host else 0)
        if not every:
            runs.fill(host, start, last, 1)
        self._enter(last, stop, moves, keep_host)

    def _bring_in_few(self, start: int, stop: int, moves: BlockMoves, keep_host: bool) -> None:
        """Make a short range resident block by block, which is faster than slices of the tables.

        VRAM must have space for the whole range, so that it never evicts its own start. One long
        function, because a run on a virtual GPU spends most of its time here.
        """
        resident, host, stamps, queue = self.resident, self.host, self._stamps, self._queue
        count, capacity = self.count, self.capacity
        self._stamp = stamp = self._stamp + 1
        first = end = old = migrated_in = populated = migrated_out = 0
        for block in range(start, stop):
            if resident[block]:
                if not keep_host:
                    host[block] = 0
                continue
            while count >= capacity:
                if first == end:
                    first, end, old = queue.popleft()
                if stamps[first] == old:
                    if not host[first]:
                        migrated_out += 1
                        host[first] = 1
                    resident[first] = 0
                    count -= 1
                first += 1
            if not host[block]:
                populated += 1
            else:
                migrated_in += 1
                if not keep_host:
                    host[block] = 0
            resident[block] = 1
            stamps[block] = stamp
            count += 1
        if first != end:
            queue.appendleft((first, end, old))
        entered = migrated_in + populated
        moves.hit += stop - start - entered
        moves.migrated_in += migrated_in
        moves.populated += populated
        if count != self.count + entered:
            moves.migrated_out += migrated_out
            moves.dropped += self.count + entered - count - migrated_out
        self.count = count
        queue.append((start, stop, stamp))
        if len(queue) > 2 * count + 1000:
            self._forget_stale()

    def _enter(self, low: int, high: int, moves: BlockMoves, keep_host: bool) -> None:
        """Make blocks resident; there must be space for them."""
        count = high - low
        if self.listener is not None:
            self._report_entry(low, high)
        copies = self.host.count(1, low, high)
        if copies:
            moves.migrated_in += copies
            if not keep_host:
                self.host[low:high] = bytes(count)
        if copies != count:
            moves.populated += count - copies
        self.resident[low:high] = b"\x01" * count
        self.count += count
        self._queue_up(low, high)

    def _queue_up(self, low: int, high: int) -> None:
        """Put blocks at the end of the eviction order."""
        self._stamp = stamp = self._stamp + 1
        self._stamps[low:high] = [stamp] * (high - low)
        self._queue.append((low, high, stamp))
        if len(self._queue) > 2 * self.count + 1000:
            self._forget_stale()

    def _hit(self, low: int, high: int, moves: BlockMoves, keep_host: bool, refresh: bool) -> None:
        moves.hit += high - low
        if self._advised and not keep_host:
            runs.fill(self.host, low, high, 0)
        if refresh:
            self._queue_up(low, high)

    def _remove(self, low: int, high: int) -> None:
        runs.fill(self.resident, low, high, 0)
        self._stamps[low:high] = [0] * (high - low)
        self.count -= high - low

    def _empty(self, start: int, stop: int) -> int:
        """Mark blocks as never written; returns how many were resident."""
        count = self.resident.count(1, start, stop)
        for low, high in runs.stretches(self.resident, 1, start, stop):
            self._remove(low, high)
        runs.fill(self.host, start, stop, 0)
        return count

    def _evict(self, wanted: int, moves: BlockMoves) -> None:
        """Evict the blocks that moved in first; drop duplicates (read_mostly) without a copy."""
        queue, stamps, host = self._queue, self._stamps, self.host
        while wanted > 0:
            low, stop, stamp = queue.popleft()
            if stamps[low] != stamp:
                low = runs.first_of_stamp(stamps, low + 1, stop, stamp)
                if low == stop:
                    continue
            high = stop if stop - low <= wanted else low + wanted
            if stamps[low:high].count(stamp) != high - low:
                high = runs.end_of_stamp(stamps, low, high, stamp)
            if high != stop:
                queue.appendleft((high, stop, stamp))
            count = high - low
            valid = host.count(1, low, high)
            if self.listener is not None:
                self._report_moves(0, low, high, "out", "eviction")
            moves.dropped += valid
            moves.migrated_out += count - valid
            host[low:high] = b"\x01" * count
            self.resident[low:high] = bytes(count)
            self.count -= count
            wanted -= count

    def _report_entry(self, low: int, high: int) -> None:
        """Report blocks that move in, with the host's contents or new."""
        self._report_moves(1, low, high, "in", self._cause)
        self._report_moves(0, low, high, "new", self._cause)

    def _report_moves(self, on_host: int, low: int, high: int, way: Way, cause: Cause) -> None:
        """Report the blocks of a range that have a copy on the host, or that have none."""
        if self.listener is not None:
            for start, stop in runs.stretches(self.host, on_host, low, high):
                self.listener(start, stop, way, cause)

    def _forget_stale(self) -> None:
        """Drop extents without valid blocks; keeps the order."""
        stamps = self._stamps
        self._queue = deque(one for one in self._queue if one[2] in stamps[one[0] : one[1]])

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Find maximal runs of equal advice."""
        while start < stop:
            end = runs.end_of_run(self.advice, start, stop) if self._advised else stop
            yield start, end, self.advice[start]
            start = end
