"""`Keeper` records some steps of a run, and stops recording once it has them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from umem._common.extras import installed_version
from umem.errors import SizeError
from umem.trace.events import Event, Mark, Op
from umem.trace.frameworks import framework_notes
from umem.trace.recording.buffer import Boundary
from umem.trace.recording.recorder import Recorder
from umem.trace.trace import Trace
from umem.trace.walk import with_sizes

EVENT_LIMIT = 1_000_000
"""At most this many events are stored; an operation makes about three."""
CALIBRATION_LIMIT = 4
"""At most this many steps are measured for workspace if several kinds of steps take turns. A
choice: generator and discriminator are two kinds, and each is measured twice."""
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
            SizeError: the text is none of these, or the last step is before the first.
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
    """The trace of the kept steps, and ``notes`` on its differences from the request."""

    trace: Trace
    steps: str
    notes: tuple[str, ...] = ()


@dataclass
class Keeper:
    """Records some steps of the thread that starts it, then stops recording.

    Earlier steps are recorded too, and each is dropped once the next one is complete, so that the
    trace has the tensors that are alive when the kept steps begin. A forked child process records
    nothing.

    Args:
        steps: the steps to keep.
        stacks: whether to keep the lines of the user's code with each tensor.
        workspace: whether to measure workspace in the steps after the kept ones, until there is a
            measured step with the same operations for each kept one; at most as many steps as are
            kept, and at most `CALIBRATION_LIMIT`.
        limit: at most about this many events are stored.
        complete: called once with the result, after recording has ended.

    Attributes:
        kept: the result; None before it is complete.
    """

    steps: Steps = field(default_factory=Steps)
    stacks: bool = False
    workspace: bool = True
    limit: int = EVENT_LIMIT
    complete: Callable[[Kept], None] | None = None

    def __post_init__(self) -> None:
        """Make the recorder, which calls `_on_mark` at each mark."""
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
        """Begin to record the calling thread."""
        self._recorder.__enter__()
        self._is_on = True

    def finish(self) -> Kept | None:
        """Stop recording at the end of the run, and return the kept steps, even if too few.

        None in a forked child process.
        """
        self._stop_recording()
        if self.kept is None and os.getpid() == self._process:
            self.kept = self._gather()
        return self.kept

    def _stop_recording(self) -> None:
        if self._is_on:
            self._is_on = False
            self._recorder.__exit__(None, None, None)

    # -- step by step ----------------------------------------------------------------------

    def _on_mark(self, mark: Mark) -> None:
        """Handle the end of a step: keep or drop it, or read its workspace; then stop or continue.

        In a forked child process recording stops.
        """
        if mark != _STEP or not self._is_on:
            return
        if os.getpid() != self._process:
            self._stop_recording()
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
            self._stop_or_switch()

    def _begin_again(self) -> None:
        """Keep the step that has just ended, for now, and drop the steps before it.

        A step that did not fit in the limit is dropped too, unless it is the first one to keep.
        """
        recorder = self._recorder
        recorder.drop_before(self._boundary)
        self._ends = [recorder.stored_count]
        if self._count == self.steps.first:
            return
        self._boundary = recorder.boundary()
        if recorder.is_full:  # the end of the step is missing; the next may be shorter
            recorder.drop_before(self._boundary)
            self._boundary = self._boundary._replace(position=recorder.stored_count)
            self._ends = []

    def _stop_or_switch(self) -> None:
        """Stop when all is recorded or the store is full; measure workspace after the last step."""
        last = self.steps.last
        if self._recorder.is_full or self._is_calibrated():
            self._end()
        elif last is not None and self._count >= last:
            self._recorder.switch("workspace")

    def _is_calibrated(self) -> bool:
        """Tell whether all steps are kept, and each has workspace or enough were measured."""
        last = self.steps.last
        if last is None or self._count < last:
            return False
        most = min(len(self._ends), CALIBRATION_LIMIT) if self.workspace else 0
        return self._count - last >= most or not self._calibrated().missing

    def _read_workspace(self) -> None:
        """Store the operations of the step that has just ended, whose workspace was measured."""
        events = self._recorder.trace.events
        start = max(self._ends[-1], self._read_count)
        self._measured.append([event for event in events[start:] if isinstance(event, Op)])
        self._read_count = len(events)

    def _end(self) -> None:
        self._stop_recording()
        self.kept = self._gather()
        if self.complete is not None:
            self.complete(self.kept)

    # -- the result ------------------------------------------------------------------------

    def _calibrated(self) -> Calibrated:
        return calibrate(self._events(), self._ends, self._measured)

    def _events(self) -> list[Event]:
        """Return the events of the complete steps, or all events if no step is complete."""
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
        """Return the numbers of the kept steps as text; empty if no step is complete."""
        if not self._ends:
            return ""
        first = min(self.steps.first, self._count)
        return str(Steps(first, first + len(self._ends) - 1))

    def _notes(self, missing_count: int) -> Iterator[str]:
        """Yield a sentence for each difference of the kept steps from the request."""
        first, last, count = self.steps.first, self.steps.last, self._count
        if not count:
            yield (
                "no step ended in this thread, so the whole run was kept. Call "
                'umem.mark("step") where a step ends'
            )
        elif count < first:
            kept = f"step {count} is kept" if self._ends else "the operations after it are kept"
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
    """Return the versions, the machine and the frameworks' notes of a trace, for reports."""
    names = ("umem", "python", "numpy", "chainer", "cupy")
    versions = {name: text for name in names if (text := installed_version(name))}
    return {**versions, "machine": f"{platform.system()} {platform.machine()}", **framework_notes()}


def _counted(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


class Calibrated(NamedTuple):
    """Events, with workspace in the steps for which a measured step ran the same operations.

    ``missing`` has the indexes of the other steps.
    """

    events: list[Event]
    missing: tuple[int, ...]


def calibrate(
    events: list[Event], ends: Sequence[int], measured: Iterable[Sequence[Op]]
) -> Calibrated:
    """Copy to each step the workspace of a measured step of the same operations.

    Operations are the same if name, phase, flops and traffic are equal, in the same order: a step
    of another batch size gets none. It is missing unless its operations have their own, as on
    CuPy. Events after the last step stay as they are.

    Args:
        events: of the steps.
        ends: the index in ``events`` after the last event of each step.
        measured: the operations of each measured step.
    """
    known = [([_key(op) for op in ops], [op.workspace_bytes for op in ops]) for ops in measured]
    found: list[Event] = []
    missing = []
    for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        step = events[start:stop]
        keys = [_key(event) for event in step if isinstance(event, Op)]
        workspace = next((sizes for ops, sizes in known if ops == keys), None)
        if workspace is None:
            found += step
            if any(isinstance(event, Op) and event.workspace_bytes is None for event in step):
                missing.append(index)
        else:
            found += with_sizes(step, workspace)
    return Calibrated(found + events[len(found) :], tuple(missing))


def _key(op: Op) -> tuple[str, str, int, int]:
    return op.name, op.phase, op.flops, op.traffic_bytes
