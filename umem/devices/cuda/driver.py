"""All calls of the CUDA device to CuPy and the driver; no decisions.

Tests replace this module to put host memory in place of a GPU. Importing this module imports CuPy;
no device is used until a function here is called.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, Protocol

import cupy
from cupy.cuda import runtime

from umem._common import host as host_memory
from umem.devices.base import Advice, Place, Span
from umem.devices.cuda import captures, fork
from umem.devices.cuda import ranges as hints
from umem.devices.cuda.ranges import CoreHints, umems_errors
from umem.devices.presets import PRESETS
from umem.errors import DeviceError

Malloc = Callable[[int], Any]
"""CuPy's allocator interface: bytes to ``cupy.cuda.MemoryPointer``."""

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation; CuPy does not export the number
NOT_INITIALISED = 3  # what the driver says in a child by fork
INSUFFICIENT_DRIVER = 35
NO_DEVICE = 100
CAPTURE_ERRORS = range(900, 910)  # cudaErrorStreamCapture..., of what a capture cannot have
MANAGED_POINTER = 3  # cudaMemoryTypeManaged
_SET: dict[Advice, int] = {"read_mostly": 1, "preferred_location": 3, "accessed_by": 5}
_CPU = -1
LEAST_HEADROOM_BYTES = 512 << 20
"""The least VRAM that ``hybrid`` leaves to modules and libraries. This, and the 3% of VRAM beside
it, are guesses that no measurement supports; neither was tried on a GPU.
"""
_flushing = threading.local()


class CupyPool(Protocol):
    """The methods of CuPy's MemoryPool that umem uses."""

    def malloc(self, nbytes: int) -> Any: ...
    def free_all_blocks(self) -> None: ...
    def n_free_blocks(self) -> int: ...
    def used_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...
    def set_limit(self, size: int) -> None: ...


def own_pool() -> CupyPool:
    """Return CuPy's own pool over cudaMalloc, whichever `cupy.get_default_memory_pool` returns."""
    pool: Any = cupy.get_default_memory_pool()
    found: CupyPool = getattr(pool, "own", pool)  # of a `PoolInUse`
    return found


