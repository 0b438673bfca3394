"""Room for the gaps of a GPU's pool: what a budget in bytes leaves to a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import umem.chainer
from umem.chainer.recompute.passes import Pass
from umem.chainer.recompute.seen import SeenGraph, Target, carried
from umem.errors import BudgetError, SizeError, UnsupportedError
from umem.planner import FIRST_GAPS, LEAST_GAPS, PLAIN_GAPS, SETTLED, PoolGaps

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L


def expected() -> PoolGaps:
    gaps = PoolGaps()
    gaps.expect()
    return gaps


def test_gaps_are_one_on_the_host_and_expected_in_a_pool() -> None:
    assert PoolGaps().planned == PoolGaps().plain == 1
    gaps = expected()
    assert (gaps.planned, gaps.plain) == (FIRST_GAPS, PLAIN_GAPS)
    gaps.learn(1.2)
    gaps.expect()
    assert gaps.planned == 1.2


def test_the_first_measurement_replaces_the_expectation_and_later_ones_raise_it() -> None:
    gaps = expected()
    assert gaps.learn(1.02)
    assert gaps.planned == LEAST_GAPS
    assert not gaps.learn(1.05)
    assert not gaps.learn(LEAST_GAPS * 1.01)
    assert gaps.learn(1.4)
    assert (gaps.planned, gaps.measured) == (1.4, 1.4)


def test_gaps_are_corrected_a_few_times_and_no_more() -> None:
    gaps = expected()
    assert [gaps.run_out() for _ in range(SETTLED + 2)] == [True] * SETTLED + [False] * 2
    settled = gaps.planned
    assert settled == pytest.approx(FIRST_GAPS * 1.1**SETTLED)
    assert not gaps.learn(9.0)
    assert gaps.planned == settled


def test_a_pass_that_ran_out_leaves_more_room_for_plain_ones_too() -> None:
    gaps = expected()
    gaps.learn(1.02)
    gaps.run_out()
    assert (gaps.planned, gaps.plain) == (FIRST_GAPS, pytest.approx(1.1 * PLAIN_GAPS))


@pytest.fixture(name="graph")
def graph_fixture() -> SeenGraph:
    """A graph that was seen: a chain of layers, on NumPy."""
    net = chainer.Sequential(*[part for _ in range(12) for part in (L.Linear(64, 64), F.tanh)])
    x = np.ones((256, 64), "f")
    with umem.chainer.Recompute("min") as recompute:
        for _ in range(3):
            net.cleargrads()
            F.sum(net(x)).backward()
    return recompute.graphs[0]


def plan(graph: SeenGraph, budget: float, gaps: PoolGaps) -> tuple[int, bool]:
    """Return the peak of the plan for a budget, and whether it leaves a plain step alone."""
    found, _ = carried(graph, Target(int(budget), "auto", False), gaps=gaps)
    return found.peak_bytes, found.fits


def test_a_plan_leaves_the_gaps_of_a_budget_free(graph: SeenGraph) -> None:
    problem, gaps = graph.problem, expected()
    plain, least = problem.left_alone_bytes, problem.least().peak_bytes
    assert plain > 1.5 * least
    assert plan(graph, plain, PoolGaps()) == (plain, True)
    peak, fits = plan(graph, plain, gaps)
    assert peak <= plain / FIRST_GAPS
    assert not fits
    assert plan(graph, plain * PLAIN_GAPS + 1, gaps) == (plain, True)


def test_a_budget_without_room_for_gaps_gets_the_plan_of_the_least_peak(graph: SeenGraph) -> None:
    gaps, least = expected(), graph.problem.least().peak_bytes
    assert plan(graph, 1.1 * least, gaps) == (least, False)
    assert plan(graph, least, gaps) == (least, False)
    lowest = graph.problem.least(any_cost=True).peak_bytes
    with pytest.raises(BudgetError, match="the least budget is"):
        plan(graph, lowest - 1, gaps)


@pytest.mark.thorough
def test_a_plan_has_no_more_than_the_card_and_an_error_is_only_of_the_budget(
    graph: SeenGraph,
) -> None:
    problem, gaps = graph.problem, expected()
    plain, least = problem.left_alone_bytes, problem.least().peak_bytes
    gaps.keep_to_card(plain)
    assert gaps.room(10 * plain) == int(plain / FIRST_GAPS)
    assert gaps.room(plain // 2, plain=True) == int(plain // 2 / PLAIN_GAPS)
    peak, fits = plan(graph, 10 * plain, gaps)
    assert peak <= plain / FIRST_GAPS
    assert not fits
    gaps.keep_to_card(least - 1)
    assert plan(graph, 1.1 * least, gaps) == (least, False)


def test_a_pass_that_learns_keeps_as_few_as_can_be_once_memory_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[Pass] = []
    add = Pass.add

    def noted(now: Pass, *arguments: Any) -> None:
        passes.append(now)
        add(now, *arguments)

    monkeypatch.setattr(Pass, "add", noted)
    net = [part for _ in range(12) for part in (L.Linear(64, 64), F.tanh)]

    def kept(runs_out: bool) -> int:
        """Return how many calls hold their outputs when forward is nearly over."""
        h = chainer.Variable(np.ones((256, 64), "f"))
        with umem.chainer.Recompute("1GiB"):
            for part in net:
                h = part(h)
                now = passes[-1]
                if runs_out and len(now.calls) == 4:
                    now.rule.make_room(now, {3})
            found = sum(call.find(0) for call in now.calls)
            F.sum(h).backward()
        return found

    assert kept(runs_out=True) < kept(runs_out=False)


@pytest.mark.thorough
def test_shares_and_min_have_no_gaps(graph: SeenGraph) -> None:
    gaps = expected()
    for budget in (0.7, None):
        target = Target(budget, "auto", False)
        with_gaps, without = carried(graph, target, gaps=gaps)[0], carried(graph, target)[0]
        assert with_gaps.peak_bytes == without.peak_bytes


def test_the_card_is_no_budget_for_numpy_s_arrays() -> None:
    layer, x = L.Linear(3, 3), np.ones((2, 3), "f")
    with umem.chainer.Recompute("card"):
        with pytest.raises(UnsupportedError, match="the arrays are NumPy's"):
            layer(x)
        with pytest.raises(UnsupportedError, match="the arrays are NumPy's"):
            layer(x)
    F.sum(layer(x)).backward()
    assert layer.W.grad is not None
    with pytest.raises(SizeError, match='"min" or "card"'):
        umem.chainer.Recompute("cards")
