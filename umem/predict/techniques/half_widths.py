"""Half precision: a float32 step as `umem.chainer.half_precision` has it, as far as a trace shows.

Parameters have 16 bits, but for those of normalisations, and each has a float32 master; what else
has them says `HalfTypes`. A cast is made where a function wants another type, and kept in the place
of what it was made from as long as the function keeps its input. What is given to a step is there
as long as it was in float32.

Models: memory, and what operations move; on NumPy the float32 copies that functions compute with.
Does not model: casts of gradients (one has the type of what its function read), but for that of a
cross entropy's scores; arithmetic in halves, quicker on some GPUs and slower on NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from umem.errors import StateError
from umem.predict.techniques.half_types import BACK_OF_SCORES, NO_SCORES, HalfTypes, is_product
from umem.trace.analysis.half_functions import MOVES
from umem.trace.events import Access, Alloc, Event, Free, Hint, Mark, Op
from umem.trace.trace import Trace

LINE = "umem.chainer.half_precision(model, optimizer)"
SPARSE_PRODUCT = "SparseMatMul"
"""umem's own, which copies halves to float32 and back wherever it runs."""
CAST = "Cast"


def in_half(trace: Trace) -> Trace:
    """The trace in half precision.

    Raises:
        StateError: it is that already, or updates no parameter that could have 16 bits.
    """
    if any(e.label.endswith(".fp32") for e in trace.events if isinstance(e, Alloc)):
        raise StateError("the step is in half precision already")
    types = HalfTypes(trace)
    if not types.masters:
        raise StateError("the step updates no parameter that could have 16 bits")
    return trace.with_events(_Writer(types).events())