class Driver:
    """One GPU through CuPy and the driver.

    Thread-safety: as CuPy's; any thread may call every method. Raises CuPy's ``CUDARuntimeError``
    if the driver refuses; nothing has changed then.
    """

    error: type[Exception] = runtime.CUDARuntimeError
    core: CoreHints | None = None
    """Replaces CuPy's own calls on CUDA 13, after `check_advice`."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        properties = runtime.getDeviceProperties(ordinal)
        self.name: str = properties["name"].decode()
        self.vram_bytes: int = properties["totalGlobalMem"]
        self.integrated = bool(properties.get("integrated", 0))
        self.cuda_major: int = runtime.runtimeGetVersion() // 1000
        captures.follow_captures()

    def current(self, ordinal: int | None = None) -> Any:
        """Make a GPU, by default this one, current in the block."""
        return cupy.cuda.Device(self.ordinal if ordinal is None else ordinal)

    def bind(self) -> None:
        """Make the GPU's context current in this thread, because cuda.core does not."""
        runtime.setDevice(self.ordinal)

    def gpu_count(self) -> int:
        """Return the number of visible GPUs, which is constant in a process."""
        return _gpu_count()

    def is_current(self) -> bool:
        """Tell whether this GPU is CuPy's current one in this thread."""
        return current_ordinal() == self.ordinal

    def here(self) -> int:
        """Return the ordinal of CuPy's current GPU, and make its context current in this thread."""
        ordinal = current_ordinal()
        runtime.setDevice(ordinal)
        return ordinal

    def allocate(self, nbytes: int) -> Any:
        """Allocate by cudaMalloc, without a pool."""
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)

    def allocate_managed(self, nbytes: int) -> Any:
        """Allocate by cudaMallocManaged, without a pool."""
        return cupy.cuda.malloc_managed(nbytes)

    def flush(self, pool: CupyPool, *, waits: bool = True, ordinal: int | None = None) -> None:
        """Free a pool's free blocks on a GPU, by default this one, if `may_free` allows it.

        Does nothing inside another call of the same thread: CuPy 14's pool holds a lock there that
        the thread cannot take twice, and garbage collection may call this meanwhile.

        Args:
            pool: any CuPy pool.
            waits: False for a pool of cudaMalloc's memory.
            ordinal: the GPU.
        """
        if getattr(_flushing, "now", False):
            return
        _flushing.now = True
        try:
            with self.current(ordinal):
                if pool.n_free_blocks() and self.may_free(waits, ordinal):
                    pool.free_all_blocks()
        finally:
            _flushing.now = False

    def may_free(self, waits: bool = True, ordinal: int | None = None) -> bool:
        """Wait until no queued work of a GPU can use memory to be freed; False in a capture.

        cudaFree of managed memory and cudaFreeHost promise no wait; cudaFree of cudaMalloc's memory
        waits by itself. Free nothing while any stream is captured: a wait would end the capture,
        and so may a free.
        """
        if self.is_any_captured():
            return False
        if waits and ordinal in (None, self.ordinal):
            self.synchronize()
        elif waits:
            self.current(ordinal).synchronize()
        return True

    def is_any_captured(self) -> bool:
        """Tell whether any stream is being captured, by any thread."""
        return captures.is_any_captured()

    def allocate_pinned(self, nbytes: int) -> Any:
        """Allocate pinned host memory that this GPU accesses over the bus, without a pool.

        With unified addressing, which `hybrid_problem` requires, host and GPU use the same address.
        """
        memory = cupy.cuda.PinnedMemory(nbytes, runtime.hostAllocMapped | runtime.hostAllocPortable)
        unowned = cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, device_id=self.ordinal)
        return cupy.cuda.MemoryPointer(unowned, 0)

    def load_hints(self) -> CoreHints:
        """Return cuda.core's managed memory calls.

        Raises:
            MissingDependencyError: cuda-core is missing or too old.
        """
        return hints.load(self.cuda_major)

    def check_advice(self) -> None:
        """Load cuda.core on CUDA 13, for `give_preset`, `prefer_host` and `prefetch_here`.

        On CUDA 12 CuPy's own calls suffice, so modes need only CuPy. On CUDA 13 they raise (CuPy
        13) or cannot name the host (CuPy 14), so cuda.core is needed.

        Raises:
            MissingDependencyError: CUDA 13, and cuda-core is missing or too old.
        """
        if self.core is None and self.cuda_major >= 13:
            self.core = self.load_hints()

    def prefer_host(self, address: int, nbytes: int) -> None:
        """Advise that a range stays in host memory, where this GPU accesses it.

        Raises:
            DeviceError: as `advise`.
        """
        self.give_preset(address, nbytes, "streaming")

    def give_preset(self, address: int, nbytes: int, name: str) -> None:
        """Apply the advice of a preset to a range, for the current GPU.

        Raises:
            DeviceError: as `advise`.
        """
        for advice, where in PRESETS[name]:
            self.advise(address, nbytes, advice, "cpu" if where == "cpu" else self.here())

    def advise(self, address: int, nbytes: int, advice: Advice, place: Place) -> None:
        """Set one advice on a range, with cuda.core if `check_advice` has loaded it, else with
        CuPy.

        Raises:
            DeviceError: cuda.core refused; CuPy raises its own error.
        """
        if self.core is None:
            runtime.memAdvise(address, nbytes, _SET[advice], _CPU if place == "cpu" else place)
        else:
            self.here()
            with umems_errors():
                self.core.advise([Span(address, nbytes)], advice, place, unset=False)

    def prefetch_here(self, address: int, nbytes: int) -> None:
        """Move a range to the current GPU, in the current stream's order; does not wait for it.

        Uses cuda.core if `check_advice` has loaded it (CUDA 13), else CuPy.

        Raises:
            DeviceError: cuda.core refused; CuPy raises its own error.
        """
        stream, here = cupy.cuda.get_current_stream().ptr, self.here()
        if self.core is None:
            runtime.memPrefetchAsync(address, nbytes, here, stream)
        else:
            with umems_errors():
                self.core.prefetch([Span(address, nbytes)], here, stream)

    def make_pool(self, grow: Malloc) -> CupyPool:
        """Make a CuPy pool over ``grow``, which the caller keeps until the process ends."""
        pool: CupyPool = cupy.cuda.MemoryPool(grow)
        return pool

    @property
    def default_pool(self) -> CupyPool:
        """Return CuPy's own pool over cudaMalloc."""
        return own_pool()

    def default_pool_bytes(self) -> int:
        """Return the bytes that CuPy's own pool has reserved on this GPU."""
        with self.current():
            return int(self.default_pool.total_bytes())

    def free_bytes(self) -> int:
        """Return the free bytes of VRAM; managed memory may not count as used."""
        with self.current():
            return int(runtime.memGetInfo()[0])

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of VRAM for modules loaded later and for libraries.

        At most half of a small GPU's VRAM. 0 on the software GPU, where neither uses VRAM.
        """
        if self.name.endswith(" (simulated)"):
            return 0
        return min(max(LEAST_HEADROOM_BYTES, self.vram_bytes * 3 // 100), self.vram_bytes // 2)

    def host_available_bytes(self) -> int | None:
        """Return the host bytes that this process may still allocate; None if unknown."""
        return host_memory.available_bytes()

    def capturing(self, stream: int | None = None) -> bool:
        """Tell whether a stream, by default the current one, is being captured.

        Also true while another stream's capture makes the legacy stream unusable.
        """
        return captures.is_captured(stream)

    def is_managed(self, address: int) -> bool:
        """Tell whether an address is in managed memory."""
        return bool(runtime.pointerGetAttributes(address).type == MANAGED_POINTER)

    def is_on_host(self, address: int) -> bool:
        """Tell whether an address is in pinned host memory."""
        return bool(runtime.pointerGetAttributes(address).type == runtime.memoryTypeHost)

    def stream_address(self, stream: Any) -> int:
        """Return the handle of a stream or stream-like object; None is the current stream.

        Raises:
            DeviceError: it is not a stream.
        """
        if stream is None:
            stream = cupy.cuda.get_current_stream()
        if hasattr(stream, "ptr"):
            return int(stream.ptr)
        if hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        raise DeviceError(f"stream must be a CuPy stream; got {type(stream).__name__}")

    def synchronize(self) -> None:
        """Wait for all work of this GPU."""
        cupy.cuda.Device(self.ordinal).synchronize()

    def managed_problem(self) -> str | None:
        """Return why managed memory cannot be oversubscribed here; None if it can.

        Checks every visible GPU: one without concurrent access puts all under the old rules.
        """
        return _managed_problem()

    def hybrid_problem(self) -> str | None:
        """Return why hybrid memory cannot spill here; None if it can.

        If managed memory cannot be oversubscribed, it spills to pinned host memory.
        """
        problem = self.managed_problem()
        if problem is None or runtime.is_hip:
            return problem
        if self.integrated:
            return f"{problem}; and it shares the host's memory, so there is nothing to spill to"
        if not (self.attribute("CanMapHostMemory") and self.attribute("UnifiedAddressing")):
            return f"{problem}; and it cannot map host memory either"
        return None

    def attribute(self, name: str) -> int | None:
        """Return a device attribute by its name after ``cudaDevAttr``; None if unknown to CuPy."""
        number = getattr(runtime, f"cudaDevAttr{name}", None)
        return None if number is None else int(runtime.deviceGetAttribute(number, self.ordinal))

    def versions(self) -> dict[str, str | None]:
        """Return the versions of the kernel driver, of its CUDA, and of CuPy's CUDA."""
        return {
            "nvidia driver": host_memory.kernel_driver_version(),
            "cuda of driver": _version(runtime.driverGetVersion()),
            "cuda of cupy": _version(runtime.runtimeGetVersion()),
        }


