"""A real GPU, through CuPy: modes of allocation, hints, and the state of its memory."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from umem._common.host import host_view, unmanaged_text
from umem._common.locks import safe_lock
from umem._common.scopes import Scope
from umem.devices.base import (
    Advice,
    Device,
    Feature,
    Location,
    Mode,
    Place,
    Policy,
    Served,
    Span,
    Usage,
    Watched,
    Watcher,
)
from umem.devices.cost import cuda_model
from umem.devices.cuda import fork
from umem.devices.cuda.ledger import has_plain_pool
from umem.devices.cuda.ranges import umems_errors
from umem.devices.page_moves import MoveListener, Now
from umem.devices.spans import byte_ranges
from umem.errors import DeviceError, HintError, StateError

if TYPE_CHECKING:
    from umem.devices.cost import StepCost
    from umem.devices.cuda.driver import CupyPool, Driver, Malloc
    from umem.devices.cuda.ledger import Kind
    from umem.devices.cuda.pools import Pools
    from umem.devices.cuda.ranges import CoreHints
    from umem.devices.cuda.watching import WatchedAllocations


class CudaDevice(Device):
    """One GPU. Use `open_cuda`, which keeps one object a GPU.

    Thread-safety: see `Device`. Residency and paging are unknown, because CUDA reports them only to
    its profiler; a simulated GPU's model knows them. Every use raises StateError in a forked child.
    """

    simulated: bool = False
    backend: ClassVar[Literal["numpy", "cupy"]] = "cupy"

    def __init__(self, driver: Driver, opener: Callable[[int], CudaDevice] | None = None) -> None:
        from umem.devices.cuda.install import Installer
        from umem.devices.cuda.pools import Pools

        fork.remember_use()
        self._own_driver, self._open = driver, opener
        self._installer = Installer(self)
        self.serves_for: CudaDevice | None = None
        self._served_by: set[CudaDevice] = set()
        self.pools = Pools(driver, self._counted_policy)
        self._hints: CoreHints | None = None
        self.watches: tuple[WatchedAllocations, ...] = ()
        self._watching = safe_lock()
        self._model = cuda_model(driver.ordinal)
        self.simulated = self._model is not None
        self.name = driver.name.removesuffix(" (simulated)")
        self.ordinal = driver.ordinal

    @property
    def driver(self) -> Driver:
        """Return the GPU's `Driver`; raises StateError in a forked child."""
        fork.refuse_child()
        return self._own_driver

    @property
    def vram_bytes(self) -> int:
        """Return all bytes of VRAM, used or not."""
        return self.driver.vram_bytes

    @property
    def xp(self) -> Any:
        """Return CuPy."""
        return importlib.import_module("cupy")

    @property
    def headroom_bytes(self) -> int:
        """Return the bytes of VRAM left for modules and libraries; see `Driver`."""
        return self.driver.headroom_bytes

    @property
    def free_bytes(self) -> int:
        """Return the free bytes of VRAM; managed memory in VRAM may count as free."""
        return self.driver.free_bytes()

    def host_available_bytes(self) -> int | None:
        """Return the host bytes that this process may still allocate; None if unknown."""
        return self.driver.host_available_bytes()

    def why_not(self, mode: Mode) -> str | None:
        """Return why this GPU cannot serve ``mode``: managed memory cannot be oversubscribed.

        Hybrid does not need that: it then spills to pinned host memory.
        """
        if mode == "managed":
            return self.driver.managed_problem()
        return None if mode == "unmanaged" else self.driver.hybrid_problem()

    def features(self) -> tuple[Feature, ...]:
        """List the features of this GPU, its driver and its libraries, with reasons."""
        part = importlib.import_module("umem.devices.cuda.features")
        return part.features(self.driver, self.simulated)  # type: ignore[no-any-return]

    def versions(self) -> dict[str, str | None]:
        """Return the versions of NVIDIA's driver, of its CUDA, and of CuPy's CUDA."""
        return self.driver.versions()

    def _prepared(self, policy: Policy) -> tuple[Malloc, CupyPool]:
        """Return the allocator of a policy, and the pool that it uses first."""
        if policy.upstream is not None and self._installer.is_umems(policy.upstream):
            raise StateError("upstream= is an allocator of umem itself: give another one")
        if policy.mode == "unmanaged" and policy.limit_bytes is None:
            program_allocator = self._installer.program_allocator()
            if program_allocator is not None:
                return program_allocator, self.driver.default_pool
        cuda_modes = importlib.import_module("umem.devices.cuda.modes")
        found: tuple[Malloc, CupyPool] = cuda_modes.allocator(policy, self.driver, self.pools)
        if has_plain_pool(policy):
            each = cuda_modes.on_each_gpu(found[0], self.driver, lambda n: self._on_gpu(n, policy))
            return each, found[1]
        return found

    def _on_gpu(self, ordinal: int, policy: Policy) -> Malloc:
        """Serve a policy on another GPU that is current, and count it there."""
        if self._open is None:
            raise DeviceError(f"GPU {ordinal} is current, and only GPU {self.ordinal} is open")
        other = self._open(ordinal)
        other.serves_for = self
        self._served_by.add(other)
        cuda_modes = importlib.import_module("umem.devices.cuda.modes")
        found: Malloc = cuda_modes.allocator(policy, other.driver, other.pools)[0]
        return found

    def _counted_policy(self) -> Policy | None:
        own = self._installer.policy()
        if own is None and self.serves_for is not None:
            return self.serves_for.policy
        return own

    def _serve_all(self, scope: Scope, policy: Policy, handle: tuple[Malloc, CupyPool]) -> None:
        """Install the allocator of a policy, and a default pool that manages its memory."""
        from umem.devices.cuda.pool_in_use import PoolInUse
        from umem.devices.cuda.pools import Pools

        malloc, pool = handle
        scope.at_close(lambda: self._tidy(Pools.release))  # undone in reverse: last
        own = self.driver.default_pool
        if pool is not own:
            kind: Kind = "managed" if policy.mode == "managed" else "unmanaged"
            pool = PoolInUse(self.pools, kind, malloc, own)
            scope.at_close(pool.end)
        self._installer.serve_all(scope, policy, malloc, pool)

    def leave_all(self, scope: Scope) -> None:
        """End `serve_all`; raises StateError inside a block of this thread."""
        self._installer.leave_all(scope)

    def _watch(self, watcher: Watcher) -> WatchedAllocations:
        from umem.devices.cuda.watching import WatchedAllocations

        return WatchedAllocations(watcher)

    def _unwatch(self, handle: WatchedAllocations) -> None:
        handle.report_frees()
        with self._watching:
            self.watches = tuple(each for each in self.watches if each is not handle)

    def report_frees(self) -> None:
        """Tell watchers of all frees so far."""
        for watched in self.watches:
            watched.report_frees()

    def _entered(self, scope: Scope) -> None:
        watched = [part.handle for part in scope.payload if isinstance(part, Watched)]
        with self._watching:
            self.watches = (*self.watches, *watched)
        self._installer.enter(scope)

    def _left(self, scope: Scope) -> None:
        """Return plain memory to the driver once no policy of umem allocates it."""
        from umem.devices.cuda.install import clear
        from umem.devices.cuda.pools import Pools

        clear()
        policies = [part.policy for part in scope.payload if isinstance(part, Served)]
        ended = [policy for policy in policies if has_plain_pool(policy)]
        if ended and not has_plain_pool(self.policy):
            keep = all(policy.limit_bytes is None for policy in ended)
            self._tidy(lambda pools: Pools.release_plain(pools, keep))

    def _tidy(self, free: Callable[[Pools], None]) -> None:
        """Free memory of this GPU, and of other GPUs that served its policies, which may fail."""
        if fork.is_child():
            return
        free(self.pools)
        for device in self._served_by:
            with contextlib.suppress(self.driver.error):
                free(device.pools)

    @property
    def policy(self) -> Policy | None:
        """Return the policy of the calling code's allocations; None for CuPy's own."""
        return self._installer.policy()

    def set_over(self) -> str | None:
        """Name the allocator that the program has set over the mode of the calling code."""
        found = self._installer.set_over()
        if found is None:
            return None
        is_named = isinstance(found, (FunctionType, MethodType, BuiltinMethodType))
        return found.__qualname__ if is_named else type(found).__qualname__

    def cap_managed(self, nbytes: int | None) -> None:
        """Limit the managed memory of the whole process; None removes the limit."""
        self.pools.bounds.cap_bytes = nbytes

    def usage(self) -> Usage:
        """Return the bytes that the pools have reserved, CuPy's default pool included.

        The peak counts the default pool only at calls of this, and whenever a pool of umem grew.
        """
        reserved = self.pools.ledger.reserved()
        other = self.driver.default_pool_bytes()
        return Usage(
            reserved_bytes=sum(reserved.values()) + other,
            peak_bytes=self.pools.ledger.peak(other),
            managed_bytes=reserved["managed"] + reserved["spill"],
            resident_bytes=None if self._model is None else self._model.resident_bytes,
            paging=self._paging(),
        )

    def _paging(self) -> str:
        figures = self.figures
        if figures is None or figures.fault_count is None:
            return "unknown"
        return f"{figures.fault_count} faults (simulated)"

    @property
    def figures(self) -> StepCost | None:
        """Return the counts of a simulated GPU's model; None on a real one."""
        return None if self._model is None else self._model.figures

    def follow(self, scope: Scope, watcher: Watcher) -> None:
        """Tell a watcher of allocations of this thread until a scope is closed, by memory hooks."""
        part = importlib.import_module("umem.devices.cuda.address_hook")
        part.AddressHook(watcher).enter(scope)

    def watch_pages(self, listener: MoveListener, scope: Scope) -> Now:
        """Report page moves from a simulated GPU's model or from CUPTI; see `Device.watch_pages`.

        Never run on a GPU yet.
        """
        if self._model is not None:
            return self._model.watch_pages(listener, scope)
        part = importlib.import_module("umem.devices.cuda.cupti")
        now: Now = part.watch_pages(self.ordinal, self.driver.cuda_major, listener, scope)
        scope.at_close(self.synchronize)  # before CUPTI is asked for the last records
        return now

    def prefetch(self, array: Any, to: Place, stream: Any) -> int:
        """Move an array's own bytes in the order of ``stream``; None is CuPy's current stream.

        Raises:
            DeviceError: it is not an array of this GPU; hints cannot work here; or the stream is
                being captured, and a prefetch would end the capture. Nothing was moved.
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
            if self.pools.arena is None:
                return hints.prefetch(spans, to, address)
            return self.pools.arena.prefetch(hints, spans, to, address)

    @property
    def forgets(self) -> bool:
        """Tell whether free memory is known, and the driver can discard it (CUDA 13)."""
        if self.pools.arena is None or not self.pools.arena.is_open:
            return False
        with self._ready() as hints:
            return hints.discards

    def repeat_places(self, scope: Scope) -> None:
        """Reuse the previous step's addresses for managed memory, until ``scope`` is closed.

        Applies to allocations on the current stream. Does nothing outside a block of managed
        memory, or in one with a preset or prefetch.
        """
        from umem.devices.cuda.pools import Growth

        policy = self.policy
        if policy is None or policy != Policy("managed", policy.limit_bytes):
            return
        if self.pools.arena is None:
            arena = importlib.import_module("umem.devices.cuda.arena")
            grow, fallback = Growth(self.pools, "managed"), self.pools.malloc("managed")
            self.pools.arena = arena.Arena(self.driver, grow, fallback)
        if self.pools.arena.is_open:
            return
        scope.at_close(lambda: self._left(scope))
        scope.at_close(self.pools.arena.close)
        self.pools.arena.open()
        scope.open(Served(self, policy, (self.pools.arena.malloc, self.pools.pool("managed"))))
        self._entered(scope)

    def next_step(self) -> None:
        """End a step, so that the next one reuses its addresses."""
        if self.pools.arena is not None:
            self.pools.arena.next_step()

    def discard_free(self, blocks: Iterable[int]) -> int:
        """Discard the contents of free blocks; returns their bytes."""
        if self.pools.arena is None:
            return 0
        with self._ready() as hints:
            return self.pools.arena.discard_free(hints, blocks)

    def make_ready(self, blocks: Iterable[int], stream: Any) -> int:
        """Make free blocks resident, concurrently with operations; returns their bytes."""
        if self.pools.arena is None:
            return 0
        address = self.driver.stream_address(stream)
        with self._ready() as hints:
            return self.pools.arena.make_ready(hints, blocks, address)

    def give_back(self) -> None:
        """Return free blocks of managed memory; waits for the GPU if there are any."""
        self.pools.give_back("managed")

    def address(self, array: Any) -> int | None:
        """Return the address of an array in this GPU's managed memory; None for other arrays."""
        array = self.own_array(array)
        address = int(array.data.ptr)
        return address if array.nbytes and self.driver.is_managed(address) else None

    def advise(self, array: Any, advice: Advice, place: Place | None, *, unset: bool) -> int:
        """Set or unset advice on the pages of an array; ``place`` None is this GPU.

        Advice belongs to addresses: it stays when the pool gives the block to another array, and
        also affects neighbours on the same page. Raises the errors of `prefetch`.
        """
        spans = self._managed_spans(array)
        if not spans:
            return 0
        with self._ready() as hints:
            return hints.advise(spans, advice, self.ordinal if place is None else place, unset)

    def location(self, array: Any) -> Location:
        """Ask the driver for an array's location; residency is known only where it is fixed."""
        array = self.own_array(array)
        spans = self._managed_spans(array)
        if not spans:
            on_host = bool(array.nbytes) and self.driver.is_on_host(array.data.ptr)
            return Location(managed=False, resident_bytes=0 if on_host else int(array.nbytes))
        with self._ready() as hints:
            return hints.location(spans)

    def host_view(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the array's memory for the host, after waiting for the GPU; see
        `Device.host_view`.
        """
        array = self.own_array(array)
        if array.nbytes and not self.driver.is_managed(array.data.ptr):
            raise HintError(unmanaged_text(array.shape))
        reason = self.driver.managed_problem()
        if reason is not None:
            raise DeviceError(f"the host cannot share an array of {self.name}: {reason}")
        if self.driver.is_any_captured():
            raise DeviceError(
                "a host view waits for the GPU, which would end the capture of a stream; make it "
                "before or after the capture"
            )
        self.driver.synchronize()
        return host_view(array.data.ptr, array.shape, array.strides, array.dtype, array)

    def synchronize(self) -> None:
        """Wait for all work of this GPU."""
        self.driver.synchronize()

    def own_array(self, array: Any) -> Any:
        """Return an array of this GPU as a CuPy array; Numba's, JAX's or PyTorch's as a view.

        Raises:
            DeviceError: it is not an array of this GPU.
        """
        if not isinstance(array, self.xp.ndarray):
            # Of the object: PyTorch's tensors on the host have it in their type.
            if not hasattr(array, "__cuda_array_interface__"):
                raise DeviceError(f"not an array of GPU {self.ordinal}: {type(array).__name__}")
            array = self.xp.asarray(array)
        home = array.device.id
        if home != self.ordinal:
            raise DeviceError(
                f"the array is on GPU {home}, and this is GPU {self.ordinal}: make GPU {home} "
                f"current, with cupy.cuda.Device({home})"
            )
        return array

    def _managed_spans(self, array: Any) -> list[Span]:
        array = self.own_array(array)
        if not array.nbytes or not self.driver.is_managed(array.data.ptr):
            return []
        return byte_ranges(array.data.ptr, array.shape, array.strides, array.itemsize)

    @contextlib.contextmanager
    def _ready(self) -> Iterator[CoreHints]:
        """Yield the hints, with this GPU current in the driver; turn its errors into DeviceError.

        Raises:
            DeviceError: managed memory cannot be oversubscribed here, or the driver refused.
        """
        reason = self.driver.managed_problem()
        if reason is not None:
            raise DeviceError(f"hints cannot work on {self.name}: {reason}")
        if self._hints is None:
            self._hints = self.driver.load_hints()
        with self.driver.current():
            self.driver.bind()
            with umems_errors():
                yield self._hints
