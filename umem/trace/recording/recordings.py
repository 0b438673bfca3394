"""`record` and `mark`: record steps, and mark their ends."""

from __future__ import annotations

from umem.errors import StateError
from umem.trace.events import Mark
from umem.trace.recording.marks import listeners
from umem.trace.recording.recorder import Measure, Recorder, active


def record(*, measure: Measure = "time", stacks: bool = False) -> Recorder:
    """Record the operations of a block: ``with umem.record() as recorder: step()``.

    ``recorder.trace`` is the trace, in the block and after it.

    Args:
        measure: ``"time"`` measures times; workspace is unknown, and missing from the peak.
            ``"workspace"`` measures workspace instead, in a separate calibration pass;
            `Trace.with_workspace` adds it to a trace of the same step.
        stacks: keep with each tensor the lines of the user's code that made it, for reports.

    Raises:
        StateError: an argument is invalid. On entering: the recorder was used before.
    """
    if measure not in ("time", "workspace"):
        raise StateError(f"measure must be 'time' or 'workspace'; got {measure!r}")
    if not isinstance(stacks, bool):
        raise StateError(f"stacks must be True or False; got {stacks!r}")
    return Recorder(measure=measure, stacks=stacks)


def mark(label: str = "step") -> None:
    """Add a mark to the calling code's recordings; without a recording, do nothing.

    Call ``umem.mark("step")`` at the end of each iteration to divide a recording of plain CuPy into
    steps, for reports, `replay` and ``umem run --record``. Chainer's optimizers mark their steps
    themselves.

    Raises:
        StateError: the label is not text, is empty, or is "start" or "backward", which umem itself
            uses.
    """
    if not isinstance(label, str) or not label or label in ("start", "backward"):
        raise StateError(f"a mark must be text other than 'start' and 'backward'; got {label!r}")
    for recorder in active():
        recorder.emit(Mark(label))
    for listener in listeners:
        listener(Mark(label))
