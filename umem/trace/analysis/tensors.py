"""Every tensor of a trace: its kind, its lifetime, and the operations that made and used it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from umem.errors import TraceError
from umem.trace.events import Alloc, Checker, Event, Free, Mark, Op
from umem.trace.trace import Trace

WORKSPACE = "workspace"
KINDS = (
    "parameters", "optimizer state", "other state", "input", "arrays", "saved for backward",
    "other activations", "gradients", WORKSPACE,
)  # fmt: skip
"""Kinds of memory in reports, long-lived ones first."""
LASTING = ("parameters", "optimizer state", "other state")
"""Kinds of memory that live from step to step."""
ACTIVATIONS = ("saved for backward", "other activations")
_PLAIN = {"parameter": "parameters", "input": "input", "gradient": "gradients", "array": "arrays"}


@dataclass(slots=True)
class Tensor:
    """One tensor of a trace; its places are indexes of events.

    ``death`` is None for a tensor that is never freed. ``step`` counts the updates before its
    birth. ``maker`` is the first operation that writes it, None if it came from the host or was
    never written. ``first_use`` and ``last_use`` are the first and the last operation that touch
    it. ``saved``: backward reads it. ``updated``: an optimizer's update touches it.
    """

    number: int
    nbytes: int
    kind: str
    label: str
    uploaded: bool
    stack: tuple[str, ...]
    birth: int
    step: int
    death: int | None = None
    maker: int | None = None
    first_use: int | None = None
    last_use: int | None = None
    saved: bool = False
    updated: bool = False

    @property
    def origin(self) -> str:
        """Return the origin of a tensor that no operation of the trace made."""
        if not self.uploaded:
            return "no operation seen"
        return "the host" if self.kind == "input" else "before the recording"

    def alive(self, event: int) -> bool:
        """Tell whether it is alive after an event."""
        return self.birth <= event and (self.death is None or event < self.death)


@dataclass(frozen=True)
class Reading:
    """A trace with its tensors in order of birth.

    ``live`` are the live bytes after each event, ``total`` adds the running operation's workspace;
    ``steps`` are the places where optimizer updates ended.
    """

    trace: Trace
    tensors: list[Tensor]
    live: np.ndarray[Any, np.dtype[np.int64]]
    total: np.ndarray[Any, np.dtype[np.int64]]
    steps: list[int]

    def op(self, event: int) -> Op:
        """Return the operation at an index."""
        found = self.trace.events[event]
        assert isinstance(found, Op)
        return found


def _purpose(tensor: Tensor) -> str:
    if tensor.kind == "state":
        return "optimizer state" if tensor.updated else "other state"
    other = "saved for backward" if tensor.saved else "other activations"
    return _PLAIN.get(tensor.kind, other)


class _TensorReader:
    """Reads all tensors in one pass over the events; most of a long report's time is spent here."""

    def __init__(self, count: int) -> None:
        self.tensors: list[Tensor] = []
        self.change = [0] * count
        self.workspace = [0] * count
        self.steps: list[int] = []
        self._alive: dict[int, Tensor] = {}
        self._on: Mapping[type, Callable[[int, Any], None]] = {
            Alloc: self._alloc,
            Free: self._free,
            Op: self._op,
            Mark: self._mark,
        }

    def read(self, events: list[Event]) -> None:
        on = self._on
        for index, event in enumerate(events):
            handler = on.get(type(event))
            if handler is not None:
                handler(index, event)
        for tensor in self.tensors:
            tensor.kind = _purpose(tensor)

    def _alloc(self, index: int, alloc: Alloc) -> None:
        tensor = Tensor(*alloc, index, len(self.steps))
        self._alive[alloc.tensor] = tensor
        self.tensors.append(tensor)
        self.change[index] = alloc.nbytes

    def _free(self, index: int, free: Free) -> None:
        tensor = self._alive.pop(free.tensor)
        tensor.death = index
        self.change[index] = -tensor.nbytes

    def _op(self, index: int, op: Op) -> None:
        """Note an operation's reads, writes and workspace."""
        alive, phase = self._alive, op.phase
        for access in op.reads:
            tensor = alive[access[0]]
            if tensor.first_use is None:
                tensor.first_use = index
            tensor.last_use = index
            if phase == "backward":
                tensor.saved = True
            elif phase == "update":
                tensor.updated = True
        for access in op.writes:
            tensor = alive[access[0]]
            if tensor.first_use is None:
                tensor.first_use = index
            if tensor.maker is None and not tensor.uploaded:
                tensor.maker = index
            tensor.last_use = index
            if phase == "update":
                tensor.updated = True
        if op.workspace_bytes:
            self.workspace[index] = op.workspace_bytes

    def _mark(self, index: int, mark: Mark) -> None:
        if mark.label == "step":
            self.steps.append(index)


def read_tensors(trace: Trace) -> Reading:
    """Collect every tensor of a trace in one pass.

    Raises:
        TraceError: the trace is inconsistent (only if its events were written by hand).
    """
    reader = _TensorReader(len(trace))
    try:
        reader.read(trace.events)
    except KeyError as error:
        raise TraceError(f"the trace does not hold together: {what_fails(trace)}") from error
    live = np.cumsum(np.asarray(reader.change, np.int64))
    total = live + np.asarray(reader.workspace, np.int64)
    return Reading(trace, reader.tensors, live, total, reader.steps)


def what_fails(trace: Trace) -> str:
    """Return the reason why the first inconsistent event is wrong."""
    checker = Checker()
    for index, event in enumerate(trace.events):
        try:
            checker.check(event)
        except TraceError as error:
            return f"event {index}: {error}"
    return "an event uses a tensor that is not alive"
