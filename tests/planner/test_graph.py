"""A graph says what is wrong with it, keeps its order and survives JSON."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from umem.errors import BudgetError, GraphError
from umem.planner import Graph, Node, pareto, plan, simulate

A, B, C = Node("a", 4, 1), Node("b", 4, 1), Node("c", 4, 1)


@pytest.mark.parametrize(
    ("nodes", "edges", "named"),
    [
        ([A, B, C], [("a", "b"), ("b", "c"), ("c", "a")], "depends on itself"),
        ([A, B], [("b", "b")], "'b' depends on itself"),
        ([A], [("a", "x")], "'x'"),
        ([A], [("x", "a")], "'x'"),
        ([A, B, A], [], "'a' is there twice"),
        ([A, Node("v", 4, 1, alias_of="x")], [], "'v' is a view of 'x'"),
        ([Node("v", 4, 1, alias_of="v")], [], "'v' depends on itself"),
        ([A, Node("v", 4, 1, alias_of="w"), Node("w", 4, 1, alias_of="v")], [], "depends on"),
        ([A, B], [("a",)], "pair of names"),
        ([A, B], ["ab c"], "pair of names"),
        ([A, B], [(A, B)], "pair of names"),
        ([A, "b"], [], "Node objects"),
        ([A, B, dataclasses.replace(C, needs=("a",))], [("b", "c")], "'c' needs 'a'"),
        ([A, dataclasses.replace(B, saved=False, needs=("b",))], [], "'b', which is not saved"),
        ([Node("a", 1 << 53, 1)], [], "8 PiB"),
    ],
)
def test_a_broken_graph_is_refused_and_the_node_named(nodes, edges, named):
    with pytest.raises(GraphError, match=named):
        Graph(nodes, edges)


@pytest.mark.parametrize(
    "fields",
    [
        {"nbytes": -1},
        {"nbytes": 1.5},
        {"nbytes": True},
        {"nbytes": "4"},
        {"cost": -1},
        {"cost": float("nan")},
        {"cost": float("inf")},
        {"cost": "1"},
        {"stash_bytes": -1},
        {"grad_bytes": -4},
        {"workspace_bytes": 0.5},
        {"backward_workspace_bytes": -1},
        {"stays_bytes": True},
        {"needs": "b"},
        {"needs": (1,)},
        {"alias_of": "a", "stash_bytes": 4},
        {"cost": 10**400},
        {"cost": -(10**5000)},
        {"cost": True},
        {"cost": 1j},
        {"cost": None},
        {"cost": np.float64("inf")},
        {"cost": np.bool_(True)},
        {"nbytes": np.bool_(True)},
        {"nbytes": np.int64(-1)},
        {"nbytes": np.float64(4)},
        {"nbytes": -(10**5000)},
        {"needs": 5},
        {"alias_of": ["a"]},
        {"alias_of": 5},
    ],
    ids=range(30),
)
def test_a_broken_node_is_refused_by_its_name(fields):
    with pytest.raises(GraphError, match="node 'b'") as refused:
        Node(**{"name": "b", "nbytes": 4, "cost": 1, **fields})
    assert len(str(refused.value)) < 200, "a long value is shortened"


@pytest.mark.parametrize("wrong", [5, None, 2.5, object], ids=repr)
def test_nodes_and_edges_that_are_no_lists_are_refused(wrong):
    with pytest.raises(GraphError, match="edges must be a list of pairs of names; got"):
        Graph([A], wrong)
    with pytest.raises(GraphError, match="nodes must be a list of Node objects; got"):
        Graph(wrong, [])


def test_costs_and_workspace_that_no_plan_can_count_are_refused():
    with pytest.raises(GraphError, match="costs add up"):
        Graph([Node("a", 4, 1.7e308), Node("b", 4, 1.7e308)], [])
    for key in ("workspace_bytes", "backward_workspace_bytes"):
        with pytest.raises(GraphError, match="8 PiB"):
            Graph([Node("a", 4, 1, **{key: 10**400})], [])
    for cost in (5e-324, 1e-310, 1e300, 10**300):  # the ends of what can be counted
        chain = Graph(
            [Node(str(n), 4, cost) for n in range(9)], [(str(n), str(n + 1)) for n in range(8)]
        )
        for model in ("kusumoto", "saved"):
            found = plan(chain, None, model=model)
            assert simulate(chain, found).overhead == pytest.approx(found.overhead)


def test_whole_numbers_of_numpy_are_taken_as_ints():
    sizes = [np.int64(4), np.uint32(4), np.int8(4), 4]
    one = np.float32(1)
    nodes = [Node(str(n), size, one, workspace_bytes=size) for n, size in enumerate(sizes)]
    graph = Graph(nodes, [(str(n), str(n + 1)) for n in range(3)], np.int64(8))
    plain = Graph([Node(str(n), 4, 1.0, workspace_bytes=4) for n in range(4)], graph.edges, 8)
    assert graph == plain
    assert type(graph.nodes[0].nbytes) is int and type(graph.forward_bytes) is int
    least = plan(plain, None, model="saved")
    for budget in (np.int64(least.peak_bytes), np.uint16(least.peak_bytes)):
        assert plan(graph, budget, model="saved") == plan(plain, int(budget), model="saved")
        assert simulate(graph, least, budget_bytes=budget).peak_bytes == least.peak_bytes
    assert pareto(graph, points=np.int64(4)) == pareto(plain, points=4)


@pytest.mark.parametrize("wrong", [30.0, "30", True, -1, np.int64(-1), -(10**5000)], ids=range(6))
def test_what_is_no_budget_is_refused_in_words(wrong):
    graph = Graph([A, B, C], [("a", "b"), ("b", "c")])
    with pytest.raises(BudgetError, match="budget_bytes must be bytes as an int"):
        plan(graph, wrong)
    with pytest.raises(BudgetError, match="budget_bytes must be bytes as an int"):
        simulate(graph, plan(graph), budget_bytes=wrong)
    with pytest.raises(GraphError, match="simulate takes"):
        simulate(graph, wrong)


def test_a_node_has_a_name():
    for name in ("", None, 3):
        with pytest.raises(GraphError, match="name"):
            Node(name, 4, 1)


def test_nodes_and_graphs_do_not_change():
    graph = Graph([A, B], [("a", "b")])
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.nodes = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        A.nbytes = 5
    assert hash(graph) == hash(Graph([A, B], [("a", "b"), ("a", "b")]))


def test_nodes_out_of_order_are_sorted_and_others_stay():
    assert Graph([C, A, B], [("a", "b")]).names == ("c", "a", "b")
    assert Graph([C, A, B], [("b", "a"), ("a", "c")]).names == ("b", "a", "c")


def test_a_view_depends_on_its_base_without_an_edge():
    graph = Graph([Node("v", 4, 1, alias_of="a"), A], [])
    assert graph.names == ("a", "v")
    assert graph.numbered.size == (4, 0)
    assert graph.numbered.root == (0, 0)


def test_an_empty_graph_is_one():
    assert len(Graph([], [])) == 0
