"""The observer of a software GPU without its model: recorders are told, and nothing is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from umem._common.arithmetic import FLOAT32
from umem.host_cuda import Allocation, MemoryRange, Observer
from umem.trace import GET, Access, Op

_GATHERS = ("cupy_take", "cupy_getitem", "cupy_scatter", "cupy_cupyx_scatter")
"""CuPy's kernels that access memory at computed indexes."""


class Listener(Protocol):
    """Interface of recorders."""

    def operation(
        self, op: Op, reads: Sequence[MemoryRange], writes: Sequence[MemoryRange]
    ) -> None:
        """Record an operation."""

    def uploaded(self, access: MemoryRange) -> None:
        """Record a copy from the host."""

    def ended(self, address: int) -> None:
        """Record that the memory at an address was freed."""


class RecordingObserver(Observer):
    """Tells a recorder of what happens on the devices.

    Attributes:
        listener: is told of operations; None without a recorder.
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

    def launched(
        self,
        name: str,
        device: int,
        stream: int | None,
        reads: Sequence[MemoryRange],
        writes: Sequence[MemoryRange],
        flops: int,
        gathered_bytes: int,
        arithmetic: str,
    ) -> None:
        if self.listener is not None:
            op = operation(name, reads, writes, flops, gathered_bytes, arithmetic)
            self.listener.operation(op, reads, writes)

    def copied(
        self,
        device: int,
        stream: int,
        read: MemoryRange | None,
        write: MemoryRange | None,
        is_pinned: bool,
    ) -> None:
        if self.listener is None:
            return
        if read is None:
            assert write is not None  # one of the two is memory of a device
            self.listener.uploaded(write)
        else:
            writes = () if write is None else (write,)
            op = operation(GET if write is None else "memcpy", (read,), writes)
            self.listener.operation(op, (read,), writes)


def operation(
    name: str,
    reads: Sequence[MemoryRange],
    writes: Sequence[MemoryRange],
    flops: int = 0,
    gathered_bytes: int = 0,
    arithmetic: str = FLOAT32,
) -> Op:
    """Return the event of an operation that accesses each byte once, or gathers what it writes."""
    sizes = [stop - start for _, start, stop in reads]
    written = sum(stop - start for _, start, stop in writes)
    traffic, pattern = sum(sizes) + written, "stream"
    if name.startswith(_GATHERS) and sizes:
        traffic, pattern = min(traffic, traffic - max(sizes) + written), "random"
    if gathered_bytes:
        traffic, pattern = traffic + gathered_bytes, "random"
    return Op(
        name, "array", accesses_of(reads), accesses_of(writes), flops, traffic, pattern,
        arithmetic=arithmetic,
    )  # fmt: skip


def accesses_of(ranges: Sequence[MemoryRange]) -> tuple[Access, ...]:
    """Return the accesses of events, which know allocations by their numbers."""
    return tuple([Access(memory.number, start, stop) for memory, start, stop in ranges])
