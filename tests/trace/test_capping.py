"""What a cap on the workspace of convolutions and poolings would leave of a step's peak."""

from __future__ import annotations

from typing import Any

import pytest

from umem.reports.step_json import step_json
from umem.reports.text.step import step_text
from umem.trace.analysis.analysis import analyse
from umem.trace.analysis.capping import CAPS, advice, cap_advice, under_cap
from umem.trace.events import Access, Alloc, Free, Mark, Op
from umem.trace.trace import Trace
from umem.units import MIB


def step(workspace: int = 60 * MIB, name: str = "Convolution2DFunction") -> Trace:
    """A convolution of 20 MiB in and 20 MiB out, and a sum that needs 10 MiB inside."""
    x, y = Access(0, 0, 20 * MIB), Access(1, 0, 20 * MIB)
    events: list[Any] = [
        Alloc(0, 20 * MIB, "input", "x", True),
        Alloc(1, 20 * MIB, "activation", name),
        Op(name, "forward", (x,), (y,), flops=10**9, workspace_bytes=workspace),
        Op("Sum", "forward", (y,), (y,), flops=10**6, workspace_bytes=10 * MIB),
        Free(1),
        Mark("step"),
    ]
    return Trace(events)


def test_the_sentence_names_the_cap_and_what_it_leaves() -> None:
    assert cap_advice(step()) == (
        "60% of the peak is workspace of convolutions (columns by im2col in "
        "'Convolution2DFunction'): umem.chainer.workspace('4MiB') would leave 50%."
    )


def test_what_is_left_is_the_peak_of_the_trace_under_that_cap() -> None:
    left = [under_cap(step(), cap).peak_bytes for cap in CAPS]
    assert left == [100 * MIB, 56 * MIB, 50 * MIB, 50 * MIB]
    assert under_cap(step(), 100 * MIB).events == step().events
    assert step().peak_bytes == 100 * MIB


def test_the_largest_cap_that_is_as_good_is_proposed() -> None:
    assert "workspace('64MiB') would leave 5%" in str(advice("MaxPoolingND", 10, 100, [5, 5, 5, 5]))
    assert "of poolings" in str(advice("MaxPoolingND", 10, 100, [5, 5, 5, 5]))
    assert "workspace('1MiB') would leave 5%" in str(advice("MaxPoolingND", 10, 100, [90, 9, 7, 5]))


@pytest.mark.parametrize(
    "trace",
    [
        step(name="LinearFunction"),
        step(workspace=0),
        step(workspace=MIB),  # the sum is the peak
        Trace([]),
    ],
)
def test_where_a_cap_changes_little_nothing_is_said(trace: Trace) -> None:
    assert cap_advice(trace) is None


def test_updates_go_in_chunks_under_a_cap() -> None:
    w, gradient, new = (Access(n, 0, 20 * MIB) for n in range(3))
    events: list[Any] = [
        Alloc(0, 20 * MIB, "parameter", "W", True),
        Alloc(1, 20 * MIB, "gradient", "W"),
        Op("SGD", "update", (w, gradient), (w,), workspace_bytes=20 * MIB),
        Mark("step"),
    ]
    assert cap_advice(Trace(events)) == (
        "33% of the peak is workspace of the optimizer's update: umem.chainer.workspace('64MiB') "
        "would leave 67%."
    )
    assert under_cap(Trace(events), MIB).peak_bytes == 40 * MIB + 256 * 1024
    own = [e._replace(name="Mine") if isinstance(e, Op) else e for e in events]
    assert cap_advice(Trace(own)) is None  # a rule of one's own is left whole
    mixed = [Alloc(2, 20 * MIB, "state", "SGD.fp32"), *events]
    mixed[3] = mixed[3]._replace(reads=(w, gradient, new))
    assert under_cap(Trace(mixed), MIB).peak_bytes == 80 * MIB


def test_reports_say_it() -> None:
    said = cap_advice(step())
    assert said is not None
    analysis = analyse(step())
    text = [line.plain for line in step_text(analysis, "t", 200)]
    assert text.count(said) == 1
    assert step_json(analysis, "t")["cap_advice"] == said
