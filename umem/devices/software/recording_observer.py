"""The observer of a software GPU without a model: it notifies recorders; memory never runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from umem.host_cuda import Allocation, DeviceCopy, Launch, MemoryRange, Observer
from umem.trace import GET, Access, Op

_GATHERS = ("cupy_take", "cupy_getitem", "cupy_scatter", "cupy_cupyx_scatter")
"""CuPy's kernels that access memory at computed indices."""


class Listener(Protocol):
    """Interface of recorders."""

    def operation(self, op: Op, launch: Launch) -> None:
        """Record an operation, given as an event and as a launch."""

    def uploaded(self, access: MemoryRange) -> None:
        """Record a copy from the host."""

    def ended(self, address: int) -> None:
        """Record that the memory at an address was freed."""


class RecordingObserver(Observer):
    """Notifies a recorder of events on the devices.

    Attributes:
        listener: notified of operations; None without a recorder.
    """

    listener: Listener | None = None

    @property
    def follows_work(self) -> bool:
        return self.listener is not None

    @property
    def wants_order(self) -> bool:
        return self.listener is not None

    def may_allocate(self, memory: Allocation) -> bool:
        return True

    def free_bytes(self, device: int) -> int:
        return self.spec.usable_bytes

    def freed(self, memory: Allocation) -> None:
        if self.listener is not None:
            self.listener.ended(memory.address)

    def launched(self, launch: Launch) -> None:
        if self.listener is not None:
            self.listener.operation(event_of(launch), launch)

    def copied(self, copy: DeviceCopy) -> None:
        if self.listener is None:
            return
        if copy.read is not None:
            name, writes = (GET, ()) if copy.write is None else ("memcpy", (copy.write,))
            launch = Launch(name, copy.device, (copy.read,), writes, copy.stream)
            self.listener.operation(event_of(launch), launch)
        elif copy.write is not None:
            self.listener.uploaded(copy.write)


def event_of(launch: Launch) -> Op:
    """Return an operation's event; some operations gather what they write."""
    name, _, reads, writes, _, flops, gathered_bytes, arithmetic = launch
    read, written = ([stop - start for _, start, stop in each] for each in (reads, writes))
    traffic, pattern = sum(read) + sum(written), "stream"
    if name.startswith(_GATHERS) and read:
        traffic, pattern = min(traffic, traffic - max(read) + sum(written)), "random"
    if gathered_bytes:
        traffic, pattern = traffic + gathered_bytes, "random"
    return Op(
        name, "array", accesses_of(reads), accesses_of(writes), flops, traffic, pattern,
        arithmetic=arithmetic,
    )  # fmt: skip


def accesses_of(ranges: Sequence[MemoryRange]) -> tuple[Access, ...]:
    """Convert accesses for events, which identify allocations by number."""
    return tuple([Access(memory.number, start, stop) for memory, start, stop in ranges])
