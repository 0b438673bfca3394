"""The source of recordings of CuPy on a GPU: the blocks that its pools allocate.

Tensors are those blocks, identified by address: a memory hook reports their begin and end. A
framework's function is recorded as a whole, and the pools' meter measures its workspace.

Does not model: kernels, library calls and copies outside a framework's functions, which no hook of
CuPy reports; blocks that other threads allocated before they recorded anything; frees in threads
that record nothing, which are noticed when the memory is allocated again.
"""

from __future__ import annotations

import gc
from bisect import bisect_left, insort
from typing import Any

import cupy

from umem._common.locks import safe_lock
from umem.devices.cuda.pool_meter import PoolMeter
from umem.errors import UmemError
from umem.trace.recording import Lifetimes, active, inside, of_gpu, reporters


class CupyBlocks:
    """Reports the blocks of CuPy's pools to recorders, and measures the workspace of functions.

    Attributes:
        name: the backend's name in recordings.
        meter: the meter of the pools.

    Never run on a real GPU.
    """

    name = "cupy"

    def __init__(self) -> None:
        self.meter = PoolMeter(self)
        self._lock = safe_lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._is_on = False

    # -- a source --------------------------------------------------------------------------

    def start(self) -> None:
        """Start reporting, existing arrays included; does nothing in a forked child."""
        try:
            self.meter.start()
        except UmemError:
            return
        self._is_on = True
        reporters[:], of_gpu[:] = [self], [self.meter]
        for found in gc.get_objects():
            if type(found) is cupy.ndarray and found.base is None and found.nbytes:
                self._begin(found.data.mem.ptr, _size(found))

    def stop(self) -> None:
        """Stop reporting; does nothing if not started."""
        self.meter.stop()
        reporters.clear()
        of_gpu.clear()
        self._is_on = False
        self._starts, self._sizes = [], {}

    # -- what the pools tell ---------------------------------------------------------------

    def entered(self, recorder: Lifetimes) -> None:
        """Report existing arrays to a recorder, and follow its thread."""
        self.meter.follow_thread()
        for address in [*self._starts]:
            recorder.block(address, self._sizes[address], "array", uploaded=True)

    def block_of(self, root: Any) -> tuple[int, int]:
        """Return address and size of the pool block that contains an array."""
        self.meter.follow_thread()
        address = root.data.mem.ptr
        return address, self._sizes.get(address) or _size(root)

    def begun(self, address: int, nbytes: int) -> None:
        """Record that a pool block was allocated; outside a function it is an array."""
        if self._is_on:
            if address in self._sizes:  # it ended in another thread
                self._end(address)
            self._begin(address, nbytes)
            self._made(address, nbytes)

    def _made(self, address: int, nbytes: int) -> None:
        """Record an array that the program made itself, which no operation will report."""
        if not inside():
            for recorder in active():
                recorder.block(address, nbytes, "array")

    def ended(self, address: int) -> None:
        """Record that a pool block was freed; garbage collection may call it at any moment."""
        if self._is_on:
            self._end(address)

    def _begin(self, address: int, nbytes: int) -> None:
        with self._lock:
            if address not in self._sizes:
                insort(self._starts, address)
            self._sizes[address] = nbytes

    def _end(self, address: int) -> None:
        with self._lock:
            if self._sizes.pop(address, None) is not None:
                del self._starts[bisect_left(self._starts, address)]
        for recorder in active():
            recorder.block_freed(address)


def _size(array: Any) -> int:
    memory = array.data.mem
    return int(array.nbytes if array.data.ptr == memory.ptr else memory.size)
