"""A trace under a plan of recomputation, held against the planner's referee."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traced_graphs import INPUT_BYTES, Call, check, contents_read, steps, trace_of

from umem.errors import GraphError
from umem.onnx.fitting.applying import apply
from umem.planner import Graph, Plan, min_budget, plan, simulate
from umem.trace import Access, Alloc, Free, Mark, Op, Trace

pytestmark = pytest.mark.thorough


def plans(data: Any, graph: Graph) -> Plan:
    """A plan of some method for some budget."""
    method = data.draw(st.sampled_from(("auto", "chen", "lower_sets", "lower_sets_exact")))
    least = min_budget(graph, method, "saved")
    most = plan(graph, None, "store_all", model="saved").peak_bytes
    objective = data.draw(st.sampled_from(("time", "memory")))
    return plan(graph, data.draw(st.integers(least, max(least, most))), method, objective, "saved")


def without_what_ran_again(trace: Trace, rewritten: Trace) -> list[Any]:
    """What operations found in their reads, those left out that the trace has not."""
    wanted = contents_read(trace)
    found = []
    for op in contents_read(rewritten):
        if len(found) < len(wanted) and op[:2] == wanted[len(found)][:2]:
            found.append(op)
        else:
            assert op[:2] == ("f", "backward"), op
    return found


@settings(deadline=None, max_examples=60)
@given(steps(), st.data())
def test_the_peak_is_that_of_the_referee(calls: list[Call], data: Any) -> None:
    # Each call has a stash, by which a backward is told to be its own.
    trace = trace_of(calls)
    graph = Graph.from_trace(trace)
    found = plans(data, graph)
    order = [name for block in found.blocks for name in block]
    if found.method == "lower_sets_exact" or order != [node.name for node in graph.nodes]:
        return  # it may take branches backward in another order than the trace
    rewritten = apply(trace, found)
    assert rewritten.peak_bytes == INPUT_BYTES + simulate(graph, found).peak_bytes


def test_a_block_begins_with_its_last_call_not_where_something_is_missed() -> None:
    # The last call of a block keeps its output: its backward misses nothing, and the referee
    # runs the block again before it. Waiting would take 24 bytes, not 23.
    preds = [(), (0,), (0,), (0,), (0,), (1,), (1,), (2,), (3,), (4,)]
    calls = [Call(p, 1, 1, 0, v > 6, False) for v, p in enumerate(preds)]
    calls[0] = Call((), 5, 3, 0, False, False)
    trace = trace_of(calls)
    graph = Graph.from_trace(trace)
    found = plan(graph, 16, "lower_sets_exact", "time", "saved")
    assert simulate(graph, found).peak_bytes == 16
    assert apply(trace, found).peak_bytes == INPUT_BYTES + 16


@settings(deadline=None, max_examples=60)
@given(steps(views=True), st.data(), st.integers(1, 2))
def test_every_operation_finds_what_it_found_before(calls: list[Call], data: Any, count: int):
    trace = trace_of(calls, count)
    graph = Graph.from_trace(trace)
    found = plans(data, graph)
    rewritten = apply(trace, found)
    check(rewritten)
    assert without_what_ran_again(trace, rewritten) == contents_read(trace)
    more = len(list(rewritten.ops)) - len(list(trace.ops))
    again = sum(map(len, found.recomputed))
    # What a plan frees early is made once more where the trace has another order of backward, or
    # is still there where the plan would make it again: on a view's own memory, for instance.
    assert more == count * again or found.frees_early


def test_what_a_plan_of_another_order_frees_early_may_still_be_there() -> None:
    preds = [(), (0,), (0,), (1,), (0,), (0,), (1,), (2,), (3,), (4,), (6,)]
    calls = [Call(p, 1, 1, 0, False, v in (3, 4, 5, 6, 7, 8, 9)) for v, p in enumerate(preds)]
    calls[0], calls[1] = Call((), 4, 1, 0, False, False), Call((0,), 7, 1, 0, False, False)
    calls[4], calls[10] = Call((0,), 1, 1, 3, False, True), Call((6,), 1, 1, 1, False, False)
    trace = trace_of(calls)
    found = plan(Graph.from_trace(trace), 15, "auto", "memory", "saved")
    rewritten = apply(trace, found)
    check(rewritten)
    assert without_what_ran_again(trace, rewritten) == contents_read(trace)
    assert len(list(rewritten.ops)) - len(list(trace.ops)) < sum(map(len, found.recomputed))


@settings(deadline=None, max_examples=60)
@given(steps(views=True))
def test_a_plan_that_keeps_all_runs_what_ran_and_holds_no_more(calls: list[Call]) -> None:
    trace = trace_of(calls)
    rewritten = apply(trace, plan(Graph.from_trace(trace), None, "store_all", model="saved"))
    check(rewritten)
    assert list(rewritten.ops) == list(trace.ops)
    assert rewritten.peak_bytes <= trace.peak_bytes


# -- by hand -----------------------------------------------------------------------------------


def access(tensor: int, nbytes: int) -> Access:
    return Access(tensor, 0, nbytes)


def chain() -> Trace:
    """x -> a -> b -> c -> d, each of 100 bytes and needed by its own and the next backward.

    ``a`` also counts its calls in a state, and reads an input that is freed after it.
    """
    x, counts = access(0, 10), access(1, 4)
    value = [access(10 + v, 100) for v in range(4)]
    grad = [access(20 + v, 100) for v in range(4)]
    events: list[Any] = [
        Alloc(0, 10, "input", "x", True),
        Alloc(1, 4, "state", "counts", True),
        Alloc(10, 100, "activation", "a", stack=("model.py:3 forward",)),
        Op("a", "forward", (x, counts), (value[0], counts), 5),
        Free(0),
    ]
    for v in (1, 2, 3):
        events += [Alloc(10 + v, 100, "activation", "abcd"[v])]
        events += [Op("abcd"[v], "forward", (value[v - 1],), (value[v],), 5)]
    events += [Alloc(23, 100, "gradient", "g")]
    for v in (3, 2, 1):
        events += [Alloc(20 + v - 1, 100, "gradient", "g")]
        reads = (value[v], value[v - 1], grad[v])
        events += [Op("abcd"[v] + "'", "backward", reads, (grad[v - 1],), 7)]
        events += [Free(20 + v), Free(10 + v)]
    events += [Op("a'", "backward", (value[0], grad[0]), (), 7), Free(20), Free(10), Mark("step")]
    return Trace(events)


def plan_of_chain(recomputed: tuple[str, ...], kept: tuple[str, ...]) -> Plan:
    names = ("a#0", "b#1", "c#2", "d#3")
    return Plan(
        (names[:3], names[3:]), kept, (recomputed, ()), kept, 0, 0, "auto", "time", "saved", 0
    )


def test_what_runs_again_is_the_call_on_fresh_tensors_but_for_its_state():
    plan = plan_of_chain(("a#0", "b#1"), ("c#2", "d#3"))
    events = apply(chain(), plan).events
    again = [op for op in events if isinstance(op, Op) and op.name == "a"]
    fresh = [event for event in events if isinstance(event, Alloc) and event.label == "a"]
    assert len(again) == len(fresh) == 2 and fresh[1].tensor > 23
    assert fresh[1] == fresh[0]._replace(tensor=fresh[1].tensor)
    assert again[0] == Op(
        "a", "forward", (access(0, 10), access(1, 4)), (access(10, 100), access(1, 4)), 5
    )
    assert again[1] == again[0]._replace(phase="backward", writes=(access(fresh[1].tensor, 100),))
    assert events.index(Free(0)) > events.index(again[1]), "its input is held for it"
    assert events.index(Free(10)) < events.index(again[1])


def test_the_peak_of_the_chain_is_that_counted_by_hand():
    # d' has c, d, two gradients, x and the state: 414. Then a and b run again, and x goes: c' has
    # a, b, c, two gradients and the state.
    plan = plan_of_chain(("a#0", "b#1"), ("c#2", "d#3"))
    assert chain().peak_bytes == 604
    assert apply(chain(), plan).peak_bytes == 504


def test_what_no_backward_needs_does_not_run_again():
    # Backward ends with d', as where the first layers are frozen; the update reads what a read.
    x = access(0, 10)
    events = [e for e in chain().events if getattr(e, "name", "") not in ("c'", "b'", "a'")]
    update = Op("SGD", "update", (x,), (x,))
    trace = Trace([*(e for e in events if e != Free(0)), update, Mark("step")])
    rewritten = apply(trace, plan_of_chain(("a#0", "b#1"), ("c#2", "d#3")))
    check(rewritten)
    assert [op.name for op in rewritten.ops] == ["a", "b", "c", "d", "d'", "SGD"]


def test_a_plan_of_another_graph_is_refused():
    other = Trace([event for event in chain().events if getattr(event, "name", "") != "b"])
    with pytest.raises(GraphError, match="no forward pass"):
        apply(other, plan_of_chain(("a#0",), ("b#1", "c#2", "d#3")))
    with pytest.raises(GraphError, match="which the plan has dropped"):
        apply(chain(), plan_of_chain(("a#0",), ("c#2", "d#3")))
    with pytest.raises(GraphError, match="no forward pass"):
        apply(Trace([]), plan_of_chain(("a#0", "b#1"), ("c#2", "d#3")))