class _Writer:
    """Gives the events of a trace with their types."""

    def __init__(self, types: HalfTypes) -> None:
        self._types, self._allocs, self._halves = types, types.allocs, types.halves
        self._fresh = count(1 + max(types.allocs, default=-1))
        self._copies: dict[int, int] = {}
        self._casts: dict[int, dict[int, Access]] = {}  # what a call's backward reads and lets go
        self._with_original: dict[int, list[int]] = {}  # casts that go with what they are made from
        self._passing: list[int] = []  # casts that go with the operation
        self._gone: set[int] = set()  # what went before its time in float32

    def events(self) -> Iterator[Event]:
        """All events with their types."""
        number = -1
        for event in self._types.trace.events:
            if isinstance(event, Alloc):
                yield event._replace(nbytes=self._bytes(event.tensor))
                if event.tensor in self._types.masters:
                    yield self._master(event)
            elif isinstance(event, Op):
                number += 1
                yield from self._op(event, number)
                yield from self._free(self._types.last_uses.get(number, ()))
            elif isinstance(event, Free):
                if event.tensor not in self._gone:
                    yield event
                self._gone.discard(event.tensor)
                yield from map(Free, self._with_original.pop(event.tensor, ()))
            elif isinstance(event, Hint):
                yield event._replace(accesses=self._typed(event.accesses, {}))
            else:
                yield event
                if isinstance(event, Mark) and event.entry is not None:
                    casts = self._casts.pop(event.entry, {})
                    given = (c for n, c in casts.items() if self._allocs[n].kind != "activation")
                    yield from (Free(copy.tensor) for copy in given)

    def _free(self, tensors: Iterable[int]) -> Iterator[Event]:
        for tensor in tensors:
            self._gone.add(tensor)
            yield Free(tensor)

    def _bytes(self, tensor: int) -> int:
        alloc = self._allocs[tensor]
        if alloc.kind == "stash" and alloc.label.startswith(f"{NO_SCORES}."):
            return 0
        return alloc.nbytes // 2 if tensor in self._halves else alloc.nbytes

    def _master(self, alloc: Alloc) -> Alloc:
        copy = self._copies[alloc.tensor] = next(self._fresh)
        label = f"{self._types.masters[alloc.tensor]}.fp32"
        return alloc._replace(tensor=copy, kind="state", label=label)

    def _op(self, op: Op, number: int) -> Iterator[Event]:
        cast = self._types.casts.get(number, [])
        copies: dict[int, Access] = {}
        for tensor in dict.fromkeys(cast):
            yield from self._cast(op, tensor, copies)
        if op.phase == "backward":
            copies = self._casts.get(self._types.backward_of.get(number, -1), {})
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
        inside = None if op.workspace_bytes is None else self._inside(op, saved, before, cast)
        traffic = max(0, op.traffic_bytes - saved)
        small = small._replace(traffic_bytes=traffic, workspace_bytes=inside)
        is_cast = op.name == BACK_OF_SCORES and op.writes[0].tensor in self._halves
        yield from self._cast_back(op, small) if is_cast else [small]
        yield from map(Free, self._passing)
        self._passing.clear()

    def _inside(self, op: Op, saved: int, before: int, cast: Sequence[int]) -> int:
        """What an operation needs only while it runs."""
        needed = op.workspace_bytes or 0
        if op.phase == "update":  # of the master, by its gradient in float32
            masters = [a.tensor for a in op.writes if a.tensor in self._copies]
            return needed + sum(self._allocs[tensor].nbytes for tensor in masters)
        if op.name == SPARSE_PRODUCT:
            return needed + sum(a.stop - a.start for a in _in_halves(op, self._halves))
        if self._types.on_host:
            return self._in_float32(op, needed, cast)
        return round(needed * (1 - saved / before)) if before and saved > 0 else needed

    def _cast_back(self, op: Op, small: Op) -> Iterator[Event]:
        """Give a gradient in float32, and cast it to the half that is allocated already."""
        (half,), single = small.writes, self._allocs[op.writes[0].tensor]
        copy = Access(next(self._fresh), 0, single.nbytes)
        yield single._replace(tensor=copy.tensor)
        needed = op.workspace_bytes and max(0, op.workspace_bytes - single.nbytes // 2)
        yield small._replace(writes=(copy,), traffic_bytes=op.traffic_bytes, workspace_bytes=needed)
        elements, traffic = single.nbytes // 4, single.nbytes * 3 // 2
        yield Op(CAST, op.phase, (copy,), (half,), elements, traffic, workspace_bytes=0)
        yield Free(copy.tensor)

    def _in_float32(self, op: Op, needed: int, cast: Sequence[int]) -> int:
        """On NumPy, with float32 copies of the halves that an operation reads and writes.

        Those that it writes are there before the halves are.
        """
        read = [
            a.stop - a.start
            for a in op.reads
            if is_product(op) or (a.tensor in self._halves) != (a.tensor in cast)
        ]
        if op.name in MOVES or not read:
            return needed
        made = sum(a.stop - a.start for a in op.writes if a.tensor in self._halves)
        return max(needed + sum(read) + made - made // 2, made)

    def _cast(self, op: Op, tensor: int, copies: dict[int, Access]) -> Iterator[Event]:
        """What an operation is given in the place of a part of a tensor of another type."""
        used = [access for access in op.reads if access.tensor == tensor]
        start, stop = min(a.start for a in used), max(a.stop for a in used)
        is_half = tensor in self._halves
        nbytes = stop - start if is_half else (stop - start) // 2
        copy = next(self._fresh)
        copies[tensor] = Access(copy, start, stop)
        yield Alloc(copy, nbytes, "activation", CAST)
        reads = self._typed([Access(tensor, start, stop)], {})
        writes, traffic = (Access(copy, 0, nbytes),), (stop - start) * 3 // 2
        elements = (stop - start) // 4
        yield Op(CAST, op.phase, reads, writes, elements, traffic, workspace_bytes=0)
        places = {place for place, access in enumerate(op.reads) if access.tensor == tensor}
        if op.entry is None or places.isdisjoint(op.entry.retained):
            self._passing.append(copy)
        else:
            self._casts.setdefault(op.entry.number, {})[tensor] = copies[tensor]
            if self._allocs[tensor].kind == "activation":
                self._with_original.setdefault(tensor, []).append(copy)

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


def _in_halves(op: Op, halves: set[int]) -> list[Access]:
    return [access for access in (*op.reads, *op.writes) if access.tensor in halves]
