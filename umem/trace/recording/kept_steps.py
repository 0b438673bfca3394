"""Which steps of a run are kept, and the recorder that keeps them and then goes out of the way."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from umem.errors import SizeError
from umem.extras import installed_version
from umem.trace.events import Event, Mark, Op
from umem.trace.frameworks import told
from umem.trace.recording.buffer import Boundary
from umem.trace.recording.recorder import Recorder
from umem.trace.trace import Trace

EVENT_LIMIT = 1_000_000
"""The most events that are stored, of which an operation makes about three."""
CALIBRATION_LIMIT = 4
"""The most steps whose workspace is measured, for models whose steps take turns."""
_STEPS = re.compile(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_STEP = Mark("step")


class Steps(NamedTuple):
    """The steps to keep, counted from 1; a step ends with an optimizer's update.

    ``last`` of None is the end of the run.
    """

    first: int = 2
    last: int | None = 3

    @classmethod
    def parse(cls, text: str) -> Steps:
        """Read ``"2-3"``, ``"5"`` or ``"all"``.

        Raises:
            SizeError: it is none of these, or its end is before its beginning.
        """
        if text == "all":
            return cls(1, None)
        match = _STEPS.fullmatch(text)
        if match is None:
            raise SizeError(f'steps must be "2-3", "5" or "all", counted from 1; got {text!r}')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise SizeError(f"steps {text}: the last, {last}, is before the first, {first}")
        return cls(first, last)

    def __str__(self) -> str:
        if self.last is None:
            return "all" if self.first == 1 else f"{self.first}-"
        return f"{self.first}" if self.last == self.first else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Kept:
    """The part of a run that was kept, and ``notes`` on what is not as it was asked for."""

    trace: Trace
    steps: str
    notes: tuple[str, ...] = ()


@dataclass
class Keeper:
    """Records the thread that starts it, stores the steps that were asked for, then stops.

    Steps before are followed, so that what is alive when the kept part begins is in the trace,
    and forgotten once the next one is whole. With ``workspace`` the steps after the kept ones
    are measured again until each kept step has met its like, at most as many as are kept and at
    most `CALIBRATION_LIMIT`. A child process by fork records nothing.

    ``complete`` is called once, when everything is there: recording is over by then.
    """

    steps: Steps = field(default_factory=Steps)
    stacks: bool = False
    workspace: bool = True
    limit: int = EVENT_LIMIT
    complete: Callable[[Kept], None] | None = None

    def __post_init__(self) -> None:
        self._recorder = Recorder(stacks=self.stacks, limit=self.limit, marked=self._on_mark)
        self._process = os.getpid()
        self._count = 0
        self._boundary = Boundary(0, ())
        self._ends: list[int] = []
        self._measured: list[list[Op]] = []
        self._read_count = 0
        self._is_on = False
        self.kept: Kept | None = None

    def start(self) -> None:
        """Record from now on."""
        self._recorder.__enter__()
        self._is_on = True

    def finish(self) -> Kept | None:
        """The run is over: what was kept, also where it is less than was asked for.

        None in a child process.
        """
        self._leave()
        if self.kept is None and os.getpid() == self._process:
            self.kept = self._gather()
        return self.kept

    def _leave(self) -> None:
        if self._is_on:
            self._is_on = False
            self._recorder.__exit__(None, None, None)

    # -- step by step ----------------------------------------------------------------------

    def _on_mark(self, mark: Mark) -> None:
        if mark != _STEP or not self._is_on:
            return
        if os.getpid() != self._process:
            self._leave()
            return
        self._count += 1
        if self._count <= self.steps.first:
            self._begin_again()
        elif self.steps.last is None or self._count <= self.steps.last:
            if not self._recorder.is_full:
                self._ends.append(self._recorder.stored_count)
        else:
            self._read_workspace()
        if self._count >= self.steps.first:
            self._go_on()

    def _begin_again(self) -> None:
        """The step that has just ended is kept for now; those before it are not."""
        recorder = self._recorder
        recorder.drop_before(self._boundary)
        self._ends = [recorder.stored_count]
        if self._count == self.steps.first:
            return
        self._boundary = recorder.boundary()
        if recorder.is_full:  # its end is missing; the next may be shorter
            recorder.drop_before(self._boundary)
            self._boundary = self._boundary._replace(position=recorder.stored_count)
            self._ends = []

    def _go_on(self) -> None:
        last = self.steps.last
        if self._recorder.is_full or self._is_calibrated():
            self._end()
        elif last is not None and self._count >= last:
            self._recorder.switch("workspace")

    def _is_calibrated(self) -> bool:
        last = self.steps.last
        if last is None or self._count < last:
            return False
        most = min(len(self._ends), CALIBRATION_LIMIT) if self.workspace else 0
        done = self._count - last
        return done >= most or (done > 0 and not self._calibrated().missing)

    def _read_workspace(self) -> None:
        events = self._recorder.trace.events
        start = max(self._ends[-1], self._read_count)
        self._measured.append([event for event in events[start:] if isinstance(event, Op)])
        self._read_count = len(events)

    def _end(self) -> None:
        self._leave()
        self.kept = self._gather()
        if self.complete is not None:
            self.complete(self.kept)

    # -- what was kept ---------------------------------------------------------------------

    def _calibrated(self) -> Calibrated:
        return calibrate(self._events(), self._ends, self._measured)

    def _events(self) -> list[Event]:
        """The whole steps; everything where none is whole."""
        events = self._recorder.trace.events
        return events[: self._ends[-1]] if self._ends else events

    def _gather(self) -> Kept:
        calibrated = self._calibrated()
        steps = self._named()
        meta = {"steps": steps} if steps else {}
        meta.update(_provenance())
        trace = Trace(calibrated.events, self._recorder.backend, meta)
        return Kept(trace, steps, tuple(self._notes(len(calibrated.missing))))

    def _named(self) -> str:
        """The steps that are kept, as text; empty where no step is whole."""
        if not self._ends:
            return ""
        first = min(self.steps.first, self._count)
        return str(Steps(first, first + len(self._ends) - 1))

    def _notes(self, missing_count: int) -> Iterator[str]:
        first, last, count = self.steps.first, self.steps.last, self._count
        if not count:
            yield "no optimizer update was seen in this thread: all that ran is kept"
        elif count < first:
            kept = f"step {count} is kept" if self._ends else "what ran after it is kept"
            yield f"the run ended after step {count}, before step {first}: {kept}"
        elif last is not None and len(self._ends) <= last - first and not self._recorder.is_full:
            yield f"the run ended after step {count}, before step {last}"
        if self._recorder.is_full and not self._measured:
            yield f"recording ended after {self.limit:,} events"
        if self.workspace and missing_count:
            whose = f"the workspace of {_counted(missing_count)}"
            yield f"{whose} is unknown and not in the peak: {self._why_missing()}"

    def _why_missing(self) -> str:
        if self.steps.last is None:
            return "no step comes after all of them to measure it in"
        if self._recorder.is_full:
            return "there was no room for a step to measure it in"
        if not self._measured:
            return "the run ended before a step to measure it in"
        return "the steps after ran other operations, or of other shapes"


def _provenance() -> dict[str, str]:
    """Say where a trace comes from, and what else its run has done, for reports to show."""
    names = ("umem", "python", "numpy", "chainer", "cupy")
    versions = {name: text for name in names if (text := installed_version(name))}
    return {**versions, "machine": f"{platform.system()} {platform.machine()}", **told()}


def _counted(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


class Calibrated(NamedTuple):
    """Events with workspace where a measured step ran the same operations.

    ``missing`` are the indexes of the steps without.
    """

    events: list[Event]
    missing: tuple[int, ...]


def calibrate(
    events: list[Event], ends: Sequence[int], measured: Iterable[Sequence[Op]]
) -> Calibrated:
    """Give each step, which ends before the index in ``ends``, the workspace of a measured one.

    Operations are the same where names, phases, arithmetic and bytes are: a step of another
    order or batch gets nothing. What comes after the last end stays as it is.
    """
    known = [([_key(op) for op in ops], [op.workspace_bytes for op in ops]) for ops in measured]
    found: list[Event] = []
    missing = []
    for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        step = events[start:stop]
        keys = [_key(event) for event in step if isinstance(event, Op)]
        workspace = next((sizes for ops, sizes in known if ops == keys), None)
        if workspace is None:
            missing.append(index)
            found += step
        else:
            found += _filled(step, workspace)
    return Calibrated(found + events[len(found) :], tuple(missing))


def _key(op: Op) -> tuple[str, str, int, int]:
    return op.name, op.phase, op.flops, op.traffic_bytes


def _filled(step: list[Event], workspace: list[int | None]) -> Iterable[Event]:
    sizes = iter(workspace)
    for event in step:
        yield event._replace(workspace_bytes=next(sizes)) if isinstance(event, Op) else event
