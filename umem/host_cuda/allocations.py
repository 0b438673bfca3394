"""Host memory in place of GPU memory, with notifications for its observer.

Allocated memory is real. All devices share one address space. The observer models VRAM and time,
and is notified of every allocation, operation, copy, prefetch and advice.
"""

from __future__ import annotations

import bisect
import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from umem._common.specs import GpuSpec
from umem.host_cuda.device_state import Current, DeviceState
from umem.host_cuda.faults import ILLEGAL_ADDRESS, Fault, Finding, KernelFault
from umem.host_cuda.memory_ranges import HOST, Allocation, MemoryRange
from umem.host_cuda.memory_sources import PlainSource
from umem.host_cuda.observer import DeviceCopy, Launch, Observer
from umem.host_cuda.pool_blocks import PoolBlocks

NO_MEMORY, INVALID_VALUE = 2, 1
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
"""Values of cudaError, from driver_types.h."""


class HostMemory:
    """The allocations of all devices; notifies the observer.

    Args:
        spec: the GPU that it simulates.
        count: how many devices there are.
        observer: replaces the default one, which only counts bytes.

    Attributes:
        devices: the state of each.
        error_type: CuPy's error class for a status.
        source: the source of memory.
        is_checked: whether it is in checked mode.
        is_sticky: whether a fault ends the context of its device.
        fault_type: the error class for a fault.
        context_ends: called after a fault that ends a context.
        kernel_seconds: the limit of a kernel's processor time; None for no limit.
        is_strict: whether it raises CUDA's own errors; see `umem.host_cuda.strictness`.
        lock: held while a kernel runs, because memory shared by its threads is static; so two
            threads of the program take turns.
        thread_begins: called in each thread at its first use.
    """

    def __init__(self, spec: GpuSpec, count: int = 1, observer: Observer | None = None) -> None:
        self.spec = spec
        self.observer = Observer(spec, count) if observer is None else observer
        self.error_type: Any = RuntimeError
        self.lock = self.observer.lock
        self.source = PlainSource()
        self.is_checked = False
        self.is_sticky = True
        self.fault_type: Any = KernelFault
        self.context_ends: Callable[[], None] = lambda: None
        self.is_strict = True
        self.kernel_seconds: float | None = None
        self.devices = [DeviceState(number) for number in range(count)]
        self.thread_begins: Callable[[], None] = lambda: None
        self.current = Current(lambda: self.thread_begins())
        self._starts: list[int] = []
        self._allocations: dict[int, Allocation] = {}
        self._pool_blocks: dict[int, PoolBlocks] = {}  # by number
        self._new_blocks: OrderedDict[int, int] = OrderedDict()  # bytes by address
        self._count = 0
        self._registered: set[int] = set()
        self._postponed: list[int] = []
        self._is_searching = False

    @property
    def is_followed(self) -> bool:
        """Tell whether the observer or other devices need to know the memory that work uses."""
        return self.observer.follows_work or len(self.devices) > 1

    def fail(self, status: int) -> NoReturn:
        """Raise CuPy's error for a status."""
        raise self.error_type(status)

    def end_context(
        self,
        status: int,
        sentence: str,
        device: DeviceState | None = None,
        finding: Finding | None = None,
    ) -> NoReturn:
        """Raise a fault of a device, by default the current one; this ends its context."""
        if self.is_sticky:
            (device or self.here).fault = Fault(status, sentence, finding)
            self.context_ends()
        raise self.fault_type(status, sentence, finding)

    def refuse_ended(self, device: DeviceState) -> None:
        """Raise if a device's context has ended."""
        if device.fault is not None:
            raise self.fault_type(device.fault.status, device.fault.reminder, device.fault.finding)

    def drop_error(self) -> None:
        """Drop a pending error; here there is none."""

    def forget_faults(self) -> tuple[Fault, ...]:
        """Return and clear the faults of all devices, which become usable again."""
        faults = [device.fault for device in self.devices]
        for device in self.devices:
            device.fault = None
        return tuple(fault for fault in faults if fault is not None)

    def refuse_memory(self, nbytes: int) -> NoReturn:
        """Raise because the machine has no memory for an allocation."""
        self.fail(NO_MEMORY)

    @property
    def device_here(self) -> int:
        """Return the number of the calling thread's current device."""
        return self.current.ordinal

    @property
    def here(self) -> DeviceState:
        """Return the calling thread's current device."""
        return self.devices[self.current.ordinal]

    def allocate(self, nbytes: int, kind: int) -> int:
        """Allocate memory of a kind; return its address."""
        with self.lock:
            return self._allocated(nbytes, kind)

    def _allocated(self, nbytes: int, kind: int) -> int:
        """Allocate if both the observer and the host accept; otherwise nothing is allocated."""
        found = Allocation(0, nbytes, kind, self._count, self.device_here)
        if kind != HOST and not self.observer.may_allocate(found):
            self.fail(NO_MEMORY)
        address = self.source.take(nbytes)
        if address is None:
            self.observer.freed(found)
            self.refuse_memory(nbytes)
        self._add(found._replace(address=address))
        return address

    def _add(self, found: Allocation) -> None:
        self._count += 1
        self._allocations[found.address] = found
        bisect.insort(self._starts, found.address)
        self.observer.allocated(found)

    def register(self, address: int, nbytes: int) -> None:
        """Pin the program's own memory, in place.

        Raises CuPy's error for a status if it is empty, or partly pinned or allocated here already.
        """
        if not address or nbytes <= 0:
            self.fail(INVALID_VALUE)
        with self.lock:
            last = bisect.bisect_left(self._starts, address + nbytes) - 1
            before = self._allocations[self._starts[last]] if last >= 0 else None
            if before is not None and before.address + before.nbytes > address:
                known = before.address in self._registered
                self.fail(ALREADY_REGISTERED if known else INVALID_VALUE)
            self._registered.add(address)
            self._add(Allocation(address, nbytes, HOST, self._count, self.device_here))

    def unregister(self, address: int) -> None:
        """Unpin memory that `register` pinned; raises CuPy's error for other memory."""
        with self.lock:
            if address not in self._registered:
                self.fail(NOT_REGISTERED)
            self._registered.remove(address)
            found = self._allocations.pop(address)
            del self._starts[bisect.bisect_left(self._starts, address)]
        self.observer.freed(found)

    def allocation_of(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address; None if there is none."""
        with self.lock:
            was_searching, self._is_searching = self._is_searching, True
            try:
                index = bisect.bisect_right(self._starts, address) - 1
                found = None if index < 0 else self._allocations[self._starts[index]]
            finally:
                self._is_searching = was_searching
        if found is None or address >= found.address + max(1, found.nbytes):
            return None
        return found

    def release(self, ptr: int) -> None:
        """Free memory; null is ignored, and an unknown address returns a status."""
        if not ptr:
            return
        with self.lock:
            is_known = ptr in self._allocations and ptr not in self._registered
            if not is_known or ptr in self._postponed:
                self.fail(INVALID_VALUE)
            self._postponed.append(ptr)
            if self._is_searching:  # the collector frees it in the middle of a search
                return
            self._is_searching = True
            try:
                self._sort_blocks()
                taken = []
                while self._postponed:
                    found = self._allocations.pop(self._postponed.pop())
                    index = bisect.bisect_left(self._starts, found.address)
                    del self._starts[index]
                    self._pool_blocks.pop(found.number, None)
                    taken.append(found)
            finally:
                self._is_searching = False
        for found in taken:
            self.observer.freed(found)
            with self.lock:
                self.source.give(found.address, found.nbytes)

    def access(self, address: int, nbytes: int) -> list[MemoryRange]:
        """Return the range of an access; an empty list if it is not device memory."""
        found = self.allocation_of(address)
        if found is None or found.kind == HOST:
            return []
        start = address - found.address
        return [MemoryRange(found, start, max(start, min(found.nbytes, start + nbytes)))]

    def new_block(self, address: int, nbytes: int) -> None:
        """Record that a pool has allocated a block, inside one of its allocations."""
        # Each array comes here, and few kernels ask: what it is cut from is found then.
        self._new_blocks.pop(address, None)  # to the end, if it is there
        self._new_blocks[address] = nbytes

    def _sort_blocks(self) -> None:
        """Find the allocations of new blocks, in order; later blocks replace earlier ones."""
        was_searching, self._is_searching = self._is_searching, True
        try:
            while True:
                address, nbytes = self._new_blocks.popitem(last=False)
                found = self.allocation_of(address)
                if found is not None:
                    blocks = self._pool_blocks.setdefault(found.number, PoolBlocks())
                    blocks.add(address, address + nbytes)
        except KeyError:
            """There are no more, or another thread is adding the last one."""
        finally:
            self._is_searching = was_searching

    def end_of(self, address: int) -> int:
        """Return the end of the memory at a plain pointer: the end of its pool block.

        Outside pools it is the end of the allocation; for unknown memory the address itself.
        """
        with self.lock:
            self._sort_blocks()
            found = self.allocation_of(address)
            if found is None:
                return address
            blocks = self._pool_blocks.get(found.number)
            end = None if blocks is None else blocks.end_of(address)
        return found.address + found.nbytes if end is None else end

    def view(
        self, address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> NDArray[Any]:
        """Return memory as a NumPy array whose index zero is at the address."""
        spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1]
        low = sum(span for span in spans if span < 0)
        nbytes = sum(map(abs, spans)) + dtype.itemsize if all(shape) else 0
        memory: Any = (ctypes.c_char * nbytes).from_address(address + low)
        return np.ndarray(shape, dtype, memory, -low, strides)

    def access_of(self, array: NDArray[Any]) -> list[MemoryRange]:
        """Return the range of an access to an array of `view`."""
        if not array.size:
            return []
        low, high = byte_bounds(array)
        return self.access(low, high - low)

    # -- what the observer is told ----------------------------------------------------------

    def operation(
        self, launch: Launch, decisive: Sequence[MemoryRange] | None = None, is_whole: bool = False
    ) -> None:
        """Report an operation.

        Dry runs use ``decisive``, the part of its input that determines the sizes of its results,
        and whether it writes only whole numbers and flags.
        """
        if len(self.devices) > 1:
            self._check_peers(self.devices[launch.device], (*launch.reads, *launch.writes))
        if self.observer.follows_work:
            self.observer.launched(launch)

    def _check_peers(self, device: DeviceState, accesses: Sequence[MemoryRange]) -> None:
        """Raise if a device uses another device's memory without peer access."""
        for found, _, _ in accesses:
            is_own = found.is_managed or found.device == device.ordinal
            if not (is_own or found.device in device.peers):
                whose = f"device {device.ordinal} uses memory of device {found.device}"
                sentence = f"{whose}, which is not its peer"
                self.end_context(ILLEGAL_ADDRESS, sentence, device, Finding("memcheck"))

    def is_pinned(self, ptr: int) -> bool:
        """Tell whether host memory is pinned, so that copies run concurrently with kernels."""
        found = self.allocation_of(ptr)
        return found is not None and found.kind == HOST

    def tell_copy(self, dst: int, src: int, size: int, device: int, stream: int) -> None:
        """Report a copy on a device's stream before it runs."""
        if not self.observer.follows_work:
            return
        (read,) = self.access(src, size) or (None,)
        (write,) = self.access(dst, size) or (None,)
        if read is not None or write is not None:
            is_of_host = read is None or write is None
            is_pinned = is_of_host and self.is_pinned(dst if write is None else src)
            self.observer.copied(DeviceCopy(device, stream, read, write, is_pinned))
