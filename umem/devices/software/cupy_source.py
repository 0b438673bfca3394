"""The source of recordings of CuPy on the software GPU: kernels, copies, library calls.

Tensors are the blocks that CuPy's memory pool hands out, known by their address: the pool's hooks
tell of their beginning and end. Inside a framework's function the function as a whole is followed,
with what the pool handed out at most meanwhile as its workspace.

Models: reads and writes by the byte range of arrays, of a whole block where a kernel gets a plain
pointer; copies from the host. Does not model: memory that was not a pool's, whose whole allocation
is one tensor; blocks of other threads that were handed out before they recorded anything.
"""

from __future__ import annotations

import gc
import re
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any

from umem.devices.software.runtime import HostRuntime
from umem.trace.events import Access, Op
from umem.trace.recording.meter import HeldBytes, meters
from umem.trace.recording.recorder import Reach, Recorder, active, inside
from umem.trace.recording.sources import add_source
from umem.trace.recording.storage import tellers

_TYPES = re.compile(r"__\w*$")


class CupySource:
    """Reports CuPy's operations outside of a framework's functions to recorders.

    Args:
        runtime: is told of them.
        cupy: the module.
    """

    name = "software"

    def __init__(self, runtime: HostRuntime, cupy: Any) -> None:
        self._runtime = runtime
        self._array = cupy.ndarray
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._held_bytes = self._peak_bytes = 0
        self._is_on = False
        self._hook = _hook(cupy, self)
        self._hooked = threading.local()
        add_source(self)
        tellers.append(self)
        meters.append(self)

    # -- a source --------------------------------------------------------------------------

    def start(self) -> None:
        """Start reporting."""
        self._is_on = True
        self._runtime.listener = self
        self._find()
        self._watch()

    def stop(self) -> None:
        """Stop reporting."""
        self._runtime.listener = None
        self._is_on = False
        self._starts, self._sizes = [], {}

    def _watch(self) -> None:
        """Install the hook for this thread's pool blocks: hooks are a thread's own, and stay."""
        if not getattr(self._hooked, "done", False):
            self._hooked.done = True
            self._hook.__enter__()

    def _find(self) -> None:
        """Find the blocks of the arrays that are there."""
        for found in gc.get_objects():
            if type(found) is self._array and found.base is None and found.nbytes:
                self._begin(found.data.mem.ptr, _size(found))

    # -- a meter ---------------------------------------------------------------------------

    def held(self) -> HeldBytes:
        """Return the bytes that the pool has handed out, now and at most, from an arbitrary
        zero.
        """
        return HeldBytes(self._held_bytes, self._peak_bytes)

    def reset(self) -> None:
        """Reset the peak."""
        self._peak_bytes = self._held_bytes

    # -- what the pool tells ---------------------------------------------------------------

    def block_of(self, root: Any) -> tuple[int, int]:
        """Return address and size of the pool block that an array is in."""
        self._watch()
        address = root.data.mem.ptr
        return address, self._sizes.get(address) or _size(root)

    def begun(self, address: int, nbytes: int, held: int) -> None:
        """Record that a pool block was handed out."""
        if self._is_on:
            self._held_bytes += held
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
            if address in self._sizes:  # it ended in another thread
                self._end(address)
            self._begin(address, nbytes)

    def ended(self, address: int, held: int) -> None:
        """Record that a pool block was freed; garbage collection may call it at any moment."""
        if self._is_on:
            self._held_bytes -= held
            self._end(address)

    def _begin(self, address: int, nbytes: int) -> None:
        with self._runtime.lock:
            if address not in self._sizes:
                insort(self._starts, address)
            self._sizes[address] = nbytes

    def _end(self, address: int) -> None:
        with self._runtime.lock:
            if self._sizes.pop(address, None) is not None:
                del self._starts[bisect_left(self._starts, address)]
        for recorder in active():
            recorder.block_freed(address)

    # -- what the runtime tells ------------------------------------------------------------

    def operation(self, op: Op, addresses: dict[int, int]) -> None:
        """Record an operation; ``addresses`` maps an allocation's number to its address."""
        if inside():
            return
        for recorder in active():
            self._watch()
            name = _TYPES.sub("", op.name.removeprefix("cupy_")) or op.name
            reads = self._reaches(recorder, op.reads, addresses, name, uploaded=True)
            writes = self._reaches(recorder, op.writes, addresses, name)
            recorder.emit_op(
                name, "array", reads, writes, op.flops, op.traffic_bytes, op.pattern, None, 0
            )

    def uploaded(self, access: Access, addresses: dict[int, int]) -> None:
        """Record a copy from the host: a new tensor's contents, or an operation."""
        if inside():
            return
        for recorder in active():
            self._watch()
            count = recorder.tensor_count
            found = self._reaches(recorder, (access,), addresses, "array", uploaded=True)
            if recorder.tensor_count == count:
                recorder.emit_op("memcpy", "array", [], found, 0, None, "stream", None, 0)

    def _reaches(
        self,
        recorder: Recorder,
        accesses: Sequence[Access],
        addresses: dict[int, int],
        label: str,
        uploaded: bool = False,
    ) -> list[Reach]:
        """Return the recorder's accesses for those of the model."""
        return [
            self._reach(recorder, addresses[access.tensor], access, label, uploaded)
            for access in accesses
        ]

    def _reach(
        self, recorder: Recorder, base: int, access: Access, label: str, uploaded: bool
    ) -> Reach:
        """Return the recorder's access for one of the model, clipped to its pool block."""
        low, high = base + access.start, base + access.stop
        index = bisect_right(self._starts, low) - 1
        start = self._starts[index] if index >= 0 else -1
        nbytes = self._sizes.get(start, 0)
        if start < 0 or low >= start + nbytes:  # no block of a pool: the whole allocation
            found = self._runtime.allocation_of(low)
            start, nbytes = (base, high - base) if found is None else (base, found.nbytes)
        whole = recorder.block(start, nbytes, label, uploaded=uploaded)
        if low <= start and high >= start + nbytes:
            return whole[:3]
        return whole[0], max(0, low - start), min(high - start, whole[2])


def _size(array: Any) -> int:
    memory = array.data.mem
    return int(array.nbytes if array.data.ptr == memory.ptr else memory.size)


def _hook(cupy: Any, source: CupySource) -> Any:
    """Return a CuPy memory hook that reports pool blocks."""

    class PoolHook(cupy.cuda.memory_hook.MemoryHook):
        name = "umem.software_gpu"

        def malloc_postprocess(self, **told: int) -> None:
            source.begun(told["mem_ptr"], told["size"], told["mem_size"])

        def free_postprocess(self, **told: int) -> None:
            source.ended(told["mem_ptr"], told["mem_size"])

    return PoolHook()
