"""Memory and time of a trace: the figures behind every report.

Pure functions of a trace; nothing runs. Sizes are the bytes that the program requested: a pool
rounds them up, and caches freed memory in addition.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from umem.trace.analysis.capping import cap_advice
from umem.trace.analysis.explain import missing
from umem.trace.analysis.leaks import Leak, can_tell, find_leaks
from umem.trace.analysis.tensors import KINDS, LASTING, WORKSPACE, Reading, Tensor, read_tensors
from umem.trace.events import Alloc, Op
from umem.trace.trace import Trace, check_trace
from umem.units import format_bytes

_STEPS = re.compile(r"([1-9][0-9]{0,8})(?:-[1-9][0-9]{0,8})?")


class Vram(NamedTuple):
    """A GPU's usable memory, to compare a trace with."""

    gpu: str
    nbytes: int


@dataclass(frozen=True)
class KindBytes:
    """The bytes of all tensors of one kind."""

    kind: str
    total_bytes: int
    tensor_count: int


@dataclass(frozen=True)
class Peak:
    """The first moment of the highest memory use, workspace included.

    ``event`` is its index in the trace, ``op`` the operation that runs or is about to run then
    (None: none is left), ``step`` the number of updates that ended before. ``seconds`` is the host
    time until then, None if times were not recorded. ``tensors`` are the live ones, largest first.
    ``idle`` are live tensors that no later operation uses, so they could be freed without
    recomputation; parameters and state are left out, and CuPy arrays whose uses no hook reports.
    """

    total_bytes: int
    event: int
    op: Op | None
    step: int
    seconds: float | None
    workspace_bytes: int
    by_kind: tuple[KindBytes, ...]
    tensors: tuple[Tensor, ...]
    idle: tuple[Tensor, ...]

    @property
    def idle_bytes(self) -> int:
        """Return the bytes of the idle tensors."""
        return sum(tensor.nbytes for tensor in self.idle)


@dataclass(frozen=True)
class OpTotal:
    """Totals over all operations of one name and phase.

    ``allocated_bytes`` counts the tensors that they wrote first, ``workspace_bytes`` is the most
    that one needed. The latter and ``seconds`` are None if they were not measured.
    """

    name: str
    phase: str
    count: int
    seconds: float | None
    allocated_bytes: int
    workspace_bytes: int | None


