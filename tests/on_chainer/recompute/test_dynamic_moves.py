"""Passes whose graph never comes back, under a budget that may also move what they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import beside_plain
from recompute_cases import same
from tiers import MemoryTier

from tests.on_chainer.recompute.test_dynamic import (
    LENGTHS,
    Kept,
    backward_after_the_block,
    chain,
    half,
    run,
    with_everything,
)

import umem.chainer  # isort: skip  (before chainer)
import chainer
import chainer.functions as F

from umem.chainer.recompute import graph_store, offloaded
from umem.chainer.recompute.online.late_call import LateCall
from umem.errors import BudgetError
from umem.planner.link import Link

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::umem.errors.RecomputeWarning"),
]
FAST, SLOW = Link(1e14, 1e14), Link(1e3, 1e3)
"""Rates at which everything moves, and only what must not run twice."""


def lowered(monkeypatch: pytest.MonkeyPatch, link: Link, room: int = 1 << 40) -> list[MemoryTier]:
    """Have what moves go to memory, over a link of these rates; the tiers that were opened."""
    tiers: list[MemoryTier] = []

    def opened(array: Any, where: Any, limit: Any = None) -> MemoryTier:
        tiers.append(MemoryTier(room))
        return tiers[-1]

    monkeypatch.setattr(offloaded, "open_tier", opened)
    monkeypatch.setattr(offloaded, "link_of", lambda tier, array: link)
    return tiers


@pytest.mark.parametrize("loss_of", [chain, with_everything])
@pytest.mark.parametrize("link", [FAST, Link(2e8, 2e8), SLOW])
@pytest.mark.parametrize("debug", [False, True])
def test_the_numbers_are_those_of_plain_chainer(
    loss_of: Any, link: Link, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = lowered(monkeypatch, link)
    budget = 2 * half() if loss_of is with_everything else half()
    memory = umem.chainer.Recompute(budget, offload=True, debug=debug)
    same(run(loss_of, LENGTHS, memory), run(loss_of, LENGTHS))
    assert memory.online_count == len(LENGTHS) - graph_store.STRANGERS
    (tier,) = tiers
    assert tier.is_closed
    assert not tier.below
    if link is FAST:
        assert tier.fetched_bytes >= tier.sent_bytes > 0
        assert "were moved" in memory.report()
    if link is SLOW and loss_of is chain:
        assert not tier.sent_bytes


def test_where_the_link_is_fast_nothing_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    count, again = 0, LateCall.run_here

    def counted(call: LateCall, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return again(call, inputs)

    monkeypatch.setattr(LateCall, "run_here", counted)
    counts = []
    for link in (FAST, SLOW):
        lowered(monkeypatch, link)
        count = 0
        run(chain, LENGTHS, umem.chainer.Recompute(half(), offload=True))
        counts.append(count)
    assert counts[0] == 0 < counts[1]


def test_what_must_not_run_twice_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of which nothing may run again does not fit, unless it may move."""

    def kept(net: Any, length: int) -> Any:
        h = chainer.Variable(np.random.randn(64, 64).astype("f"))
        for place in range(length):
            h = Kept().apply((net.layers[place % 4](h),))[0]
        return F.mean(net.out(h) ** 2)

    with pytest.raises(BudgetError):
        run(kept, LENGTHS, umem.chainer.Recompute(half()))
    lowered(monkeypatch, SLOW)
    same(run(kept, LENGTHS, umem.chainer.Recompute(half(), offload=True)), run(kept, LENGTHS))


@pytest.mark.parametrize("room", [0, 40_000, 200_000])
def test_what_finds_no_room_below_runs_again(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiers, memory) = lowered(monkeypatch, FAST, room), umem.chainer.Recompute(half(), offload=True)
    same(run(chain, LENGTHS, memory), run(chain, LENGTHS))
    assert tiers[0].sent_bytes > 0 or not room


def test_a_backward_after_the_block_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = lowered(monkeypatch, FAST)
    memory = umem.chainer.Recompute(half(), offload=True)
    backward_after_the_block(memory, lambda: tiers[0].below)


def test_files_take_what_a_chain_keeps(tmp_path: Path) -> None:
    """By a real file, at whatever rate it has."""
    memory = umem.chainer.Recompute(2 * half(), offload=tmp_path)
    same(run(with_everything, LENGTHS, memory), run(with_everything, LENGTHS))
    assert memory.online_count == len(LENGTHS) - graph_store.STRANGERS
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40))]
)
def test_random_programs_have_the_numbers_of_plain_chainer(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        graph_store, "STRANGERS", 0
    )  # no pass is expected back, from the first one on
    monkeypatch.setattr(graph_store, "OFTEN", 99)
    wrong, moved = [], 0
    for seed in range(first, first + 20):
        tiers = lowered(monkeypatch, (FAST, FAST, Link(3e8, 3e8))[seed % 3], 1 << (16 + seed % 9))

        def memory(number: int, seed: int = seed) -> Any:
            return umem.chainer.Recompute(60_000 + 20_000 * (seed % 5), offload=True)

        _, found, _ = beside_plain(seed, memory)
        wrong += [f"seed {seed}: {found[:3]}"] if found else []
        moved += any(tier.sent_bytes for tier in tiers)
    assert not wrong
    assert moved > 2
