"""Host memory in place of a GPU's, and the listeners that are told of its use.

The memory handed out is real. VRAM, pages and time are those of `umem.devices.virtual.model`, which
is told of every allocation, copy, kernel, prefetch and piece of advice; recorders are told of
operations. Each device has a model of its own, and the program one address space:
`device_peers.py` finds the parts of an operation that touch another device's memory.
"""

from __future__ import annotations

import bisect
import ctypes
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from umem._common.locks import safe_lock
from umem._common.specs import GpuSpec
from umem.devices.base import Policy
from umem.devices.page_moves import MoveListener, PageMove
from umem.devices.software.device_state import Current, DeviceState
from umem.devices.software.faults import Fault, Finding, KernelFault
from umem.devices.software.memory_sources import PlainSource
from umem.devices.software.pool_blocks import PoolBlocks
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.trace import Access, Alloc, Event, Free, Op

HOST, DEVICE, MANAGED = 1, 2, 3
"""Values of cudaMemoryType, from driver_types.h."""
NO_MEMORY, INVALID_VALUE = 2, 1
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
"""Values of cudaError, from driver_types.h."""
_POLICIES = {DEVICE: Policy("unmanaged"), MANAGED: Policy("managed")}


class Allocation(NamedTuple):
    """An allocation: address, size, kind, number in models, and device."""

    address: int
    nbytes: int
    kind: int
    number: int
    device: int

    @property
    def is_managed(self) -> bool:
        """Tell whether it is managed memory."""
        return self.kind == MANAGED


class Listener(Protocol):
    """Interface of recorders; ``addresses`` maps an allocation's number to its address."""

    def operation(self, op: Op, addresses: dict[int, int]) -> None:
        """Record an operation."""

    def uploaded(self, access: Access, addresses: dict[int, int]) -> None:
        """Record a copy from the host."""

    def ended(self, address: int) -> None:
        """Record that the memory at an address was freed."""


