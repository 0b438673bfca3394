"""A CUDA runtime on host memory: what CuPy calls in place of NVIDIA's.

What it computes is real. VRAM, pages and time are those of a model (`umem.devices.virtual.model`),
which hears of every allocation, copy, kernel, prefetch and piece of advice.

Models: one device, one context; streams that do their work at once. Does not model: several
devices, graphs, textures, peers.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from umem.devices.base import Policy
from umem.devices.software.streams import HostStreams
from umem.devices.specs import CHIPS, COSTS, GpuSpec
from umem.devices.virtual.model import Model
from umem.errors import OutOfMemoryError
from umem.locks import safe_lock
from umem.trace.events import Access, Alloc, Event, Free, Hint, Op
from umem.units import BLOCK_BYTES

HOST, DEVICE, MANAGED = 1, 2, 3
"""cudaMemoryType, of driver_types.h."""
NO_MEMORY, INVALID_VALUE, INVALID_DEVICE = 2, 1, 101
"""cudaError, of driver_types.h."""
CUDA_VERSION = 12090
CPU = -1
"""The host as a place, CU_DEVICE_CPU."""
_DEVICE_ATTRIBUTES = {
    1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 8: 49152, 9: 65536, 10: 32,
    12: 65536, 18: 0, 19: 1, 35: 0, 39: 2048, 40: 2, 41: 1, 81: 65536, 82: 65536, 83: 1, 88: 0,
    89: 1, 97: 49152, 101: 0, 115: 1,
}  # fmt: skip
"""cudaDeviceAttr, of driver_types.h: block and grid sizes, shared memory, managed memory."""
_MAJOR, _MINOR, _SM_COUNT = 75, 76, 16
_ADVICE = {
    1: ("read_mostly", False), 2: ("read_mostly", True), 3: ("preferred_location", False),
    4: ("preferred_location", True), 5: ("accessed_by", False), 6: ("accessed_by", True),
}  # fmt: skip
"""cudaMemoryAdvise, of driver_types.h, and whether it takes the advice back."""
_POLICIES = {DEVICE: Policy("unmanaged"), MANAGED: Policy("managed")}
_libc = ctypes.CDLL(None)
_libc.free.argtypes = [ctypes.c_void_p]
SIMULATED = " (simulated)"
"""The end of the name that CuPy is told."""
ALIGNMENT = 512
"""What cudaMalloc's addresses are multiples of at least (CUDA C++ Programming Guide)."""


class Allocation(NamedTuple):
    """Memory that was asked for: its number in the model, where it is, and of which kind."""

    address: int
    nbytes: int
    kind: int
    number: int


