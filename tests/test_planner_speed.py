"""Graphs as large as the published ones are planned from a bounded number of lower sets.

`bench/planners.py` measures how long that takes.
"""

from __future__ import annotations

import pytest

from umem.planner import Graph, Node, plan, simulate
from umem.planner.lower_sets import MAX_SETS, prefixes

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


@pytest.mark.parametrize("model", ["paper", "saved"])
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_570_nodes_are_planned_from_a_set_a_node(model, objective):
    graph = residual_network(57)
    assert len(prefixes(graph)) == len(graph) + 1 <= MAX_SETS
    tight = plan(graph, None, "lower_sets", objective, model)
    loose = plan(graph, 2 * tight.peak_bytes, "lower_sets", objective, model)
    assert simulate(graph, loose, budget_bytes=2 * tight.peak_bytes).overhead == loose.overhead


@pytest.mark.parametrize("model", ["paper", "saved"])
def test_a_long_recurrent_network_is_planned_with_fewer_sets(model):
    graph = residual_network(120)
    assert len(prefixes(graph)) <= MAX_SETS
    found = plan(graph, None, "lower_sets", "time", model)
    everything = plan(graph, None, "store_all", "time", model)
    assert found.peak_bytes < everything.peak_bytes / 4
    assert simulate(graph, found).overhead == found.overhead
