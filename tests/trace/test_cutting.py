"""A step cut out of a trace is seen with all that it found, and its clock starts with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import traces

import umem
from umem.trace import Trace
from umem.trace.events import Access, Alloc, Checker, Event, Free, Mark, Op
from umem.trace.trace import tail
from umem.units import BLOCK_BYTES as BLOCK

W = Alloc(0, 6 * BLOCK, "parameter", "W", True)
USE = Op("use", "array", (Access(0, 0, W.nbytes),), (), 6_000_000)
MADE = Alloc(1, 2 * BLOCK, "gradient", "g", stack=("train.py:1 main",))


def test_what_is_alive_comes_first_as_uploaded_and_the_rest_follows() -> None:
    gone = Alloc(2, 10, "activation", "y")
    events: list[Event] = [W, gone, MADE, USE, Free(2), Mark("step"), USE, Free(1), Mark("step")]
    found = tail(Trace(events, "numpy", {"a": "b"}), 6)
    assert found == Trace(
        [W, MADE._replace(uploaded=True), Mark("start"), USE, Free(1), Mark("step")],
        "numpy",
        {"a": "b"},
    )
    assert tail(Trace(events), 0).events == [Mark("start"), *events]
    assert tail(Trace(events), len(events)).events == [W, Mark("start")]


@pytest.mark.thorough
@given(traces(), st.integers(0, 25))
@settings(deadline=None)
def test_any_tail_holds_together_and_ends_with_what_the_trace_ends_with(
    trace: Trace, start: int
) -> None:
    found = tail(trace, start)
    checker = Checker()
    for event in found.events:
        checker.check(event)
    assert alive(found) == alive(trace)


def alive(trace: Trace) -> set[int]:
    held: set[int] = set()
    for event in trace.events:
        if isinstance(event, Alloc):
            held.add(event.tensor)
        elif isinstance(event, Free):
            held.discard(event.tensor)
    return held


@pytest.mark.parametrize("mode", ["managed", "unmanaged"])
def test_uploads_before_the_start_take_no_time_of_the_step(mode: str) -> None:
    events: list[Event] = [USE, Mark("step")]
    whole = umem.replay(Trace([W, *events]), "v100-16gb", mode)
    step = umem.replay(Trace([W, Mark("start"), *events]), "v100-16gb", mode)
    upload = W.nbytes / 12e9
    compute = 10e-6 + 6_000_000 / (0.6 * 15.7e12)
    assert whole.seconds > upload
    assert step.seconds == pytest.approx(compute)
    assert step.step_seconds == (step.seconds,)
    assert step.seconds_low < step.seconds <= step.seconds_high < upload
    assert step.peak_bytes == step.resident_peak_bytes == W.nbytes
    assert step.figures.uploaded_bytes == step.figures.populated_bytes == 0
    assert step.timeline[0] == (0.0, W.nbytes, W.nbytes)


def test_what_was_pushed_out_before_the_start_is_missed_after_it() -> None:
    other = Alloc(1, 6 * BLOCK, "state", "m", True)
    trace = Trace([W, other, Mark("start"), USE])
    found = umem.replay(trace, "v100-16gb", vram=8 * BLOCK)
    assert found.figures.migrated_in_bytes == 6 * BLOCK  # the later upload pushed it out


def test_a_start_after_an_operation_is_a_mark_like_any_other() -> None:
    plain = umem.replay(Trace([W, USE, USE]), "v100-16gb")
    marked = umem.replay(Trace([W, USE, Mark("start"), USE]), "v100-16gb")
    assert marked.figures == plain.figures
