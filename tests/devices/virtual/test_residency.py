"""Residency against a naive oracle that moves one block at a time, and against hand-made cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_um import Oracle
from project import ROOT

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


@settings(max_examples=600, deadline=None)
@given(capacity=st.integers(0, 9), steps=st.lists(orders(advised=False), max_size=40))
def test_without_advice_every_block_is_where_the_oracle_has_it(
    capacity: int, steps: list[tuple[str, range, object]]
) -> None:
    pair = Pair(capacity)
    for step in steps:
        pair.do(step)
    pair.compare_eviction_order()


@settings(max_examples=1200, deadline=None)
@given(capacity=st.integers(0, 9), steps=st.lists(orders(advised=True), max_size=40))
def test_with_advice_every_block_is_where_the_oracle_has_it(
    capacity: int, steps: list[tuple[str, range, object]]
) -> None:
    pair = Pair(capacity)
    for step in steps:
        pair.do(step)
    pair.compare_eviction_order()


@settings(max_examples=600, deadline=None)
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


# -- cases worked out by hand ------------------------------------------------------------------


def made(capacity: int, block_count: int = 32) -> Residency:
    residency = Residency(capacity)
    residency.grow(block_count)
    return residency


def resident(residency: Residency) -> list[int]:
    return [block for block, there in enumerate(residency.resident) if there]


def test_a_range_larger_than_vram_evicts_its_own_start() -> None:
    residency = made(4)
    assert residency.touch(0, 10, write=True) == BlockMoves(populated=10, migrated_out=6)
    assert resident(residency) == [6, 7, 8, 9]


def test_a_cyclic_stream_larger_than_vram_misses_every_block_of_every_pass() -> None:
    residency = made(4)
    residency.touch(0, 5, write=True)
    for _ in range(3):
        moves = residency.touch(0, 5, write=False)
        assert moves == BlockMoves(migrated_in=5, migrated_out=5)


def test_hits_do_not_refresh_a_block() -> None:
    residency = made(3)
    residency.touch(0, 3, write=True)
    for _ in range(5):
        assert residency.touch(0, 1, write=True) == BlockMoves(hit=1)
    residency.touch(3, 4, write=True)
    assert resident(residency) == [1, 2, 3]


def test_a_prefetch_refreshes_a_block_that_is_there() -> None:
    residency = made(3)
    residency.touch(0, 3, write=True)
    assert residency.prefetch(0, 1) == BlockMoves(hit=1)
    residency.touch(3, 4, write=True)
    assert resident(residency) == [0, 2, 3]


def test_a_block_that_left_and_came_back_is_the_youngest() -> None:
    residency = made(3)
    residency.touch(0, 3, write=True)
    residency.prefetch_out(0, 1)
    residency.touch(0, 1, write=False)
    residency.touch(3, 4, write=True)
    assert resident(residency) == [0, 2, 3]


def test_clean_blocks_are_copied_back_too() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    residency.prefetch_out(0, 2)
    residency.touch(0, 2, write=False)
    assert residency.touch(2, 4, write=True) == BlockMoves(populated=2, migrated_out=2)


def test_read_mostly_blocks_are_evicted_without_a_copy_while_the_host_has_them() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    residency.prefetch_out(0, 2)
    residency.advise(0, 2, READ_MOSTLY, unset=False)
    assert residency.touch(0, 2, write=False) == BlockMoves(migrated_in=2)
    assert residency.touch(2, 4, write=True) == BlockMoves(populated=2, dropped=2)
    assert residency.touch(0, 2, write=False) == BlockMoves(migrated_in=2, migrated_out=2)


def test_a_write_collapses_the_copies_of_a_read_mostly_block() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    residency.prefetch_out(0, 2)
    residency.advise(0, 2, READ_MOSTLY, unset=False)
    residency.touch(0, 2, write=False)
    assert residency.touch(0, 1, write=True) == BlockMoves(hit=1)
    assert residency.touch(2, 4, write=True) == BlockMoves(populated=2, migrated_out=1, dropped=1)


def test_a_write_collapses_a_block_before_it_pushes_that_block_out() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    residency.prefetch_out(0, 2)
    residency.advise(0, 4, READ_MOSTLY, unset=False)
    residency.touch(0, 2, write=False)
    assert residency.touch(0, 4, write=True) == BlockMoves(hit=2, populated=2, migrated_out=2)


def test_taking_read_mostly_back_leaves_one_copy() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    residency.prefetch_out(0, 2)
    residency.advise(0, 2, READ_MOSTLY, unset=False)
    residency.touch(0, 2, write=False)
    residency.advise(0, 2, READ_MOSTLY, unset=True)
    assert residency.touch(2, 4, write=True) == BlockMoves(populated=2, migrated_out=2)


def test_blocks_that_prefer_the_host_never_take_vram() -> None:
    residency = made(4)
    residency.advise(0, 3, PREFER_HOST, unset=False)
    for write in (True, False):
        assert residency.touch(0, 3, write=write) == BlockMoves(remote=3)
    assert resident(residency) == []


@pytest.mark.parametrize("flag", [PREFER_HOST, ACCESSED_BY_GPU])
def test_read_mostly_overrides_the_other_advice(flag: int) -> None:
    residency = made(4)
    residency.touch(0, 3, write=True)
    residency.prefetch_out(0, 3)
    residency.advise(0, 3, flag, unset=False)
    residency.advise(0, 3, READ_MOSTLY, unset=False)
    assert residency.touch(0, 3, write=False) == BlockMoves(migrated_in=3)


def test_accessed_by_is_read_over_the_bus_once_it_was_evicted() -> None:
    residency = made(2)
    residency.advise(0, 2, ACCESSED_BY_GPU, unset=False)
    assert residency.touch(0, 2, write=True) == BlockMoves(populated=2)
    residency.touch(2, 4, write=True)
    assert residency.touch(0, 2, write=False) == BlockMoves(remote=2)
    assert resident(residency) == [2, 3]


def test_taking_back_a_preferred_location_does_not_ask_which() -> None:
    residency = made(4)
    residency.advise(0, 2, PREFER_HOST, unset=False)
    residency.advise(0, 2, PREFER_GPU, unset=True)
    assert residency.touch(0, 2, write=True) == BlockMoves(populated=2)


def test_the_two_preferred_locations_exclude_each_other() -> None:
    residency = made(4)
    residency.advise(0, 2, PREFER_HOST, unset=False)
    residency.advise(0, 2, PREFER_GPU, unset=False)
    assert residency.touch(0, 2, write=True) == BlockMoves(populated=2)
    residency.advise(0, 2, PREFER_HOST, unset=False)
    assert set(residency.advice[0:2]) == {PREFER_HOST}


def test_without_vram_the_bus_serves_everything_and_a_prefetch_does_nothing() -> None:
    residency = made(0)
    assert residency.prefetch(0, 4) == BlockMoves()
    assert residency.touch(0, 4, write=True) == BlockMoves(remote=4)
    assert residency.touch(0, 4, write=False) == BlockMoves(remote=4)
    residency.shrink(4)  # VRAM comes back, and what was written on the host is there to migrate
    assert residency.touch(0, 5, write=False) == BlockMoves(
        migrated_in=4, populated=1, migrated_out=1
    )


def test_memory_that_was_never_written_is_populated_where_a_prefetch_sends_it() -> None:
    residency = made(4)
    assert residency.prefetch(0, 2) == BlockMoves(populated=2)
    assert residency.prefetch_out(2, 4) == BlockMoves()
    assert residency.touch(0, 4, write=False) == BlockMoves(hit=2, migrated_in=2)


def test_a_discarded_block_is_as_never_written_and_leaves_without_a_copy() -> None:
    residency = made(2)
    residency.touch(0, 2, write=True)
    assert residency.discard(0, 2) == BlockMoves(discarded=2)
    assert residency.touch(2, 4, write=True) == BlockMoves(populated=2)
    assert residency.touch(0, 1, write=False) == BlockMoves(populated=1, migrated_out=1)


def test_released_blocks_lose_their_contents_and_their_advice() -> None:
    residency = made(2)
    residency.advise(0, 2, PREFER_HOST, unset=False)
    residency.touch(0, 2, write=True)
    assert residency.release(0, 2) == BlockMoves()
    assert residency.touch(0, 2, write=True) == BlockMoves(populated=2)
    assert residency.release(0, 2) == BlockMoves(released=2)


def test_vram_that_shrinks_evicts_the_oldest_first() -> None:
    residency = made(4)
    for block in (3, 1, 0, 2):
        residency.touch(block, block + 1, write=True)
    assert residency.shrink(2) == BlockMoves(migrated_out=2)
    assert resident(residency) == [0, 2]


def test_a_prefetch_evicts_as_it_goes() -> None:
    residency = made(4)
    residency.touch(20, 24, write=True)
    assert residency.prefetch(0, 3) == BlockMoves(populated=3, migrated_out=3)
    assert resident(residency) == [0, 1, 2, 23]
    assert residency.prefetch(0, 10) == BlockMoves(hit=3, populated=7, migrated_out=7)
    assert resident(residency) == [6, 7, 8, 9]


def test_an_empty_range_moves_nothing() -> None:
    residency = made(4)
    residency.touch(0, 4, write=True)
    assert residency.touch(2, 2, write=True) == BlockMoves()
    assert (
        residency.prefetch(2, 2)
        == residency.discard(2, 2)
        == residency.release(2, 2)
        == BlockMoves()
    )


def test_the_benchmark_of_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "residency.py"), "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["bench"] == "residency" and len(report["rows"]) == 16
    assert all(len(row["touches_per_second"]) == 2 for row in report["rows"])
