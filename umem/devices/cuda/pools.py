"""The pools of one GPU, with their source of memory, limits and reserved bytes.

CuPy's pool methods are installed unwrapped, so an allocation from the cache costs the same as in
CuPy. `Growth`, the allocator that a pool calls if its cache has no block, checks limits and host
memory and counts reserved bytes. A pool lives as long as the process: up to CuPy 13 a dying pool
frees blocks that live arrays still use.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, get_args

# From cupy.cuda: an import from cupy.cuda.runtime would replace the module by a copy.
from cupy.cuda import MemoryPointer, UnownedMemory
from cupy.cuda import runtime as cuda_runtime

from umem.devices.base import Policy
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda import fork
from umem.devices.cuda.bounds import Bounds
from umem.devices.cuda.driver import CupyPool, Driver, Malloc
from umem.devices.cuda.ledger import Kind, Ledger, has_plain_pool
from umem.devices.cuda.out_of_memory import CudaOutOfMemoryError
from umem.errors import DeviceError, StateError
from umem.units import format_bytes

if TYPE_CHECKING:
    from umem.devices.cuda.arena import Arena

_Answer = TypeVar("_Answer")


class Growth:
    """The allocator that a pool calls if its cache has no fitting block.

    First, an unused arena frees its free blocks (`Arena.tidy`). Under ``hybrid`` a refusal is final
    at once, because the spill pool takes over; otherwise it frees free blocks (`give_back`) and
    then collects garbage before it fails. Thread-safe: CuPy holds no lock here.

    Raises:
        CudaLimitError, CudaOutOfMemoryError: nothing was reserved.
        DeviceError: the current stream is being captured, so managed memory cannot be allocated;
            nothing was reserved, and the capture continues.
        StateError: this process was forked from one that had used CUDA.
    """

    def __init__(self, pools: Pools, kind: Kind, preset: str | None = None) -> None:
        self._pools, self._kind, self._preset = pools, kind, preset
        self._driver, self._ledger = pools.driver, pools.ledger
        of_managed: tuple[Kind, ...] = ("managed", "spill")
        self._together = of_managed if kind in of_managed else (kind,)

    def __call__(self, nbytes: int) -> Any:
        """Reserve ``nbytes`` more.

        Raises:
            StateError: this process is a forked child.
            DeviceError: managed memory is requested during a capture.
            CudaOutOfMemoryError, CudaLimitError: it does not fit; nothing was allocated.
        """
        fork.refuse_child()
        if not nbytes:
            return self._allocate(0)
        if self._kind != "unmanaged" and self._driver.capturing():
            raise DeviceError(
                f"managed memory ({format_bytes(nbytes)}) cannot be allocated while a stream is "
                "captured. Run the step once before capturing it, so that the pool has room."
            )
        return self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> Any:
        """Reserve, after freeing caches and collecting garbage if it fails at first."""
        if self._pools.arena is not None and "managed" in self._together:
            self._pools.arena.tidy()
        self._pools.make_room(self._kind, nbytes)
        reclaims = () if self._spills() else (self._give_back, self._collect)
        for reclaim in reclaims:
            try:
                return self._attempt(nbytes)
            except CudaOutOfMemoryError:
                reclaim()
        return self._attempt(nbytes)

    def _spills(self) -> bool:
        policy = self._pools.policy()
        return self._kind == "unmanaged" and policy is not None and policy.mode == "hybrid"

    def _give_back(self) -> None:
        self._pools.give_back(*self._together)

    def _collect(self) -> None:
        cuda_driver.collect_garbage()
        self._give_back()

    def _attempt(self, nbytes: int) -> Any:
        """Reserve once, counted in the ledger; an error leaves the count unchanged."""
        self._ledger.claim(
            self._kind, nbytes, lambda after: self._pools.bounds.refusal(self._kind, nbytes, after)
        )
        try:
            self._pools.gpus.add(self._driver.here())
            pointer = self._allocate(nbytes)
        except BaseException as error:
            self._ledger.give_back(self._kind, nbytes)
            if getattr(error, "status", None) == cuda_driver.OUT_OF_MEMORY:
                raise self._driver_error(nbytes) from error
            raise
        pointer = self._leased(pointer, nbytes)
        self._ledger.peak(self._driver.default_pool_bytes())
        return pointer

    def _allocate(self, nbytes: int) -> Any:
        """Allocate memory of the pool's kind from the driver: unmanaged, pinned or managed.

        Managed memory gets the preset's advice, if any; memory of the kind "spill" also prefers the
        host.
        """
        if self._kind == "unmanaged":
            return self._driver.allocate(nbytes)
        if self._kind == "pinned":
            return self._driver.allocate_pinned(nbytes)
        pointer = self._driver.allocate_managed(nbytes)
        if self._kind == "spill" and nbytes:
            self._driver.prefer_host(pointer.ptr, nbytes)
        if self._preset is not None and nbytes:
            self._driver.give_preset(pointer.ptr, nbytes, self._preset)
        return pointer

    def _leased(self, pointer: Any, nbytes: int) -> Any:
        lease = self._ledger.lease(self._kind, nbytes, pointer.mem)
        return cuda_driver.borrowed(pointer, nbytes, lease)

    def _driver_error(self, nbytes: int) -> Exception:
        reserved = self._ledger.reserved()[self._kind]
        return CudaOutOfMemoryError(
            f"needs {format_bytes(nbytes)}; the driver has no more {self._kind} memory, "
            f"{format_bytes(reserved)} are reserved. Free arrays, or use umem.managed().",
            needed_bytes=nbytes,
        )


class _InUpstream(threading.local):
    now = False


class GivenMemory(UnownedMemory):  # type: ignore[misc, unused-ignore]
    """Memory of another library's allocator; the ledger counts its end."""

    __slots__ = ("__weakref__",)


