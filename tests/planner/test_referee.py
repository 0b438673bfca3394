"""Plans of every method, carried out on the toy machine, do what they promise."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.errors import BudgetError, GraphError
from umem.planner import Graph, Node, Plan, min_budget, pareto, plan, simulate
from umem.planner.chains import METHODS as FAMILIES
from umem.planner.plans import MODELS, OBJECTIVES
from umem.planner.referee import referee
from umem.planner.schedule import Action, actions

pytestmark = pytest.mark.thorough

GB = 1 << 30
METHODS = ("auto", *FAMILIES)


@st.composite
def graphs(draw: Any, max_nodes: int = 8, plain: bool = False, scale: int = 1) -> Graph:
    """A graph; a plain one has nothing that the paper's formula does not know."""
    nodes, edges = [], []
    sizes = st.integers(0, 20).map(lambda size: size * scale)
    for v in range(draw(st.integers(1, max_nodes))):
        preds = draw(st.lists(st.integers(0, v - 1), unique=True, max_size=3)) if v else []
        edges += [(f"n{x}", f"n{v}") for x in preds]
        node = Node(f"n{v}", draw(sizes), draw(st.integers(0, 5)))
        if not plain:
            base = draw(st.sampled_from([None, None, *(f"n{x}" for x in preds)]))
            node = dataclasses.replace(
                node,
                saved=draw(st.booleans()),
                alias_of=base,
                recomputable=draw(st.integers(0, 9)) > 0,
                stash_bytes=0 if base else draw(st.sampled_from([0, 0, 3, 11])),
                grad_bytes=draw(st.sampled_from([None, None, 0, 7])),
                workspace_bytes=draw(st.sampled_from([0, 0, 30])),
                backward_workspace_bytes=draw(st.sampled_from([0, 0, 30])),
                stays_bytes=draw(st.sampled_from([0, 0, 5, 40])),
            )
        nodes.append(node)
    return Graph(nodes, edges, 0 if plain else draw(st.sampled_from([0, 0, 25])))


def asked(graph: Graph, data: Any) -> tuple[Plan, Any, Any]:
    """A plan for a method, a model, an objective and a budget that fits."""
    model = data.draw(st.sampled_from(MODELS), "model")
    method = data.draw(st.sampled_from(METHODS), "method")
    objective = data.draw(st.sampled_from(OBJECTIVES), "objective")
    least = min_budget(graph, method, model)
    budget = data.draw(st.none() | st.integers(least, least + 60), "budget")
    return plan(graph, budget, method, objective, model), budget, least


@settings(max_examples=300, deadline=None)
@given(graphs(), st.data())
def test_the_referee_finds_what_was_predicted(graph, data):
    found, budget, least = asked(graph, data)
    limit = least if budget is None else budget
    assert found.peak_bytes <= limit == found.budget_bytes
    for liveness in (True, False):
        if found.model == "saved" and not liveness:
            continue
        done = simulate(graph, found, liveness, limit)
        assert done.overhead == found.overhead
        assert done.peak_bytes <= found.peak_bytes
        if found.model == "saved":
            assert done.peak_bytes == found.peak_bytes


@settings(max_examples=150, deadline=None)
@given(graphs(), st.data())
def test_what_must_not_run_twice_does_not_and_views_are_free(graph, data):
    found, _, _ = asked(graph, data)
    nodes = {node.name: node for node in graph.nodes}
    size = {node.name: 0 if node.alias_of else node.nbytes for node in graph.nodes}
    before = 0
    for action, during, after in simulate(graph, found).timeline:
        if action.kind == "recompute":
            assert nodes[action.node].recomputable
        if action.kind in ("forward", "recompute") and found.model == "kusumoto":
            assert after - before == size[action.node]
        assert during >= after
        before = after
    assert before == (
        sum(node.stays_bytes for node in graph.nodes) if found.model == "saved" else 0
    )
    again = [name for names in found.recomputed for name in names]
    if not found.frees_early:
        assert len(again) == len(set(again)) and not set(again) & set(found.kept)


@settings(max_examples=100, deadline=None)
@given(graphs(), st.data())
def test_a_plan_of_the_paper_holds_on_a_tape_too(graph, data):
    method = data.draw(st.sampled_from(METHODS))
    found = plan(graph, None, method, "memory", "kusumoto")
    done = simulate(graph, found, model="saved")
    assert done.overhead == found.overhead
    assert simulate(graph, found, liveness=False, model="saved").peak_bytes >= done.peak_bytes


@settings(max_examples=60, deadline=None)
@given(graphs(max_nodes=6), st.sampled_from(MODELS), st.sampled_from(METHODS))
def test_below_the_least_budget_nothing_fits_and_the_error_says_which(graph, model, method):
    least = min_budget(graph, method, model)
    if not least:
        return
    with pytest.raises(BudgetError, match=rf"\({least} bytes\), which \w+ of 'n\d+' forces"):
        plan(graph, least - 1, method, model=model)


