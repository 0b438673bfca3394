"""A CUDA runtime on host memory, which CuPy calls instead of NVIDIA's.

Models: devices of one kind with one context each, each thread's current device, streams that run
their work at once. Does not model: graphs, textures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from umem._common.specs import GpuSpec
from umem.host_cuda.boards import attributes
from umem.host_cuda.copy_checks import CopyChecks
from umem.host_cuda.memory_ranges import DEVICE, HOST, MANAGED
from umem.host_cuda.observer import Launch, Observer
from umem.host_cuda.pools import INVALID_VALUE
from umem.host_cuda.streams import FIRST_HANDLE, HostStreams

DRIVER_VERSION = 13000
"""A driver runs programs of its own CUDA version and older ones, so cuda-bindings of both load."""
CPU = -1
"""The host as a location: CU_DEVICE_CPU."""
_DEVICE_ATTRIBUTES = {
    1: 1024, 2: 1024, 3: 1024, 4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 9: 65536, 10: 32,
    11: 2**31 - 1, 12: 65536, 14: 512, 15: 1, 17: 0, 19: 1, 20: 0, 30: 512, 31: 1, 32: 0, 33: 0,
    34: 0, 35: 0, 40: 2, 41: 1, 50: 0, 51: 32, 78: 0, 79: 1, 80: 1, 82: 65536, 83: 1, 84: 0, 85: 0,
    86: 0, 89: 1, 90: 1, 91: 0, 95: 0, 96: 0, 98: 0, 99: 1, 101: 0, 112: 0, 113: 0, 114: 0, 115: 1,
    116: 0, 117: 0, 118: 0, 119: 0,
}  # fmt: skip
"""Values of cudaDeviceAttr from driver_types.h: block and grid sizes, managed memory, missing
features such as cooperative launches, and two copy engines, one for each direction, as datasheets
do not give their number. `umem.host_cuda.boards` has attributes that differ between GPUs. Texture
attributes are missing.
"""
_PROPERTIES = {
    "accessPolicyMaxWindowSize": 109, "asyncEngineCount": 40, "canMapHostMemory": 19,
    "canUseHostPointerForRegisteredMem": 91, "clockRate": 13, "computeMode": 20,
    "computePreemptionSupported": 90, "concurrentKernels": 31, "concurrentManagedAccess": 89,
    "cooperativeLaunch": 95, "cooperativeMultiDeviceLaunch": 96, "deviceOverlap": 15,
    "directManagedMemAccessFromHost": 101, "ECCEnabled": 32, "globalL1CacheSupported": 79,
    "hostNativeAtomicSupported": 86, "integrated": 18, "isMultiGpuBoard": 84,
    "kernelExecTimeoutEnabled": 17, "l2CacheSize": 38, "localL1CacheSupported": 80,
    "luidDeviceNodeMask": 0, "major": 75, "managedMemory": 83, "maxBlocksPerMultiProcessor": 106,
    "maxThreadsPerBlock": 1, "maxThreadsPerMultiProcessor": 39, "memPitch": 11,
    "memoryBusWidth": 37, "memoryClockRate": 36, "minor": 76, "multiGpuBoardGroupID": 85,
    "multiProcessorCount": 16, "pageableMemoryAccess": 88,
    "pageableMemoryAccessUsesHostPageTables": 100, "pciDeviceID": 34, "pciDomainID": 50,
    "persistingL2CacheMaxSize": 108, "regsPerBlock": 12, "regsPerMultiprocessor": 82,
    "reservedSharedMemPerBlock": 111, "sharedMemPerBlock": 8, "sharedMemPerBlockOptin": 97,
    "sharedMemPerMultiprocessor": 81, "singleToDoublePrecisionPerfRatio": 87,
    "streamPrioritiesSupported": 78, "surfaceAlignment": 30, "tccDriver": 35,
    "textureAlignment": 14, "texturePitchAlignment": 51, "totalConstMem": 9,
    "unifiedAddressing": 41, "warpSize": 10,
} | dict.fromkeys((
    "maxSurface1D", "maxSurface1DLayered", "maxSurface2D", "maxSurface2DLayered", "maxSurface3D",
    "maxSurfaceCubemap", "maxSurfaceCubemapLayered", "maxTexture1D", "maxTexture1DLayered",
    "maxTexture1DLinear", "maxTexture1DMipmap", "maxTexture2D", "maxTexture2DGather",
    "maxTexture2DLayered", "maxTexture2DLinear", "maxTexture2DMipmap", "maxTexture3D",
    "maxTexture3DAlt", "maxTextureCubemap", "maxTextureCubemapLayered",
), 0)  # fmt: skip
"""Fields of cudaDeviceProp that CuPy returns, with the attribute of equal value; 0 means none."""
UUID = "umem-simulated-{}"
_ADVICE = {
    1: ("read_mostly", False), 2: ("read_mostly", True), 3: ("preferred_location", False),
    4: ("preferred_location", True), 5: ("accessed_by", False), 6: ("accessed_by", True),
}  # fmt: skip
"""Values of cudaMemoryAdvise from driver_types.h, and whether each unsets its advice."""
_OF_A_DEVICE = (3, 5, 6)
"""Advice with a location."""
FORGOTTEN = 0xA5
"""Fills discarded memory, so that reading it is noticed."""
FRESH = 0xFF
"""Fills new memory of the driver: NaN in every float type, -1 in signed integers."""
FRESH_BYTES = 64 << 20
"""Most bytes to fill, outside checked mode: filling uses the machine's memory, and a program that
reserves all VRAM in one piece does not use it all. A guess.
"""
SIMULATED = " (simulated)"
"""Suffix of the device's name."""