class GivenAllocator(Growth):
    """Another library's allocator of managed memory, counted and limited like a pool.

    It keeps its free blocks itself, so umem counts all it has allocated as in use, and sees every
    allocation: most are within `Bounds.covered_bytes`, and need no check of the machine
    (bench/allocation.py has the cost). In a capture it serves requests from its free memory.
    """

    def __init__(self, pools: Pools, malloc: Malloc, limit_bytes: int | None) -> None:
        super().__init__(pools, "managed")
        self._malloc, self._limit = malloc, limit_bytes
        self._bounds, self._in_upstream = pools.bounds, _InUpstream()
        self._is_managed = False

    def __call__(self, nbytes: int) -> Any:
        """Allocate.

        Raises:
            as `Growth`, except that a capture refuses only requests beyond the allocator's free
            memory.
        """
        fork.refuse_child()
        if not nbytes:
            return self._allocate(0)
        most = self._bounds.covered_bytes(self._limit)
        if self._ledger.claim_within("managed", nbytes, most) or self._claim_in_capture(nbytes):
            try:
                return self._leased(self._allocate(nbytes), nbytes)
            except BaseException as error:
                self._ledger.give_back("managed", nbytes)
                if not isinstance(error, CudaOutOfMemoryError):
                    raise
        return self._reserve(nbytes)

    def _claim_in_capture(self, nbytes: int) -> bool:
        """Check only the limit in a capture, because asking for free VRAM might end it."""
        most = self._bounds.limited(sys.maxsize, self._limit)
        return self._driver.capturing() and self._ledger.claim_within("managed", nbytes, most)

    def _allocate(self, nbytes: int) -> Any:
        """Allocate.

        Raises:
            StateError: the allocator calls this one.
            DeviceError: it returns too little memory, or memory that is not managed (checked at the
                first allocation), or had to grow in a capture.
        """
        if self._in_upstream.now:
            raise StateError("upstream= calls CuPy's allocator, which is umem's: pass another one")
        self._in_upstream.now = True
        try:
            pointer = self._malloc(nbytes)
        except (MemoryError, cuda_runtime.CUDARuntimeError) as error:
            status = getattr(error, "status", cuda_driver.OUT_OF_MEMORY)
            if status == cuda_driver.OUT_OF_MEMORY:
                raise CudaOutOfMemoryError(
                    f"needs {format_bytes(nbytes)}; upstream= has no more memory: {error}",
                    needed_bytes=nbytes,
                ) from error
            if status not in cuda_driver.CAPTURE_ERRORS:
                raise
            raise DeviceError(
                f"upstream= does not have {format_bytes(nbytes)} free, and asking the driver for "
                "more has ended the capture of a stream. Run the step once before capturing it."
            ) from error
        finally:
            self._in_upstream.now = False
        if not isinstance(pointer, MemoryPointer):
            raise DeviceError(
                f"upstream= returns {type(pointer).__name__}, not CuPy's MemoryPointer"
            )
        memory = pointer.mem
        if memory.ptr + memory.size < pointer.ptr + nbytes:
            raise DeviceError(
                f"upstream= returns {format_bytes(memory.ptr + memory.size - pointer.ptr)}, but "
                f"{format_bytes(nbytes)} were requested"
            )
        if not self._is_managed and nbytes:
            self._check(pointer)
        return pointer

    def _check(self, pointer: Any) -> None:
        if not self._driver.is_managed(pointer.ptr):
            raise DeviceError(
                "upstream= returns memory that is not managed: let it allocate managed memory, or "
                "set it as CuPy's allocator, which umem.unmanaged() uses"
            )
        self._is_managed = True

    def _leased(self, pointer: Any, nbytes: int) -> Any:
        # With the allocator: up to CuPy 13 a pool that dies frees blocks that arrays use.
        owner, device = (pointer.mem, self._malloc), pointer.device_id
        memory = GivenMemory(pointer.ptr, nbytes, owner, device)
        self._ledger.follow_given(memory, nbytes)
        return MemoryPointer(memory, 0)


