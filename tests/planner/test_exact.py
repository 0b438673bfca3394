"""Exact means exact: against brute force over all chains of lower sets, from the formula."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from umem.errors import GraphError
from umem.planner import Graph, Node, Plan, min_budget, pareto, plan, search, simulate
from umem.planner.kusumoto.families import all_lower_sets, ancestors
from umem.planner.kusumoto.formula import KusumotoModel
from umem.planner.lower_sets import prefixes
from umem.planner.saved import SavedModel
from umem.planner.step_table import Hop, peak_of, time_of

pytestmark = pytest.mark.thorough

Lower = frozenset[str]


class Brute:
    """A graph by names, and all chains of its lower sets."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self.order = [node.name for node in graph.nodes]
        self.pred = {name: {s for s, t in graph.edges if t == name} for name in self.nodes}
        self.succ = {name: {t for s, t in graph.edges if s == name} for name in self.nodes}
        every = [
            frozenset(n for n, take in zip(self.nodes, taken, strict=True) if take)
            for taken in product((0, 1), repeat=len(self.nodes))
        ]
        self.lower = [s for s in every if all(self.pred[name] <= s for name in s)]

    def chains(self, start: Lower = frozenset()) -> Iterator[list[Lower]]:
        if len(start) == len(self.nodes):
            yield []
            return
        for larger in self.lower:
            if start < larger:
                for rest in self.chains(larger):
                    yield [larger, *rest]

    def boundary(self, lower: Lower) -> Lower:
        return frozenset(name for name in lower if self.succ[name] - lower)

    def bytes(self, names: set[str] | Lower) -> int:
        return sum(self.nodes[name].nbytes for name in names)

    def kusumoto(self, chain: list[Lower]) -> tuple[float, int]:
        """Overhead and peak, as the paper writes them."""
        overhead: float = 0
        peak, before, cached = 0, frozenset[str](), frozenset[str]()
        for lower in chain:
            block, edge = lower - before, self.boundary(lower)
            users = set().union(*(self.succ[name] for name in lower))
            inputs = set().union(*(self.pred[name] for name in users))
            overhead += sum(self.nodes[name].cost for name in block - edge)
            here = self.bytes(cached) + 2 * self.bytes(block)
            peak = max(peak, here + self.bytes(users - lower) + self.bytes(inputs - lower))
            cached, before = cached | edge, lower
        return overhead, peak


