"""Traces: the memory that a step allocated, freed, read and wrote, in order.

A trace is a list of events without contents, so it can be replayed on any device.
`umem.trace.file` documents the file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING

from umem._common.printable import quoted
from umem.errors import TraceError
from umem.trace.events import Event, Mark, Op
from umem.trace.walk import Lifetime, lifetimes, used_bytes, with_sizes

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, repr=False)
class Trace:
    """The events of a run, and its backend (``numpy``, ``cupy``, ``software`` or ``model``)."""

    events: list[Event]
    backend: str = "numpy"
    meta: Mapping[str, str] = field(default_factory=dict)

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
        return f"<Trace of {self.backend}: {', '.join(counts)}>"

    def __len__(self) -> int:
        return len(self.events)

    @property
    def ops(self) -> Iterator[Op]:
        """Yield the operations in order."""
        return (event for event in self.events if isinstance(event, Op))

    @property
    def step_count(self) -> int:
        """Return the number of optimizer updates that ended in the trace."""
        return sum(event == Mark("step") for event in self.events)

    @property
    def unmeasured_count(self) -> int:
        """Return the number of operations whose workspace is unknown; the peak may be too low."""
        return sum(op.workspace_bytes is None for op in self.ops)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes alive at once, known workspace included."""
        return max(used_bytes(self.events), default=0)

    def lifetimes(self) -> dict[int, Lifetime]:
        """Return each tensor's birth and death, as indexes of events."""
        return lifetimes(self.events)

    def with_workspace(self, calibration: Trace) -> Trace:
        """Return this trace with the workspace measured in a calibration run of the same code.

        Raises:
            TraceError: the two runs have different operations, or the calibration run measured
                times.
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
        return self.with_events(with_sizes(self.events, [size for _, _, size in measured]))

    def with_events(self, events: Iterable[Event]) -> Trace:
        """Return a trace with other events, and this one's backend and notes."""
        return Trace(list(events), self.backend, self.meta)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the trace; ``force`` overwrites an existing file.

        Raises:
            TraceError: the file exists, or cannot be written; no partial file is left.
        """
        from umem.trace.file import Header, write

        return write(path, Header(self.backend, dict(self.meta)), self.events, force=force)

    @classmethod
    def load(
        cls, path: str | Path, *, max_events: int | None = None, max_bytes: int | None = None
    ) -> Trace:
        """Read a trace and check its consistency; executes nothing.

        From a file of several sizes, written by an older version of umem, the largest is read.

        Args:
            path: a regular file.
            max_events: the most events to read; `umem.trace.file` has the defaults.
            max_bytes: the most bytes of decompressed text to read: a small file can hold more text
                than fits in memory.

        Raises:
            TraceError: the file does not exist, is not a trace, is truncated, longer than allowed,
                from a newer version of umem, or inconsistent (a tensor used before it is
                allocated, freed twice, larger than any machine's memory, ...). Names the line.
        """
        from umem.trace.file import read

        header, events = read(path, max_events, max_bytes)
        return cls(events, header.backend, header.meta)


def check_trace(trace: object) -> None:
    """Raise TraceError unless a value is a trace.

    Raises:
        TraceError: the value is something else, such as a path.
    """
    if isinstance(trace, (str, PathLike)):
        raise TraceError(
            f"a trace is needed, not a path: umem.Trace.load({quoted(str(trace))}) reads it"
        )
    if not isinstance(trace, Trace):
        raise TraceError(
            "a trace is needed, such as umem.record()'s .trace or the result of umem.Trace.load; "
            f"got {type(trace).__name__}"
        )