@settings(max_examples=60, deadline=None)
@given(graphs(max_nodes=6), st.sampled_from(MODELS), st.sampled_from(METHODS))
def test_pareto_is_a_front_of_plans_that_exist(graph, model, method):
    front = pareto(graph, method, model)
    overheads, peaks = [t for t, _ in front], [m for _, m in front]
    assert overheads == sorted(set(overheads))
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] == min_budget(graph, method, model)
    for overhead, peak in front:
        assert plan(graph, peak, method, model=model).overhead == overhead


def test_keeping_a_view_keeps_its_base():
    graph = Graph(
        [Node("x", 100, 1), Node("v", 100, 1, alias_of="x"), Node("y", 1, 1)],
        [("x", "v"), ("v", "y")],
    )
    stream = [Action("forward", name) for name in "xvy"]
    stream.insert(2, Action("drop", "x"))
    after = []
    with pytest.raises(GraphError):
        referee(graph, _spy(stream, after))
    kept = plan(graph, method="store_all", model="saved")
    moments = simulate(graph, kept).timeline
    assert [m.after_bytes for m in moments[:3]] == [100, 100, 101]


def _spy(stream, seen):
    for action in stream:
        seen.append(action)
        yield action


CHAIN = Graph([Node(n, 10, 1) for n in "abcd"], [("a", "b"), ("b", "c"), ("c", "d")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1:], "forward of 'b': it reads a value not in memory: 'a'"),
        (lambda s: s[:-3], "left at the end|never done"),
        (lambda s: [*s[:1], *s], "forward of 'a': forward was done of 'a'"),
        (lambda s: [Action("recompute", "a"), *s], "recompute of 'a': forward was not done"),
        (lambda s: [*s[:4], Action("backward", "a"), *s[4:]], "backward was not done of 'b'"),
        (lambda s: [*s[:2], Action("backward", "a"), *s[2:]], "forward is not done"),
        (lambda s: [*s[:2], Action("drop", "c"), *s[2:]], "it is not in memory: 'c'"),
        (lambda s: [*s[:4], Action("drop", "c"), *s[4:]], "it needs a value not in memory: 'c'"),
        (lambda s: [*s[:4], Action("free", "c"), *s[4:]], "no gradient to free: 'c'"),
        (lambda s: [*s[:4], Action("drop_stash", "c"), *s[4:]], "stash is not in memory: 'c'"),
        (lambda s: [*s, Action("forward", "e")], "is not an action"),
        (lambda s: [*s, Action("jump", "a")], "is not an action"),
        (lambda s: [*s[:2], Action("recompute", "b"), *s[2:]], "it is in memory: 'b'"),
        (lambda s: [*s, Action("recompute", "a")], "backward was done of 'a'"),
        (lambda s: [a for a in s if a.kind != "free"], "left at the end"),
    ],
)
def test_the_referee_trusts_nobody(change, message):
    stream = list(actions(CHAIN, plan(CHAIN, method="store_all", model="saved")))
    referee(CHAIN, stream)
    with pytest.raises(GraphError, match=message):
        referee(CHAIN, change(stream))


def test_the_referee_refuses_to_run_a_call_twice_that_must_not():
    graph = Graph([dataclasses.replace(n, recomputable=False) for n in CHAIN.nodes], CHAIN.edges)
    found = plan(CHAIN, model="saved")
    assert found.overhead > 0
    with pytest.raises(GraphError, match="must not be run twice"):
        simulate(graph, found)
    assert plan(graph, model="saved").overhead == plan(graph, model="kusumoto").overhead == 0


def test_the_referee_holds_the_budget():
    found = plan(CHAIN, method="store_all", model="saved")
    assert simulate(CHAIN, found, budget_bytes=found.peak_bytes).peak_bytes == found.peak_bytes
    with pytest.raises(BudgetError, match="of 'd' needs"):
        simulate(CHAIN, found, budget_bytes=found.peak_bytes - 1)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": (("a", "b"), ("c",))},
        {"blocks": (("a", "b", "c", "d"), ("d",))},
        {"kept": ("x",)},
        {"recomputed": ()},
        {"blocks": (("b", "a", "c", "d"),)},
        {"kept": (), "recomputed": ((), ())},
    ],
)
def test_a_plan_that_does_not_hold_together_is_found(change):
    found = plan(CHAIN, method="chen", model="kusumoto")
    with pytest.raises(GraphError):
        simulate(CHAIN, dataclasses.replace(found, **change))


def test_a_plan_of_a_tape_does_not_hold_under_the_formula():
    with pytest.raises(GraphError, match="is invalid under"):
        simulate(CHAIN, plan(CHAIN, model="saved"), model="kusumoto")


