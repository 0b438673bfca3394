"""The pool and the driver behind the virtual GPU, held against rules, not against their code."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from umem._common.specs import COSTS, gpu_spec
from umem.devices.base import Policy, Span
from umem.devices.virtual.clock import BlockMoves
from umem.devices.virtual.driver import DriverModel
from umem.devices.virtual.model import Model
from umem.devices.virtual.pool import Pool, UncachedPool
from umem.errors import LimitError, OutOfMemoryError, SizeError, SpanError
from umem.trace import Access, Alloc, Free, Hint, Op

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 2 * MIB


class Heap:
    """A source of memory that keeps a list: room for so many bytes, addresses never used twice."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.next, self.held = room, 4096, {}

    def reserve(self, nbytes: int) -> int:
        if nbytes > self.room - sum(self.held.values()):
            raise OutOfMemoryError("full")
        address, self.next = self.next, self.next + nbytes + 512
        self.held[address] = nbytes
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        assert self.held.pop(address) == nbytes


def snapshot(pool: Pool) -> object:
    free = sorted((size, sorted(c.address for c in chunks)) for size, chunks in pool._free.items())
    return pool.used_bytes, pool.reserved_bytes, sorted(pool._used), free


# -- the pool, by hand ---------------------------------------------------------------------------


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    pool = Pool(Heap())
    assert [pool.malloc(nbytes).nbytes for nbytes in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert pool.used_bytes == pool.reserved_bytes == 2560


def test_the_smallest_free_chunk_that_fits_is_taken() -> None:
    pool = Pool(Heap())
    spans = [pool.malloc(nbytes) for nbytes in (8 * KIB, 2 * KIB, 4 * KIB)]
    for span in spans:
        pool.free(span)
    assert pool.malloc(3 * KIB).address == spans[2].address
    assert pool.malloc(2 * KIB).address == spans[1].address
    assert pool.malloc(5 * KIB).address == spans[0].address


def test_the_rest_of_a_split_chunk_is_handed_out_next() -> None:
    pool = Pool(Heap())
    whole = pool.malloc(8 * KIB)
    pool.free(whole)
    low, high = pool.malloc(3 * KIB), pool.malloc(5 * KIB)
    assert (low.address, high.address) == (whole.address, whole.address + 3 * KIB)
    assert pool.reserved_bytes == 8 * KIB


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_neighbours_merge_in_whatever_order_they_are_freed(order: tuple[int, ...]) -> None:
    pool = Pool(Heap())
    whole = pool.malloc(6 * KIB)
    pool.free(whole)
    parts = [pool.malloc(2 * KIB) for _ in range(3)]
    for index in order:
        pool.free(parts[index])
    assert pool.malloc(6 * KIB) == whole
    assert pool.reserved_bytes == 6 * KIB


def test_reservations_that_happen_to_touch_do_not_merge() -> None:
    class Adjacent(Heap):
        def reserve(self, nbytes: int) -> int:
            address = super().reserve(nbytes)
            self.next -= 512
            return address

    pool = Pool(Adjacent())
    first, second = pool.malloc(KIB), pool.malloc(KIB)
    assert first.address + KIB == second.address
    pool.free(first)
    pool.free(second)
    pool.malloc(2 * KIB)
    assert pool.reserved_bytes == 4 * KIB


def test_a_span_freed_twice_is_refused_and_nothing_changes() -> None:
    pool = Pool(Heap())
    span, other = pool.malloc(KIB), pool.malloc(KIB)
    pool.free(span)
    before = snapshot(pool)
    for wrong in (span, Span(other.address, 512), Span(other.address + 512, 512), Span(0, 512)):
        with pytest.raises(SpanError):
            pool.free(wrong)
        assert snapshot(pool) == before
    pool.free(other)


def test_only_reservations_without_a_used_part_are_given_back() -> None:
    heap = Heap()
    pool = Pool(heap)
    kept, gone = pool.malloc(4 * KIB), pool.malloc(4 * KIB)
    pool.free(kept)
    part = pool.malloc(KIB)
    pool.free(gone)
    assert pool.free_all_blocks() == 4 * KIB
    assert heap.held == {kept.address: 4 * KIB} and pool.reserved_bytes == 4 * KIB
    pool.free(part)
    assert pool.free_all_blocks() == 4 * KIB and not heap.held


def test_free_reservations_are_given_back_before_an_allocation_fails() -> None:
    heap = Heap(room=8 * KIB)
    pool = Pool(heap)
    for span in [pool.malloc(4 * KIB), pool.malloc(4 * KIB)]:
        pool.free(span)
    span = pool.malloc(8 * KIB)
    before = snapshot(pool)
    with pytest.raises(OutOfMemoryError, match="full"):
        pool.malloc(512)
    assert snapshot(pool) == before
    pool.free(span)


def test_a_limit_counts_whole_units_and_is_checked_before_the_pool_grows() -> None:
    heap = Heap()
    pool = Pool(heap)
    with pytest.raises(LimitError, match=r"512 B.*0 B of the limit of 511 B"):
        pool.malloc(100, limit_bytes=511)
    assert not heap.held and pool.reserved_bytes == 0
    span = pool.malloc(100, limit_bytes=512)
    pool.free(span)
    assert pool.malloc(512, limit_bytes=512) == span


def test_a_pool_without_a_cache_gives_every_span_back_at_once() -> None:
    heap = Heap()
    pool = UncachedPool(heap)
    span = pool.malloc(4 * KIB)
    assert heap.held == {span.address: 4 * KIB}
    pool.free(span)
    assert not heap.held and pool.reserved_bytes == pool.used_bytes == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * KIB)), max_size=60), st.booleans())
