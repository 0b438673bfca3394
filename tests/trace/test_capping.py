"""What is said of workspace that a cap concerns, where it is a part of a step's peak."""

from __future__ import annotations

from typing import Any

import pytest

from umem.reports import step_json, step_text
from umem.trace.analysis.analysis import analyse
from umem.trace.analysis.capping import cap_advice
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


def test_reports_say_how_much_of_the_peak_is_workspace_and_whose() -> None:
    said = cap_advice(step())
    assert said == (
        "60% of the peak is workspace of convolutions (columns by im2col in "
        "'Convolution2DFunction'): umem.chainer.workspace caps it."
    )
    assert "of poolings: " in str(cap_advice(step(name="MaxPoolingND")))
    analysis = analyse(step())
    text = [line.plain for line in step_text(analysis, "t", 200)]
    assert text.count(said) == 1
    assert step_json(analysis, "t")["cap_advice"] == said


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


def test_updates_are_named() -> None:
    w, gradient = (Access(n, 0, 20 * MIB) for n in range(2))
    events: list[Any] = [
        Alloc(0, 20 * MIB, "parameter", "W", True),
        Alloc(1, 20 * MIB, "gradient", "W"),
        Op("SGD", "update", (w, gradient), (w,), workspace_bytes=20 * MIB),
        Mark("step"),
    ]
    assert cap_advice(Trace(events)) == (
        "33% of the peak is workspace of the optimizer's update: umem.chainer.workspace caps it."
    )
