"""What a trace says of memory and time, held against figures by hand or by brute force."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

from umem.errors import TraceError
from umem.trace import Access, Alloc, Event, Free, Mark, Op, Trace
from umem.trace.analysis.analysis import analyse
from umem.trace.analysis.differences import compare
from umem.trace.analysis.live_bands import bands, kind_curves, thinned
from umem.trace.analysis.tensors import KINDS, read_tensors


def op(name: str, phase: str, reads: Any = (), writes: Any = (), **more: Any) -> Op:
    """An operation on the first byte of tensors."""
    return Op(
        name,
        phase,
        tuple(Access(t, 0, 1) for t in reads),
        tuple(Access(t, 0, 1) for t in writes),
        **more,
    )


def test_an_analysis_prints_as_one_line() -> None:
    said = "<Analysis of <Trace of numpy: 2 events, 0 operations, 0 steps>: peak 1.5 KiB>"
    events: list[Event] = [Alloc(0, 1536, "parameter", "W", True), Free(0)]
    assert repr(analyse(Trace(events))) == said


STEP: list[Event] = [
    Alloc(0, 1000, "parameter", "W", True),
    Alloc(1, 100, "input", "x", True),
    Alloc(2, 500, "activation", "h"),
    op("Linear", "forward", (0, 1), (2,), host_seconds=0.5, workspace_bytes=50),
    Alloc(3, 30, "stash", "mask"),
    Alloc(4, 500, "activation", "y"),
    op("Dropout", "forward", (2,), (3, 4), host_seconds=0.25),
    Free(2),
    Alloc(5, 4, "activation", "loss"),
    op("Mean", "forward", (4,), (5,), host_seconds=0.125),
    Alloc(6, 500, "gradient", "gy"),
    op("MeanGrad", "backward", (5,), (6,), host_seconds=0.125),
    Free(4),
    Alloc(7, 1000, "gradient", "gW"),
    op("LinearGrad", "backward", (6, 3, 1), (7,), host_seconds=0.5, workspace_bytes=200),
    Alloc(8, 2000, "state", "Adam.m"),
    op("Adam", "update", (0, 7, 8), (0, 8), host_seconds=1.0),
    Mark("step"),
]
TRACE = Trace(STEP, "numpy", {"model": "small"})


# -- the peak ----------------------------------------------------------------------------------


def test_the_peak_is_where_the_most_bytes_are_alive() -> None:
    peak = analyse(TRACE).peak
    # W 1000, x 100, mask 30, loss 4, gy 500, gW 1000 and m 2000, while Adam runs
    assert (peak.total_bytes, peak.event, peak.step) == (4634, 15, 0)
    assert peak.op is not None and (peak.op.name, peak.op.phase) == ("Adam", "update")
    assert peak.seconds == 1.5
    assert peak.total_bytes == TRACE.peak_bytes


def test_what_is_alive_at_the_peak_is_told_by_what_it_is_for() -> None:
    found = {
        kind.kind: (kind.total_bytes, kind.tensor_count) for kind in analyse(TRACE).peak.by_kind
    }
    assert found == {
        "parameters": (1000, 1),
        "optimizer state": (2000, 1),
        "input": (100, 1),
        "saved for backward": (34, 2),
        "gradients": (1500, 2),
    }


def test_the_largest_tensor_comes_first_and_what_is_not_used_again_is_counted() -> None:
    peak = analyse(TRACE).peak
    assert [tensor.label for tensor in peak.tensors][:2] == ["Adam.m", "W"]
    assert peak.idle_bytes == 100 + 30 + 4 + 500  # gW is still to be read, the rest is lasting


def test_workspace_can_make_the_peak() -> None:
    events = [*STEP[:3], op("Conv", "forward", (1,), (2,), workspace_bytes=9000), *STEP[4:]]
    peak = analyse(Trace(events)).peak
    assert (peak.total_bytes, peak.event, peak.workspace_bytes) == (10600, 3, 9000)
    assert [(k.kind, k.total_bytes) for k in peak.by_kind][-1] == ("workspace", 9000)


def test_state_that_no_optimizer_touches_is_other_state_and_arrays_are_arrays() -> None:
    events = [
        Alloc(0, 8, "state", "running_mean", True),
        Alloc(1, 4, "array", "a"),
        op("Norm", "forward", (0,), (0,)),
        op("add", "array", (1,), (1,)),
    ]
    kinds = {kind.kind for kind in analyse(Trace(events)).peak.by_kind}
    assert kinds == {"other state", "arrays"}


def test_an_activation_is_saved_only_if_backward_reads_it() -> None:
    tensors = {tensor.label: tensor for tensor in read_tensors(TRACE).tensors}
    assert tensors["h"].kind == tensors["y"].kind == "other activations"
    assert tensors["mask"].kind == tensors["loss"].kind == "saved for backward"


def test_a_tensor_knows_who_made_it_and_when_it_was_used() -> None:
    tensors = {tensor.label: tensor for tensor in read_tensors(TRACE).tensors}
    h, W, state = tensors["h"], tensors["W"], tensors["Adam.m"]
    assert (h.birth, h.death, h.maker, h.first_use, h.last_use) == (2, 7, 3, 3, 6)
    assert (W.maker, W.first_use, W.last_use, W.death, W.updated) == (None, 3, 16, None, True)
    assert state.updated and not tensors["gy"].updated


@pytest.mark.parametrize("events", [[], [Mark("step")], [op("F", "forward")], [Mark("a")] * 3])
def test_a_trace_without_tensors_has_figures_all_the_same(events: list[Event]) -> None:
    analysis = analyse(Trace(events))
    assert analysis.peak.total_bytes == 0 and analysis.peak.by_kind == ()
    assert analysis.leaks == [] and analysis.seconds is None
    assert list(thinned(analysis.reading.total, 5)) == list(range(len(events)))


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([Free(3)], "event 0: tensor 3 is freed, and is not alive"),
        ([Alloc(0, 5, "array", "a"), Free(0), Free(0)], "event 2: tensor 0 is freed"),
        ([op("F", "forward", (9,))], "event 0: tensor 9 is used, and is not alive"),
    ],
)
def test_events_that_do_not_hold_together_are_refused(events: list[Event], why: str) -> None:
    with pytest.raises(TraceError, match=why):
        analyse(Trace(events))


# -- operations --------------------------------------------------------------------------------


def test_operations_are_added_up_by_name_and_phase() -> None:
    ops = {
        op.name: op for op in analyse(Trace([*STEP, op("Mean", "forward", host_seconds=2.0)])).ops
    }
    assert (ops["Mean"].count, ops["Mean"].seconds, ops["Mean"].allocated_bytes) == (2, 2.125, 4)
    assert ops["Dropout"].allocated_bytes == 530 and ops["Adam"].allocated_bytes == 2000
    assert (ops["Linear"].workspace_bytes, ops["Mean"].workspace_bytes) == (50, None)


def test_operations_are_sorted_by_time_and_by_memory() -> None:
    analysis = analyse(TRACE)
    assert [op.name for op in analysis.ops_by_seconds()][:2] == ["Adam", "Linear"]
    assert [op.name for op in analysis.ops_by_bytes()][:2] == ["Adam", "LinearGrad"]
    assert (analysis.seconds, analysis.seconds_per_step, analysis.op_count) == (2.5, 2.5, 6)


def test_a_trace_without_times_has_none() -> None:
    events = [e._replace(host_seconds=None) if isinstance(e, Op) else e for e in STEP]
    analysis = analyse(Trace(events))
    assert analysis.seconds is None and analysis.seconds_per_step is None
    assert all(op.seconds is None for op in analysis.ops) and analysis.peak.seconds is None


# -- over time, by brute force -----------------------------------------------------------------


def alive_after(trace: Trace) -> list[dict[int, Alloc]]:
    """What is alive after each event, followed as slowly and plainly as can be."""
    states, now = [], {}
    for index, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            now = {**now, index: event}
        elif isinstance(event, Free):
            now = {key: a for key, a in now.items() if a.tensor != event.tensor}
        states.append(now)
    return states


@pytest.mark.thorough
@given(traces(max_events=30))
@settings(deadline=None, max_examples=40)
def test_bytes_over_time_are_those_of_the_tensors_alive(trace: Trace) -> None:
    reading = read_tensors(trace)
    states = alive_after(trace)
    live = [sum(a.nbytes for a in state.values()) for state in states]
    extra = [(e.workspace_bytes or 0) if isinstance(e, Op) else 0 for e in trace.events]
    assert list(reading.live) == live
    assert list(reading.total) == [a + b for a, b in zip(live, extra, strict=True)]
    for event, state in enumerate(states):
        assert [t.birth for t in reading.tensors if t.alive(event)] == sorted(state)


@given(traces(max_events=30))
@settings(deadline=None, max_examples=40)
def test_the_kinds_of_the_peak_add_up_to_it(trace: Trace) -> None:
    peak = analyse(trace).peak
    assert sum(kind.total_bytes for kind in peak.by_kind) == peak.total_bytes == trace.peak_bytes
    assert sum(kind.tensor_count for kind in peak.by_kind) == len(peak.tensors)
    assert 0 <= peak.idle_bytes <= peak.total_bytes - peak.workspace_bytes


@given(traces(max_events=30))
@settings(deadline=None, max_examples=40)
def test_the_curves_of_the_kinds_add_up_to_the_whole(trace: Trace) -> None:
    reading = read_tensors(trace)
    curves = kind_curves(reading)
    assert list(curves) == [kind for kind in KINDS if kind in curves]
    for event in range(len(trace)):
        assert sum(int(curve[event]) for curve in curves.values()) == reading.total[event]


@pytest.mark.thorough
@given(traces(max_events=30), st.integers(0, 6), st.sampled_from([0, 1e-3, 0.2, 1.0]))
@settings(deadline=None, max_examples=40)
def test_drawn_and_folded_bands_are_every_byte(trace: Trace, count: int, share: float) -> None:
    reading = read_tensors(trace)
    parts = bands(reading, count, share)
    assert len(parts.drawn) <= count
    ranks = [(KINDS.index(tensor.kind), tensor.birth) for tensor in parts.drawn]
    assert ranks == sorted(ranks)
    folded = Counter({event: nbytes for event, _, nbytes in parts.folded})
    small = 0
    for event in range(len(trace)):
        small += folded[event]
        drawn = sum(tensor.nbytes for tensor in parts.drawn if tensor.alive(event))
        assert small >= 0 and drawn + small == reading.live[event]
    if parts.drawn:
        assert min(t.nbytes for t in parts.drawn) >= share * reading.total.max() - 0.5


@given(st.lists(st.integers(0, 99), max_size=50), st.integers(1, 60))
def test_a_thinned_curve_keeps_its_highest_place(values: list[int], count: int) -> None:
    import numpy as np

    places = [int(place) for place in thinned(np.array(values, np.int64), count)]
    assert places == sorted(set(places)) and len(places) == min(count, len(values))
    if values:
        assert max(values) == max(values[place] for place in places)


# -- two traces --------------------------------------------------------------------------------


def test_a_comparison_is_of_a_step_and_carries_signs() -> None:
    twice = Trace([*STEP, op("Mean", "forward", host_seconds=0.5), Mark("step")])
    found = compare(analyse(TRACE), analyse(twice))
    assert found.per_step
    assert found.peak_bytes.change == 0
    assert (found.seconds.before, found.seconds.after, found.seconds.change) == (2.5, 1.5, -1.0)
    assert (found.op_count.before, found.op_count.after) == (6, 3.5)
    ops = {op.name: op for op in found.ops}
    assert ops["Mean"].seconds.change == pytest.approx(0.625 / 2 - 0.125)
    assert ops["Adam"].count.change == -0.5


def test_a_comparison_knows_what_one_trace_does_not_have() -> None:
    other = Trace([Alloc(0, 7, "array", "a"), op("add", "array", (), (0,))])
    found = compare(analyse(TRACE), analyse(other))
    assert not found.per_step
    assert (found.seconds.after, found.seconds.change) == (None, None)
    kinds = {kind.name: (kind.before, kind.after) for kind in found.kinds}
    assert kinds["arrays"] == (0, 7) and kinds["parameters"] == (1000, 0)
    ops = {op.name: op for op in found.ops}
    assert (ops["Adam"].count.after, ops["add"].count.before) == (0, 0)
    assert ops["add"].seconds.before == 0 and ops["add"].seconds.change is None