def test_live_spans_never_overlap_and_lie_in_reservations(
    steps: list[tuple[bool, int]], tight: bool
) -> None:
    heap = Heap(room=24 * KIB if tight else 1 << 40)
    pool, live = Pool(heap), []
    for allocate, number in steps:
        if allocate or not live:
            try:
                live.append(pool.malloc(number))
            except OutOfMemoryError:
                assert tight
        else:
            pool.free(live.pop(number % len(live)))
        check_spans(live, heap.held)
        assert pool.used_bytes == sum(span.nbytes for span in live)
        assert pool.reserved_bytes == sum(heap.held.values())
    for span in live:
        pool.free(span)
    pool.free_all_blocks()
    assert not heap.held and pool.reserved_bytes == pool.used_bytes == 0


def check_spans(live: list[Span], held: dict[int, int]) -> None:
    ordered = sorted(live)
    for low, high in itertools.pairwise(ordered):
        assert low.address + low.nbytes <= high.address
    for span in live:
        assert any(
            start <= span.address and span.address + span.nbytes <= start + nbytes
            for start, nbytes in held.items()
        )


# -- the driver, by hand ---------------------------------------------------------------------------


def make_driver(blocks: int) -> tuple[DriverModel, BlockMoves]:
    moves = BlockMoves()
    return DriverModel(blocks * BLOCK, "caching", moves.add), moves


def test_cudamalloc_pushes_managed_blocks_out_and_gives_room_back() -> None:
    driver, moves = make_driver(4)
    managed = driver.malloc(4 * BLOCK, Policy("managed")).span
    first = managed.address // BLOCK
    driver.residency.touch(first, first + 4, write=True)
    place = driver.malloc(3 * BLOCK, Policy("unmanaged"))
    assert moves == BlockMoves(migrated_out=3)
    assert (driver.resident_count, driver.pinned_count, driver.residency.capacity) == (4, 3, 1)
    place.free()
    driver.unmanaged.free_all_blocks()
    assert (driver.resident_count, driver.pinned_count, driver.residency.capacity) == (1, 0, 4)


