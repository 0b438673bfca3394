"""The observer: notified of events on the devices, it decides on memory and time.

A runtime has one observer, by default `Observer` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from umem._common.arithmetic import FLOAT32
from umem._common.locks import safe_lock
from umem._common.specs import GpuSpec
from umem.host_cuda.memory_ranges import DEVICE, Allocation, MemoryRange


class Launch(NamedTuple):
    """An operation on a device, of a kernel or a library.

    Attributes:
        reads, writes: the memory that it accesses, each byte once.
        stream: the kernel's stream; None if unknown.
        flops: its floating-point operations, 0 if unknown.
        gathered_bytes: further bytes read, if it reads rows of its last operand several times.
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
    """A copy on a device's stream; a side in host memory is None, but never both sides.

    ``is_pinned`` means that the host memory is pinned, so that the copy runs concurrently with
    kernels.
    """

    device: int
    stream: int
    read: MemoryRange | None
    write: MemoryRange | None
    is_pinned: bool


class Observer:
    """Counts allocated bytes against VRAM, so that memory can run out; no time passes.

    Subclasses override methods for notifications and decisions. Devices are given by number, times
    in simulated seconds.

    Models: device memory takes VRAM. Does not model: managed memory in VRAM, time.

    Args:
        spec: the GPU.
        count: the number of GPUs.

    Attributes:
        lock: guards the observer and the runtime: the garbage collector may free memory at any
            moment, and would take two locks in either order.
    """

    def __init__(self, spec: GpuSpec, count: int = 1) -> None:
        self.spec = spec
        self.lock = safe_lock()
        self._used_bytes = [0] * count

    @property
    def follows_work(self) -> bool:
        """Tell whether it needs notifications of launches, copies and hints.

        Otherwise the runtime does not look up the memory that they use.
        """
        return False

    @property
    def wants_order(self) -> bool:
        """Tell whether it needs notifications of library calls in the program's order.

        Library calls then run at once, even if streams are late.
        """
        return False

    # -- asked -----------------------------------------------------------------------------

    def may_allocate(self, memory: Allocation) -> bool:
        """Reserve space for device or managed memory; return whether there is space.

        The address is not known yet. `allocated` follows, or `freed` if the host has no memory.
        """
        if memory.kind == DEVICE:
            if memory.nbytes > self.free_bytes(memory.device):
                return False
            self._used_bytes[memory.device] += memory.nbytes
        return True

    def free_bytes(self, device: int) -> int:
        """Return the free bytes of VRAM."""
        return max(0, self.spec.usable_bytes - self._used_bytes[device])

    def seconds_of(self, stream: int, device: int) -> float:
        """Return the time at which a stream's work so far has finished."""
        return 0.0

    # -- told of memory --------------------------------------------------------------------

    def allocated(self, memory: Allocation) -> None:
        """Note an allocation, which may be pinned host memory."""

    def freed(self, memory: Allocation) -> None:
        """Note the end of an allocation."""
        if memory.kind == DEVICE:
            with self.lock:
                self._used_bytes[memory.device] -= memory.nbytes

    # -- told of work ----------------------------------------------------------------------

    def launched(self, launch: Launch) -> None:
        """Note an operation before it runs, or when it is queued."""

    def copied(self, copy: DeviceCopy) -> None:
        """Note a copy before it runs, or when it is queued."""

    def prefetched(
        self, ranges: Sequence[MemoryRange], device: int | None, *, overlap: bool
    ) -> None:
        """Note a prefetch of managed memory; None is the host.

        With ``overlap`` it runs concurrently with operations.
        """

    def discarded(self, ranges: Sequence[MemoryRange]) -> None:
        """Note a discard of managed memory."""

    def advised(
        self, ranges: Sequence[MemoryRange], advice: str, device: int | None, *, unset: bool
    ) -> None:
        """Note advice on managed memory: ``read_mostly``, ``preferred_location`` and so on.

        None is the host. ``unset`` ends the advice.
        """

    # -- told of waits ---------------------------------------------------------------------

    def host_waited(self, device: int) -> None:
        """Note that the host waits for a device."""

    def host_waited_until(self, device: int, seconds: float) -> None:
        """Note that the host waits until a time, for an event of a device."""

    def stream_waited(self, stream: int, device: int, seconds: float) -> None:
        """Note that a stream waits until a time, for an event."""
