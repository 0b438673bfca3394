"""Plans that may run a call again several times: against brute force, and never worse than others.

The brute force searches every order of letting go, running again and going backward, by rules that
are written down here once more; it calls nothing of the planner.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_referee import graphs
from umem.errors import BudgetError, GraphError
from umem.planner import Graph, Node, min_budget, pareto, plan, simulate
from umem.planner.dispatch import least_once
from umem.planner.plans import reruns_of
from umem.planner.problem import CallFacts, Problem
from umem.planner.rematerialize import keep_more, plan_of

pytestmark = pytest.mark.thorough

MIB = 1 << 20
OTHERS = ("store_all", "chen", "lower_sets")

State = tuple[int, frozenset[int], frozenset[int]]
"""How many forward and backward steps are done; which values and stashes are there."""


class Tape:
    """Every state that a step can be in."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.forward_bytes = graph.forward_bytes
        number = {node.name: v for v, node in enumerate(self.nodes)}
        self.reads: list[set[int]] = [set() for _ in self.nodes]
        for source, target in graph.edges:
            self.reads[number[target]].add(number[source])
        self.base = []
        for v, node in enumerate(self.nodes):
            if node.alias_of is not None:
                self.reads[v].add(number[node.alias_of])
            self.base.append(v if node.alias_of is None else self.base[number[node.alias_of]])
        self.needs = [
            {x for x in (v, *self.reads[v]) if self.nodes[x].saved} for v in range(len(self.nodes))
        ]
        self.gradients = list(self._gradients())

    def _gradients(self) -> Iterator[tuple[int, int]]:
        """By step of backward, the bytes of gradients before it and during it."""
        alive: set[int] = set()
        stays = 0
        for v in reversed(range(len(self.nodes))):
            before = sum(map(self._gradient, alive)) + stays
            alive |= {v} | self.reads[v]
            stays += self.nodes[v].stays_bytes
            during = sum(map(self._gradient, alive)) + stays
            yield before, during + self.nodes[v].backward_workspace_bytes
            alive.remove(v)

    def _gradient(self, v: int) -> int:
        node = self.nodes[v]
        own = 0 if node.alias_of else node.nbytes
        return own if node.grad_bytes is None else node.grad_bytes

    def held(self, values: frozenset[int], stashes: frozenset[int]) -> int:
        own = {self.base[v] for v in values}
        return sum(self.nodes[v].nbytes for v in own) + sum(
            self.nodes[v].stash_bytes for v in stashes
        )

    def moves(self, state: State, budget: int) -> Iterator[tuple[float, State]]:
        done, values, stashes = state
        count = len(self.nodes)
        for v in values:
            yield 0, (done, values - {v}, stashes)
        for v in stashes:
            yield 0, (done, values, stashes - {v})
        if done < count:
            if self.reads[done] <= values:
                yield from self._run(done, done + 1, values, stashes, budget - self.forward_bytes)
            return
        v = 2 * count - 1 - done
        before, during = self.gradients[done - count]
        stash_is_there = v in stashes or not self.nodes[v].stash_bytes
        fits = self.held(values, stashes) + during <= budget
        if self.needs[v] <= values and stash_is_there and fits:
            yield 0, (done + 1, values, stashes - {v})
        for w in range(v + 1):
            free = w not in values and w not in stashes and self.nodes[w].recomputable
            if free and self.reads[w] <= values:
                for _, after in self._run(w, done, values, stashes, budget - before):
                    yield self.nodes[w].cost, after

    def _run(
        self, v: int, done: int, values: frozenset[int], stashes: frozenset[int], room: int
    ) -> Iterator[tuple[float, State]]:
        values |= {v}
        stashes |= {v} if self.nodes[v].stash_bytes else set()
        if self.held(values, stashes) + self.nodes[v].workspace_bytes <= room:
            yield 0, (done, values, stashes)

    def least_overhead(self, budget: int) -> float | None:
        """The least cost of all that runs again, by Dijkstra's algorithm."""
        start: State = (0, frozenset(), frozenset())
        costs: dict[State, float] = {start: 0}
        todo: list[tuple[float, int, State]] = [(0, 0, start)]
        count = 0
        while todo:
            cost, _, state = heapq.heappop(todo)
            if state[0] == 2 * len(self.nodes):
                return cost
            if cost > costs[state]:
                continue
            for more, after in self.moves(state, budget):
                if cost + more < costs.get(after, float("inf")):
                    costs[after] = cost + more
                    count += 1
                    heapq.heappush(todo, (cost + more, count, after))
        return None


def random_graph(seed: int) -> Graph:
    source = random.Random(seed)
    count = source.randrange(3, 7)
    edges = [(x, v) for v in range(count) for x in range(v) if source.random() < 0.5]
    hard = seed % 3
    nodes = [
        Node(
            f"n{v}",
            source.randrange(1, 12),
            source.randrange(1, 6),
            saved=source.random() < 0.7,
            recomputable=hard != 1 or source.random() < 0.8,
            stash_bytes=source.choice((0, 0, 5)) if hard == 1 else 0,
            workspace_bytes=source.choice((0, 6)) if hard else 0,
            backward_workspace_bytes=source.choice((0, 6)) if hard else 0,
            stays_bytes=source.choice((0, 2)) if hard else 0,
        )
        for v in range(count)
    ]
    if hard == 2:
        reads = {v: [x for x, w in edges if w == v] for v in range(count)}
        nodes = [
            dataclasses.replace(node, alias_of=f"n{source.choice(reads[v])}")
            if reads[v] and source.random() < 0.3
            else node
            for v, node in enumerate(nodes)
        ]
    return Graph(nodes, [(f"n{x}", f"n{v}") for x, v in edges], source.choice((0, 4)))


