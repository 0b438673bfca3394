"""Half precision: a float32 step as `umem.chainer.half_precision` has it, as far as a trace shows.

Parameters have 16 bits, but for those of normalisations, and each has a float32 master. From there
types go through the step by the rules of that function: products take and give halves, losses and
sums are float32, anything else is half where all it reads is. A cast is made where a function wants
another type, and kept as long as the function keeps its input.

Models: memory, and what operations move. Does not model: casts of gradients (one has the type of
what its function read); arithmetic in halves, quicker on some GPUs and slower on NumPy. A trace has
no types: whole numbers are told by who reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.cupy_differences import DONE
from umem.predict.techniques.technique import Prepared
from umem.trace.analysis.capping import CONVOLUTIONS, POOLINGS
from umem.trace.events import LEAF, Access, Alloc, Event, Free, Hint, Mark, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

if TYPE_CHECKING:
    from umem.predict.techniques.subject import Subject

LINE = "umem.chainer.half_precision(model, optimizer)"
PRODUCTS = frozenset((
    "BilinearFunction", "Convolution2DFunction", "ConvolutionND", "Deconvolution2DFunction",
    "DeconvolutionND", "EinSum", "LinearFunction", "LocalConvolution2DFunction", "MatMul",
    "TensorDot",
))  # fmt: skip
"""Functions that are given halves."""
BACK_OF_PRODUCTS = ("GradData", "GradWeight", "GradW")
"""The ends of the names of functions that give their gradients."""
SINGLES = frozenset((
    "BatchL2NormSquared", "Cumsum", "LogSoftmax", "LogSumExp", "Mean", "NormalizeL2", "Sum",
    "SoftmaxCrossEntropy", "SigmoidCrossEntropy", "MeanSquaredError", "MeanAbsoluteError",
    "HuberLoss", "Hinge", "CTC", "ConnectionistTemporalClassification", "Contrastive", "Triplet",
    "Accuracy",
))  # fmt: skip
"""Sums, losses and evaluations, which are given float32."""
NORMALIZES = frozenset((
    "BatchNormalization", "FixedBatchNormalization", "GroupNormalization", "LayerNormalization",
))  # fmt: skip
"""They are given what there is; their parameters stay."""
WHOLE_NUMBERS = {"EmbedIDFunction": 0, "SelectItem": 1, "SoftmaxCrossEntropy": 1, "Accuracy": 1,
                 "SigmoidCrossEntropy": 1}  # fmt: skip
"""Where functions read whole numbers."""
NO_SCORES = "SoftmaxCrossEntropy"
"""Its scores are not kept; NumPy takes them as they are, some samples at a time."""
CAST = "Cast"
FROM_COLUMNS = CONVOLUTIONS | POOLINGS
COPIES = 2
"""NumPy computes these as float32: so many times what 16 bits save is in copies meanwhile."""
SCALAR_BYTES = 4


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step in half precision.

    Raises:
        StateError: it has no parameter that could have 16 bits.
    """
    return Prepared(subject.changed(half=True).trace, LINE)


def in_half(trace: Trace) -> Trace:
    """The trace in half precision.

    Raises:
        StateError: it is that already, or updates no parameter that could have 16 bits.
    """
    if any(e.label.endswith(".fp32") for e in trace.events if isinstance(e, Alloc)):
        raise StateError("the step is in half precision already")
    types = _Types(trace)
    if not types.masters:
        raise StateError("the step updates no parameter that could have 16 bits")
    return trace.with_events(types.events())