@functools.cache  # asked wherever a block is entered
def _gpu_count() -> int:
    return int(runtime.getDeviceCount())


@functools.cache
def _managed_problem() -> str | None:
    if runtime.is_hip:
        return "this CuPy is built for ROCm, and umem supports managed memory on CUDA only"
    return next(filter(None, map(_managed_problem_of, range(_gpu_count()))), None)


def _managed_problem_of(ordinal: int) -> str | None:
    """Return why a GPU's managed memory cannot be oversubscribed; None if it can."""
    if not runtime.deviceGetAttribute(runtime.cudaDevAttrManagedMemory, ordinal):
        return f"GPU {ordinal} has no managed memory"
    if runtime.deviceGetAttribute(runtime.cudaDevAttrConcurrentManagedAccess, ordinal):
        return None
    return (
        f"GPU {ordinal} has no concurrent managed access, so its memory cannot be oversubscribed: "
        "that is so on Windows, under WSL2, before Pascal, on many Jetsons and some virtual GPUs "
        "(to use another GPU, hide this one with CUDA_VISIBLE_DEVICES)"
    )


def visible_gpus() -> int | str:
    """Return the number of GPUs, or a sentence that explains why there is none."""
    try:
        return int(runtime.getDeviceCount()) or "the driver sees no GPU"
    except runtime.CUDARuntimeError as error:
        return count_problem(error)


def count_problem(error: Any) -> str:
    """Explain from the error's ``status`` why CUDA cannot count GPUs."""
    if error.status == NOT_INITIALISED:
        return fork.TEXT
    if error.status == NO_DEVICE:
        return "the driver sees no GPU (is CUDA_VISIBLE_DEVICES set?)"
    if error.status != INSUFFICIENT_DRIVER:
        return f"the driver failed: {error}"
    if not runtime.driverGetVersion():
        return "no NVIDIA driver is loaded"
    return (
        f"the NVIDIA driver supports CUDA {_version(runtime.driverGetVersion())}, CuPy needs "
        f"{_version(runtime.runtimeGetVersion())}: update the driver, or install a CuPy for that"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def libraries_problem() -> str | None:
    """Return why CuPy cannot load CUDA's libraries (tries NVRTC); None if it can."""
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        first = str(error).strip().split("\n")[0]
        return f"CUDA libraries are missing ({first})"
    return None


def borrowed(pointer: Any, nbytes: int, owner: Any) -> Any:
    """Wrap memory so that ``owner`` lives as long as its last user."""
    memory = cupy.cuda.UnownedMemory(pointer.ptr, nbytes, owner, device_id=pointer.device_id)
    return cupy.cuda.MemoryPointer(memory, 0)


def current_ordinal() -> int:
    """Return the ordinal of CuPy's current GPU in this thread."""
    return int(runtime.getDevice())


def collect_garbage() -> None:
    """Collect cycles that may hold arrays; takes up to a few hundred milliseconds."""
    gc.collect()
