"""Graphs as large as the published ones are planned from a bounded number of lower sets.

`bench/planners.py` measures how long that takes.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.planner.test_referee import graphs
from umem.planner import Graph, Node, plan, simulate
from umem.planner.kusumoto.families import MAX_SETS, ancestors, boundary_bytes
from umem.planner.lower_sets import prefixes
from umem.planner.step_table import LEVELS, units

pytestmark = pytest.mark.thorough


def residual_network(blocks: int, calls: int = 10) -> Graph:
    """As many calls a block as a bottleneck has, with a skip around each."""
    nodes, edges = [], []
    for v in range(blocks * calls):
        size = (64 >> (4 * v // (blocks * calls))) * (1 + (v % 3 == 0)) << 20
        nodes.append(Node(f"n{v}", size, 10 if v % 3 == 0 else 1, saved=v % 3 != 1))
        edges += [(f"n{v - 1}", f"n{v}")] if v else []
        edges += [(f"n{v - calls}", f"n{v}")] if v % calls == 0 and v else []
    return Graph(nodes, edges)


@pytest.mark.parametrize("model", ["kusumoto", "saved"])
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_570_nodes_are_planned_from_a_set_a_node(model, objective):
    graph = residual_network(57)
    assert len(prefixes(graph)) == len(graph) + 1 <= MAX_SETS
    tight = plan(graph, None, "lower_sets", objective, model)
    loose = plan(graph, 2 * tight.peak_bytes, "lower_sets", objective, model)
    assert simulate(graph, loose, budget_bytes=2 * tight.peak_bytes).overhead == loose.overhead


@pytest.mark.parametrize("model", ["kusumoto", "saved"])
def test_a_long_recurrent_network_is_planned_with_fewer_sets(model):
    graph = residual_network(120)
    assert len(prefixes(graph)) <= MAX_SETS
    found = plan(graph, None, "lower_sets", "time", model)
    everything = plan(graph, None, "store_all", "time", model)
    assert found.peak_bytes < everything.peak_bytes / 4
    assert simulate(graph, found).overhead == found.overhead


def chain(count: int) -> Graph:
    """Calls one after another, of several sizes and costs."""
    nodes = [
        Node(
            f"n{v}",
            (1 + v % 7) << 20,
            1 + v % 3,
            saved=v % 3 != 1,
            stays_bytes=v % 5,
            stash_bytes=64 * (v % 4 == 0),
        )
        for v in range(count)
    ]
    return Graph(nodes, [(f"n{v - 1}", f"n{v}") for v in range(1, count)])


@pytest.mark.parametrize("model", ["kusumoto", "saved"])
def test_a_chain_of_ten_thousand_calls_is_planned(model):
    graph = chain(10_000)
    everything = plan(graph, None, "store_all", "time", model)
    least = plan(graph, None, model=model)
    half = plan(graph, everything.peak_bytes // 2, model=model)
    assert least.peak_bytes < everything.peak_bytes / 20
    assert half.overhead < 1.02 * least.overhead, "but for what rounding to levels costs"
    assert model == "kusumoto" or half.overhead < 0.9 * least.overhead
    for found in (least, half):
        done = simulate(graph, found, budget_bytes=found.budget_bytes)
        assert done.overhead == found.overhead
        if model == "saved":
            assert done.peak_bytes == found.peak_bytes


def test_many_small_costs_add_up_in_levels_to_what_they_are():
    costs = tuple(0.3 + v % 3 for v in range(20_000))
    for few in (costs, costs[::3], costs[1::3]):
        found = units(few, exact=False)
        level = sum(few) / LEVELS
        for some in (slice(None), slice(500, 1500), slice(None, None, 7)):
            assert sum(found[some]) * level == pytest.approx(sum(few[some]), rel=0.02)


@given(graphs())
@settings(deadline=None, max_examples=60)
def test_the_bytes_on_boundaries_are_those_counted_one_by_one(graph):
    g = graph.numbered
    sets = (0, *ancestors(graph), (1 << len(graph)) - 1)
    assert boundary_bytes(graph, sets) == [
        sum(
            g.size[v]
            for v, users in enumerate(g.succs)
            if mask >> v & 1 and any(not mask >> w & 1 for w in users)
        )
        for mask in sets
    ]
