"""A step recorded once, or at several sizes so that it can be replayed at others."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from umem.errors import ScalingError, StateError, TraceError, UmemError
from umem.trace.align import VARIED
from umem.trace.recording.recorder import Measure, Recorder
from umem.trace.scale import check_sizes
from umem.trace.trace import Trace, tail


def record(*, measure: Measure = "time", stacks: bool = False) -> Recorder:
    """Record the operations of a block: ``with umem.record() as recorder: step()``.

    Args:
        measure: ``"time"``, which leaves workspace unknown and the peak too low by it; or
            ``"workspace"``, a calibration pass of its own whose measured workspace
            `Trace.with_workspace` adds to a trace of the same step.
        stacks: keep with each tensor the user's places that made it, for reports to name lines.

    The trace is at ``recorder.trace``, during the block and after it.
    """
    if measure not in ("time", "workspace"):
        raise StateError(f"measure is 'time' or 'workspace'; got {measure!r}")
    if not isinstance(stacks, bool):
        raise StateError(f"stacks is True or False; got {stacks!r}")
    return Recorder(measure=measure, stacks=stacks)


def record_at(step: Callable[[int], Any], sizes: Sequence[int] = (4, 8)) -> Trace:
    """Record ``step(size)`` at each size: a trace for `Trace.at` and ``umem.replay(size=...)``.

    At each size the step runs three times: once for what only the first step makes (optimizer
    state, parameters that take their shape from the data), once recorded with times, and once
    more for the workspace of each operation, which slows it down. It really runs: parameters are
    updated each time. With umem.chainer imported Chainer's functions are seen; otherwise what a
    virtual GPU's ``xp`` does.

    Args:
        step: makes its input for a size and runs one training step on it, an update included.
        sizes: two, or three where the third is to check the fit, or to fit squares
            (``degree=2``). Small ones will do, as long as most arrays have some 10,000 elements:
            below that, NumPy's buffers show in the workspace. For small layers take (32, 64).

    Raises:
        SizeError: a size that is not a whole number of at least 1. ScalingError: fewer than two,
            equal ones, a step of which nothing was seen, that does not do the same at each
            size, of which nothing depends on the size, or that fails at a size after it ran at
            another. Whatever ``step`` raises at the first size. No recording is active
            afterwards.
    """
    check_sizes(sizes)
    first, *others = sizes
    traces = [_record(step, first)]
    traces += [_record_after(step, size, first) for size in others]
    return Trace.join(traces, sizes)


def _record_after(step: Callable[[int], Any], size: int, first: int) -> Trace:
    try:
        return _record(step, size)
    except (UmemError, MemoryError):
        raise
    except Exception as error:
        raise ScalingError(
            f"the step ran at size {first} and fails at size {size}, with "
            f"{type(error).__name__} (above). It must keep nothing from one size to the next: "
            "where a recurrent network keeps its state, begin the step with reset_state()"
        ) from error


def _record(step: Callable[[int], Any], size: int) -> Trace:
    with record() as recorder:
        step(size)
        gc.collect()  # the graph of the first step must not die in the middle of the second
        recorder.flush()
        start = recorder.stored_count
        step(size)
    timed = tail(recorder.trace, start)
    if not any(timed.ops):
        raise ScalingError(
            f"no operation was seen in the step at size {size}: import umem.chainer before the "
            "model runs, or use the arrays of a umem.virtual_gpu block"
        )
    gc.collect()
    with record(measure="workspace") as calibration:
        step(size)
    try:
        return timed.with_workspace(calibration.trace)
    except TraceError as error:
        raise ScalingError(
            f"the step does not do the same twice at size {size}: {error}. {VARIED}"
        ) from error
