"""A graph says what is wrong with it, keeps its order and survives JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_planner_referee import graphs

from umem.errors import GraphError
from umem.planner import Graph, Node

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
        {"nbytes": -1}, {"nbytes": 1.5}, {"nbytes": True}, {"nbytes": "4"}, {"cost": -1},
        {"cost": float("nan")}, {"cost": float("inf")}, {"cost": "1"}, {"stash_bytes": -1},
        {"grad_bytes": -4}, {"workspace_bytes": 0.5}, {"backward_workspace_bytes": -1},
        {"stays_bytes": True},
        {"needs": "b"}, {"needs": (1,)}, {"alias_of": "a", "stash_bytes": 4},
    ],
)  # fmt: skip
def test_a_broken_node_is_refused_by_its_name(fields):
    with pytest.raises(GraphError, match="node 'b'"):
        Node(**{"name": "b", "nbytes": 4, "cost": 1, **fields})


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
    assert Graph.from_json(Graph([], []).to_json()) == Graph([], [])


@given(graphs())
def test_a_graph_survives_json(graph):
    assert Graph.from_json(graph.to_json()) == graph


@given(st.text(max_size=20))
def test_text_that_is_no_graph_is_refused(text):
    with pytest.raises(GraphError):
        Graph.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"version": 2}, {"version": None}, {"nodes": None}, {"nodes": [3]},
        {"nodes": [{"name": "a"}]}, {"nodes": [{"name": "a", "nbytes": 4, "cost": 1, "x": 1}]},
        {"edges": 3}, {"edges": [["a", "x"]]},
    ],
)  # fmt: skip
def test_json_that_is_no_graph_is_refused(change):
    content = json.loads(Graph([A, B], [("a", "b")]).to_json())
    with pytest.raises(GraphError):
        Graph.from_json(json.dumps({**content, **change}))
