"""`record`, `mark` and `record_at`: a recording of steps, or one from which other sizes follow."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from umem.errors import ScalingError, StateError, TraceError, UmemError
from umem.trace.align import VARIED
from umem.trace.axes import (
    Nodes,
    StepSize,
    check_axes,
    check_sizes,
    grid,
    size_of,
    size_option,
    size_text,
)
from umem.trace.events import Mark
from umem.trace.recording.marks import listeners
from umem.trace.recording.recorder import Measure, Recorder, active
from umem.trace.scale import grows_faster
from umem.trace.trace import Trace, tail


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
    steps, for reports, `choose` and ``umem run --record``. Chainer's optimizers mark their steps
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


def record_at(
    step: Callable[..., Any], sizes: Sequence[int] | Mapping[str, Sequence[int]] = (4, 8)
) -> Trace:
    """Record ``step(size)`` at each size: a trace for `Trace.at` and ``umem.replay(size=...)``.

    At each size the step runs three times: first to allocate what only a first step allocates
    (optimizer state, parameters that take their shape from the data), then recorded with times, and
    then, more slowly, to measure the workspace of each operation. Parameters are really updated
    each time. With umem.chainer imported Chainer's functions are recorded; otherwise the operations
    of a virtual GPU's ``xp``.

    Along several axes, ``sizes={"batch": (4, 8), "length": (16, 32)}``, the step is called as
    ``step(batch=4, length=16)``, once recorded for each size of an axis with each of the others:
    4 recordings here. Where an array grows faster than an axis, as the scores of attention do with
    the length and weights with the width, the axis needs a third size: as far beyond the second
    as that is beyond the first, unless it was given. Then 6 recordings, or 9 where both axes do.
    A step whose parameters depend on a size keeps a model and an optimizer for each.

    Args:
        step: makes its input for a size and runs one training step on it, an update included.
        sizes: two, or three where the third is to check the fit, or to fit squares
            (``degree=2``); or a mapping of two or three for the name of each axis. Small sizes are
            enough, as long as most arrays have some 10,000 elements: below that, NumPy's buffers
            show in the workspace. For small layers take (32, 64).

    Raises:
        SizeError: a size is not a whole number of at least 1. ScalingError: there are fewer than
            two sizes, or equal ones; or the step does not accept its sizes, runs no operation that
            is recorded, does not run the same operations at each size, depends on no size, or fails
            at a size after it ran at another. Whatever ``step`` raises at the first size. In each
            case no recording is active afterwards.
    """
    if isinstance(sizes, Mapping):
        return _record_grid(step, check_axes(sizes))
    check_sizes(sizes)
    _check_call(step, sizes[0])
    first, *others = sizes
    traces = [_record(step, first)]
    traces += [_record_after(step, size, first) for size in others]
    return Trace.join(traces, sizes)


def _record_grid(step: Callable[..., Any], nodes: Nodes) -> Trace:
    """Record a step at all points of a grid of sizes along several axes.

    An axis of two sizes gets a third where an array grows faster than the axis; ``nodes`` is
    changed by that.
    """
    axes = tuple(nodes)
    corner = tuple(sizes[0] for sizes in nodes.values())
    first = size_of(corner, axes)
    _check_call(step, first)
    found = {corner: _record(step, first)}

    def record_point(point: tuple[int, ...]) -> Trace:
        if point not in found:
            found[point] = _record_after(step, size_of(point, axes), first)
        return found[point]

    for place, (axis, sizes) in enumerate(nodes.items()):
        if len(sizes) == 2:
            neighbour = record_point((*corner[:place], sizes[1], *corner[place + 1 :]))
            if grows_faster(found[corner].events, neighbour.events, sizes):
                nodes[axis] = (*sizes, 2 * sizes[1] - sizes[0])
    points = grid(nodes)
    return Trace.join(list(map(record_point, points)), [size_of(point, axes) for point in points])


def _called(step: Callable[..., Any], size: StepSize) -> Any:
    return step(**size) if isinstance(size, Mapping) else step(size)


def _check_call(step: Callable[..., Any], size: StepSize) -> None:
    """Raise ScalingError, before the step runs, if it cannot be called with its size."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        _called(signature.bind, size)
    except TypeError as error:
        how = size_option(size).replace(",", ", ")
        raise ScalingError(
            f"the step is called as step({how}), and does not take that: {error}"
        ) from None


_OF_AXES = (
    "; where parameters depend on a size, keep a model for each. A third size that you did not "
    "give is there because arrays grow faster than the axis does: give three that the step takes"
)


def _record_after(step: Callable[..., Any], size: StepSize, first: StepSize) -> Trace:
    """Record a step at a further size.

    Raises:
        ScalingError: the step raises an error of its own; or as `_record`. UmemError, MemoryError:
            the step's.
    """
    try:
        return _record(step, size)
    except (UmemError, MemoryError):
        raise
    except Exception as error:
        raise ScalingError(
            f"the step ran at size {size_text(first)} and fails at size {size_text(size)}, with "
            f"{type(error).__name__} (above). It must keep nothing from one size to the next: "
            "where a recurrent network keeps its state, begin the step with reset_state()"
            f"{_OF_AXES if isinstance(size, Mapping) else ''}"
        ) from error


def _record(step: Callable[..., Any], size: StepSize) -> Trace:
    """Record a step at one size, with times and workspace, after a first run.

    Raises:
        ScalingError: no operation was recorded, or the steps differ.
    """
    with record() as recorder:
        _called(step, size)
        gc.collect()  # the graph of the first step must not die in the middle of the second
        recorder.flush()
        start = recorder.stored_count
        _called(step, size)
    timed = tail(recorder.trace, start)
    if not any(timed.ops):
        raise ScalingError(
            f"no operation was seen in the step at size {size_text(size)}: import umem.chainer "
            "before the model runs, or use the arrays of a umem.virtual_gpu block"
        )
    gc.collect()
    with record(measure="workspace") as calibration:
        _called(step, size)
    try:
        return timed.with_workspace(calibration.trace)
    except TraceError as error:
        raise ScalingError(
            f"the step does not do the same twice at size {size_text(size)}: {error}. {VARIED}"
        ) from error
