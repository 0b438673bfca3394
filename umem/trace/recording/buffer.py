"""What a recorder has stored: events in few plain values, decoded when somebody asks."""

from __future__ import annotations

from typing import Any, NamedTuple

from umem.trace.events import OUTSIDE, Access, Alloc, Event, Free, Mark, Op, TapeEntry
from umem.trace.stacks import Reader

Raw = Any
"""An event as it is stored.

- `Free`: the tensor's number.
- `Alloc`: (tensor, 0, nbytes, kind, label, uploaded), then the stack's places where they are kept.
  So it is also an access to the whole tensor, and stands for one in operations.
- `Op`: (how many reads, its fields but for accesses, then the accesses that it reads and writes).
  None among them is an array that was not there; None as traffic is every byte of them once.
- `Mark` of an entry's backward: (the number).
- `Hint` and other `Mark`, of which there are few: as they are.
"""


class Boundary(NamedTuple):
    """A place in what is stored, and how a recording begins there.

    That is with the allocations that were alive there and the mark ``"start"``.
    """

    position: int
    beginning: tuple[Raw, ...]


class Store:
    """The events of one recording, decoded when somebody asks.

    While recording, an event is a number or one tuple of plain values: the garbage collector
    leaves those alone once it has seen them, while walking through named tuples, lists and tuples
    of tuples costs more than the rest of recording.
    """

    def __init__(self) -> None:
        self.raw: list[Raw] = []
        self._decoded: list[Event] = []
        self._reader = Reader()
        self.first_entry = 0
        self._names: dict[int, tuple[str, str]] = {}

    def rename(self, tensor: int, kind: str, label: str) -> None:
        """Give a tensor the kind and label that were learnt after it was allocated."""
        self._names[tensor] = kind, label
        self._decoded.clear()

    def __len__(self) -> int:
        return len(self.raw)

    def events(self) -> list[Event]:
        """Everything that is stored."""
        self._decoded += [self._decode(raw) for raw in self.raw[len(self._decoded) :]]
        return list(self._decoded)

    def _decode(self, raw: Raw) -> Event:
        if type(raw) is int:
            return Free(raw)
        if type(raw) is not tuple:  # an event
            return raw  # type: ignore[no-any-return]
        if len(raw) == 1:
            number = raw[0] - self.first_entry
            return Mark("backward", number if number >= 0 else None)
        if type(raw[1]) is str:
            op = decode_op(raw)
            reads, writes = _accesses(op.reads), _accesses(op.writes)
            return op._replace(reads=reads, writes=writes, entry=self._entry(op.entry))
        tensor, _, nbytes, kind, label, uploaded, *stacks = raw
        kind, label = self._names.get(tensor, (kind, label))
        stack = self._reader.texts(stacks[0]) if stacks else ()
        return Alloc(tensor, nbytes, kind, label, uploaded, stack)

    def _entry(self, entry: TapeEntry | None) -> TapeEntry | None:
        """The entry with calls numbered from the recording's first."""
        if entry is None:
            return None
        first = self.first_entry
        sources = [s if s < 0 else s - first if s >= first else OUTSIDE for s in entry.sources]
        return TapeEntry(entry.number - first, tuple(sources), *entry[2:])

    def drop_before(self, boundary: Boundary) -> None:
        """Forget what was stored before it, but for the allocations that were alive there."""
        self.raw[: boundary.position] = boundary.beginning
        self._decoded.clear()


def decode_op(raw: Raw) -> Op:
    """The operation that a stored one stands for, its accesses as plain tuples for speed."""
    read_count, name, phase, flops, traffic, pattern, seconds, workspace, entry, *accesses = raw
    reads = tuple([reach[:3] for reach in accesses[:read_count] if reach is not None])
    writes = tuple([reach[:3] for reach in accesses[read_count:] if reach is not None])
    if traffic is None:
        traffic = 0
        for _, start, stop in reads + writes:
            traffic += stop - start
    if entry is not None:
        entry = TapeEntry(*entry)
    fields = name, phase, reads, writes, flops, traffic, pattern, seconds, workspace, entry
    return tuple.__new__(Op, fields)


def _accesses(plain: tuple[Any, ...]) -> tuple[Access, ...]:
    return tuple(Access(*reach) for reach in plain)
