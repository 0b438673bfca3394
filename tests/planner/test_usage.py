"""The bytes of a schedule are those that the referee counts for itself; an agenda sorts them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from umem.planner import Graph, Link, Move, Node, Plan, plan, simulate
from umem.planner.schedule import Task, actions, agenda
from umem.planner.usage_of_actions import gradient_bytes, usage

SEEDS = range(40)


def some_graph(seed: int, count: int = 9) -> Graph:
    """A random graph with views, stashes, workspaces and gradients of parameters."""
    source = random.Random(seed)
    nodes, edges = [], []
    for v in range(count):
        preds = source.sample(range(max(0, v - 4), v), min(v, source.randrange(1, 3)))
        edges += [(f"n{x}", f"n{v}") for x in preds]
        base = f"n{preds[0]}" if preds and source.random() < 0.25 else None
        nodes.append(
            Node(
                f"n{v}",
                source.randrange(20),
                source.randrange(1, 6),
                saved=source.random() < 0.6,
                alias_of=base,
                stash_bytes=0 if base else source.choice((0, 0, 3, 11)),
                grad_bytes=source.choice((None, None, 0, 7)),
                workspace_bytes=source.choice((0, 0, 30)),
                backward_workspace_bytes=source.choice((0, 0, 30)),
                stays_bytes=source.choice((0, 5, 40)),
            )
        )
    return Graph(nodes, edges, source.choice((0, 25)))


def plans_of(graph: Graph) -> list[Plan]:
    """Plans of several methods, within several budgets, with a link and without."""
    found = [plan(graph, None, name) for name in ("store_all", "lower_sets", "auto")]
    least, most = found[-1].peak_bytes, found[0].peak_bytes
    budget = (least + max(least, most)) // 2
    found.append(plan(graph, budget))
    return [*found, plan(graph, budget, link=Link(5.0, 5.0))]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_each_action_has_the_bytes_that_the_referee_counts(seed: int) -> None:
    graph = some_graph(seed)
    for found in plans_of(graph):
        stream = list(actions(graph, found))
        moments = simulate(graph, found).timeline
        used = usage(graph, stream)
        assert list(used.during_bytes) == [moment.during_bytes for moment in moments]
        assert list(used.actions) == stream
        highest = max(moments, key=lambda moment: moment.during_bytes)
        assert used.highest == highest.action and used.peak_bytes == found.peak_bytes


def test_a_plan_of_the_formula_is_counted_by_the_rules_of_a_tape() -> None:
    for seed in SEEDS:
        graph = some_graph(seed)
        found = plan(graph, None, "lower_sets", model="kusumoto")
        for liveness in (True, False):
            stream = actions(graph, found, liveness=liveness, model="saved")
            moments = simulate(graph, found, liveness, model="saved").timeline
            during = [moment.during_bytes for moment in moments]
            assert list(usage(graph, stream).during_bytes) == during


def test_no_action_uses_nothing() -> None:
    nothing = usage(Graph([], []), [])
    assert nothing.peak_bytes == 0 and nothing.during_bytes == ()
    with pytest.raises(ValueError):
        _ = nothing.highest


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bytes_of_gradients_are_those_of_a_step_that_holds_nothing_else(seed: int) -> None:
    full = some_graph(seed)
    bare = [
        Node(
            node.name,
            0,
            1,
            saved=False,
            alias_of=node.alias_of,
            grad_bytes=full.numbered.grad[full.names.index(node.name)],
            backward_workspace_bytes=node.backward_workspace_bytes,
            stays_bytes=node.stays_bytes,
        )
        for node in full.nodes
    ]
    graph = Graph(bare, full.edges)
    stream = list(actions(graph, plan(graph, None, "store_all")))
    used = usage(graph, stream)
    for place, action in enumerate(stream):
        if action.kind == "backward":
            beside = gradient_bytes(full)[full.names.index(action.node)]
            assert beside.during == used.during_bytes[place]
            assert beside.before <= beside.during


# -- when actions are due --------------------------------------------------------------------------

CHAIN = Graph([Node(n, 10, 1) for n in "abcd"], [("a", "b"), ("b", "c"), ("c", "d")])


def chain_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "blocks": (("a", "b"), ("c", "d")),
        "kept": ("b", "c", "d"),
        "recomputed": (("a",), ()),
        "stashed": (),
        "overhead": 1,
        "peak_bytes": 0,
        "method": "auto",
        "objective": "time",
        "model": "saved",
        "budget_bytes": 0,
    }
    return Plan(**(values | changes))


def test_an_agenda_says_what_to_do_after_each_call_and_before_each_step() -> None:
    due = agenda(CHAIN, chain_plan(), "abcd")
    assert due.after_forward == {1: [Task("drop", 0)]}
    assert due.recomputed == {1: [0]}
    steps = [task.call for task in due.backward if task.kind == "backward"]
    assert steps == [3, 2, 1, 0]
    assert [due.backward[place].call for place in due.places.values()] == steps
    assert not any(task.kind == "free" for task in due.backward)
    assert due.backward.index(Task("recompute", 0)) < due.places[1]


def test_an_action_waits_until_the_program_has_run_all_that_comes_before_it_in_the_plan() -> None:
    graph = Graph([Node(n, 10, 1, saved=False) for n in "abc"], [("a", "b"), ("a", "c")])
    found = chain_plan(blocks=(("a", "c", "b"),), kept=(), recomputed=((),))
    due = agenda(graph, found, "abc")
    # The plan runs c before b, and drops it then; the program has run b, and a with it, before c.
    assert due.after_forward == {2: [Task("drop", 2), Task("drop", 0), Task("drop", 1)]}


def test_views_leave_with_their_base_and_fetches_belong_to_backward() -> None:
    nodes = [Node("x", 10, 1), Node("v", 10, 1, alias_of="x"), Node("y", 10, 1)]
    graph = Graph(nodes, [("x", "v"), ("v", "y")])
    move = Move("x", "value", "y", "v")
    found = chain_plan(
        blocks=(("x",), ("v",), ("y",)),
        kept=("x", "v", "y"),
        recomputed=((), (), ()),
        frees_early=True,
        moves=(move,),
    )
    due = agenda(graph, found, "xvy")
    leaving = [task for tasks in due.after_forward.values() for task in tasks]
    assert leaving.index(Task("drop", 1)) < leaving.index(Task("leave", 0))
    assert not any(task.kind == "fetch" for task in leaving)
    assert due.backward.index(Task("fetch", 0)) < due.places[1]