@dataclass(frozen=True, repr=False)
class Analysis:
    """The figures of one trace."""

    reading: Reading
    peak: Peak
    ops: tuple[OpTotal, ...]
    seconds: float | None

    def __repr__(self) -> str:
        return f"<Analysis of {self.trace}: peak {format_bytes(self.peak.total_bytes)}>"

    @property
    def trace(self) -> Trace:
        """Return the analysed trace."""
        return self.reading.trace

    @property
    def step_count(self) -> int:
        """Return the number of optimizer updates that ended in the trace."""
        return len(self.reading.steps)

    @property
    def first_step(self) -> int:
        """Return the number of the first step, from 1, in the recorded run."""
        named = _STEPS.fullmatch(self.trace.meta.get("steps", ""))
        return 1 if named is None else int(named[1])

    @cached_property
    def caveat(self) -> str | None:
        """Return sentences on memory that the peak leaves out; None if it is complete."""
        return missing(self.trace)

    @cached_property
    def cap_advice(self) -> str | None:
        """Return a sentence on workspace that `umem.chainer.workspace` caps; None if there is
        little.
        """
        return cap_advice(self.trace)

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean host seconds of a step; None without times or steps."""
        return self.seconds / self.step_count if self.seconds and self.step_count else None

    @property
    def op_count(self) -> int:
        """Return the number of operations."""
        return sum(op.count for op in self.ops)

    @cached_property
    def leaks(self) -> list[Leak]:
        """Return the tensors that outlive their step; see `umem.trace.analysis.leaks`."""
        return find_leaks(self.reading)

    @cached_property
    def trains(self) -> bool:
        """Tell whether the trace is of a network: by its operations, or kinds of tensors."""
        return any(op.phase != "array" for op in self.ops) or any(
            isinstance(event, Alloc) and event.kind != "array" for event in self.trace.events
        )

    @cached_property
    def no_leaks(self) -> str:
        """Return a sentence for a trace without leaks, on how certain that is."""
        if self.step_count < 2:
            return "Two recorded steps are needed to find them."
        if not can_tell(self.reading):
            return "None found. Record one more step to be sure."
        return "None."

    def ops_by_seconds(self) -> list[OpTotal]:
        """Return the operation totals by descending time; in order of occurrence without times."""
        return sorted(self.ops, key=lambda op: -(op.seconds or 0))

    def ops_by_bytes(self) -> list[OpTotal]:
        """Return the operation totals by descending bytes allocated."""
        return sorted(self.ops, key=lambda op: (-op.allocated_bytes, -(op.workspace_bytes or 0)))


def analyse(trace: Trace) -> Analysis:
    """Compute a trace's figures: peak, tensors alive then, operations, leaks.

    Costs about as much as reading the trace from its file.

    Raises:
        TraceError: the argument is not a trace, or its events are inconsistent.
    """
    check_trace(trace)
    reading = read_tensors(trace)
    seconds = [event.host_seconds for event in trace.events if isinstance(event, Op)]
    timed = [value for value in seconds if value is not None]
    return Analysis(
        reading=reading,
        peak=_peak(reading),
        ops=_op_totals(reading),
        seconds=float(sum(timed)) if timed else None,
    )


# -- the peak ----------------------------------------------------------------------------------


def _peak(reading: Reading) -> Peak:
    """Compute the peak and the tensors alive there."""
    if not len(reading.total):
        return Peak(0, 0, None, 0, None, 0, (), (), ())
    event = int(reading.total.argmax())
    workspace = int(reading.total[event] - reading.live[event])
    alive = [tensor for tensor in reading.tensors if tensor.alive(event)]
    largest = tuple(heapq.nlargest(len(alive), alive, key=lambda tensor: tensor.nbytes))
    return Peak(
        total_bytes=int(reading.total[event]),
        event=event,
        op=next((e for e in reading.trace.events[event:] if isinstance(e, Op)), None),
        step=sum(end < event for end in reading.steps),
        seconds=_seconds_before(reading.trace, event),
        workspace_bytes=workspace,
        by_kind=_by_kind(alive, workspace),
        tensors=largest,
        idle=tuple(tensor for tensor in largest if _is_idle(tensor, event, reading.trace)),
    )


def _seconds_before(trace: Trace, event: int) -> float | None:
    if all(op.host_seconds is None for op in trace.ops):
        return None
    before = (e.host_seconds for e in trace.events[:event] if isinstance(e, Op))
    return float(sum(seconds or 0.0 for seconds in before))


def _by_kind(alive: Iterable[Tensor], workspace: int) -> tuple[KindBytes, ...]:
    nbytes: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for tensor in alive:
        nbytes[tensor.kind] += tensor.nbytes
        count[tensor.kind] += 1
    if workspace:
        nbytes[WORKSPACE] = workspace
    return tuple(KindBytes(kind, nbytes[kind], count[kind]) for kind in KINDS if kind in nbytes)


def _is_idle(tensor: Tensor, event: int, trace: Trace) -> bool:
    if tensor.updated or tensor.kind in LASTING:
        return False
    if tensor.last_use is None:
        return trace.backend != "cupy"  # where its uses are not in the trace
    return tensor.last_use < event


# -- operations --------------------------------------------------------------------------------


def _op_totals(reading: Reading) -> tuple[OpTotal, ...]:
    """Sum up operations by name and phase."""
    allocated: Counter[int] = Counter()
    for tensor in reading.tensors:
        if tensor.maker is not None:
            allocated[tensor.maker] += tensor.nbytes
    groups: dict[tuple[str, str], list[tuple[int, Op]]] = defaultdict(list)
    for index, event in enumerate(reading.trace.events):
        if isinstance(event, Op):
            groups[event.name, event.phase].append((index, event))
    return tuple(_op_total(key, items, allocated) for key, items in groups.items())


def _op_total(
    key: tuple[str, str], items: list[tuple[int, Op]], allocated: Counter[int]
) -> OpTotal:
    """Sum up the operations of one name and phase."""
    seconds = [op.host_seconds for _, op in items if op.host_seconds is not None]
    workspace = [op.workspace_bytes for _, op in items if op.workspace_bytes is not None]
    return OpTotal(
        name=key[0],
        phase=key[1],
        count=len(items),
        seconds=float(sum(seconds)) if seconds else None,
        allocated_bytes=sum(allocated[index] for index, _ in items),
        workspace_bytes=max(workspace) if workspace else None,
    )
