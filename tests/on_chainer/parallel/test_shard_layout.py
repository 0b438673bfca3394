"""Where a flat vector of parameters is cut: equal state, whole blocks, and nothing lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import umem.chainer  # isort: skip  (before Chainer, which it mends)
import chainer
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from umem.chainer.parallel.shard_layout import FlatVector, Stretch, cut
from umem.chainer.parameters_once import overlapping

stretches = st.builds(
    Stretch,
    st.integers(1, 5000),
    st.sampled_from([1, 256]),
    st.sampled_from([0.0, 2.03125, 8.0, 12.0]),
)


@given(st.lists(stretches, min_size=1, max_size=30), st.integers(1, 9))
def test_shards_are_behind_one_another_and_cut_no_block(found: list[Stretch], count: int) -> None:
    bounds = cut(found, count)
    assert len(bounds) == count + 1 and bounds == sorted(bounds)
    assert bounds[0] == 0 and bounds[-1] == sum(one.size for one in found)
    begin = 0
    for one in found:
        inside = [at - begin for at in bounds if begin < at < begin + one.size]
        assert not any(at % one.block for at in inside)
        begin += one.size


@given(st.lists(stretches, min_size=1, max_size=30), st.integers(1, 9))
def test_no_shard_has_more_than_its_share_and_a_block(found: list[Stretch], count: int) -> None:
    if not any(one.element_bytes for one in found):
        found = [one._replace(element_bytes=1.0) for one in found]
    of_element = [one.element_bytes for one in found for _ in range(one.size)]
    bounds = cut(found, count)
    largest = max(sum(of_element[a:b]) for a, b in pairwise(bounds))
    assert largest <= sum(of_element) / count + 256 * max(of_element) + 1e-6


@pytest.mark.parametrize(("begin", "overlap"), [(0, True), (5, True), (6, False)])
def test_arrays_that_share_memory_are_found_in_either_direction(begin: int, overlap: bool) -> None:
    whole = np.arange(10, dtype="f4")
    named = [("/a", chainer.Parameter(whole[:6])), ("/b", chainer.Parameter(whole[begin:][::-1]))]
    assert [(a, b) for a, _, b, _ in overlapping(named)] == [("/a", "/b")] * overlap


def model() -> Any:
    """One parameter has four fifths of a million elements, and 200 small ones the rest."""
    made = chainer.Chain()
    with made.init_scope():
        made.large = chainer.Parameter(np.zeros((800, 1000), np.float32))
        for index in range(200):
            setattr(made, f"small{index}", chainer.Parameter(np.zeros(1000, np.float32)))
    return made


def state_bytes(optimizer: Any, rank: int, count: int) -> int:
    """Of one rank's shards."""
    target = model()
    optimizer.setup(target)
    total = 0
    for shard in FlatVector(sorted(target.namedparams()), rank, count).shards:
        shard.show(np.zeros(shard.stop - shard.start, np.float32))
        shard.part.update()
        total += sum(value.nbytes for value in shard.part.update_rule.state.values())
    return total


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "kind", [chainer.optimizers.Adam, umem.chainer.optimizers.Adam8bit], ids=["adam", "8bit"]
)
def test_a_rank_has_an_nth_of_the_state_and_two_hundredths_more(kind: Any, count: int) -> None:
    every = [state_bytes(kind(), rank, count) for rank in range(count)]
    whole = state_bytes(kind(), 0, 1)
    assert sum(every) == whole
    assert max(every) <= whole * (1 / count) * 1.02
