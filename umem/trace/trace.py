"""Traces: what a step allocated, freed, read and wrote, in order.

A trace is a list of events. It says nothing of contents, so it can be replayed on any device.
`umem.trace.file` documents the file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

from umem.errors import ScalingError, TraceError
from umem.printable import quoted
from umem.trace.axes import Point, StepSize, in_order, listed, points_of, size_of
from umem.trace.events import Access, Alloc, Checker, Event, Free, Hint, Mark, Op
from umem.trace.walk import Alive, Lifetime, lifetimes, used_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from umem.trace.align import Aligned

__all__ = [
    "Access", "Alloc", "Checker", "Event", "Free", "Hint", "Lifetime", "Mark", "Op", "Trace",
]  # fmt: skip


@dataclass(frozen=True, repr=False)
class Trace:
    """The events of a run, and the backend they came from (``numpy``, ``cupy`` or ``model``).

    ``recordings`` has the events of the same step by the size that it was run at, in a trace that
    can be scaled; ``events`` are then those of the largest size. Where the step has several sizes,
    ``axes`` names them, and ``recordings`` goes by the tuple of them.
    """

    events: list[Event]
    backend: str = "numpy"
    meta: Mapping[str, str] = field(default_factory=dict)
    recordings: Mapping[Point, list[Event]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the backend and the counts of events, operations and steps."""
        counts = [
            f"{count:,} {what}" + "s" * (count != 1)
            for count, what in (
                (len(self), "event"),
                (sum(1 for _ in self.ops), "operation"),
                (self.step_count, "step"),
            )
        ]
        sizes = [f"sizes {listed(self.sizes)}"] if self.recordings else []
        return f"<Trace of {self.backend}: {', '.join(counts + sizes)}>"

    def __len__(self) -> int:
        return len(self.events)

    @property
    def ops(self) -> Iterator[Op]:
        """Yield the operations in order."""
        return (event for event in self.events if isinstance(event, Op))

    @property
    def has_entries(self) -> bool:
        """Tell whether a framework's tape was recorded, as it is with Chainer."""
        return any(op.entry is not None for op in self.ops)

    @property
    def step_count(self) -> int:
        """Return the number of optimizer updates that ended in the trace."""
        return sum(event == Mark("step") for event in self.events)

    @property
    def unmeasured_count(self) -> int:
        """Return the number of operations without known workspace, for which the peak is too
        low.
        """
        return sum(op.workspace_bytes is None for op in self.ops)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive at once, known workspace included."""
        return max(used_bytes(self.events), default=0)

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        """Return the recorded sizes in ascending order; empty if they are unknown."""
        return tuple(size_of(point, self.axes) for point in in_order(self.recordings))

    def at(self, size: StepSize, degree: int = 1) -> Trace:
        """Return this step at another size, with every figure extrapolated from the recorded sizes.

        A size that was recorded is returned as it was recorded.

        Args:
            size: such as a batch size; where the step was recorded along named axes, one number
                for each: ``{"batch": 64, "length": 512}``. Figures are affine in an axis, and have
                a square where it was recorded at three sizes.
            degree: for a size without a name: 1 where bytes and operations are affine in it, 2
                where they have a square, as in attention over a sequence's length.

        Raises:
            ScalingError: it was recorded at too few sizes, a further recorded size does not lie on
                the fit, or ``degree`` is neither 1 nor 2, or is 2 for named axes.
            SizeError: a size is not a whole number of at least 1, or is too large for any machine;
                an axis is unknown or missing.
        """
        from umem.trace.scale import events_at

        return self.with_events(
            events_at(self.recordings, self.axes, lambda: self._aligned, size, degree)
        )

    @cached_property
    def _aligned(self) -> Aligned:
        from umem.trace.align import align

        return align(self.recordings, self.axes)

    @classmethod
    def join(cls, traces: Sequence[Trace], sizes: Sequence[StepSize]) -> Trace:
        """Join traces of one step, recorded at different ``sizes``, to one that can be scaled.

        The joined trace is the one at the largest size, with `at` for the others. Sizes are
        numbers, or the points of a grid, ``[{"batch": 4, "length": 16}, ...]``: each of two or
        three sizes of an axis with each of the others.

        Raises:
            ScalingError: another number of sizes than traces, fewer than two, equal sizes, no
                whole grid, traces of several backends, steps that do not do the same, of which
                nothing depends on a size, or that shrink as it grows; workspace that was measured
                in some only.
            SizeError: a size that is not a whole number of at least 1, other axes than the first
                has.
            TraceError: an argument is not a trace, such as the path of one.
        """
        from umem.trace.align import check_growth

        axes, points, nodes = points_of(sizes)
        if not isinstance(traces, (list, tuple)):
            raise ScalingError(f"traces come as a list, such as [a, b]; got {quoted(traces)}")
        if len(traces) != len(sizes):
            counts = f"{len(traces)} traces and {len(sizes)} sizes"
            raise ScalingError(f"{counts}: each trace has one size")
        for trace in traces:
            check_trace(trace)
        if len({trace.backend for trace in traces}) > 1:
            names = ", ".join(trace.backend for trace in traces)
            raise ScalingError(f"traces of one backend can be joined; these are of {names}")
        for trace in traces:
            if trace.recordings:
                raise ScalingError(f"a trace holds sizes {listed(trace.sizes)} already")
        by_point = dict(zip(points, traces, strict=True))
        recordings = {point: by_point[point].events for point in in_order(points)}
        largest = by_point[in_order(points)[-1]]
        joined = cls(largest.events, largest.backend, largest.meta, recordings, axes)
        check_growth(joined._aligned, nodes)
        return joined

    def lifetimes(self) -> dict[int, Lifetime]:
        """Return each tensor's birth and death, as indexes of events."""
        return lifetimes(self.events)

    def with_workspace(self, calibration: Trace) -> Trace:
        """Return this trace with the workspace that a calibration run of the same code measured.

        Raises:
            TraceError: the two passes did not run the same operations, or the calibration pass
                measured times.
        """
        measured = [(op.name, op.phase, op.workspace_bytes) for op in calibration.ops]
        own = [(op.name, op.phase) for op in self.ops]
        if own != [(name, phase) for name, phase, _ in measured]:
            raise TraceError(
                f"the calibration pass ran {len(measured)} operations and the recorded one "
                f"{len(own)}, or in another order: record the same step twice"
            )
        if measured and all(workspace is None for _, _, workspace in measured):
            raise TraceError(
                'the calibration pass measured no workspace: record it with measure="workspace"'
            )
        workspace = iter(measured)

        def filled(event: Event) -> Event:
            if isinstance(event, Op):
                return event._replace(workspace_bytes=next(workspace)[2])
            return event

        return self.map(filled)

    def map(self, change: Callable[[Event], Event]) -> Trace:
        """Return the trace with a function applied to each event."""
        return self.with_events(map(change, self.events))

    def with_events(self, events: Iterable[Event]) -> Trace:
        """Return a trace with other events and this one's origin."""
        return Trace(list(events), self.backend, self.meta)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the trace; refuses to overwrite a file without ``force``.

        Raises:
            TraceError: the file exists, or cannot be written; nothing is left half-written.
        """
        from umem.trace.file import Header, write

        points = in_order(self.recordings)
        sections = [self.recordings[point] for point in points] or [self.events]
        header = Header(self.backend, dict(self.meta), tuple(points), self.axes)
        return write(path, header, sections, force=force)

    @classmethod
    def load(
        cls, path: str | Path, *, max_events: int | None = None, max_bytes: int | None = None
    ) -> Trace:
        """Read a trace and check that it holds together; executes nothing.

        Args:
            path: a regular file.
            max_events: how many events are read at most; `umem.trace.file` has the defaults.
            max_bytes: how much text is read at most, once it is decompressed. A small file can
                hold more than fits any memory.

        Raises:
            TraceError: no such file, not a trace, truncated, longer than allowed, from a newer
                umem, or inconsistent (a tensor used before it is allocated, freed twice, bytes
                that no machine has, ...). Names the line.
        """
        from umem.trace.file import read

        header, sections = read(path, max_events, max_bytes)
        recordings = dict(zip(header.points, sections, strict=False))
        return cls(sections[-1], header.backend, header.meta, recordings, header.axes)


def check_trace(trace: object) -> None:
    """Raise TraceError unless a value is a trace.

    Raises:
        TraceError: it is something else, such as the path of one.
    """
    if isinstance(trace, (str, PathLike)):
        raise TraceError(
            f"a trace is needed, and this is a path: umem.Trace.load({quoted(str(trace))}) reads it"
        )
    if not isinstance(trace, Trace):
        raise TraceError(
            "a trace is needed, such as the .trace of umem.record() or what umem.Trace.load "
            f"reads; got {type(trace).__name__}"
        )


def tail(trace: Trace, start: int) -> Trace:
    """Return the trace from event ``start`` on, with the tensors alive there as its first events.

    The tensors alive at ``start`` are uploaded first, in the order of their allocation, so that
    optimizer state and gradients of the step before count from the first operation. Then comes the
    mark ``"start"``, so that uploads take none of the step's time.
    """
    found = Alive(trace.events[:start]).tensors.values()
    uploads = [alloc._replace(uploaded=True) for alloc in found]
    return trace.with_events([*uploads, Mark("start"), *trace.events[start:]])