class Pools:
    """The pools of one GPU, made on first use and kept.

    Advice belongs to addresses, so each preset has its own pool of managed memory. They count
    together: a limit applies to all of them, and one may grow into memory that another has freed.
    Managed memory that was allocated while another GPU was current counts here too. Thread-safety:
    any thread.

    Attributes:
        gpus: the GPUs that were current when a pool grew; umem makes no other GPU current.
    """

    def __init__(self, driver: Driver, policy: Callable[[], Policy | None]) -> None:
        self.driver, self.policy = driver, policy
        self.ledger = Ledger()
        self.bounds = Bounds(driver, policy)
        self.gpus = {driver.ordinal}
        self.arena: Arena | None = None
        self._is_collection_due = False
        self._grown_bytes = 0  # while CuPy's pool had free blocks
        self._lock = threading.RLock()  # a collection of garbage may come while it is held
        self._pools: dict[tuple[Kind, str | None], CupyPool] = {}
        self._mallocs: dict[tuple[Kind | None, str | None], Malloc] = {}

    def pool(self, kind: Kind | None, preset: str | None = None) -> CupyPool:
        """Return the pool of a kind and preset; kind None is CuPy's default pool."""
        if kind is None:
            return self.driver.default_pool
        with self._lock:
            if (kind, preset) not in self._pools:
                self._pools[kind, preset] = self._make(kind, preset)
            return self._pools[kind, preset]

    def malloc(self, kind: Kind | None, preset: str | None = None) -> Malloc:
        """Return the pool's bound method, the same object every time."""
        return self._mallocs.setdefault((kind, preset), self.pool(kind, preset).malloc)

    def used_bytes(self, kind: Kind) -> int:
        """Return the bytes of a kind that arrays use, in all presets; walks all pools."""
        others = 0
        if kind == "managed":
            others = self.ledger.given_bytes() + (self.arena.used_bytes() if self.arena else 0)
        return others + sum(self._on_each_gpu(lambda gpu: self._used_bytes_on(gpu, kind)))

    def _used_bytes_on(self, gpu: int, kind: Kind) -> int:
        with self.driver.current(gpu):
            return sum(int(pool.used_bytes()) for pool in self._of(kind))

    def all_used_bytes(self) -> int:
        """Return the bytes that arrays use of all kinds, CuPy's default pool included."""
        with self.driver.current():
            own = int(self.driver.default_pool.used_bytes())
        return own + sum(self.used_bytes(kind) for kind in get_args(Kind))

    def free_plain_bytes(self) -> int:
        """Return the free bytes of pools of plain memory, CuPy's default pool included."""
        with self.driver.current():
            own = self.driver.default_pool
            cached = int(own.total_bytes()) - int(own.used_bytes())
        return cached + self.ledger.reserved()["unmanaged"] - self.used_bytes("unmanaged")

    def made(self) -> list[CupyPool | Arena]:
        """Return the existing pools and the arena, except CuPy's default pool."""
        with self._lock:
            return [*self._pools.values(), *([self.arena] if self.arena else [])]

    def give_back(self, *kinds: Kind) -> None:
        """Free these kinds' free blocks; waits for the GPU if there are any that are not plain."""
        reserved = self.ledger.reserved()
        for kind in filter(reserved.get, kinds):
            for pool in self._of(kind):
                self.flush(pool, waits=kind != "unmanaged")
            if kind == "managed" and self.arena is not None:
                self.arena.free_all_blocks()

    def flush(self, pool: CupyPool, waits: bool = True) -> None:
        """Free a pool's free blocks on all GPUs; see `Driver.flush`."""
        self._on_each_gpu(lambda gpu: self.driver.flush(pool, waits=waits, ordinal=gpu))

    def _on_each_gpu(self, read: Callable[[int], _Answer]) -> list[_Answer]:
        """Call a function with the ordinal of each of `gpus`.

        Ignores errors of other GPUs: the memory of a lost GPU is lost too.
        """
        found = []
        for gpu in sorted(self.gpus):
            try:
                found.append(read(gpu))
            except self.driver.error:
                if gpu == self.driver.ordinal:
                    raise
        return found

    def release(self) -> None:
        """Free the free blocks of all kinds; plain memory also when it becomes free later."""
        self.give_back_all()
        self.release_plain()

    def release_plain(self, keep: bool = False) -> None:
        """Free the free blocks of plain memory; with ``keep``, only if they exceed free VRAM.

        Otherwise CuPy's own pool, which does not know them, would run out although memory is
        unused. While some are left, or arrays outlive their block, explicit garbage collections
        free them: CuPy's pool requests one before it fails.
        """
        if ("unmanaged", None) not in self._pools:
            return
        cached = self.ledger.reserved()["unmanaged"] - self.used_bytes("unmanaged")
        if cached > 0 and not (keep and cached <= self.driver.free_bytes()):
            self.give_back("unmanaged")
        is_hooked = self._after_collection in gc.callbacks
        if self.ledger.reserved()["unmanaged"] and not is_hooked:
            gc.callbacks.insert(0, self._after_collection)  # before others change the counts
        elif is_hooked and not self.ledger.reserved()["unmanaged"]:
            gc.callbacks.remove(self._after_collection)

    def _after_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Free plain memory after a full collection, where CuPy's own pool allocates.

        Only after an explicit collection. Python starts others itself wherever an object is made,
        up to Python 3.11 also in the code of a pool, while this thread holds the pool's lock. It
        starts them only while the count of new objects is above its threshold.

        Does not change the list of callbacks: the collector is walking it, and would skip one.
        Raises nothing.
        """
        if info["generation"] < 2 or sys.is_finalizing() or fork.is_child():
            return
        if phase == "start":
            most = gc.get_threshold()[0]
            self._is_collection_due = not (gc.isenabled() and most) or gc.get_count()[0] <= most
        elif self._is_collection_due:
            with suppress(Exception):  # it may come at any time, also while CUDA is in error
                policy = self.policy()
                if not has_plain_pool(policy):
                    self.give_back("unmanaged")

    def give_back_all(self) -> None:
        """Free all free blocks, except in CuPy's default pool."""
        self.give_back(*get_args(Kind))

    def give_back_everything(self) -> None:
        """Free all free blocks, those of CuPy's default pool too."""
        self.give_back_all()
        self.clear_default()

    def make_room(self, kind: Kind, nbytes: int) -> None:
        """Free CuPy's own free blocks if a growing kind of memory needs the space.

        Memory of cudaMalloc is never evicted. Frees nothing while VRAM has space, because CuPy
        would only reserve it again. Costs a driver call if there are free blocks.
        """
        if kind not in ("managed", "unmanaged"):
            return  # it stays on the host
        own = self.driver.default_pool
        with self.driver.current():
            cached = int(own.total_bytes()) - int(own.used_bytes())
        self._grown_bytes = self._grown_bytes + nbytes if cached else 0
        if not cached:
            return
        free = self.driver.free_bytes()
        is_short = nbytes + (self.bounds.headroom if kind == "unmanaged" else 0) > free
        if kind == "managed" and self._grown_bytes >= cached:
            # The driver may count managed memory as free, so all that is reserved has to fit. It
            # need not at once: in a loop CuPy's pool would soon have as much again.
            is_short = is_short or nbytes + self.ledger.reserved()["managed"] > free
        if is_short:
            self.clear_default()

    def clear_default(self) -> None:
        """Free CuPy's own free blocks."""
        self.driver.flush(self.driver.default_pool, waits=False)

    def _of(self, kind: Kind) -> list[CupyPool]:
        with self._lock:
            return [pool for (other, _), pool in self._pools.items() if other == kind]

    def _make(self, kind: Kind, preset: str | None) -> CupyPool:
        pool = self.driver.make_pool(Growth(self, kind, preset))
        if kind != "unmanaged":
            # CUPY_GPU_MEMORY_LIMIT caps every new pool: right for VRAM, and for managed memory
            # a ban on oversubscription that nobody asked for.
            with self.driver.current():
                pool.set_limit(size=0)
        return pool
