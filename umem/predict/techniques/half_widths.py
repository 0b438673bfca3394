"""Half precision: a float32 step as `umem.chainer.half_precision` has it, as far as a trace shows.

Parameters, activations and gradients have 16 bits; each parameter has a float32 master, made when
it is first updated, and the optimizer's states stay. Batch normalisation keeps its parameters and
statistics, and losses compute in float32, of a cast of what they are given.

Models: memory, and what operations move. Does not model: types, which no trace has: what has whole
numbers is told by who reads it; half-precision arithmetic, quicker on some GPUs, slower on hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.techniques.technique import Prepared
from umem.trace.events import Access, Alloc, Event, Free, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations, with_accesses

if TYPE_CHECKING:
    from umem.predict.techniques.subject import Subject

LINE = "umem.chainer.half_precision(model, optimizer)"
WIDE = frozenset((
    "SoftmaxCrossEntropy", "_SoftmaxCrossEntropyGrad_NoDoubleBackprop", "SigmoidCrossEntropy",
    "SigmoidCrossEntropyGrad", "MeanSquaredError", "MeanAbsoluteError", "HuberLoss", "Hinge",
    "GaussianKLDivergence", "BernoulliNLL", "CTC", "ConnectionistTemporalClassification",
))  # fmt: skip
"""Losses, which compute in float32."""
NORMALIZES = frozenset(("BatchNormalization", "FixedBatchNormalization", "BatchNormalizationGrad"))
"""Their parameters and statistics stay in float32."""
WHOLE_INPUTS = {"EmbedIDFunction": 0, "EmbedIDGrad": 0, "SelectItem": 1}
"""Where functions read whole numbers; losses read them second."""
CAST = "Cast"


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step in half precision.

    Raises:
        StateError: it has no parameter that could have 16 bits.
    """
    return Prepared(subject.changed(half=True).trace, LINE)


def in_half(trace: Trace) -> Trace:
    """The trace in half precision.

    Raises:
        StateError: it updates no parameter in float32.
    """
    if any(e.label.endswith(".fp32") for e in trace.events if isinstance(e, Alloc)):
        raise StateError("the step is in half precision already")
    halves = _Halves(trace)
    if not halves.masters:
        raise StateError("the step updates no parameter that could have 16 bits")
    return trace.with_events(halves.events())


class _Halves:
    """Which tensors get 16 bits, and the events with them."""

    def __init__(self, trace: Trace) -> None:
        self._events = trace.events
        self._allocs = allocations(trace.events)
        stay = _staying(trace, self._allocs)
        self._half = {
            n: alloc.nbytes // 2
            for n, alloc in self._allocs.items()
            if n not in stay and alloc.kind != "state" and alloc.nbytes > 4
        }
        updated = (op for op in trace.ops if op.phase == "update")
        self.masters = {
            access.tensor: op.name
            for op in updated
            for access in op.writes
            if access.tensor in self._half and self._allocs[access.tensor].kind == "parameter"
        }
        self._fresh = count(1 + max(self._allocs, default=-1))
        self._copies: dict[int, int] = {}
        self._casts: dict[int, int] = {}

    def events(self) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, Alloc):
                yield event._replace(nbytes=self._half.get(event.tensor, event.nbytes))
            elif isinstance(event, Free):
                yield event
                if event.tensor in self._casts:
                    yield Free(self._casts.pop(event.tensor))
            elif not isinstance(event, Op):
                yield with_accesses(event, self._halved)
            else:
                yield from self._op(event)

    def _op(self, op: Op) -> Iterator[Event]:
        if op.phase == "forward" and op.name in WIDE:
            yield from self._cast(op)
        before = _bytes(op)
        small = with_accesses(op, self._halved)
        assert isinstance(small, Op)
        share = _bytes(small) / before if before else 1.0
        inside = op.workspace_bytes
        small = small._replace(
            traffic_bytes=round(op.traffic_bytes * share),
            workspace_bytes=None if inside is None else round(inside * share),
        )
        if op.phase == "update":
            yield from self._update(op, small)
        else:
            yield small

    def _cast(self, op: Op) -> Iterator[Event]:
        """A loss reads a copy in float32, which goes with what it is of."""
        for access in op.reads:
            tensor, nbytes = access.tensor, self._allocs[access.tensor].nbytes
            if tensor in self._half and tensor not in self._casts:
                copy = self._casts[tensor] = next(self._fresh)
                reads = (Access(tensor, 0, self._half[tensor]),)
                writes = (Access(copy, 0, nbytes),)
                yield Alloc(copy, nbytes, "activation", CAST)
                yield Op(CAST, op.phase, reads, writes, nbytes // 4, nbytes * 3 // 2)

    def _update(self, op: Op, small: Op) -> Iterator[Event]:
        """An update goes by the master, and converts the gradient and the parameter."""
        writes = list(small.writes)
        for access in op.writes:
            if access.tensor in self.masters:
                nbytes = self._allocs[access.tensor].nbytes
                if access.tensor not in self._copies:
                    self._copies[access.tensor] = next(self._fresh)
                    label = f"{op.name}.fp32"
                    yield Alloc(self._copies[access.tensor], nbytes, "state", label)
                writes.append(Access(self._copies[access.tensor], 0, nbytes))
                inside = op.workspace_bytes
                small = small._replace(
                    traffic_bytes=op.traffic_bytes + 2 * nbytes,
                    workspace_bytes=None if inside is None else inside + nbytes,
                )
        yield small._replace(
            reads=(*small.reads, *writes[len(small.writes) :]), writes=tuple(writes)
        )

    def _halved(self, accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            Access(n, start // 2, stop // 2) if n in self._half else Access(n, start, stop)
            for n, start, stop in accesses
        )


def _staying(trace: Trace, allocs: dict[int, Alloc]) -> set[int]:
    """What keeps its bytes: what is in float32 by rule, and whole numbers."""
    stay: set[int] = set()
    for op in trace.ops:
        place = WHOLE_INPUTS.get(op.name)
        if place is not None and place < len(op.reads):
            stay.add(op.reads[place].tensor)
        elif op.name in NORMALIZES:
            stay.update(a.tensor for a in op.reads[1:] if allocs[a.tensor].kind != "activation")
            stay.update(a.tensor for a in op.writes if allocs[a.tensor].kind == "stash")
        elif op.name in WIDE:
            stay.update(a.tensor for a in op.writes)
            stay.update(a.tensor for a in op.reads if allocs[a.tensor].kind == "input")
    stay.update(n for n, alloc in allocs.items() if ".indexes" in alloc.label)
    updates = (op for op in trace.ops if op.phase == "update")
    for op in updates:  # the gradient of what stays
        if any(a.tensor in stay for a in op.writes):
            stay.update(a.tensor for a in op.reads)
    return stay


def _bytes(op: Op) -> int:
    return sum(stop - start for _, start, stop in (*op.reads, *op.writes))
