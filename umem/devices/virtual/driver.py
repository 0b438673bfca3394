"""A virtual GPU's driver: address space, pinned VRAM, managed memory.

Models: blocks of 2 MiB; requests below half a block share blocks, as the driver's own
suballocation does; ``cudaMalloc`` pins VRAM and evicts managed blocks. Does not model: the driver's
fragmentation, the VRAM of a CUDA context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from umem.devices.base import Policy, Span
from umem.devices.virtual.advice import ACCESSED_BY_GPU, PREFER_HOST, preset_flags
from umem.devices.virtual.clock import BlockMoves
from umem.devices.virtual.pool import Pool, UncachedPool
from umem.devices.virtual.repeating_pool import RepeatingPool
from umem.devices.virtual.residency import Residency
from umem.errors import OutOfMemoryError, SizeError
from umem.units import BLOCK_BYTES, format_bytes

SMALL_BYTES = BLOCK_BYTES // 2
"""Ranges of at least this size get their own blocks; smaller ones share a block. A choice that no
measurement supports.
"""
ADDRESS_LIMIT_BYTES = 8 << 40
"""End of the model's address space, beyond any host's memory, to keep its tables small."""


class BlockNumbers:
    """Allocates runs of block numbers; never number 0, so that no address is null."""

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        self._on_growth = on_growth
        self._next = 1
        self._holes: dict[int, list[int]] = {}

    def take(self, count: int) -> int:
        """Take a run of ``count`` numbers; return the first.

        Raises:
            OutOfMemoryError: the model has no more addresses; nothing was taken.
        """
        holes = self._holes.get(count)
        if holes:
            return holes.pop()
        if (self._next + count) * BLOCK_BYTES > ADDRESS_LIMIT_BYTES:
            raise OutOfMemoryError(f"fewer than {count} blocks of address space are left")
        first, self._next = self._next, self._next + count
        self._on_growth(self._next)
        return first

    def give_back(self, first: int, count: int) -> None:
        """Return a run, to be reused for a run of the same length."""
        self._holes.setdefault(count, []).append(first)


class _AddressSpace:
    """Ranges of one kind of memory; small ones share a block."""

    def __init__(self, numbers: BlockNumbers) -> None:
        self._numbers = numbers
        self._shared: dict[int, int] = {}
        self._open_block = -1
        self._open_bytes = 0

    def blocks_needed(self, nbytes: int) -> int:
        """Return the number of new blocks that `reserve` would need."""
        if nbytes >= SMALL_BYTES:
            return -(-nbytes // BLOCK_BYTES)
        return 0 if self._fits_open(nbytes) else 1

    def reserve(self, nbytes: int) -> int:
        """Reserve ``nbytes``, and return the address."""
        if nbytes >= SMALL_BYTES:
            return self._numbers.take(-(-nbytes // BLOCK_BYTES)) * BLOCK_BYTES
        if not self._fits_open(nbytes):
            self._open_block, self._open_bytes = self._numbers.take(1), 0
            self._shared[self._open_block] = 0
        address = self._open_block * BLOCK_BYTES + self._open_bytes
        self._open_bytes += nbytes
        self._shared[self._open_block] += 1
        return address

    def give_back(self, address: int, nbytes: int) -> tuple[int, int]:
        """Free a range; returns the blocks ``(start, stop)`` that became free."""
        block, count = address // BLOCK_BYTES, 1
        if nbytes >= SMALL_BYTES:
            count = -(-nbytes // BLOCK_BYTES)
        else:
            self._shared[block] -= 1
            if self._shared[block]:
                return block, block
            del self._shared[block]
            if block == self._open_block:
                self._open_block = -1
        self._numbers.give_back(block, count)
        return block, block + count

    def _fits_open(self, nbytes: int) -> bool:
        return self._open_block >= 0 and self._open_bytes + nbytes <= BLOCK_BYTES


class _Pinned:
    """Address space of ``cudaMalloc``."""

    def __init__(self, driver: DriverModel) -> None:
        self._driver = driver
        self._space = _AddressSpace(driver.numbers)

    def reserve(self, nbytes: int) -> int:
        self._driver.pin(self._space.blocks_needed(nbytes))
        return self._space.reserve(nbytes)

    def give_back(self, address: int, nbytes: int) -> None:
        start, stop = self._space.give_back(address, nbytes)
        self._driver.unpin(stop - start)


class _Managed:
    """Address space of ``cudaMallocManaged``, with advice for every range."""

    def __init__(self, driver: DriverModel, advice: int = 0) -> None:
        self._driver, self._advice = driver, advice
        self._space = _AddressSpace(driver.numbers)

    def reserve(self, nbytes: int) -> int:
        address = self._space.reserve(nbytes)
        if self._advice:
            start, stop = covered(Span(address, nbytes))
            self._driver.residency.advise(start, stop, self._advice, unset=False)
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        self._driver.released(*self._space.give_back(address, nbytes))


@dataclass(slots=True)
class Placed:
    """A tensor or workspace in the model's memory; empty ones have no pool."""

    pool: Pool | None
    span: Span
    nbytes: int
    managed: bool

    def part(self, low: int, high: int) -> Span:
        """Return the span of bytes ``low`` to ``high``."""
        return Span(self.span.address + low, high - low)

    def free(self) -> None:
        """Return the memory to its pool."""
        if self.pool is not None:
            self.pool.free(self.span)