class _Types:
    """Follows the types through a trace, and gives its events with them.

    Attributes:
        masters: the parameters that become halves, and the names of their updates.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._on_host = trace.backend == "numpy" and DONE not in trace.meta
        self._allocs = allocations(trace.events)
        kept = _parameters_of(trace, NORMALIZES, self._allocs)
        self.masters = {
            access.tensor: op.name
            for op in trace.ops
            if op.phase == "update"
            for access in op.writes
            if self._allocs[access.tensor].kind == "parameter" and access.tensor not in kept
        }
        self._halves = set(self.masters)
        self._whole = _whole_numbers(trace)
        self._fresh = count(1 + max(self._allocs, default=-1))
        self._copies: dict[int, int] = {}
        self._trained = {LEAF}  # the calls that something with a gradient goes into
        self._casts: dict[int, list[int]] = {}  # what a call's backward lets go
        self._passing: list[int] = []  # casts that go with the operation
        self._makes_half = self._outputs()
        self._halves |= self._left_over()

    def _outputs(self) -> dict[int, list[int]]:
        """Find for each operation the casts it needs; what it makes is noted as half or not."""
        wanted: dict[int, list[int]] = {}
        for index, op in enumerate(self._trace.ops):
            if op.phase == "forward":
                wanted[index] = self._forward(op)
            elif op.phase == "backward":
                self._backward(op)
        return wanted

    def _is_float(self, tensor: int) -> bool:
        return tensor not in self._whole and self._allocs[tensor].nbytes > SCALAR_BYTES

    def _forward(self, op: Op) -> list[int]:
        """Note what an operation makes, and return the tensors that are cast for it."""
        if op.entry is not None and not self._trained.isdisjoint(op.entry.sources):
            self._trained.add(op.entry.number)
        reads = [a.tensor for a in op.reads if self._is_float(a.tensor)]
        halves = [n for n in reads if n in self._halves]
        if halves and op.name not in PRODUCTS | SINGLES | NORMALIZES:
            self._halves.update(n for n in reads if self._is_first_state(op, n))
        singles = [n for n in reads if n not in self._halves]
        if op.name in NORMALIZES or not halves:
            is_half, cast = bool(reads) and reads[0] in self._halves, []
        elif op.name in SINGLES:
            by_samples = self._on_host and op.name == NO_SCORES
            is_half, cast = False, [] if by_samples else halves
        elif op.name in PRODUCTS or all(self._is_constant(op, n) for n in singles):
            is_half, cast = True, singles
        else:
            is_half, cast = False, halves
        for access in op.writes:
            is_stash = self._allocs[access.tensor].kind == "stash"
            stays = (op.name in NORMALIZES and is_stash) or ".indexes" in self._label(access)
            if is_half and not stays and self._allocs[access.tensor].kind != "state":
                self._halves.add(access.tensor)
        return cast

    def _label(self, access: Access) -> str:
        return self._allocs[access.tensor].label

    def _is_constant(self, op: Op, tensor: int) -> bool:
        """Tell whether an input is given from outside, without a gradient."""
        if self._allocs[tensor].kind != "input":
            return False
        if op.entry is None:
            return True
        pairs = zip(op.entry.sources, op.reads, strict=False)
        return not any(source in self._trained for source, a in pairs if a.tensor == tensor)

    def _is_first_state(self, op: Op, tensor: int) -> bool:
        """Tell whether an input with a gradient is what a recurrent link begins with.

        Chainer's LSTM and GRU make it of the type of what they read beside it.
        """
        if self._allocs[tensor].kind != "input" or op.entry is None:
            return False
        pairs = zip(op.entry.sources, op.reads, strict=False)
        return any(source == LEAF and a.tensor == tensor for source, a in pairs)

    def _left_over(self) -> set[int]:
        """What the step before left, of the types that the same has in this one."""
        made: dict[tuple[str, str, int], set[bool]] = {}
        for tensor, alloc in self._allocs.items():
            if not alloc.uploaded:
                key = alloc.kind, alloc.label, alloc.nbytes
                made.setdefault(key, set()).add(tensor in self._halves)
        return {
            tensor
            for tensor, alloc in self._allocs.items()
            if alloc.uploaded and alloc.kind in ("activation", "gradient")
            if made.get((alloc.kind, alloc.label, alloc.nbytes)) == {True}
        }

    def _backward(self, op: Op) -> None:
        """A gradient has the type of what is read beside gradients; without, of those."""
        if op.name in PRODUCTS or op.name.endswith(BACK_OF_PRODUCTS):
            self._halves.update(access.tensor for access in op.writes)
            return
        floats = [n for a in op.reads if self._is_float(n := a.tensor)]
        beside = [
            n
            for n in floats
            if self._allocs[n].kind in ("activation", "stash", "input") or n in self.masters
        ]
        deciding = beside or floats
        if deciding and all(n in self._halves for n in deciding) and "CrossEntropy" not in op.name:
            made = (a.tensor for a in op.writes if self._allocs[a.tensor].kind != "parameter")
            self._halves.update(made)

    # -- the events ------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """All events with their types."""
        number = -1
        for event in self._trace.events:
            if isinstance(event, Alloc):
                yield event._replace(nbytes=self._bytes(event.tensor))
                if event.tensor in self.masters:
                    yield self._master(event)
            elif isinstance(event, Op):
                number += 1
                yield from self._op(event, self._makes_half.get(number, []))
            elif isinstance(event, Hint):
                yield event._replace(accesses=self._typed(event.accesses, {}))
            else:
                yield event
                if isinstance(event, Mark) and event.entry is not None:
                    yield from map(Free, self._casts.pop(event.entry, []))

    def _bytes(self, tensor: int) -> int:
        alloc = self._allocs[tensor]
        if alloc.kind == "stash" and alloc.label.startswith(f"{NO_SCORES}."):
            return 0
        return alloc.nbytes // 2 if tensor in self._halves else alloc.nbytes

    def _master(self, alloc: Alloc) -> Alloc:
        copy = self._copies[alloc.tensor] = next(self._fresh)
        label = f"{self.masters[alloc.tensor]}.fp32"
        return alloc._replace(tensor=copy, kind="state", label=label)

    def _op(self, op: Op, cast: list[int]) -> Iterator[Event]:
        copies: dict[int, Access] = {}
        for tensor in dict.fromkeys(cast):
            yield from self._cast(op, tensor, copies)
        before = _sum(op)
        reads, writes = self._typed(op.reads, copies), self._typed(op.writes, copies)
        if op.phase == "update":
            masters = tuple(
                Access(copy, 0, self._allocs[a.tensor].nbytes)
                for a in op.writes
                if (copy := self._copies.get(a.tensor)) is not None
            )
            reads, writes = (*reads, *masters), (*writes, *masters)
        small = op._replace(reads=reads, writes=writes)
        saved = before - _sum(small)
        inside = None if op.workspace_bytes is None else self._inside(op, saved, before)
        traffic = max(0, op.traffic_bytes - saved)
        yield small._replace(traffic_bytes=traffic, workspace_bytes=inside)
        yield from map(Free, self._passing)
        self._passing.clear()

    def _inside(self, op: Op, saved: int, before: int) -> int:
        """What an operation needs only while it runs."""
        needed = op.workspace_bytes or 0
        if op.phase == "update":  # by float32 gradients; on NumPy the rule needs more than that
            nbytes = sum(
                self._allocs[a.tensor].nbytes for a in op.writes if a.tensor in self._copies
            )
            return max(needed, nbytes)
        if self._on_host:
            return needed + (COPIES * saved if op.name in FROM_COLUMNS else 0)
        return round(needed * (1 - saved / before)) if before and saved > 0 else needed

    def _cast(self, op: Op, tensor: int, copies: dict[int, Access]) -> Iterator[Event]:
        """What an operation is given in the place of a part of a tensor of another type."""
        used = [access for access in op.reads if access.tensor == tensor]
        start, stop = min(a.start for a in used), max(a.stop for a in used)
        is_half = tensor in self._halves
        nbytes = stop - start if is_half else (stop - start) // 2
        copy = next(self._fresh)
        copies[tensor] = Access(copy, start, stop)
        yield Alloc(copy, nbytes, "activation", CAST)
        if self._allocs[tensor].kind != "input":
            reads = self._typed([Access(tensor, start, stop)], {})
            writes, traffic = (Access(copy, 0, nbytes),), (stop - start) * 3 // 2
            elements = (stop - start) // 4
            yield Op(CAST, op.phase, reads, writes, elements, traffic, workspace_bytes=0)
        places = {place for place, access in enumerate(op.reads) if access.tensor == tensor}
        if op.entry is None or places.isdisjoint(op.entry.retained):
            self._passing.append(copy)
        else:
            self._casts.setdefault(op.entry.number, []).append(copy)

    def _typed(
        self, accesses: Iterable[Access], copies: Mapping[int, Access]
    ) -> tuple[Access, ...]:
        found = []
        for tensor, start, stop in accesses:
            now, whole = self._bytes(tensor), max(1, self._allocs[tensor].nbytes)
            copy = copies.get(tensor)
            if copy is None:
                found.append(Access(tensor, start * now // whole, stop * now // whole))
            else:
                share = 1 if tensor in self._halves else 2
                begin, end = (start - copy.start) // share, (stop - copy.start) // share
                found.append(Access(copy.tensor, begin, end))
        return tuple(found)


def _sum(op: Op) -> int:
    return sum(stop - start for _, start, stop in (*op.reads, *op.writes))


def _whole_numbers(trace: Trace) -> set[int]:
    """What functions read as whole numbers."""
    return {
        op.reads[place].tensor
        for op in trace.ops
        if (place := WHOLE_NUMBERS.get(op.name)) is not None and place < len(op.reads)
    }


def _parameters_of(trace: Trace, names: frozenset[str], allocs: Mapping[int, Alloc]) -> set[int]:
    return {
        access.tensor
        for op in trace.ops
        if op.name in names
        for access in op.reads
        if allocs[access.tensor].kind == "parameter"
    }