def test_small_allocations_share_blocks_and_large_ones_do_not() -> None:
    driver, _ = make_driver(4)
    small = [driver.malloc(100 * KIB, Policy("unmanaged")).span for _ in range(20)]
    assert driver.pinned_count == 1  # 2000 KiB of 2048
    driver.malloc(100 * KIB, Policy("unmanaged"))
    assert driver.pinned_count == 2
    driver.malloc(BLOCK // 2, Policy("unmanaged"))
    assert driver.pinned_count == 3
    assert len({span.address for span in small}) == 20


def test_a_failed_cudamalloc_moves_nothing() -> None:
    driver, moves = make_driver(4)
    managed = driver.malloc(4 * BLOCK, Policy("managed")).span
    first = managed.address // BLOCK
    driver.residency.touch(first, first + 4, write=True)
    for policy in (Policy("unmanaged"), Policy("unmanaged", limit_bytes=BLOCK)):
        with pytest.raises(OutOfMemoryError):
            driver.malloc(5 * BLOCK, policy)
    with pytest.raises(LimitError):
        driver.malloc(2 * BLOCK, Policy("unmanaged", limit_bytes=BLOCK))
    assert moves == BlockMoves() and driver.resident_count == 4


@pytest.mark.parametrize("spill", ["host", "migrate"])
def test_hybrid_spills_what_no_longer_fits(spill: str) -> None:
    driver, _ = make_driver(4)
    policy = Policy("hybrid", spill=spill)
    pools = [driver.malloc(2 * BLOCK, policy).pool for _ in range(3)]
    assert pools[:2] == [driver.unmanaged] * 2
    assert pools[2] is (driver.spill_host if spill == "host" else driver.spill_migrate)
    assert driver.managed_bytes == 2 * BLOCK


def test_a_limit_below_what_is_in_use_is_refused() -> None:
    driver, _ = make_driver(8)
    place = driver.malloc(2 * BLOCK, Policy("managed"))
    with pytest.raises(SizeError, match=r"limit of 2.0 MiB is below the 4.0 MiB"):
        driver.check_limit(Policy("managed", limit_bytes=BLOCK))
    driver.check_limit(Policy("unmanaged", limit_bytes=BLOCK))
    place.free()
    driver.check_limit(Policy("managed", limit_bytes=BLOCK))  # what was only cached is given back
    assert driver.managed_bytes == 0


def test_addresses_are_handed_out_again_without_what_was_known_of_them() -> None:
    driver, _ = make_driver(8)
    place = driver.malloc(2 * BLOCK, Policy("managed"))
    first = place.span.address // BLOCK
    driver.residency.advise(first, first + 2, 1, unset=False)
    driver.residency.prefetch(first, first + 2)
    place.free()
    driver.managed.free_all_blocks()
    again = driver.malloc(2 * BLOCK, Policy("managed")).span
    assert again == place.span
    assert set(driver.residency.advice[first : first + 2]) == {0}
    assert set(driver.residency.last_prefetch[first : first + 2]) == {0}
    assert driver.residency.count == 0


# -- everything together ---------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(100 * KIB, 3 * MIB),
    st.integers(1, 9).map(lambda n: n * BLOCK),
)
POLICIES = [
    Policy("unmanaged"),
    Policy("managed"),
    Policy("managed", prefetch=True),
    Policy("hybrid"),
    Policy("hybrid", spill="migrate"),
    Policy("hybrid", limit_bytes=4 * BLOCK, prefetch=True),
    Policy("hybrid", limit_bytes=4 * BLOCK, spill="migrate"),
    Policy("managed", limit_bytes=12 * BLOCK),
    Policy("unmanaged", limit_bytes=5 * BLOCK + 1000),
]
ACTIONS = ["prefetch", "discard", "read_mostly", "preferred_location", "accessed_by"]
NUMBERS = st.integers(0, 99)
EDGES = st.just((0, 16)) | st.tuples(st.integers(0, 16), st.integers(0, 16))
ACCESSES = st.tuples(NUMBERS, EDGES).map(lambda pair: (pair[0], *pair[1]))
Part = tuple[int, int, int]


