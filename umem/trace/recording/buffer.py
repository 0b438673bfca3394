"""The store of a recording: events as few plain values, decoded on demand."""

from __future__ import annotations

from typing import Any, NamedTuple

from umem._common.stacks import Reader
from umem.trace.events import Alloc, Event, Free, Op, accesses

Raw = Any
"""An event as it is stored.

- `Free`: the tensor's number.
- `Alloc`: (tensor, 0, nbytes, kind, label, uploaded), then the stack's places where stacks are
  recorded. The tuple is also the access to the whole tensor in stored operations.
- `Op`: (number of reads, its fields without the accesses, then its reads and its writes). An access
  of None is an argument that was None; traffic of None is every byte of the accesses once.
- `Hint` and `Mark`, which are few: themselves.
"""


class Boundary(NamedTuple):
    """A position in a store, and the first events of a recording that begins there.

    These are the allocations alive at the position, and the mark ``"start"``.
    """

    position: int
    beginning: tuple[Raw, ...]


class Store:
    """The events of one recording, decoded on demand.

    While recording, an event is a number or one tuple of plain values, which the garbage collector
    stops tracking once it has seen it. Tracking named tuples, lists or tuples of tuples would cost
    more time than all the rest of recording.

    Attributes:
        raw: the stored events; see `Raw`.
    """

    def __init__(self) -> None:
        self.raw: list[Raw] = []
        self._decoded: list[Event] = []
        self._reader = Reader()
        self._names: dict[int, tuple[str, str]] = {}

    def rename(self, tensor: int, kind: str, label: str) -> None:
        """Set a tensor's kind and label, which become known after its allocation was stored."""
        self._names[tensor] = kind, label
        self._decoded.clear()

    def __len__(self) -> int:
        return len(self.raw)

    def events(self) -> list[Event]:
        """Return all events, decoded; only those stored since the last call cost time."""
        self._decoded += [self._decode(raw) for raw in self.raw[len(self._decoded) :]]
        return list(self._decoded)

    def _decode(self, raw: Raw) -> Event:
        """Decode one stored event; tensors have their latest kind and label."""
        if type(raw) is int:
            return Free(raw)
        if type(raw) is not tuple:  # an event
            return raw  # type: ignore[no-any-return]
        if type(raw[1]) is str:
            op = decode_op(raw)
            return op._replace(reads=accesses(op.reads), writes=accesses(op.writes))
        tensor, _, nbytes, kind, label, uploaded, *stacks = raw
        kind, label = self._names.get(tensor, (kind, label))
        stack = self._reader.texts(stacks[0]) if stacks else ()
        return Alloc(tensor, nbytes, kind, label, uploaded, stack)

    def drop_before(self, boundary: Boundary) -> None:
        """Replace the events before a boundary by the boundary's own events."""
        self.raw[: boundary.position] = boundary.beginning
        self._decoded.clear()


def decode_op(raw: Raw) -> Op:
    """Decode a stored operation; its accesses are plain tuples, for speed."""
    read_count, name, phase, flops, traffic, pattern, seconds, workspace, *rest = raw
    kernels, arithmetic, *accesses = rest
    reads = tuple([reach[:3] for reach in accesses[:read_count] if reach is not None])
    writes = tuple([reach[:3] for reach in accesses[read_count:] if reach is not None])
    if traffic is None:
        traffic = 0
        for _, start, stop in reads + writes:
            traffic += stop - start
    fields = (
        name, phase, reads, writes, flops, traffic, pattern, seconds, workspace, None, kernels,
        arithmetic,
    )  # fmt: skip
    return tuple.__new__(Op, fields)
