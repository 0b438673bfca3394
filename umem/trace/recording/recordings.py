"""`record` and `mark`: a recording of steps, and where they end."""

from __future__ import annotations

from umem.errors import StateError
from umem.trace.events import Mark
from umem.trace.recording.marks import listeners
from umem.trace.recording.recorder import Measure, Recorder, active


def record(*, measure: Measure = "time", stacks: bool = False) -> Recorder:
    """Record the operations of a block: ``with umem.record() as recorder: step()``.

    ``recorder.trace`` is the trace, in the block and after it.

    Args:
        measure: ``"time"``, which leaves workspace unknown, and the peak too low by the workspace;
            or ``"workspace"``, for a separate calibration pass, whose measured workspace
            `Trace.with_workspace` adds to a trace of the same step.
        stacks: keep with each tensor the lines of the user's code that made it, for reports.

    Raises:
        StateError: an argument is none of these. On entering: the recorder was used before.
    """
    if measure not in ("time", "workspace"):
        raise StateError(f"measure is 'time' or 'workspace'; got {measure!r}")
    if not isinstance(stacks, bool):
        raise StateError(f"stacks is True or False; got {stacks!r}")
    return Recorder(measure=measure, stacks=stacks)


def mark(label: str = "step") -> None:
    """Put a mark into the recordings of the calling code; without one, do nothing.

    ``umem.mark("step")`` at the end of each round of a loop divides a recording of plain CuPy into
    steps, for reports, `replay` and ``umem run --record``. Chainer's optimizers mark their steps
    themselves.

    Raises:
        StateError: the label is no text, is empty, or is one that umem gives a meaning of its own:
            "start" or "backward".
    """
    if not isinstance(label, str) or not label or label in ("start", "backward"):
        raise StateError(f"a mark is a text, and neither 'start' nor 'backward'; got {label!r}")
    for recorder in active():
        recorder.emit(Mark(label))
    for listener in listeners:
        listener(Mark(label))