class DriverModel:
    """VRAM in blocks, some pinned, the rest a cache of managed memory, with caching pools.

    ``on_moves`` is called with the blocks that ``cudaMalloc`` evicts or that are returned,
    ``on_free`` with the number of blocks returned to the driver. Not thread-safe: its device holds
    the lock.
    """

    def __init__(
        self,
        vram_bytes: int,
        allocator: Literal["caching", "plain"],
        on_moves: Callable[[BlockMoves], None],
        on_free: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.vram_bytes, self.block_count = vram_bytes, vram_bytes // BLOCK_BYTES
        self.pinned_count = 0
        self.residency = Residency(self.block_count)
        self.numbers = BlockNumbers(self.residency.grow)
        self._on_moves = on_moves
        self._on_free = on_free
        self._make = make = Pool if allocator == "caching" else UncachedPool
        self._managed: list[Pool] = []
        self._presets: dict[str, Pool] = {}
        self.unmanaged = make(_Pinned(self))
        self.repeating = RepeatingPool(_Managed(self), self._managed)
        is_cached = allocator == "caching"
        self.managed: Pool = self.repeating if is_cached else make(_Managed(self), self._managed)
        self.spill_host = make(_Managed(self, PREFER_HOST | ACCESSED_BY_GPU))
        self.spill_migrate = make(_Managed(self))

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that all pools hold."""
        return self.unmanaged.reserved_bytes + self.managed_bytes

    @property
    def managed_bytes(self) -> int:
        """Return the bytes that pools of managed memory hold."""
        pools = (*self._managed, self.spill_host, self.spill_migrate)
        return sum(pool.reserved_bytes for pool in pools)

    @property
    def resident_count(self) -> int:
        """Return the number of VRAM blocks in use."""
        return self.pinned_count + self.residency.count

    def malloc(self, nbytes: int, policy: Policy) -> Placed:
        """Allocate ``nbytes`` by a policy.

        Raises:
            OutOfMemoryError: the mode has no space; LimitError if the limit is the reason.
        """
        if policy.mode == "managed":
            pool = self._pool_of(policy.preset)
            return Placed(pool, pool.malloc(nbytes, policy.limit_bytes), nbytes, True)
        try:
            span = self.unmanaged.malloc(nbytes, self._bound(policy))
            return Placed(self.unmanaged, span, nbytes, False)
        except OutOfMemoryError:
            if policy.mode == "unmanaged":
                raise
        spill = self.spill_host if policy.spill == "host" else self.spill_migrate
        return Placed(spill, spill.malloc(nbytes), nbytes, True)

    def _bound(self, policy: Policy) -> int | None:
        if not policy.headroom_bytes:
            return policy.limit_bytes
        room = self.vram_bytes - policy.headroom_bytes
        return room if policy.limit_bytes is None else min(room, policy.limit_bytes)

    def check_limit(self, policy: Policy) -> None:
        """Raise if a policy's limit is below the used bytes of its pool.

        Raises:
            SizeError: it is, even after the pool returned its free memory.
        """
        limit = policy.limit_bytes
        pools = self._managed if policy.mode == "managed" else [self.unmanaged]
        if limit is None or _reserved(pools) <= limit:
            return
        for pool in pools:
            pool.free_all_blocks()
        if _reserved(pools) > limit:
            raise SizeError(
                f"a limit of {format_bytes(limit)} is below the "
                f"{format_bytes(_reserved(pools))} that {policy.mode} memory has in use"
            )

    def no_room(self, policy: Policy) -> tuple[str, str]:
        """Return the used bytes and the way out as text, for an out-of-memory message."""
        if policy.mode == "unmanaged":
            used, whole = self.pinned_count * BLOCK_BYTES, self.vram_bytes
            where = f"{format_bytes(used)} of {format_bytes(whole)} of VRAM in use"
            return where, "Run the block under umem.managed() or umem.hybrid()."
        used, whole = self.reserved_bytes, ADDRESS_LIMIT_BYTES
        where = f"{format_bytes(used)} in use of at most {format_bytes(whole)} of host memory"
        return where, "Run a smaller step."

    def _pool_of(self, preset: str | None) -> Pool:
        if preset is None:
            return self.managed
        if preset not in self._presets:
            source = _Managed(self, preset_flags(preset))
            self._presets[preset] = self._make(source, self._managed)
        return self._presets[preset]

    # -- what the pools' sources call ------------------------------------------------------

    def pin(self, count: int) -> None:
        """Pin blocks of VRAM, evicting managed ones."""
        if self.pinned_count + count > self.block_count:
            raise OutOfMemoryError(f"fewer than {count} blocks of VRAM are left")
        self.pinned_count += count
        self._on_moves(self.residency.shrink(self.block_count - self.pinned_count))

    def unpin(self, count: int) -> None:
        """Unpin blocks of VRAM."""
        self.pinned_count -= count
        self.residency.capacity = self.block_count - self.pinned_count
        self._on_free(count)

    def released(self, start: int, stop: int) -> None:
        """Free managed blocks, with their advice."""
        self._on_moves(self.residency.release(start, stop))
        self._on_free(stop - start)


def _reserved(pools: list[Pool]) -> int:
    return sum(pool.reserved_bytes for pool in pools)


def covered(span: Span) -> tuple[int, int]:
    """Find the blocks ``(start, stop)`` that a span touches."""
    return span.address // BLOCK_BYTES, -(-(span.address + span.nbytes) // BLOCK_BYTES)


def half_covered(span: Span) -> tuple[int, int]:
    """Find the blocks that a span covers at least half of."""
    half = BLOCK_BYTES // 2
    if span.nbytes < half:
        block = span.address // BLOCK_BYTES
        return block, block
    return (span.address + half) // BLOCK_BYTES, (span.address + span.nbytes + half) // BLOCK_BYTES


def wholly_covered(span: Span) -> tuple[int, int]:
    """Find the blocks that a span covers wholly."""
    start = -(-span.address // BLOCK_BYTES)
    return start, max(start, (span.address + span.nbytes) // BLOCK_BYTES)
