"""What a recorder has stored: events in few plain values, decoded when somebody asks."""

from __future__ import annotations

from typing import Any, NamedTuple

from umem.trace.events import Access, Alloc, Event, Free, Op
from umem.trace.recording.storage import Reach
from umem.trace.stacks import Reader

Raw = Any
"""An event as it is stored.

- `Free`: the tensor's number.
- `Alloc`: (tensor, 0, nbytes, kind, label, uploaded), then the stack's places where they are kept.
  So it is also an access to the whole tensor, and stands for one in operations.
- `Op`: (how many reads, its fields but for accesses, then the accesses that it reads and writes).
  None among them is an array that was not there; None as traffic is every byte of them once.
- `Hint` and `Mark`, of which there are few: as they are.
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
        if type(raw[1]) is str:
            return decode_op(raw)
        tensor, _, nbytes, kind, label, uploaded, *stacks = raw
        stack = self._reader.texts(stacks[0]) if stacks else ()
        return Alloc(tensor, nbytes, kind, label, uploaded, stack)

    def drop_before(self, boundary: Boundary) -> None:
        """Forget what was stored before it, but for the allocations that were alive there."""
        self.raw[: boundary.position] = boundary.beginning
        self._decoded.clear()


def decode_op(raw: Raw) -> Op:
    """The operation that a stored one stands for."""
    read_count, name, phase, flops, traffic, pattern, seconds, workspace, *accesses = raw
    reads = _accesses(accesses[:read_count])
    writes = _accesses(accesses[read_count:])
    if traffic is None:
        traffic = sum(access.stop - access.start for access in (*reads, *writes))
    return Op(name, phase, reads, writes, flops, traffic, pattern, seconds, workspace)


def _accesses(reaches: list[Reach | None]) -> tuple[Access, ...]:
    return tuple(Access(*reach[:3]) for reach in reaches if reach is not None)