class PoolAndDevice(RuleBasedStateMachine):
    """Tensors come, go and are used under changing modes; the books must balance throughout."""

    @initialize(
        blocks=st.integers(1, 14),
        allocator=st.sampled_from(["caching", "plain"]),
        policy=st.sampled_from(POLICIES),
        sizes=st.lists(SIZES, min_size=1, max_size=4),
    )
    def start(self, blocks: int, allocator: str, policy: Policy, sizes: list[int]) -> None:
        self.vram_bytes, self.policy = blocks * BLOCK, policy
        spec = gpu_spec("v100-16gb").with_vram(self.vram_bytes)
        self.model = Model(spec, COSTS, allocator, "numpy", lambda: self.policy)
        self.live: dict[int, int] = {}
        self.count = 0
        for nbytes in sizes:
            self.allocate(nbytes, False)

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy: Policy) -> None:
        try:
            self.model.driver.check_limit(policy)
        except SizeError:
            return
        self.policy = policy

    @rule(nbytes=SIZES, uploaded=st.booleans())
    def allocate(self, nbytes: int, uploaded: bool) -> None:
        before = self.model.driver.reserved_bytes, self.model.counters.live_bytes
        try:
            self.model.on_event(Alloc(self.count, nbytes, "array", "x", uploaded))
        except OutOfMemoryError:
            assert isinstance(nbytes, int) and nbytes > 0
            assert self.policy.mode == "unmanaged" or self.policy.limit_bytes is not None
            assert self.count not in self.model.tensors
            assert self.model.driver.reserved_bytes <= before[0]
            assert self.model.counters.live_bytes == before[1]
            return
        self.live[self.count] = nbytes
        self.count += 1

    @rule(number=NUMBERS)
    def free(self, number: int) -> None:
        if not self.live:
            return
        tensor = self.pick(number)
        placed = self.model.tensors[tensor]
        self.model.on_event(Free(tensor))
        del self.live[tensor]
        if placed.pool is not None:
            before = snapshot(placed.pool)
            with pytest.raises(SpanError):
                placed.pool.free(placed.span)
            assert snapshot(placed.pool) == before

    @rule(
        reads=st.lists(ACCESSES, max_size=3),
        writes=st.lists(ACCESSES, max_size=3),
        pattern=st.sampled_from(["stream", "random", "strided"]),
        workspace=st.sampled_from([None, 0, 700, 3 * MIB]),
    )
    def run_operation(
        self, reads: list[Part], writes: list[Part], pattern: str, workspace: int | None
    ) -> None:
        if not self.live:
            return
        accesses = tuple(self.access(part) for part in reads), tuple(map(self.access, writes))
        before = self.model.clock.seconds
        try:
            self.model.on_event(Op("f", "forward", *accesses, 10, 1000, pattern, None, workspace))
        except OutOfMemoryError:
            assert workspace
        assert self.model.clock.seconds >= before

    @rule(
        part=ACCESSES,
        action=st.sampled_from(ACTIONS),
        place=st.sampled_from([0, "cpu"]),
        unset=st.booleans(),
        overlap=st.booleans(),
    )
    def hint(self, part: Part, action: str, place: int | str, unset: bool, overlap: bool) -> None:
        if self.live:
            self.model.on_event(Hint(action, (self.access(part),), place, unset, overlap))

    @rule()
    def empty_the_pools(self) -> None:
        for pool in self.pools():
            pool.free_all_blocks()

    def pick(self, number: int) -> int:
        return sorted(self.live)[number % len(self.live)]

    def access(self, part: Part) -> Access:
        """A part in sixteenths of one of the live tensors."""
        tensor = self.pick(part[0])
        low, high = (self.live[tensor] * sixteenths // 16 for sixteenths in sorted(part[1:]))
        return Access(tensor, low, high)

    def pools(self) -> list[Pool]:
        driver = self.model.driver
        return [driver.unmanaged, driver.managed, driver.spill_host, driver.spill_migrate]

    @invariant()
    def no_two_live_spans_overlap(self) -> None:
        spans = sorted(p.span for p in self.model.tensors.values() if p.pool is not None)
        for low, high in itertools.pairwise(spans):
            assert low.address + low.nbytes <= high.address
        for tensor, nbytes in self.live.items():
            assert self.model.tensors[tensor].nbytes == nbytes
            assert nbytes == 0 or self.model.tensors[tensor].span.nbytes >= nbytes

    @invariant()
    def no_block_is_both_managed_and_not(self) -> None:
        kinds: dict[int, set[int]] = {}
        for placed in self.model.tensors.values():
            if placed.pool is not None:
                low, high = placed.span.address, placed.span.address + placed.span.nbytes
                for block in range(low // BLOCK, -(-high // BLOCK)):
                    kinds.setdefault(block, set()).add(id(placed.pool))
        assert all(len(found) == 1 for found in kinds.values())

    @invariant()
    def resident_blocks_never_exceed_vram(self) -> None:
        driver = self.model.driver
        resident = sum(driver.residency.resident)
        assert driver.residency.count == resident
        assert (driver.pinned_count + resident) * BLOCK <= self.vram_bytes
        assert driver.resident_count == driver.pinned_count + resident
        assert self.model.figures.resident_peak_bytes <= self.vram_bytes
        assert driver.unmanaged.reserved_bytes <= driver.pinned_count * BLOCK

    @invariant()
    def blocks_are_conserved(self) -> None:
        moves = self.model.counters.moves
        came = moves.populated + moves.migrated_in
        left = moves.migrated_out + moves.dropped + moves.released + moves.discarded
        assert came - left - moves.prefetched_out == self.model.driver.residency.count

    @invariant()
    def limits_are_kept(self) -> None:
        policy, driver = self.policy, self.model.driver
        pool = driver.managed if policy.mode == "managed" else driver.unmanaged
        if policy.limit_bytes is not None:
            assert pool.reserved_bytes <= policy.limit_bytes

    @invariant()
    def used_bytes_are_those_of_the_live_tensors(self) -> None:
        used = sum(pool.used_bytes for pool in self.pools())
        assert used == sum(-(-nbytes // 512) * 512 for nbytes in self.live.values())
        assert self.model.counters.live_bytes == sum(self.live.values())
        assert self.model.figures.peak_bytes >= sum(self.live.values())

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for tensor in self.live:
            self.model.on_event(Free(tensor))
        self.empty_the_pools()
        driver = self.model.driver
        assert [pool.reserved_bytes for pool in self.pools()] == [0, 0, 0, 0]
        assert driver.pinned_count == driver.residency.count == driver.resident_count == 0
        assert driver.residency.capacity * BLOCK == self.vram_bytes
        assert not any(driver.residency.host) and not any(driver.residency.advice)


PoolAndDevice.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAndDevice = pytest.mark.thorough(PoolAndDevice.TestCase)
