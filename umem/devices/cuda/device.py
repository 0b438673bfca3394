"""A real GPU, through CuPy: modes of allocation, hints, and what is known of the memory.

Importing this module imports neither CuPy nor cuda.core; opening a device imports CuPy, and the
first hint cuda.core.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from umem import extras
from umem.devices.base import (
    Advice,
    Device,
    Feature,
    Location,
    Mode,
    Place,
    Policy,
    Span,
    Usage,
    Watched,
    Watcher,
    byte_ranges,
)
from umem.devices.cuda import fork
from umem.devices.host import host_view, unmanaged_text
from umem.errors import DeviceError, DeviceNotFoundError, HintError, UmemError
from umem.locks import safe_lock
from umem.scopes import Scope

if TYPE_CHECKING:
    from umem.devices.cuda.driver import Driver, Malloc, Pool
    from umem.devices.cuda.ranges import CoreHints
    from umem.devices.cuda.watching import Telling

OLDEST_CUPY = 13

opened: dict[int, CudaDevice] = {}
"""The GPUs that `open_cuda` has returned, by ordinal."""
_lock = threading.Lock()


def open_cuda(ordinal: int | None = None) -> CudaDevice:
    """The GPU with this ordinal, or the one that CuPy uses now.

    The same object every time: its pools live as long as the process. The first call imports
    CuPy and asks the driver for the GPUs; it creates no context on any of them. Thread-safe.

    Raises:
        DeviceNotFoundError: there is no such GPU that CuPy can use; the message says why, and
            what to do instead. Nothing was opened.
        StateError: this process was forked from one that had used CUDA.
    """
    fork.refuse_child()
    known = _already_open(ordinal)
    if known is not None:
        return known
    reason = cuda_reason(ordinal)
    if reason is not None:
        raise DeviceNotFoundError(_ways_out(reason))
    driver = importlib.import_module("umem.devices.cuda.driver")
    number = driver.current_ordinal() if ordinal is None else ordinal
    with _lock:
        if number not in opened:
            opened[number] = CudaDevice(driver.Driver(number))
        return opened[number]


def _already_open(ordinal: int | None) -> CudaDevice | None:
    # Every hint asks for the current device, so the checks are not repeated.
    if ordinal is None and opened:
        ordinal = importlib.import_module("umem.devices.cuda.driver").current_ordinal()
    return None if ordinal is None else opened.get(ordinal)


def cuda_reason(ordinal: int | None = None) -> str | None:
    """Why there is no CUDA device, or None when there is one.

    Imports CuPy where it is installed. Raises nothing.
    """
    reason = _cupy_reason()
    if reason is not None:
        return reason
    driver = importlib.import_module("umem.devices.cuda.driver")
    gpus: int | str = driver.visible_gpus()
    if isinstance(gpus, str):
        return gpus
    if ordinal is not None and not 0 <= ordinal < gpus:
        return f"GPU {ordinal} was asked for, and {gpus} can be seen"
    problem: str | None = driver.libraries_problem()
    return problem


def _cupy_reason() -> str | None:
    try:
        version = str(importlib.import_module("cupy").__version__)
    except ImportError as error:
        if getattr(error, "name", None) == "cupy":
            return "CuPy is not installed"
        return "CuPy cannot be imported: " + str(error).strip().split("\n")[0]
    major = version.split(".")[0]
    if major.isdigit() and int(major) < OLDEST_CUPY:
        return f"CuPy {version} is too old; {OLDEST_CUPY} or newer is needed"
    return None


def _ways_out(reason: str) -> str:
    return (
        f"no CUDA device: {reason}. On a machine with an NVIDIA GPU install what its CUDA needs: "
        f"{extras.command('cuda12')}, or {extras.command('cuda13')}; without one, model it: "
        'with umem.virtual_gpu("v100-16gb"): ...'
    )


def _after_fork() -> None:
    if any(device.is_installed for device in opened.values()):
        fork.refuse_allocations()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class CudaDevice(Device):
    """One GPU. Use `open_cuda`, which keeps one object a GPU.

    Thread-safety: see `Device`. Residency and paging are unknown: CUDA does not tell without its
    profiler. A child by fork gets a StateError from all of it.
    """

    kind: ClassVar[Literal["cuda", "virtual"]] = "cuda"

    def __init__(self, driver: Driver) -> None:
        from umem.devices.cuda.install import Installer
        from umem.devices.cuda.pools import Pools

        fork.remember_use()
        self._own_driver = driver
        self._installer = Installer(self)
        self.pools = Pools(driver, self._installer.policy)
        self._hints: CoreHints | None = None
        self.watches: tuple[Telling, ...] = ()
        self._watching = safe_lock()
        self.name, self.ordinal = driver.name, driver.ordinal

    @property
    def driver(self) -> Driver:
        """Return what this GPU is asked through; a StateError in a child by fork."""
        fork.refuse_child()
        return self._own_driver

    @property
    def vram_bytes(self) -> int:
        """Bytes of VRAM, all of it, whoever uses it now."""
        return self.driver.vram_bytes

    @property
    def xp(self) -> Any:
        """CuPy."""
        return importlib.import_module("cupy")

    @property
    def free_bytes(self) -> int:
        """Bytes of VRAM that are free; what managed memory holds may count as free."""
        return self.driver.free_bytes()

    def host_available_bytes(self) -> int | None:
        """Host bytes that this process may still take, None where it is unknown."""
        return self.driver.host_available_bytes()

    def why_not(self, mode: Mode) -> str | None:
        """Why this GPU cannot serve ``mode``: managed memory that cannot be oversubscribed.

        Hybrid does not need it: there it spills to pinned host memory.
        """
        if mode == "managed":
            return self.driver.managed_problem()
        return None if mode == "unmanaged" else self.driver.hybrid_problem()

    def features(self) -> tuple[Feature, ...]:
        """What this GPU, its driver and its libraries can do, and why not more."""
        found: tuple[Feature, ...] = importlib.import_module("umem.devices.cuda.features").features(
            self.driver
        )
        return found

    def versions(self) -> dict[str, str | None]:
        """Versions of NVIDIA's driver, of the CUDA that it serves, and of CuPy's CUDA."""
        return self.driver.versions()

    def _prepared(self, policy: Policy) -> Malloc:
        return self._allocator(policy)[0]

    def serve_all(self, scope: Scope, policy: Policy) -> None:
        """Serve CuPy's allocations outside of blocks by ``policy``; see `Device.serve_all`.

        Plain `managed`, with or without a limit, sets the pool's own method. A change to managed
        or hybrid, for the process or a block, gives the free blocks of CuPy's default pool back
        first: memory from cudaMalloc is never evicted.

        Raises:
            DeviceError: the GPU cannot serve the mode.
            SizeError: the limit is below what the mode's arrays use now.
            MissingDependencyError: cuda-core is needed and missing (prefetch or hybrid's
                spill to the host, on CUDA 13 only).
            StateError: inside a block of this thread.
            In every case nothing has changed.
        """
        self._installer.serve_all(scope, policy, *self._allocator(policy))

    def leave_all(self, scope: Scope) -> None:
        """End `serve_all`; a StateError inside a block of this thread."""
        self._installer.leave_all(scope)

    def _allocator(self, policy: Policy) -> tuple[Malloc, Pool]:
        reason = self.why_not(policy.mode)
        if reason is not None:
            raise DeviceError(f"{self.name} cannot serve mode {policy.mode!r}: {reason}")
        cuda_modes = importlib.import_module("umem.devices.cuda.modes")
        found: tuple[Malloc, Pool] = cuda_modes.allocator(policy, self.driver, self.pools)
        if policy.mode != "unmanaged":
            self._clear_default_pool()
        return found

    def _watch(self, watcher: Watcher) -> Telling:
        from umem.devices.cuda.watching import Telling

        return Telling(watcher)

    def _unwatch(self, how: Telling) -> None:
        how.settle()
        with self._watching:
            self.watches = tuple(each for each in self.watches if each is not how)

    def settle(self) -> None:
        """Tell watchers of everything that was freed so far."""
        for telling in self.watches:
            telling.settle()

    def _entered(self, scope: Scope) -> None:
        tellings = [part.how for part in scope.payload if isinstance(part, Watched)]
        with self._watching:
            self.watches = (*self.watches, *tellings)
        self._installer.enter(scope)

    def _left(self, scope: Scope) -> None:
        self._installer.clear()

    @property
    def is_installed(self) -> bool:
        """Whether the calling code's allocations are served by a policy of this device."""
        return self.policy is not None

    @property
    def policy(self) -> Policy | None:
        """Return how the calling code's allocations are served; None is CuPy's own way."""
        return self._installer.policy()

    def follow_chainer(self) -> None:
        """Point Chainer's alias of the pool at the one installed; for after Chainer's import."""
        self._installer.follow_chainer()

    def cap_managed(self, nbytes: int | None) -> None:
        """Bound all managed memory of this process together, whatever the mode; None lifts it."""
        self.pools.bounds.cap_bytes = nbytes

    def usage(self) -> Usage:
        """What the pools have reserved, CuPy's default pool included.

        The peak counts the default pool as it was whenever one of ours grew or this was asked.
        """
        reserved = self.pools.ledger.reserved()
        other = self.driver.default_pool_bytes()
        return Usage(
            reserved_bytes=sum(reserved.values()) + other,
            peak_bytes=self.pools.ledger.peak(other),
            managed_bytes=reserved["managed"] + reserved["spill"],
            resident_bytes=None,
            paging="unknown",
        )

    def prefetch(self, array: Any, to: Place, stream: Any) -> int:
        """Move the array's own bytes, in the order of ``stream`` (None: CuPy's current one).

        Raises:
            DeviceError: not an array of this GPU; hints cannot work here; or the stream is being
                captured, which a prefetch would end. Nothing was moved.
            MissingDependencyError: cuda-core is missing.
        """
        spans = self._managed_spans(array)
        if not spans:
            return 0
        address = self.driver.stream_address(stream)
        if self.driver.capturing(address):
            raise DeviceError(
                "a prefetch cannot be captured, and would end the capture of its stream; "
                "prefetch before capturing, or on another stream"
            )
        with self._ready() as hints:
            return hints.prefetch(spans, to, address)

    def advise(self, array: Any, advice: Advice, place: Place | None, *, unset: bool) -> int:
        """Give or take back advice on the pages that the array covers; None is this GPU.

        Advice belongs to addresses: it stays when the pool hands the block to another array,
        and reaches neighbours on the same page. Raises as `prefetch` does.
        """
        spans = self._managed_spans(array)
        if not spans:
            return 0
        with self._ready() as hints:
            return hints.advise(spans, advice, self.ordinal if place is None else place, unset)

    def location(self, array: Any) -> Location:
        """What the driver says of the array's range; residency only where it is fixed."""
        spans = self._managed_spans(array)
        if not spans:
            on_host = bool(array.nbytes) and self.driver.is_on_host(array.data.ptr)
            return Location(managed=False, resident_bytes=0 if on_host else int(array.nbytes))
        with self._ready() as hints:
            return hints.location(spans)

    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """The array's memory for the host; see `Device.host_view`. Waits for the whole GPU."""
        self._check_mine(array)
        if array.nbytes and not self.driver.is_managed(array.data.ptr):
            raise HintError(unmanaged_text(array.shape))
        reason = self.driver.managed_problem()
        if reason is not None:
            raise DeviceError(f"the host cannot share an array of {self.name}: {reason}")
        if self.driver.capturing():
            raise DeviceError(
                "a host view waits for the GPU, which would end the capture of the current "
                "stream; take it before or after"
            )
        self.driver.synchronize()
        return host_view(array.data.ptr, array.shape, array.strides, array.dtype, array)

    def synchronize(self) -> None:
        """Wait for everything that was asked of this GPU."""
        self.driver.synchronize()

    def _clear_default_pool(self) -> None:
        if self.driver.capturing():
            return  # cudaFree would end the capture
        with self.driver.current():
            self.pools.pool(None).free_all_blocks()

    def _check_mine(self, array: Any) -> None:
        if not isinstance(array, self.xp.ndarray):
            raise DeviceError(f"not an array of GPU {self.ordinal}: {type(array).__name__}")
        home = array.device.id
        if home != self.ordinal:
            raise DeviceError(
                f"the array lives on GPU {home}, and this is GPU {self.ordinal}: make that one "
                f"the current one, with cupy.cuda.Device({home})"
            )

    def _managed_spans(self, array: Any) -> list[Span]:
        self._check_mine(array)
        if not array.nbytes or not self.driver.is_managed(array.data.ptr):
            return []
        return byte_ranges(array.data.ptr, array.shape, array.strides, array.itemsize)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[CoreHints]:
        reason = self.driver.managed_problem()
        if reason is not None:
            raise DeviceError(f"hints cannot work on {self.name}: {reason}")
        if self._hints is None:
            self._hints = self.driver.load_hints()
        with self.driver.current():
            self.driver.bind()
            try:
                yield self._hints
            except UmemError:
                raise
            except Exception as error:  # cuda.core's error class is private before 1.3
                raise DeviceError(f"the driver refused the hint: {error}") from error
