"""Datasets that are kept in memory by a policy: what comes out, what is hit, what is held."""

from __future__ import annotations

import gc
import os
import threading
import time
from itertools import islice
from typing import Any

import numpy as np
import pytest
from data_cases import Items, epochs, most_hits, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import umem.data
from umem.data import ClassBalanced, Weighted, known_order
from umem.errors import DataError, DataWarning, SizeError, StateError, UnsupportedError


def two_passes_over_a_window(bits: umem.data.EpochBits, count: int) -> Any:
    """Every item in some order, each stretch of it twice."""
    window = 5
    parts = np.split(umem.data.shuffle(bits, count), range(window, count, window))
    return np.concatenate([part for part in parts for _ in range(2)])


DRAWS = {
    "shuffle": lambda count: umem.data.shuffle,
    "with replacement": lambda count: umem.data.with_replacement,
    "class-balanced": lambda count: ClassBalanced(np.arange(count) ** 2 % 7 // 3),
    "by 1/rank": lambda count: Weighted(1 / np.arange(1, count + 1)),
    "two passes over a window": lambda count: two_passes_over_a_window,
}


def requests_of(data: Any, source: Items, order: Any, passes: int) -> list[int]:
    """Ask for every item in an order, and see that each is what the dataset has."""
    asked = list[int]()
    for now in islice(epochs(order, len(source)), passes):
        for i in now:
            assert same(data[i], source.item(i))
        asked += now
    return asked


@pytest.mark.parametrize("seeds", [8, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", DRAWS)
def test_hits_are_those_of_beladys_min(kind: str, seeds: int) -> None:
    for seed in range(seeds):
        count = 5 + seed * 11 % 37
        room = 1 + (seed * 13) % count
        source, order = Items(count, 600 + 10 * seed), known_order(seed, DRAWS[kind](count))
        ahead = bool(seed % 2)
        with umem.data.cached(source, room * source.packed(), order=order, ahead=ahead) as data:
            asked = requests_of(data, source, order, 4)
            found = data.counters
        assert found.hit_count == most_hits(asked, room)
        assert found.request_count == len(asked)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_is_asked_comes_back_and_memory_keeps_its_limit(draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, 12))
    source = Items(count, draw.draw(st.lists(st.integers(0, 9000), min_size=count, max_size=count)))
    policy = draw.draw(st.sampled_from(["lru", "cost", "next-use"]))
    order = known_order(0, umem.data.with_replacement) if policy == "next-use" else None
    memory = draw.draw(st.integers(1, 40_000))
    disk = draw.draw(st.sampled_from([0, 20_000]))
    with umem.data.cached(source, memory, disk, policy, order) as data:
        following = epochs(order, count) if order else None
        for _ in range(draw.draw(st.integers(1, 4))):
            indices = st.lists(st.integers(-count, count - 1), max_size=15)
            for i in next(following) if following else draw.draw(indices):
                assert same(data[i], source.item(i % count))
    found = data.counters  # what is fetched ahead has ended
    assert found.peak_memory_bytes <= memory * 1.05
    assert found.spilled_bytes <= disk
    assert found.load_count + found.check_count == source.asked.total()
    answered = found.hit_count + found.ahead_count + found.disk_count + found.load_count
    assert found.request_count <= answered + 1


@pytest.mark.parametrize("policy", ["next-use", "lru"])
def test_what_leaves_memory_before_its_next_use_is_fetched_ahead_again(policy: str) -> None:
    source, order = Items(10), known_order(0)
    with umem.data.cached(source, 3 * source.packed(), policy=policy, order=order) as data:
        for now in islice(epochs(order, 10), 3):
            for i in now:
                assert same(data[i], source.item(i))
                time.sleep(0.02)  # the thread has time to fetch the next
        found = data.counters
    assert found.ahead_count >= 0.5 * (found.request_count - found.hit_count)


def test_the_least_recently_used_goes_first() -> None:
    source = Items(4)
    with umem.data.cached(source, 2 * source.packed()) as data:
        for i in (0, 1, 0, 2, 0, 1):
            data[i]
        assert data.counters.hit_count == 2  # 0 and 0; 1 went for 2


def test_what_costs_less_a_byte_goes_first() -> None:
    class Slow(Items):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.02 if index == 0 else 0)
            return super().__getitem__(index)

    source = Slow(6)
    with umem.data.cached(source, 2 * source.packed(), policy="cost") as data:
        for i in (0, 1, 2, 3, 4, 5, 0):
            data[i]
        assert data.counters.hit_count == 1 and data.counters.load_count == 6


def test_indices_are_those_of_chainers_datasets() -> None:
    source = Items(5)
    with umem.data.cached(source, "1MiB") as data:
        assert len(data) == 5
        assert [x[1] for x in data[1:4]] == [1, 2, 3]
        assert [x[1] for x in data[::-2]] == [4, 2, 0]
        assert [x[1] for x in data[[3, 0]]] == [3, 0]
        assert [x[1] for x in data[np.array([2, 2])]] == [2, 2]
        assert data[-1][1] == 4 and data[np.int64(3)][1] == 3
        assert data.get_example(2)[1] == 2
        for wrong in (5, -6):
            with pytest.raises(IndexError):
                data[wrong]
        with pytest.raises(TypeError):
            data[1.0]


def test_items_that_are_changed_by_the_program_change_nothing() -> None:
    source = Items(2)
    with umem.data.cached(source, "1MiB") as data:
        for _ in range(3):
            item = data[0]
            assert same(item, source.item(0))
            item[0][:] = 99


def test_items_larger_than_memory_are_not_kept() -> None:
    source = Items(3, [50_000, 100, 100])
    with umem.data.cached(source, 4000) as data:
        for _ in range(2):
            for i in range(3):
                assert same(data[i], source.item(i))
        assert data.counters.bypass_count == 2 and source.asked[0] == 2
        assert data.counters.hit_count == 2


def test_another_order_is_noticed_at_the_first_item_and_said_once() -> None:
    source, order = Items(10), known_order(0)
    order(np.arange(10), 0)
    wrong = int(order.items(0)[1])
    with umem.data.cached(source, "1MiB", order=order) as data:
        with pytest.warns(DataWarning, match=f"item {wrong} was requested, but") as caught:
            data[wrong]
            for i in range(10):
                assert same(data[i], source.item(i))
        assert len(caught) == 1 and caught[0].filename == __file__
        now = order(np.arange(10), 0)  # an iterator begins
        for i in now.tolist():
            data[i]


def test_after_another_order_the_least_recently_used_goes() -> None:
    source, order = Items(10), known_order(0)
    with umem.data.cached(source, 3 * source.packed(), order=order, ahead=False) as data:
        begun = order(np.arange(10), 0).tolist()
        data[begun[0]]
        with pytest.warns(DataWarning):
            data[begun[5]]
        others = [i for i in range(10) if i not in (begun[0], begun[5])]
        for i in (others[0], others[1], begun[5], others[0]):
            data[i]
        assert data.counters.hit_count == 2


def test_an_iterator_that_begins_anew_is_followed() -> None:
    source, order = Items(10), known_order(0)
    with umem.data.cached(source, "1MiB", order=order) as data:
        for _ in range(3):
            now = order(np.arange(10), 0).tolist()
            for i in now[:4]:
                assert same(data[i], source.item(i))


def test_errors_of_the_dataset_come_through_and_leave_all_as_it_was() -> None:
    class Failing(Items):
        fails = True

        def __getitem__(self, index: int) -> Any:
            if index == 3 and self.fails:
                raise OSError("item 3 is not there")
            return super().__getitem__(index)

    source, order = Failing(6), known_order(0)
    with umem.data.cached(source, "1MiB", order=order) as data:
        for i in order(np.arange(6), 0).tolist():
            if i == 3:
                with pytest.raises(OSError, match="item 3 is not there"):
                    data[i]
            else:
                assert same(data[i], source.item(i))
        source.fails = False
        for i in order(np.arange(6), 0).tolist():
            assert same(data[i], source.item(i))


def test_objects_are_refused_by_name() -> None:
    with umem.data.cached([(1, np.array([None]))], "1MiB") as data:
        with pytest.raises(UnsupportedError, match=r"item 0 .* the item\[1\] is an array of"):
            data[0]


def test_a_dataset_that_gives_something_else_is_noticed_and_said_once() -> None:
    class Changing(Items):
        add = 0

        def item(self, index: int) -> Any:
            array, number = super().item(index)
            return array + np.uint8(self.add), number

    source = Changing(4)
    with umem.data.cached(source, "1MiB") as data:
        for i in range(4):
            data[i]
        source.add = 1
        with pytest.warns(DataWarning, match="has changed") as caught:
            for _ in range(100):
                for i in range(4):
                    found = data[i]
        assert len(caught) == 1 and same(found, source.item(3))
        assert data.counters.lost_count == 1


def test_threads_ask_at_once() -> None:
    source, order = Items(40), known_order(1)
    with umem.data.cached(source, 10 * source.packed(), "1MB", order=order) as data:
        wrong = list[int]()

        def ask(indices: list[int]) -> None:
            wrong.extend(i for i in indices if not same(data[i], source.item(i)))

        for now in islice(epochs(order, 40), 4):
            for start in range(0, 40, 8):  # batches, as MultithreadIterator has them
                batch = now[start : start + 8]
                threads = [threading.Thread(target=ask, args=(batch[k::4],)) for k in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        assert not wrong and data.counters.hit_count > 10


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_thread_may_begin_with_what_comes_late_in_the_order(goes_back: bool) -> None:
    drawn = epochs(known_order(3, umem.data.with_replacement), 20)
    first, second = next(drawn), next(drawn)
    late = sorted(set(range(20)) - {*first, *second})
    source, order = Items(20), known_order(3, umem.data.with_replacement)
    with umem.data.cached(source, 10 * source.packed(), order=order, ahead=False) as data:
        if goes_back:
            requests_of(data, source, order, 1)
            next(epochs(order, 20))  # an iterator that begins anew
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(data[i][1] for i in late))
        thread.start()
        thread.join()
        assert late and found == late


def test_a_cache_that_nobody_has_leaves_no_thread_and_no_handle() -> None:
    gc.collect()
    source, order = Items(10), known_order(0)
    before = threading.active_count(), _handles()
    data = umem.data.cached(source, "1MiB", "1MiB", order=order)
    data[int(order(np.arange(10), 0)[0])]
    assert threading.active_count() == before[0] + 1
    del data
    gc.collect()
    assert (threading.active_count(), _handles()) == before


def _handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_closed_cache_says_so() -> None:
    data = umem.data.cached(Items(2), "1MiB")
    data.close()
    data.close()
    with pytest.raises(StateError, match="was closed"):
        data[0]


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"memory": -1}, SizeError, "memory must be above zero"),
        ({"memory": "1MiB", "disk": -5}, SizeError, "disk must be above zero"),
        ({"memory": "much"}, SizeError, "memory must be a size"),
        ({"memory": 1, "policy": "mru"}, DataError, "next-use, lru, cost; got 'mru'"),
        ({"memory": 1, "policy": "next-use"}, DataError, "known_order"),
        ({"memory": 1, "disk": 1, "folder": "/nowhere"}, OSError, "is not a folder"),
    ],
)
def test_what_cannot_be_is_refused(arguments: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        umem.data.cached(Items(2), **arguments)


def test_no_items_at_all() -> None:
    with umem.data.cached([], "1MiB", order=known_order(0)) as data:
        assert len(data) == 0 and data[:] == []
        assert str(data.counters).startswith("0 of 0 items")


@pytest.mark.parametrize("draw", [umem.data.shuffle, umem.data.with_replacement])
def test_items_of_several_sizes_hit_the_same_bytes_whether_fetched_ahead_or_not(draw: Any) -> None:
    sizes, hit = [9000, 31_000, 14_000, 22_000, 5000, 40_000, 12_000, 27_000], []
    for ahead in (False, True):
        source, order = Items(len(sizes), sizes), umem.data.known_order(3, draw)
        room = sum(map(source.packed, range(len(sizes)))) // 2
        with umem.data.cached(source, room, order=order, ahead=ahead) as data:
            for now in islice(epochs(order, len(sizes)), 5):
                for item in now:
                    data[item]
            hit.append(data.counters.hit_bytes)
    assert hit[0] == hit[1] > 0