def overwrite(ranges: Sequence[tuple[int, int]]) -> None:
    """Overwrite discarded memory."""
    for address, nbytes in ranges:
        ctypes.memset(address, FORGOTTEN, nbytes)


class LeftOut(Exception):
    """A library's work is skipped in a dry run, after the observer was notified.

    Attributes:
        returned: the result of the library's function then, if any.
    """

    returned = 0


class HostRuntime(CopyChecks):
    """Functions of ``cupy_backends.cuda.api.runtime``, under the same names.

    Args:
        spec, count, observer: see `HostMemory`.

    Attributes:
        attributes_type: CuPy's class of pointer attributes.
        cuda_version: the CUDA version that CuPy was built for, such as 12090 for 12.9.
        is_refused: whether this child was forked after the first use.
        hints: receives advice and prefetches; see `umem.host_cuda.libcuda`.
    """

    def __init__(self, spec: GpuSpec, count: int = 1, observer: Observer | None = None) -> None:
        super().__init__(spec, count, observer)
        assert spec.chip is not None  # `software_gpu` refuses it
        self._total_bytes = spec.total_bytes or spec.usable_bytes
        self._attributes = _DEVICE_ATTRIBUTES | attributes(spec)
        self.attributes_type: Any = None
        self.cuda_version = 0
        self.is_refused = False
        self.hints: Any = None

    @property
    def was_used(self) -> bool:
        """Tell whether the program has allocated memory, or made a stream, event or module."""
        return self._count > 0 or self._handle > FIRST_HANDLE

    def finish(self) -> None:
        """Do nothing, because work runs at once here."""

    # -- memory ----------------------------------------------------------------------------

    def allocate(self, nbytes: int, kind: int) -> int:
        self.refuse_unsafe()
        address = super().allocate(nbytes, kind)
        self.calls.allocation_count += 1
        return address

    def malloc(self, size: int) -> int:
        address = self.allocate(size, DEVICE)
        self.fill_fresh(address, size)
        return address

    def mallocAsync(self, size: int, stream: int) -> int:
        address = self.malloc(size)
        self.here.pool.add(address, size)
        return address

    def fill_fresh(self, address: int, nbytes: int) -> None:
        """Fill new memory of the driver, so that reading it is noticed."""
        ctypes.memset(address, FRESH, nbytes if self.is_checked else min(nbytes, FRESH_BYTES))

    def fill_block(self, address: int, nbytes: int, stream: int) -> None:
        """Fill a pool's new block for a stream, except managed memory.

        Does nothing while a stream is captured, when a program's own fill would be refused.
        """
        if not self.captures and self.pointerGetMemoryType(address) == DEVICE:
            self.put_bytes(address, FRESH, nbytes, stream)

    def put_bytes(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Write bytes in stream order, which here means at once; does not notify the observer."""
        ctypes.memset(address, value, nbytes)

    def mallocFromPoolAsync(self, size: int, pool: int, stream: int) -> int:
        return self.mallocAsync(size, stream)

    def mallocManaged(self, size: int, flags: int = 1) -> int:
        return self.allocate(size, MANAGED)

    def hostAlloc(self, size: int, flags: int) -> int:
        return self.allocate(size, HOST)

    def free(self, ptr: int) -> None:
        self.unpooled(ptr)
        self.release(ptr)
        self.calls.free_count += bool(ptr)

    def freeAsync(self, ptr: int, stream: int) -> None:
        self.free(ptr)

    freeHost = free

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        self.register(ptr, size)

    def hostUnregister(self, ptr: int) -> None:
        self.unregister(ptr)

    def memGetInfo(self) -> tuple[int, int]:
        return self.observer.free_bytes(self.device_here), self._total_bytes

    def pointerGetMemoryType(self, ptr: int) -> int:
        found = self.allocation_of(ptr)
        return 0 if found is None else found.kind

    def pointerGetAttributes(self, ptr: int) -> Any:
        found = self.allocation_of(ptr)
        if found is None:
            return self.attributes_type(-2, 0, ptr, 0)
        on_host = 0 if found.kind == DEVICE else ptr
        return self.attributes_type(found.device, ptr, on_host, found.kind)

    # -- what happens ----------------------------------------------------------------------

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        self.refuse_copy(dst, src, size, kind)
        if not self.is_captured(0):
            self.copy(dst, src, size)

    def copy(self, dst: int, src: int, size: int, stream: int = 0) -> None:
        """Copy memory, as an operation that notifies the observer."""
        self.tell_copy(dst, src, size, self.home_of(stream), stream)
        ctypes.memmove(dst, src, size)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.refuse_copy(dst, src, size, kind)
        if not self.is_captured(stream):
            self.copy(dst, src, size, stream)

    def memcpyPeer(self, dst: int, dst_device: int, src: int, src_device: int, size: int) -> None:
        self.memcpy(dst, src, size, 3)

    def memcpyPeerAsync(
        self, dst: int, dst_device: int, src: int, src_device: int, size: int, stream: int
    ) -> None:
        self.memcpyAsync(dst, src, size, 3, stream)

    def memcpy2D(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int, kind: int
    ) -> None:
        self.refuse_copy_2d(dst, dst_pitch, src, src_pitch, width, height, kind)
        for row in range(height):
            self.memcpy(dst + row * dst_pitch, src + row * src_pitch, width, kind)

    def memcpy2DAsync(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, height: int,
        kind: int, stream: int,
    ) -> None:  # fmt: skip
        self.refuse_copy_2d(dst, dst_pitch, src, src_pitch, width, height, kind)
        for row in range(height):
            self.memcpyAsync(dst + row * dst_pitch, src + row * src_pitch, width, kind, stream)

    def memset(self, ptr: int, value: int, size: int) -> None:
        self.refuse_range("fill", ptr, size)
        if not self.is_captured(0):
            self.fill(ptr, value, size)

    def fill(self, ptr: int, value: int, size: int) -> None:
        """Fill memory with a byte, as an operation that notifies the observer."""
        self.tell_fill(ptr, size)
        ctypes.memset(ptr, value, size)

    def tell_fill(self, ptr: int, size: int) -> None:
        """Report a fill as an operation of the memory's device."""
        if self.is_followed:
            accesses = self.access(ptr, size)
            own = [found.device for found, _, _ in accesses if not found.is_managed]
            self.operation(Launch("memset", own[0] if own else self.device_here, [], accesses))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        self.refuse_range("fill", ptr, size)
        if not self.is_captured(stream):
            self.fill(ptr, value, size)

    def prefetch(self, address: int, nbytes: int, device: int, stream: int) -> None:
        """Report a prefetch of a managed range; with a stream, concurrent with operations."""
        where = None if device == CPU else device
        self.observer.prefetched(self.access(address, nbytes), where, overlap=stream != 0)

    def discard(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        """Report a discard of managed ranges, and overwrite them in stream order."""
        self.observer.discarded([access for each in ranges for access in self.access(*each)])
        self.put_other_bytes(ranges, stream)

    def put_other_bytes(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        """Overwrite ranges in stream order, which here means at once."""
        overwrite(ranges)

    def advise(self, address: int, nbytes: int, advice: int, device: int) -> None:
        """Report advice on a managed range."""
        name, unset = _ADVICE[advice]
        where = device if advice in _OF_A_DEVICE and device != CPU else None
        self.observer.advised(self.access(address, nbytes), name, where, unset=unset)

    def memPrefetchAsync(self, ptr: int, size: int, device: int, stream: int) -> None:
        status = self.hints.prefetch(ptr, size, device, stream)
        if status:
            self.fail(status)

    def memAdvise(self, ptr: int, size: int, advice: int, device: int) -> None:
        status = self.hints.advise(ptr, size, advice, device)
        if status:
            self.fail(status)

    # -- the device ------------------------------------------------------------------------

    def driverGetVersion(self) -> int:
        return max(DRIVER_VERSION, self.cuda_version)

    def runtimeGetVersion(self) -> int:
        return self.cuda_version

    _getLocalRuntimeVersion = runtimeGetVersion

    def _getCUDAMajorVersion(self) -> int:
        return self.cuda_version // 1000

    def getDeviceCount(self) -> int:
        return self.count

    def getDevice(self) -> int:
        return self.current.ordinal

    def setDevice(self, device: int) -> None:
        self.refuse_other(device)
        self.current.ordinal = device
        self.current.has_context = True

    def _ensure_context(self) -> None:
        self.current.has_context = True

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        self.refuse_other(device)
        if attrib not in self._attributes:
            self.fail(INVALID_VALUE)
        if attrib == _PROPERTIES["kernelExecTimeoutEnabled"]:
            return int(self.kernel_seconds is not None)
        return int(self._attributes[attrib])

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        """Return a device's properties, as CuPy reads them; texture properties are 0."""
        self.refuse_other(device)
        numbers = {name: int(self._attributes.get(a, 0)) for name, a in _PROPERTIES.items()}
        return numbers | {
            "name": (self.spec.title + SIMULATED).encode(),
            "kernelExecTimeoutEnabled": int(self.kernel_seconds is not None),
            "totalGlobalMem": self._total_bytes,
            "maxThreadsDim": (1024, 1024, 64),
            "maxGridSize": (2**31 - 1, 65535, 65535),
            "pciBusID": device,
            "uuid": UUID.format(device).encode(),
            "luid": b"",
        }

    profilerStart = profilerStop = HostStreams.nothing
