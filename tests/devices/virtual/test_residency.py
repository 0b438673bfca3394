"""Residency against a naive oracle that moves one block at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from bench_scripts import written
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_um import Oracle

from umem.devices.virtual.advice import ACCESSED_BY_GPU, PREFER_GPU, PREFER_HOST, READ_MOSTLY
from umem.devices.virtual.clock import BlockMoves
from umem.devices.virtual.residency import Residency

pytestmark = pytest.mark.thorough

BLOCK_COUNT = 14
COUNTERS = (
    "hit", "migrated_in", "populated", "migrated_out", "dropped", "prefetched_out", "discarded",
    "released", "remote",
)  # fmt: skip
ORACLE_NAMES = {"hit": "hits", "remote": "zero_copy"}
FLAGS = {"read_mostly": READ_MOSTLY, "prefers_cpu": PREFER_HOST, "accessed_by": ACCESSED_BY_GPU}


class Pair:
    """The model and the oracle, given the same orders and compared after each."""

    def __init__(self, capacity: int) -> None:
        self.model, self.oracle = Residency(capacity), Oracle(capacity)
        self.model.grow(BLOCK_COUNT)
        self.total = BlockMoves()

    def do(self, order: tuple[str, range, object]) -> None:
        name, blocks, argument = order
        moves = getattr(self, name)(blocks, argument)
        if moves is not None:
            self.total.add(moves)
        self.compare(order)

    def compare(self, order: object) -> None:
        model, oracle = self.model, self.oracle
        resident = {block for block in range(BLOCK_COUNT) if model.resident[block]}
        host = {block for block in range(BLOCK_COUNT) if model.host[block]}
        assert resident == set(oracle.resident), order
        assert host == oracle.host, order
        assert model.count == len(oracle.resident) <= max(model.capacity, 0), order
        expected = {name: getattr(oracle, ORACLE_NAMES.get(name, name)) for name in COUNTERS}
        assert asdict(self.total) == expected, order
        assert oracle.conserved()

    def compare_eviction_order(self) -> None:
        """Take VRAM away block by block: what leaves first tells the order."""
        for capacity in range(self.model.capacity - 1, -1, -1):
            self.do(("shrink", range(0), capacity))

    def touch(self, blocks: range, write: bool) -> BlockMoves:
        self.oracle.touch(blocks, write)
        return self.model.touch(blocks.start, blocks.stop, write=write)

    def prefetch(self, blocks: range, _: object) -> BlockMoves:
        self.oracle.prefetch(blocks)
        return self.model.prefetch(blocks.start, blocks.stop)

    def prefetch_out(self, blocks: range, _: object) -> BlockMoves:
        self.oracle.prefetch_out(blocks)
        return self.model.prefetch_out(blocks.start, blocks.stop)

    def discard(self, blocks: range, _: object) -> BlockMoves:
        self.oracle.discard(blocks)
        return self.model.discard(blocks.start, blocks.stop)

    def release(self, blocks: range, _: object) -> BlockMoves:
        self.oracle.release(blocks)
        return self.model.release(blocks.start, blocks.stop)

    def shrink(self, _: range, capacity: int) -> BlockMoves:
        self.oracle.resize(capacity)
        return self.model.shrink(capacity)

    def advise(self, blocks: range, name: str) -> None:
        if name == "prefers_gpu":  # the two preferred locations exclude each other
            self.oracle.unset("prefers_cpu", blocks)
            self.model.advise(blocks.start, blocks.stop, PREFER_GPU, unset=False)
        else:
            self.oracle.advise(name, blocks)
            self.model.advise(blocks.start, blocks.stop, FLAGS[name], unset=False)

    def unset(self, blocks: range, name: str) -> None:
        if name == "prefers_gpu":  # taking a preferred location back ignores which it was
            self.oracle.unset("prefers_cpu", blocks)
            self.model.advise(blocks.start, blocks.stop, PREFER_GPU, unset=True)
        else:
            self.oracle.unset(name, blocks)
            self.model.advise(blocks.start, blocks.stop, FLAGS[name], unset=True)


def ranges() -> st.SearchStrategy[range]:
    ends = st.tuples(st.integers(0, BLOCK_COUNT - 1), st.integers(1, 7))
    return ends.map(lambda pair: range(pair[0], min(BLOCK_COUNT, sum(pair))))


def orders(*, advised: bool) -> st.SearchStrategy[tuple[str, range, object]]:
    touch = st.tuples(st.just("touch"), ranges(), st.booleans())
    plain = ("prefetch", "prefetch_out", "discard", "release")
    moves = st.tuples(st.sampled_from(plain), ranges(), st.none())
    shrink = st.tuples(st.just("shrink"), st.just(range(0)), st.integers(0, 9))
    if not advised:
        return touch | touch | moves | shrink
    advice = st.sampled_from([*FLAGS, "prefers_gpu"])
    hints = st.tuples(st.sampled_from(("advise", "advise", "unset")), ranges(), advice)
    return touch | touch | touch | moves | shrink | hints | hints


@pytest.mark.parametrize("advised", [False, True])
@settings(max_examples=450, deadline=None)
@given(capacity=st.integers(0, 9), data=st.data())
def test_every_block_is_where_the_oracle_has_it(
    advised: bool, capacity: int, data: st.DataObject
) -> None:
    pair = Pair(capacity)
    for step in data.draw(st.lists(orders(advised=advised), max_size=40)):
        pair.do(step)
    pair.compare_eviction_order()


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(0, 9), steps=st.lists(orders(advised=True), max_size=40))
def test_a_listener_is_told_of_every_move_and_changes_none(
    capacity: int, steps: list[tuple[str, range, object]]
) -> None:
    told: Counter[tuple[str, str]] = Counter()
    there: set[int] = set()

    def moved(start: int, stop: int, way: str, cause: str) -> None:
        told[way, cause] += stop - start
        assert 0 <= start < stop <= BLOCK_COUNT
        if cause == "eviction":
            assert there.issuperset(range(start, stop)) or stop - start > capacity
        (there.difference_update if way == "out" else there.update)(range(start, stop))

    pair = Pair(capacity)
    pair.model.listener = moved
    for step in steps:
        there.update(block for block, is_in in enumerate(pair.model.resident) if is_in)
        pair.do(step)
    pair.compare_eviction_order()
    total = pair.total
    assert told["in", "fault"] + told["in", "prefetch"] == total.migrated_in
    assert told["new", "fault"] + told["new", "prefetch"] == total.populated
    assert told["out", "eviction"] == total.migrated_out
    assert told["out", "prefetch"] == total.prefetched_out
    assert sum(told.values()) == (
        total.migrated_in + total.populated + total.migrated_out + total.prefetched_out
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(orders(advised=True), min_size=1, max_size=12))
def test_a_long_run_keeps_the_queue_short_and_stays_right(
    cycle: list[tuple[str, range, object]],
) -> None:
    pair = Pair(6)
    for _ in range(400):
        for step in cycle:
            if step[0] != "shrink":
                pair.do(step)
        pair.do(("release", range(2), None))
        for block in range(2):
            pair.do(("touch", range(block, block + 1), True))
    assert len(pair.model._queue) <= 2 * BLOCK_COUNT + 1001
    pair.compare_eviction_order()


def test_the_benchmark_of_it_runs(tmp_path: Path) -> None:
    report, _ = written(tmp_path, "residency.py", "--quick")
    assert report["bench"] == "residency" and len(report["rows"]) == 16
    assert all(len(row["touches_per_second"]) == 2 for row in report["rows"])