@pytest.mark.parametrize("seed", range(45))
def test_nothing_beats_it_on_tiny_graphs(seed: int) -> None:
    graph = random_graph(seed)
    tape = Tape(graph)
    least = min_budget(graph, "rematerialize", "saved")
    assert tape.least_overhead(least - 1) is None
    most = simulate(graph, plan(graph, None, "store_all", model="saved")).peak_bytes
    for budget in sorted({least, (2 * least + most) // 3, (least + 2 * most) // 3}):
        found = plan(graph, budget, "rematerialize", model="saved")
        assert found.overhead == tape.least_overhead(budget)


@settings(max_examples=100, deadline=None)
@given(graphs(), st.data())
def test_it_is_never_worse_than_chains_and_the_referee_agrees(graph: Graph, data: Any) -> None:
    least = min_budget(graph, model="saved")
    assert least <= min(min_budget(graph, method, "saved") for method in OTHERS)
    budget = data.draw(st.integers(least, least + 60))
    found = plan(graph, budget, model="saved")
    done = simulate(graph, found, budget_bytes=budget)
    assert (done.peak_bytes, done.overhead) == (found.peak_bytes, found.overhead)
    for method in OTHERS:
        try:
            assert found.overhead <= plan(graph, budget, method, model="saved").overhead
        except BudgetError:
            assert min_budget(graph, method, "saved") > budget


def perceptron() -> Graph:
    names = ["l1", "r1", "l2", "r2", "l3"]
    sizes = [31 * MIB] * 4 + [MIB]
    nodes = [
        Node(name, size, 10 if name in ("l1", "l2") else 1, saved=name not in ("l1", "l2"))
        for name, size in zip(names, sizes, strict=True)
    ]
    return Graph(nodes, pairwise(names))


def test_a_small_perceptron_saves_its_first_layer() -> None:
    graph = perceptron()
    found = plan(graph, None, model="saved")
    assert simulate(graph, found).peak_bytes == 93 * MIB
    assert min(min_budget(graph, method, "saved") for method in OTHERS) == 124 * MIB
    assert found.recomputed == ((), (), ("l1", "r1"), (), ())
    assert found.frees_early and found.kept == ("r2", "l3")


def chain(count: int, cost: int = 1) -> Graph:
    nodes = [Node(f"n{v}", 10, cost) for v in range(count)]
    return Graph(nodes, [(f"n{v - 1}", f"n{v}") for v in range(1, count)])


def test_a_chain_can_run_again_from_its_beginning_for_every_step() -> None:
    """With room for four values and gradients, of each call all that comes before runs again."""
    graph = chain(8)
    assert min_budget(graph, model="saved") == 40
    found = plan(graph, 40, model="saved")
    assert found.overhead > 8
    cheap = least_once(graph)
    assert cheap.overhead <= 8 and cheap.peak_bytes > 40
    assert plan(graph, cheap.peak_bytes, model="saved").overhead <= 8
    with pytest.raises(BudgetError, match=r"\(40 bytes\), which \w+ of 'n\d' forces"):
        plan(graph, 39, model="saved")


def test_a_front_goes_from_keeping_all_to_the_least() -> None:
    graph = chain(10)
    front = pareto(graph, model="saved")
    assert front[0] == (0, plan(graph, None, "store_all", model="saved").peak_bytes)
    assert front[-1][1] == 40
    assert front == sorted(front) and len(front) > 4


def test_it_plans_for_a_tape_alone() -> None:
    with pytest.raises(GraphError, match='pass model="saved"'):
        plan(chain(3), None, "rematerialize", model="kusumoto")


def test_a_long_plan_keeps_what_there_is_room_for() -> None:
    graph = chain(80)
    whole = plan(graph, None, "lower_sets", model="saved")
    reruns = reruns_of(graph, whole)
    budget = whole.peak_bytes + 30
    fewer = plan_of(graph, keep_more(graph, reruns, budget), budget, "")
    assert fewer.overhead < whole.overhead and fewer.peak_bytes <= budget
    assert keep_more(graph, reruns, whole.peak_bytes // 2) == reruns, "which did not fit before"
    assert not any(keep_more(graph, reruns, 10**6))


def problem(count: int) -> Problem:
    calls = [CallFacts("Call", 10, 1.0, 10, needs=(v, v - 1) if v else (v,)) for v in range(count)]
    return Problem(tuple(calls), tuple((v, v + 1) for v in range(count - 1)))


def test_a_problem_names_what_its_least_budget_costs() -> None:
    one = problem(8)
    least = one.least()
    assert least.plan.overhead <= 8
    assert one.within(least.peak_bytes).plan.overhead <= 8
    assert one.within(40).plan.overhead > 8
    with pytest.raises(
        BudgetError, match=r"the least budget is .* bytes; 40 bytes for \d\.\d more"
    ):
        one.within(39)