class HostMemory:
    """The allocations, and the models and recorders that are told of them.

    Args:
        spec: the GPU that it pretends to be.
        is_modelled: whether VRAM, pages and time are; otherwise nothing is reported to the model.
        count: how many devices there are.

    Attributes:
        devices: each with a model of its own.
        error_type: CuPy's error for a status.
        listener: is told of operations; None without a recorder.
        source: where memory comes from.
        is_checked: whether it is in checked mode.
        is_sticky: whether a fault ends the context of its device.
        fault_type: the error for a fault.
        context_ends: is called after a fault that ends a context.
        kernel_seconds: processor time that a kernel may take; None for no limit.
        is_strict: whether what CUDA refuses is refused; see `umem.devices.software.strictness`.
        lock: held while a kernel runs: what its threads share is static, so that two threads of the
            program take turns.
        thread_begins: is called in each thread that begins to use it.
    """

    def __init__(self, spec: GpuSpec, is_modelled: bool = True, count: int = 1) -> None:
        self.spec = spec
        self.error_type: Any = RuntimeError
        self.lock = safe_lock()  # before the model's, which is taken inside
        self.source = PlainSource()
        self.is_modelled = is_modelled
        self.is_checked = False
        self.is_sticky = True
        self.fault_type: Any = KernelFault
        self.context_ends: Callable[[], None] = lambda: None
        self.is_strict = True
        self.kernel_seconds: float | None = None
        self.listener: Listener | None = None
        self.devices = [
            DeviceState(number, spec, lambda: _POLICIES[self._kind]) for number in range(count)
        ]
        self.thread_begins: Callable[[], None] = lambda: None
        self.current = Current(lambda: self.thread_begins())
        self._turn = self.devices[0]
        self._kind = DEVICE
        self._starts: list[int] = []
        self._allocations: dict[int, Allocation] = {}
        self._addresses: dict[int, int] = {}  # by number
        self._pool_blocks: dict[int, PoolBlocks] = {}  # by number
        self._new_blocks: OrderedDict[int, int] = OrderedDict()  # bytes by address
        self._count = 0
        self._registered: set[int] = set()
        self._freed: list[int] = []
        self._postponed: list[int] = []
        self._is_searching = False
        self._is_telling = False

    @property
    def is_followed(self) -> bool:
        """Tell whether operations are reported: to a model, a recorder or other devices."""
        return self.is_modelled or self.listener is not None or len(self.devices) > 1

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
        """Raise a fault of a device, by default the current one; its context has ended then."""
        if self.is_sticky:
            (device or self.here).fault = Fault(status, sentence, finding)
            self.context_ends()
        raise self.fault_type(status, sentence, finding)

    def refuse_ended(self, device: DeviceState) -> None:
        """Raise if a device's context has ended."""
        if device.fault is not None:
            raise self.fault_type(device.fault.status, device.fault.reminder, device.fault.finding)

    def drop_error(self) -> None:
        """Forget an error that a later call would raise: here there is none."""

    def forget_faults(self) -> tuple[Fault, ...]:
        """Return the faults of all devices, which can be used again."""
        faults = [device.fault for device in self.devices]
        for device in self.devices:
            device.fault = None
        return tuple(fault for fault in faults if fault is not None)

    def refuse_memory(self, nbytes: int) -> NoReturn:
        """Raise where the machine has no memory for an allocation."""
        self.fail(NO_MEMORY)

    @property
    def here(self) -> DeviceState:
        """Return the calling thread's current device."""
        return self.devices[self.current.ordinal]

    def turn_to(self, device: DeviceState) -> Model:
        """Return a device's model, its clock advanced to the program's: all devices have one
        host.
        """
        before, self._turn = self._turn.model.clock, device
        clock = device.model.clock
        clock.host_seconds = max(clock.host_seconds, before.host_seconds)
        return device.model

    def allocate(self, nbytes: int, kind: int) -> int:
        """Allocate memory of a kind; returns its address."""
        with self.lock:
            return self._allocated(nbytes, kind)

    def _allocated(self, nbytes: int, kind: int) -> int:
        """Allocate in the model, then on the host; if either fails, neither is done."""
        number = self._count
        if kind != HOST:
            self._kind = kind
            try:
                self.tell(Alloc(number, nbytes, "array", "cudaMalloc"))
            except OutOfMemoryError:
                self.fail(NO_MEMORY)
        address = self.source.take(nbytes)
        if address is None:
            if kind != HOST:
                self.tell(Free(number))
            self.refuse_memory(nbytes)
        self._count += 1
        self._addresses[number] = address
        self._allocations[address] = Allocation(address, nbytes, kind, number, self.here.ordinal)
        bisect.insort(self._starts, address)
        return address

    def register(self, address: int, nbytes: int) -> None:
        """Pin memory of the program's own, which stays where it is.

        Raises CuPy's error for a status: it is empty, or in part pinned or given out already.
        """
        if not address or nbytes <= 0:
            self.fail(INVALID_VALUE)
        with self.lock:
            last = bisect.bisect_left(self._starts, address + nbytes) - 1
            before = self._allocations[self._starts[last]] if last >= 0 else None
            if before is not None and before.address + before.nbytes > address:
                known = before.address in self._registered
                self.fail(ALREADY_REGISTERED if known else INVALID_VALUE)
            found = Allocation(address, nbytes, HOST, self._count, self.here.ordinal)
            self._count += 1
            self._addresses[found.number] = address
            self._allocations[address] = found
            self._registered.add(address)
            bisect.insort(self._starts, address)

    def unregister(self, address: int) -> None:
        """Unpin memory that `register` pinned; raises CuPy's error for any other."""
        with self.lock:
            if address not in self._registered:
                self.fail(NOT_REGISTERED)
            self._registered.remove(address)
            found = self._allocations.pop(address)
            del self._starts[bisect.bisect_left(self._starts, address)]
            del self._addresses[found.number]
        if self.listener is not None:
            self.listener.ended(address)

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
                    del self._starts[index], self._addresses[found.number]
                    self._pool_blocks.pop(found.number, None)
                    taken.append(found)
            finally:
                self._is_searching = False
        for found in taken:
            self._tell_end(found)

    def _tell_end(self, found: Allocation) -> None:
        if self.listener is not None:
            self.listener.ended(found.address)
        if found.kind != HOST and self.is_modelled:
            self._freed.append(found.number)
            if not self._is_telling:
                self.tell(None)
        with self.lock:
            self.source.give(found.address, found.nbytes)

    def of_number(self, number: int) -> Allocation:
        """Return an allocation by its number in models."""
        return self._allocations[self._addresses[number]]

    def access(self, address: int, nbytes: int) -> list[Access]:
        """Return the access to a range; an empty list if no model knows the memory."""
        found = self.allocation_of(address)
        if found is None or found.kind == HOST:
            return []
        start = address - found.address
        return [Access(found.number, start, max(start, min(found.nbytes, start + nbytes)))]

    def new_block(self, address: int, nbytes: int) -> None:
        """Note that a pool has handed out a block, of an allocation that it asked for before."""
        # Each array comes here, and few kernels ask: what it is cut from is found then.
        self._new_blocks.pop(address, None)  # to the end, if it is there
        self._new_blocks[address] = nbytes

    def _sort_blocks(self) -> None:
        """Find the allocations of new blocks, in order: later ones replace earlier ones."""
        was_searching, self._is_searching = self._is_searching, True
        try:
            while True:
                address, nbytes = self._new_blocks.popitem(last=False)
                found = self.allocation_of(address)
                if found is not None:
                    blocks = self._pool_blocks.setdefault(found.number, PoolBlocks())
                    blocks.add(address, address + nbytes)
        except KeyError:
            """There are no more, or another thread puts the last one at the end."""
        finally:
            self._is_searching = was_searching

    def end_of(self, address: int) -> int:
        """Return where the memory that a plain pointer leads to ends: with its block of a pool.

        Outside of pools it is the end of the allocation; of unknown memory the address itself.
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
        """Return memory as a NumPy array; the address is that of index zero."""
        spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1]
        low = sum(span for span in spans if span < 0)
        nbytes = sum(map(abs, spans)) + dtype.itemsize if all(shape) else 0
        memory: Any = (ctypes.c_char * nbytes).from_address(address + low)
        return np.ndarray(shape, dtype, memory, -low, strides)

    def access_of(self, array: NDArray[Any]) -> list[Access]:
        """Return the access to an array of `view`."""
        if not array.size:
            return []
        low, high = byte_bounds(array)
        return self.access(low, high - low)

    def tell_listener(self, op: Op) -> None:
        """Report an operation to the recorder."""
        if self.listener is not None:
            self.listener.operation(op, self._addresses)

    def tell_managed(self, found: Allocation, device: DeviceState) -> None:
        """Report managed memory that another device allocated to a model."""
        with self.lock:
            self._kind = MANAGED
            self.tell(Alloc(found.number, found.nbytes, "array", "cudaMallocManaged"), device)

    def tell(
        self,
        event: Event | None,
        device: DeviceState | None = None,
        copy: Callable[[], None] | None = None,
    ) -> None:
        """Report an event to a model, and frees that garbage collection causes meanwhile.

        The collector may run in the middle of the model, which would take it for a signal. ``copy``
        tells it of a copy. The model is that of the current device, unless another is given.
        """
        if not self.is_modelled:
            return
        with self.lock:
            self._is_telling = True
            try:
                while self._freed:
                    self._tell_free(Free(self._freed.pop()))
                model = self.turn_to(device or self.here)
                if event is not None:
                    model.on_event(event)
                if copy is not None:
                    copy()
            finally:
                self._is_telling = False

    def address_of(self, number: int) -> int | None:
        """Return the address of an allocation by its number in models; None once it is freed."""
        return self._addresses.get(number)

    def _tell_free(self, event: Free) -> None:
        """Tell every model that knows the memory: that of several devices is managed."""
        for device in self.devices:
            if event.tensor in device.model.tensors:
                self.turn_to(device).on_event(event)


class AllocationParts:
    """Reports moves of a model's blocks by allocation; the last one has the rest of the blocks."""

    def __init__(self, memory: HostMemory, model: Model, told: MoveListener) -> None:
        self._memory, self._model, self._told = memory, model, told
        self._known: tuple[int, int] = (0, -1)
        self._placed: list[tuple[int, int, int]] = []  # address, end and number, in the model

    def tell(self, move: PageMove) -> None:
        """Report a move."""
        rest, address, stop = move.nbytes, 0, 0
        for start, end, number in self._between(move.address, move.stop):
            own = self._memory.address_of(number)
            if own is None:
                continue
            if stop:
                self._told(move._replace(address=address, stop=stop, nbytes=stop - address))
                rest, move = rest - (stop - address), move._replace(gpu_faults=0)
            low, high = max(move.address, start), min(move.stop, end)
            address, stop = own + low - start, own + high - start
        self._told(move._replace(address=address, stop=stop, nbytes=rest))

    def _between(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Return what is placed in a range of the model's addresses."""
        tensors = self._model.tensors
        known = len(tensors), next(reversed(tensors), -1)  # numbers only rise
        if known != self._known:
            self._known = known
            placed = (
                (one.span.address, one.nbytes, n) for n, one in tensors.items() if one.managed
            )
            self._placed = sorted((start, start + nbytes, n) for start, nbytes, n in placed)
        first = bisect.bisect_right(self._placed, (low, 0, 0))
        if first and self._placed[first - 1][1] > low:
            first -= 1
        return self._placed[first : bisect.bisect_left(self._placed, (high, 0, 0))]
