"""The source of recordings of CuPy on the software GPU: kernels, copies, library calls.

Beside blocks, as on any GPU, it sees the calls of the stand-ins of the driver and libraries.

Models: reads and writes by the byte range of arrays, or to the end of its block for a plain pointer
of a kernel; copies from the host. Does not model: memory outside pools, whose whole allocation is
one tensor; blocks that other threads allocated before they recorded anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from umem.devices.cuda.cupy_blocks import CupyBlocks
from umem.devices.software.recording_observer import RecordingObserver
from umem.host_cuda import Launch, MemoryRange
from umem.trace import Op
from umem.trace.recording import Lifetimes, Reach, Recorder, active, inside

_TYPES = re.compile(r"__\w*$")


class CupySource(CupyBlocks):
    """Reports CuPy's operations outside a framework's functions to recorders.

    Args:
        observer: notifies it of operations.
    """

    name = "software"

    def __init__(self, observer: RecordingObserver) -> None:
        super().__init__()
        self._observer = observer

    def start(self) -> None:
        """Start reporting."""
        super().start()
        self._observer.listener = self

    def stop(self) -> None:
        """Stop reporting."""
        self._observer.listener = None
        super().stop()

    def entered(self, recorder: Lifetimes) -> None:
        """Follow a recorder's thread; an operation reports the arrays that it uses."""
        self.meter.follow_thread()

    def _made(self, address: int, nbytes: int) -> None:
        """Do nothing: the operation that writes the array reports it."""

    # -- what the observer hears -----------------------------------------------------------

    def operation(self, op: Op, launch: Launch) -> None:
        """Record an operation."""
        if inside():
            return
        for recorder in active():
            self.meter.follow_thread()
            name = _TYPES.sub("", op.name.removeprefix("cupy_")) or op.name
            read = [self._reach(recorder, each, name, True) for each in launch.reads]
            written = [self._reach(recorder, each, name, False) for each in launch.writes]
            recorder.emit_op(
                name, "array", read, written, op.flops, op.traffic_bytes, op.pattern, None, 0,
                arithmetic=op.arithmetic,
            )  # fmt: skip

    def uploaded(self, access: MemoryRange) -> None:
        """Record a copy from the host: a new tensor's contents, or an operation."""
        if inside():
            return
        for recorder in active():
            self.meter.follow_thread()
            count = recorder.tensor_count
            found = [self._reach(recorder, access, "array", True)]
            if recorder.tensor_count == count:
                recorder.emit_op("memcpy", "array", [], found, 0, None, "stream", None, 0)

    def _reach(self, recorder: Recorder, access: MemoryRange, label: str, uploaded: bool) -> Reach:
        """Convert an access of the runtime for the recorder, clipped to its pool block."""
        memory, low, high = access.memory, access.low, access.high
        index = bisect_right(self._starts, low) - 1
        start = self._starts[index] if index >= 0 else -1
        nbytes = self._sizes.get(start, 0)
        if start < 0 or low >= start + nbytes:  # no block of a pool: the whole allocation
            start, nbytes = memory.address, memory.nbytes
        whole = recorder.block(start, nbytes, label, uploaded=uploaded)
        if low <= start and high >= start + nbytes:
            return whole[:3]
        return whole[0], max(0, low - start), min(high - start, whole[2])