def test_a_chain_on_a_tape_by_hand():
    """Four calls of ten bytes that all need their inputs and their outputs."""
    everything = plan(CHAIN, method="store_all", model="saved")
    assert everything.peak_bytes == 60  # d's backward: a, b, c, d and the gradients of c and d
    assert min_budget(CHAIN, model="saved") == 40  # a and b are not there by then
    # One of a, b, c is not there by then: what is kept stays until its block's turn.
    assert min_budget(CHAIN, "lower_sets", model="saved") == 50
    found = plan(CHAIN, 50, "lower_sets", model="saved")
    assert found.overhead == 1
    blocks, kept, again = (("a", "b"), ("c", "d")), ("b", "c", "d"), (("a",), ())
    assert (found.blocks, found.kept, found.recomputed) == (blocks, kept, again)
    assert [
        f"{m.action.kind} {m.action.node} {m.after_bytes}" for m in simulate(CHAIN, found).timeline
    ] == [
        "forward a 10",
        "forward b 20",
        "drop a 10",
        "forward c 20",
        "forward d 30",
        "backward d 50",
        "drop d 40",
        "free d 30",
        "backward c 40",
        "drop c 30",
        "free c 20",
        "recompute a 30",
        "backward b 40",
        "drop b 30",
        "free b 20",
        "backward a 20",
        "drop a 10",
        "free a 0",
    ]


def test_gradients_of_parameters_stay_and_those_of_the_step_before_are_there_in_forward():
    nodes = [Node(name, 4, 1, stays_bytes=10) for name in "ab"]
    for before, forward in ((0, 8), (25, 33)):
        graph = Graph(nodes, [("a", "b")], before)
        found = simulate(graph, plan(graph, method="store_all", model="saved"))
        during = {action: nbytes for action, nbytes, _ in found.timeline}
        assert during[Action("forward", "b")] == forward
        # b's backward: both values, both gradients, its parameters'; a's: a's own, and both sets
        assert during[Action("backward", "b")] == 8 + 8 + 10
        assert during[Action("backward", "a")] == 4 + 4 + 20
        assert found.peak_bytes == max(forward, 28)


def test_sizes_beyond_32_bits_add_up():
    graph = Graph(
        [Node(f"n{v}", 3 * GB, 1) for v in range(40)], [(f"n{v}", f"n{v + 1}") for v in range(39)]
    )
    small = Graph([dataclasses.replace(n, nbytes=3) for n in graph.nodes], graph.edges)
    for model in MODELS:
        for method in METHODS:
            large, little = (
                plan(graph, None, method, model=model),
                plan(small, None, method, model=model),
            )
            assert large.peak_bytes == GB * little.peak_bytes
            assert large.blocks == little.blocks
            assert simulate(graph, large).peak_bytes <= large.peak_bytes
    assert plan(graph, method="store_all", model="kusumoto").peak_bytes == 240 * GB


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"budget_bytes": -1}, BudgetError),
        ({"budget_bytes": 1.5}, BudgetError),
        ({"budget_bytes": "12GiB"}, BudgetError),
        ({"method": "best"}, GraphError),
        ({"objective": "speed"}, GraphError),
        ({"model": "real"}, GraphError),
        ({"budget_bytes": 0}, BudgetError),
    ],
)
def test_nonsense_gets_a_clear_error(arguments, error):
    with pytest.raises(error):
        plan(CHAIN, **arguments)


def test_an_unknown_model_is_refused_by_all():
    refused = r"model must be one of kusumoto, saved; got 'paper'"
    for ask in (plan, min_budget, pareto):
        with pytest.raises(GraphError, match=refused):
            ask(CHAIN, model="paper")
    with pytest.raises(GraphError, match=refused):
        simulate(CHAIN, plan(CHAIN), model="paper")


@pytest.mark.parametrize("method", ["auto", "store_all", "lower_sets"])
def test_plans_are_those_of_a_tape_unless_the_formula_is_asked_for(method):
    found = plan(CHAIN, method=method)
    assert found == plan(CHAIN, method=method, model="saved")
    assert min_budget(CHAIN, method) == found.peak_bytes
    assert pareto(CHAIN, method) == pareto(CHAIN, method, "saved")


def test_what_is_no_graph_is_refused():
    with pytest.raises(GraphError, match="a list"):
        plan([])
    with pytest.raises(GraphError, match="points"):
        pareto(CHAIN, points=1)


def test_an_empty_graph_needs_nothing():
    empty = Graph([], [])
    assert plan(empty).blocks == () and min_budget(empty) == 0 and pareto(empty) == []
    assert simulate(empty, plan(empty)).peak_bytes == 0


@pytest.mark.parametrize("module", ["dispatch", "graph", "referee"])
def test_the_examples_of_the_docstrings_hold(module):
    found = doctest.testmod(importlib.import_module(f"umem.planner.{module}"))
    assert found.attempted and not found.failed
