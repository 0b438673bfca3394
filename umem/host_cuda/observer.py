"""The observer: it is told what happens on the devices, and asked what is allowed and when.

A runtime has one. Without one of the caller's it is `Observer` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from umem._common.arithmetic import FLOAT32
from umem._common.locks import safe_lock
from umem._common.specs import GpuSpec
from umem.host_cuda.memory_ranges import DEVICE, Allocation, MemoryRange


class Launch(NamedTuple):
    """An operation on a device: a kernel, or that of a library.

    Attributes:
        reads, writes: the memory that it accesses, each byte once.
        stream: of a kernel; None if it is not known.
        flops: its floating-point operations, 0 if they are not known.
        gathered_bytes: what it reads besides, where it reads rows of its last operand several
            times.
        arithmetic: the kind of its flops; see `umem._common.arithmetic`.
    """

    name: str
    device: int
    reads: Sequence[MemoryRange]
    writes: Sequence[MemoryRange]
    stream: int | None = None
    flops: int = 0
    gathered_bytes: int = 0
    arithmetic: str = FLOAT32


class DeviceCopy(NamedTuple):
    """A copy on a device's stream; a side that is memory of the host is None, and one side is not.

    ``is_pinned`` says that memory of the host is, so that the copy runs beside kernels.
    """

    device: int
    stream: int
    read: MemoryRange | None
    write: MemoryRange | None
    is_pinned: bool


class Observer:
    """Counts allocated bytes against VRAM, so that memory runs out as on a GPU; no time passes.

    Subclasses override what they want to hear or decide. Devices are given by their numbers, times
    in simulated seconds.

    Models: memory of devices takes VRAM. Does not model: managed memory in VRAM, time.

    Args:
        spec: the GPU.
        count: how many of them there are.

    Attributes:
        lock: guards it, and is the runtime's too: the garbage collector, which may free memory at
            any moment, would take two of them in either order.
    """

    def __init__(self, spec: GpuSpec, count: int = 1) -> None:
        self.spec = spec
        self.lock = safe_lock()
        self._used_bytes = [0] * count

    @property
    def follows_work(self) -> bool:
        """Tell whether it wants to be told of launches, copies and hints.

        The runtime does not look up what memory they use otherwise.
        """
        return False

    @property
    def wants_order(self) -> bool:
        """Tell whether calls of libraries are to be told of in the program's order.

        They are done at once then, though streams be late.
        """
        return False

    # -- asked -----------------------------------------------------------------------------

    def may_allocate(self, memory: Allocation) -> bool:
        """Reserve room for an allocation of a device's or managed memory, if there is any.

        Its address is not known yet. `allocated` follows, or `freed` where the host has no memory.
        """
        if memory.kind == DEVICE:
            if memory.nbytes > self.free_bytes(memory.device):
                return False
            self._used_bytes[memory.device] += memory.nbytes
        return True

    def free_bytes(self, device: int) -> int:
        """Return the VRAM that is free."""
        return max(0, self.spec.usable_bytes - self._used_bytes[device])

    def seconds_of(self, stream: int, device: int) -> float:
        """Return when a stream's work so far is done."""
        return 0.0

    # -- told of memory --------------------------------------------------------------------

    def allocated(self, memory: Allocation) -> None:
        """Hear of an allocation, pinned memory of the host included."""

    def freed(self, memory: Allocation) -> None:
        """Hear of the end of an allocation."""
        if memory.kind == DEVICE:
            with self.lock:
                self._used_bytes[memory.device] -= memory.nbytes

    # -- told of work ----------------------------------------------------------------------

    def launched(self, launch: Launch) -> None:
        """Hear of an operation before it runs, or as it is queued."""

    def copied(self, copy: DeviceCopy) -> None:
        """Hear of a copy before it runs, or as it is queued."""

    def prefetched(
        self, ranges: Sequence[MemoryRange], device: int | None, *, overlap: bool
    ) -> None:
        """Hear of a prefetch of managed memory; None is the host.

        ``overlap`` says that it runs beside the operations.
        """

    def discarded(self, ranges: Sequence[MemoryRange]) -> None:
        """Hear of a discard of managed memory."""

    def advised(
        self, ranges: Sequence[MemoryRange], advice: str, device: int | None, *, unset: bool
    ) -> None:
        """Hear of advice on managed memory: ``read_mostly``, ``preferred_location`` and the like.

        None is the host. ``unset`` says that the advice ends.
        """

    # -- told of waits ---------------------------------------------------------------------

    def host_waited(self, device: int) -> None:
        """Hear that the host waits until a device is done."""

    def host_waited_until(self, device: int, seconds: float) -> None:
        """Hear that the host waits until a time, for an event of a device."""

    def stream_waited(self, stream: int, device: int, seconds: float) -> None:
        """Hear that a stream waits until a time, for an event."""