class HostRuntime(HostStreams):
    """The functions of ``cupy_backends.cuda.api.runtime``, by their names there.

    Args:
        spec: the GPU that it pretends to be.

    Attributes:
        error_type: CuPy's error for a status.
        attributes_type: CuPy's class of what is known of a pointer.
        hints: takes advice and prefetches, see `umem.devices.software.libcuda`.
        lock: held while a kernel runs: what its threads share is static, so that two threads of the
            program take turns.
    """

    def __init__(self, spec: GpuSpec) -> None:
        super().__init__()
        self.spec = spec
        self.error_type: Any = RuntimeError
        self._chip = CHIPS.get(spec.name, (7, 5, 40))
        self._kind = DEVICE
        self.lock = safe_lock()  # before the model's, which is taken inside
        self.model = Model(spec, COSTS, "plain", "numpy", lambda: _POLICIES[self._kind])
        self._starts: list[int] = []
        self._allocations: dict[int, Allocation] = {}
        self._count = 0
        self._freed: list[int] = []
        self._is_telling = False
        self.attributes_type: Any = None
        self.hints: Any = None

    def _fail(self, status: int) -> NoReturn:
        raise self.error_type(status)

    @property
    def seconds(self) -> float:
        return self.model.clock.seconds

    # -- memory ----------------------------------------------------------------------------

    def _tell(self, event: Event | None) -> None:
        """Tell the model of an event, and of what was freed; also what a collector frees meanwhile.

        The collector may run in the middle of the model, which would take it for a signal.
        """
        with self.lock:
            self._is_telling = True
            try:
                while self._freed:
                    self.model.on_event(Free(self._freed.pop()))
                if event is not None:
                    self.model.on_event(event)
            finally:
                self._is_telling = False

    def _allocate(self, nbytes: int, kind: int) -> int:
        self.refuse_unsafe()
        with self.lock:
            return self._allocated(nbytes, kind)

    def _allocated(self, nbytes: int, kind: int) -> int:
        number = self._count
        if kind != HOST:
            self._kind = kind
            try:
                self._tell(Alloc(number, nbytes, "array", "cudaMalloc"))
            except OutOfMemoryError:
                self._fail(NO_MEMORY)
        place = ctypes.c_void_p()
        if _libc.posix_memalign(ctypes.byref(place), ALIGNMENT, ctypes.c_size_t(max(1, nbytes))):
            if kind != HOST:
                self._tell(Free(number))
            self._fail(NO_MEMORY)
        address = place.value or 0
        self._count += 1
        self._allocations[address] = Allocation(address, nbytes, kind, number)
        bisect.insort(self._starts, address)
        return address

    def allocation_of(self, address: int) -> Allocation | None:
        """The allocation that an address is in."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        found = self._allocations[self._starts[index]]
        return found if address < found.address + max(1, found.nbytes) else None

    def malloc(self, size: int) -> int:
        return self._allocate(size, DEVICE)

    def mallocAsync(self, size: int, stream: int) -> int:
        return self._allocate(size, DEVICE)

    def mallocFromPoolAsync(self, size: int, pool: int, stream: int) -> int:
        return self._allocate(size, DEVICE)

    def mallocManaged(self, size: int, flags: int = 1) -> int:
        return self._allocate(size, MANAGED)

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._allocate(size, HOST)

    def free(self, ptr: int) -> None:
        if not ptr:
            return
        found = self._allocations.pop(ptr, None)
        if found is None:
            self._fail(INVALID_VALUE)
            return
        del self._starts[bisect.bisect_left(self._starts, ptr)]
        if found.kind != HOST:
            self._freed.append(found.number)
            if not self._is_telling:
                self._tell(None)
        _libc.free(ptr)

    def freeAsync(self, ptr: int, stream: int) -> None:
        self.free(ptr)

    freeHost = free

    def memGetInfo(self) -> tuple[int, int]:
        total = self.spec.usable_bytes
        return max(0, total - self.model.driver.pinned_count * BLOCK_BYTES), total

    def pointerGetMemoryType(self, ptr: int) -> int:
        found = self.allocation_of(ptr)
        return 0 if found is None else found.kind

    def pointerGetAttributes(self, ptr: int) -> Any:
        kind = self.pointerGetMemoryType(ptr)
        on_device, on_host = ptr if kind else 0, 0 if kind == DEVICE else ptr
        return self.attributes_type(0 if kind else -2, on_device, on_host, kind)

    # -- what happens ----------------------------------------------------------------------

    def access(self, address: int, nbytes: int) -> list[Access]:
        """The access of the model to a range, none where the model does not know it."""
        found = self.allocation_of(address)
        if found is None or found.kind == HOST:
            return []
        start = address - found.address
        return [Access(found.number, start, max(start, min(found.nbytes, start + nbytes)))]

    def view(
        self, address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> NDArray[Any]:
        """Return memory as a NumPy array; the address is of the element at index zero."""
        spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1]
        low = sum(span for span in spans if span < 0)
        nbytes = sum(map(abs, spans)) + dtype.itemsize if all(shape) else 0
        memory: Any = (ctypes.c_char * nbytes).from_address(address + low)
        return np.ndarray(shape, dtype, memory, -low, strides)

    def access_of(self, array: NDArray[Any]) -> list[Access]:
        """The access of the model to an array that `view` gave."""
        if not array.size:
            return []
        low, high = byte_bounds(array)
        return self.access(low, high - low)

    def operation(
        self, name: str, reads: Sequence[Access], writes: Sequence[Access], flops: int = 0
    ) -> None:
        """Tell the model of an operation that touches each byte once."""
        traffic = sum(access.stop - access.start for access in (*reads, *writes))
        self._tell(Op(name, "array", tuple(reads), tuple(writes), flops, traffic))

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        if not self.is_captured(0):
            self.copy(dst, src, size)

    def copy(self, dst: int, src: int, size: int) -> None:
        """Copy memory, as an operation."""
        self.operation("memcpy", self.access(src, size), self.access(dst, size))
        ctypes.memmove(dst, src, size)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        if not self.is_captured(stream):
            self.copy(dst, src, size)

    def memcpyPeer(self, dst: int, dst_device: int, src: int, src_device: int, size: int) -> None:
        self.memcpy(dst, src, size, 3)

    def memset(self, ptr: int, value: int, size: int) -> None:
        if not self.is_captured(0):
            self.fill(ptr, value, size)

    def fill(self, ptr: int, value: int, size: int) -> None:
        """Set every byte of memory, as an operation."""
        self.operation("memset", [], self.access(ptr, size))
        ctypes.memset(ptr, value, size)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        if not self.is_captured(stream):
            self.fill(ptr, value, size)

    def prefetch(self, address: int, nbytes: int, device: int, stream: int) -> None:
        """Have the model move a managed range; on a stream it does so beside the operations."""
        place = "cpu" if device == CPU else 0
        accesses = tuple(self.access(address, nbytes))
        self._tell(Hint("prefetch", accesses, place, overlap=stream != 0))

    def advise(self, address: int, nbytes: int, advice: int, device: int) -> None:
        """Give the model a piece of advice, or take it back."""
        action, unset = _ADVICE[advice]
        place = "cpu" if device == CPU else 0
        self._tell(Hint(action, tuple(self.access(address, nbytes)), place, unset))

    def memPrefetchAsync(self, ptr: int, size: int, device: int, stream: int) -> None:
        status = self.hints.prefetch(ptr, size, device, stream)
        if status:
            self._fail(status)

    def memAdvise(self, ptr: int, size: int, advice: int, device: int) -> None:
        status = self.hints.advise(ptr, size, advice, device)
        if status:
            self._fail(status)

    # -- the device ------------------------------------------------------------------------

    def driverGetVersion(self) -> int:
        return CUDA_VERSION

    runtimeGetVersion = driverGetVersion

    _getLocalRuntimeVersion = driverGetVersion

    def _getCUDAMajorVersion(self) -> int:
        return CUDA_VERSION // 1000

    def getDeviceCount(self) -> int:
        return 1

    def getDevice(self) -> int:
        return 0

    def setDevice(self, device: int) -> None:
        if device != 0:
            self._fail(INVALID_DEVICE)

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        major, minor, count = self._chip
        known = {_MAJOR: major, _MINOR: minor, _SM_COUNT: count}
        return known.get(attrib, _DEVICE_ATTRIBUTES.get(attrib, 0))

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        major, minor, count = self._chip
        return {
            "name": (self.spec.title + SIMULATED).encode(),
            "totalGlobalMem": self.spec.usable_bytes,
            "sharedMemPerBlock": 49152,
            "warpSize": 32,
            "maxThreadsPerBlock": 1024,
            "major": major,
            "minor": minor,
            "multiProcessorCount": count,
            "integrated": 0,
            "computeMode": 0,
            "concurrentManagedAccess": 1,
        }

    nothing = HostStreams.nothing
    _ensure_context = nothing
    deviceEnablePeerAccess = _deviceEnsurePeerAccess = profilerStart = profilerStop = nothing