def seeds(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of a check that takes a seed, for all of them."""

    def over(check: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(check)
        others = [p for p in signature.parameters.values() if p.name != "seed"]

        @functools.wraps(check)
        def test(**given: Any) -> None:
            for seed in range(count):
                check(seed=seed, **given)

        test.__signature__ = signature.replace(parameters=others)  # what pytest gives it
        return test

    return over


def random_graph(seed: int, nodes: int, most_sets: int, **fields: object) -> Graph:
    """A graph of random sizes, costs and edges that has not too many lower sets."""
    source = random.Random(seed)
    while True:
        edges = [
            (f"n{s}", f"n{t}")
            for t in range(nodes)
            for s in range(t)
            if source.random() < 0.35 or (s == t - 1 and source.random() < 0.6)
        ]
        graph = Graph(
            [
                Node(
                    f"n{v}",
                    source.randrange(1, 30),
                    source.randrange(4),
                    saved=not fields or source.random() < 0.6,
                    stash_bytes=source.choice((0, 0, 9)) if fields else 0,
                    stays_bytes=source.choice((0, 0, 25)) if fields else 0,
                )
                for v in range(nodes)
            ],
            edges,
            source.choice((0, 15)) if fields else 0,
        )
        if all_lower_sets(graph, most_sets) is not None:
            return graph


def check(graph: Graph, points: set[tuple[float, int]], model: str) -> None:
    """The exact planner against every (overhead, peak) there is, for every budget that matters."""
    peaks = sorted({peak for _, peak in points})
    assert min_budget(graph, "lower_sets_exact", model) == peaks[0]
    budgets = [*peaks, *(peak + 1 for peak in peaks)]
    for budget in budgets if len(budgets) < 80 else random.Random(0).sample(budgets, 80):
        within = [overhead for overhead, peak in points if peak <= budget]
        for objective, wanted in (("time", min(within)), ("memory", max(within))):
            found = plan(graph, budget, "lower_sets_exact", objective, model)
            assert found.overhead == wanted
            assert found.peak_bytes <= budget
            assert (found.overhead, found.peak_bytes) in points
    front = {
        (t, m)
        for t, m in points
        if not any(u <= t and n <= m and (u, n) != (t, m) for u, n in points)
    }
    assert set(pareto(graph, "lower_sets_exact", model)) == front


@seeds(40)
def test_the_formula_is_optimised_exactly(seed):
    graph = random_graph(seed, 2 + seed % 8, 40)
    brute = Brute(graph)
    points = {brute.kusumoto(chain) for chain in brute.chains()}
    check(graph, points, "kusumoto")


@seeds(4)
def test_costs_that_are_not_small_whole_numbers_are_exact_too(seed):
    graph = random_graph(seed, 7, 30)
    for scale in (0.125, 10**7 + 1):
        scaled = Graph(
            [Node(n.name, n.nbytes, n.cost * scale + (seed == 0) * scale / 4) for n in graph.nodes],
            graph.edges,
        )
        brute = Brute(scaled)
        check(scaled, {brute.kusumoto(chain) for chain in brute.chains()}, "kusumoto")


class Tape(Brute):
    """Chains of prefixes: blocks are stored (2) or run again (0, 1 cheaply), by the referee."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.graph = graph
        saved = {name for name in self.nodes if self.nodes[name].saved}
        self.needs = {name: ({name} | self.pred[name]) & saved for name in self.nodes}
        self.needed = set().union(*self.needs.values())
        mean = sum(node.cost for node in graph.nodes) / len(graph)
        self.costly = {node.name for node in graph.nodes if node.cost > mean}
        self.lower = [frozenset(self.order[:length]) for length in range(len(self.order) + 1)]

    def measured(self, chain: list[Lower], kinds: tuple[int, ...]) -> tuple[float, int]:
        before: Lower = frozenset()
        blocks, kept, again, stashed = [], [], [], []
        for lower, kind in zip(chain, (*kinds, 2), strict=True):
            block = [name for name in self.order if name in lower - before]
            extra = (set(), self.costly, self.needed)[kind]
            keep = [name for name in block if name in self.boundary(lower) | extra]
            rebuilt = [] if kind == 2 else self.rebuilt(block, set(keep), lower)
            blocks.append(tuple(block))
            kept += keep
            stashed += block if kind == 2 else keep
            again.append(tuple(rebuilt))
            before = lower
        guess = Plan(
            tuple(blocks),
            tuple(kept),
            tuple(again),
            tuple(stashed),
            0,
            0,
            "store_all",
            "time",
            "saved",
            0,
        )
        done = simulate(self.graph, guess)
        return done.overhead, done.peak_bytes

    def rebuilt(self, block: list[str], kept: set[str], lower: Lower) -> list[str]:
        wanted = set().union(*(self.needs[name] for name in lower))
        wanted |= {name for name in block if self.nodes[name].stash_bytes}
        found: list[str] = []
        for name in reversed(block):
            if name not in kept and (name in wanted or self.succ[name] & set(found)):
                found.append(name)
        return found[::-1]


@seeds(16)
def test_a_tape_is_optimised_exactly(seed):
    graph = random_graph(seed, 2 + seed % 5, 14, tape=True)
    tape = Tape(graph)
    points = {
        tape.measured(chain, kinds)
        for chain in tape.chains()
        for kinds in product(range(3), repeat=len(chain) - 1)
    }
    check(graph, points, "saved")


@seeds(12)
def test_the_approximate_family_is_searched_exactly(seed):
    """All chains of {v and what leads to v}, the empty set and all."""
    graph = random_graph(seed, 9, 60)
    brute = Brute(graph)
    family = {
        frozenset(graph.nodes[v].name for v in range(9) if mask >> v & 1)
        for mask in ancestors(graph)
    }
    assert family <= set(brute.lower) and len(family) <= 11
    brute.lower = sorted(family, key=len)
    points = {brute.kusumoto(chain) for chain in brute.chains()}
    for budget in sorted({peak for _, peak in points}):
        within = [overhead for overhead, peak in points if peak <= budget]
        for objective, wanted in (("time", min(within)), ("memory", max(within))):
            assert plan(graph, budget, "lower_sets", objective, "kusumoto").overhead == wanted


@pytest.mark.parametrize(("model", "count"), [("kusumoto", 40), ("saved", 700)])
def test_too_many_lower_sets_are_refused_with_the_way_out(model, count):
    graph = Graph([Node(f"n{v}", 1, 1) for v in range(count)], [])
    with pytest.raises(GraphError, match=r'more than .* lower sets.*use method="lower_sets"'):
        plan(graph, method="lower_sets_exact", model=model)
    assert plan(graph, model=model).peak_bytes >= 1


def graph_with_everything(source: random.Random) -> Graph:
    """Views, function state, workspaces, and calls that must not run twice."""
    nodes, edges = [], []
    for v in range(14):
        preds = [x for x in range(max(0, v - 4), v) if source.random() < 0.4]
        edges += [(f"n{x}", f"n{v}") for x in preds]
        view = f"n{preds[0]}" if preds and source.random() < 0.3 else None
        nodes.append(
            Node(
                f"n{v}",
                source.randrange(20),
                source.randrange(4),
                source.random() < 0.6,
                view,
                source.random() < 0.9,
                0 if view else source.choice((0, 0, 5)),
                source.choice((None, 3)),
                source.choice((0, 25)),
                source.choice((0, 25)),
            )
        )
    return Graph(nodes, edges)


@seeds(60)
def test_every_chain_of_prefixes_has_the_bytes_that_the_referee_counts(seed):
    source = random.Random(seed)
    graph = graph_with_everything(source)
    costs = SavedModel(graph)
    table = costs.table(sets := prefixes(graph), exact=True)
    inner = sorted(source.sample(range(1, len(graph)), source.randrange(6)))
    places = [0, *inner, len(graph)]
    kinds = [*(source.randrange(3) for _ in inner), 2]
    chain = tuple(map(Hop, places, places[1:], kinds))
    blocks = [costs.block(sets[source], sets[target], kind) for source, target, kind in chain]

    def named(numbers: Any) -> tuple[str, ...]:
        return tuple(graph.names[v] for v in numbers)

    found = Plan(
        tuple(named(block.nodes) for block in blocks),
        named(v for block in blocks for v in block.kept),
        tuple(named(block.rerun) for block in blocks),
        named(v for block in blocks for v in block.stashed),
        0,
        0,
        "lower_sets",
        "time",
        "saved",
        0,
    )
    done = simulate(graph, found)
    assert done.peak_bytes == peak_of(table, chain)
    assert done.overhead == time_of(table, chain)


def test_a_family_of_a_tape_has_prefixes_alone():
    graph = Graph([Node(name, 1, 1) for name in "ab"], [])
    with pytest.raises(GraphError, match="every lower set must be a prefix"):
        SavedModel(graph).table((0, 0b10, 0b11))


@pytest.mark.parametrize("model", ["kusumoto", "saved"])
@seeds(10)
def test_what_a_bound_rules_out_was_not_the_best(seed, model, monkeypatch):
    graph = random_graph(seed, 30, 300)
    sets = prefixes(graph) if model == "saved" else ancestors(graph)
    table = (SavedModel if model == "saved" else KusumotoModel)(graph).table(sets)
    for budget in (table.least, table.least * 3 // 2, table.least * 3):
        for one in (table, table.longest_first()):
            pruned = search.best(one, budget)
            monkeypatch.setattr(search, "NARROW", 1e-9)
            plain = search.best(one, budget)
            monkeypatch.undo()
            assert time_of(one, pruned) == time_of(one, plain)
            assert peak_of(table, pruned) <= budget


def test_the_most_overhead_of_real_costs_is_found_without_a_label_for_every_sum_of_them():
    # Sums of 90 real costs differ nearly all; following each took gigabytes.
    source = random.Random(90)
    nodes = [Node(f"n{v}", source.randrange(1 << 16, 1 << 24), source.random()) for v in range(90)]
    graph = Graph(nodes, [(f"n{v - 1}", f"n{v}") for v in range(1, 90)])
    budget = plan(graph, None, "store_all", model="kusumoto").peak_bytes // 2
    found = {
        objective: plan(graph, budget, "lower_sets_exact", objective, "kusumoto")
        for objective in ("time", "memory")
    }
    assert found["memory"].overhead > found["time"].overhead
    assert all(one.peak_bytes <= budget for one in found.values())
