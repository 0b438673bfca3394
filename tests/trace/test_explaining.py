"""The sentence on a peak names who holds it, by shares worked out by hand."""

from __future__ import annotations

import umem.chainer  # isort: skip  (before Chainer, which it makes ready)
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import traces

import umem
from umem.trace import Trace
from umem.trace.analysis.explain import missing_workspace, peak_shares, why_peak
from umem.trace.events import Access, Alloc, Event, Free, Mark, Op


def whole(alloc: Alloc) -> Access:
    return Access(alloc.tensor, 0, alloc.nbytes)


def test_nothing_is_held_for_no_reason() -> None:
    assert why_peak(Trace([])) is None
    assert why_peak(Trace([Alloc(0, 0, "array", "a"), Free(0)])) is None
    assert umem.replay(Trace([Alloc(0, 0, "array", "a")]), "t4").because is None


def test_what_the_peak_leaves_out_is_said() -> None:
    alloc, op = Alloc(0, 8, "input", "x", True), Op("f", "forward", (Access(0, 0, 8),), ())
    measured = op._replace(workspace_bytes=0)
    said = {
        (op, op): "Workspace was not measured. The real peak is higher.",
        (op, measured): "The workspace of 1 of 2 operations was not measured. The real peak may "
        "be higher.",
        (measured, measured): None,
        (): None,
    }
    for ops, sentence in said.items():
        trace = Trace([alloc, *ops], "model")
        assert missing_workspace(trace) == sentence
        assert umem.replay(trace, "t4").caveat == sentence


def test_gradient_and_state_belong_to_the_function_that_uses_the_parameter() -> None:
    w, y = Alloc(0, 100, "parameter", "W", True), Alloc(1, 60, "activation", "EmbedIDFunction")
    g, m = Alloc(2, 100, "gradient", "_ + _"), Alloc(3, 140, "state", "Adam.m")
    events: list[Event] = [
        w,
        y,
        Op("EmbedIDFunction", "forward", (whole(w),), (whole(y),)),
        g,
        m,
        Op("Adam", "update", (whole(w), whole(m), whole(g)), (whole(w), whole(m))),
    ]
    shares = {share.owner: dict(share.parts) for share in peak_shares(Trace(events))}
    assert shares == {
        "EmbedID": {"parameters": 100, "gradients": 100, "Adam state": 140, "outputs": 60}
    }
    # 140 + 100 + 100 of 400: the outputs are the fourth part, and only three are named
    expected = "'EmbedID' Adam state, parameters and gradients are 85% of the peak"
    assert why_peak(Trace(events)) == expected
    assert umem.replay(Trace(events), "t4").because == expected


def test_where_the_first_holds_less_than_half_the_second_is_named_too() -> None:
    events: list[Event] = [
        Alloc(0, 40, "activation", "Convolution2DFunction"),
        Alloc(1, 35, "stash", "Dropout.mask"),
        Alloc(2, 20, "input", "Convolution2DFunction", True),
        Alloc(3, 5, "state", "Norm.mean"),
    ]
    assert why_peak(Trace(events)) == ("'Convolution2D' outputs and input are 60% of the peak")
    del events[2]
    assert why_peak(Trace(events)) == "'Convolution2D' outputs are 50% of the peak"
    events.append(Alloc(9, 10, "array", "add"))
    assert why_peak(Trace(events)) == (
        "'Convolution2D' outputs are 44% of the peak, 'Dropout' saved arrays 39%"
    )


def test_workspace_counts_where_it_makes_the_peak_and_what_is_freed_does_not() -> None:
    events: list[Event] = [
        Alloc(0, 30, "array", "a"),
        Free(0),
        Alloc(1, 20, "array", "b"),
        Op("sort", "array", (), (), workspace_bytes=80),
        Alloc(2, 70, "array", "c"),
    ]
    assert why_peak(Trace(events)) == "'sort' workspace is 80% of the peak"


@pytest.mark.thorough
@given(traces())
@settings(deadline=None)
def test_the_shares_of_any_trace_add_up_to_its_peak(trace: Trace) -> None:
    assert sum(share.total_bytes for share in peak_shares(trace)) == trace.peak_bytes


def test_a_word_embedding_that_is_most_of_a_step_is_named() -> None:
    words, width, size = 2000, 64, 8
    model = chainer.Sequential(L.EmbedID(words, width), L.Linear(width, 4))
    optimizer = chainer.optimizers.Adam().setup(model)

    def step(size: int) -> None:
        x = np.arange(size, dtype=np.int32)
        optimizer.update(lambda: F.sum(model(x)))

    step(size)
    with umem.record() as recorder:
        step(size)
    because = umem.replay(recorder.trace, "t4").because
    assert because is not None
    assert because.startswith("'EmbedID' ")
    assert "Adam state" in because


def test_a_single_step_does_not_know_what_the_one_before_it_left() -> None:
    said = "The trace leaves out what the previous step kept during forward, such as gradients."
    w, g = Access(0, 0, 8), Access(1, 0, 8)
    step: list[Event] = [
        Alloc(1, 8, "gradient", "W.grad"),
        Op("b", "backward", (w,), (g,), 1, workspace_bytes=0),
        Op("SGD", "update", (g,), (w,), 1, workspace_bytes=0),
        Mark("step"),
    ]
    weights = Alloc(0, 8, "parameter", "W", True)

    def caveat(*events: Event) -> str | None:
        return umem.replay(Trace([weights, *events], "cupy"), "t4").caveat

    assert caveat(*step) == said
    assert caveat(Mark("start"), *step) is None
    assert caveat(*step, Free(1), *step) is None


def test_a_replay_of_numpy_says_whose_bytes_these_are() -> None:
    events: list[Event] = [Alloc(0, 8, "input", "x", True)]
    said = umem.replay(Trace(events), "t4").caveat
    assert said == "The trace was recorded on NumPy, with NumPy's bytes; CuPy's may differ."
    assert umem.replay(Trace(events, "cupy"), "t4").caveat != said
