"""Moves in a trace, held against the planner's referee."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_graphs import INPUT_BYTES, Call, check, contents_read, steps, trace_of

from umem.onnx.fitting.applying import apply
from umem.planner import Graph, Link, min_budget, plan, simulate
from umem.trace import Access, Alloc, Free, Hint, Mark, Op, Trace

pytestmark = pytest.mark.thorough


def moved(trace: Trace, data: Any, graph: Graph) -> Any:
    """A plan that moves some of what it keeps."""
    least = min_budget(graph, "auto", "saved")
    most = plan(graph, None, "store_all", model="saved").peak_bytes
    budget = data.draw(st.integers(least, max(least, most)))
    rate = data.draw(st.sampled_from((0.5, 5.0, 500.0)))
    return plan(graph, budget, model="saved", link=Link(rate, rate))


@settings(deadline=None, max_examples=25)
@given(steps(max_calls=9), st.data())
def test_the_peak_is_at_most_that_of_the_referee(calls: list[Call], data: Any) -> None:
    hold_against_the_referee(calls, data)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps(), st.data())
def test_the_peaks_of_longer_steps_are_at_most_those_of_the_referee(
    calls: list[Call], data: Any
) -> None:
    hold_against_the_referee(calls, data)


def hold_against_the_referee(calls: list[Call], data: Any) -> None:
    trace = trace_of(calls)
    graph = Graph.from_trace(trace)
    found = moved(trace, data, graph)
    order = [name for block in found.blocks for name in block]
    rewritten = apply(trace, found)
    check(rewritten)
    if order == [node.name for node in graph.nodes]:  # backward as in the trace
        assert rewritten.peak_bytes <= INPUT_BYTES + simulate(graph, found).peak_bytes


@settings(deadline=None, max_examples=25)
@given(steps(views=True, max_calls=9), st.data(), st.integers(1, 2))
def test_every_operation_finds_what_it_found_before(
    calls: list[Call], data: Any, count: int
) -> None:
    hold_against_the_recording(calls, data, count)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps(views=True), st.data(), st.integers(1, 2))
def test_every_operation_of_longer_steps_finds_what_it_found_before(
    calls: list[Call], data: Any, count: int
) -> None:
    hold_against_the_recording(calls, data, count)


def hold_against_the_recording(calls: list[Call], data: Any, count: int) -> None:
    trace = trace_of(calls, count)
    graph = Graph.from_trace(trace)
    found = moved(trace, data, graph)
    rewritten = apply(trace, found)
    check(rewritten)
    hints = [event for event in rewritten.events if isinstance(event, Hint)]
    assert sum(one.action == "send" for one in hints) >= count * (len(found.moves) > 0)
    sent = sum(access.stop for one in hints if one.action == "send" for access in one.accesses)
    back = sum(access.stop for one in hints if one.action == "fetch" for access in one.accesses)
    assert sent == back
    if not any(found.recomputed):
        assert [op.name for op in rewritten.ops] == [op.name for op in trace.ops]
        assert len(contents_read(rewritten)) == len(contents_read(trace))


def access(tensor: int, nbytes: int) -> Access:
    return Access(tensor, 0, nbytes)


def chain(nbytes: int, count: int = 3) -> Trace:
    """a -> b -> c ..., whose outputs backward reads; ``b`` is read through a view of it."""
    names = "abcdefghij"[:count]
    value = [access(10 + v, nbytes) for v in range(count)]
    grad = [access(30 + v, nbytes) for v in range(count)]
    events: list[Any] = [Alloc(0, 10, "input", "x", True)]
    for v, name in enumerate(names):
        reads = (value[v - 1],) if v else (access(0, 10),)
        events += [Alloc(10 + v, nbytes, "activation", name)]
        events += [Op(name, "forward", reads, (value[v],), 5, nbytes)]
        if name == "b":
            events += [Op("view", "forward", (value[v],), (value[v],))]
    last = count - 1
    events += [Alloc(30 + last, nbytes, "gradient", "g")]
    for v in range(last, 0, -1):
        events += [Alloc(30 + v - 1, nbytes, "gradient", "g")]
        reads = (value[v], value[v - 1], grad[v])
        events += [Op(names[v] + "'", "backward", reads, (grad[v - 1],), 7, nbytes)]
        events += [Free(30 + v), Free(10 + v)]
    events += [Op("a'", "backward", (value[0], grad[0]), (), 7), Free(30), Free(10), Mark("step")]
    return Trace(events)


def test_what_moves_is_sent_goes_and_comes_back() -> None:
    trace = chain(100)
    graph = Graph.from_trace(trace)
    kept = plan(graph, None, "store_all", model="saved")
    move = plan(graph, 1 << 20, model="saved", link=Link(1, 1)).moves
    assert move == (), "nothing moves where all has room"
    made = umem_move("a#0", leaves="view#2", fetched="b#1")
    events = apply(trace, replace(kept, moves=(made,))).events
    kinds = [
        (event.action, event.accesses[0].tensor) if isinstance(event, Hint) else event
        for event in events
        if isinstance(event, (Hint, Free)) or getattr(event, "label", "") == "a"
    ]
    fresh = next(e.tensor for e in reversed(events) if isinstance(e, Alloc) and e.label == "a")
    first = kinds.index(("send", 10))
    assert fresh != 10 and kinds.index(Free(10)) > first
    assert kinds.index(("fetch", fresh)) > kinds.index(Free(10))
    op = next(e for e in events if isinstance(e, Op) and e.name == "b'")
    assert access(fresh, 100) in op.reads
    assert events.index(op) > events.index(Hint("fetch", (access(fresh, 100),), overlap=True))


def umem_move(node: str, leaves: str, fetched: str) -> Any:
    from umem.planner import Move

    return Move(node, "value", leaves, fetched)


def test_a_view_that_is_kept_keeps_what_it_lies_in() -> None:
    trace = chain(100)
    graph = Graph.from_trace(trace)
    kept = plan(graph, None, "store_all", model="saved")
    names = [node.name for node in graph.nodes]
    by_view = replace(
        kept,
        kept=(*(name for name in kept.kept if not name.startswith("b#")), "view#2"),
        blocks=tuple((name,) for name in names),
        recomputed=((),) * len(names),
        frees_early=True,
    )
    assert [op.name for op in apply(trace, by_view).ops] == [op.name for op in trace.ops]
