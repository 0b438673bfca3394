"""The allocator of each policy on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from cupy.cuda.memory import OutOfMemoryError

from umem.devices.base import Policy
from umem.devices.cuda import driver as cuda_driver
from umem.devices.cuda.bounds import limit_of
from umem.devices.cuda.driver import CupyPool, Driver, Malloc
from umem.devices.cuda.ledger import Kind
from umem.devices.cuda.pools import GivenAllocator, Pools
from umem.errors import DeviceError, SizeError
from umem.units import format_bytes

LARGE_BYTES = 1 << 20
"""Under pressure requests of at least this size spill at once. Smaller ones try VRAM first: many
fit into the cache, and paging them is expensive. A guess that no measurement supports, as memory
pressure costs nothing on the software GPU.
"""

PROBE_EVERY = 64
"""Under pressure one large request in this many is tried unmanaged: other programs may have freed
VRAM, which the counts here cannot show. A guess that no measurement supports."""


class Hybrid:
    """Tries the allocator ``fast``, and falls back to ``spill`` when it is out of memory.

    The first failure frees the free blocks of the fast pool and of CuPy's own, then collects
    garbage, as CuPy does. That is too expensive to repeat, so the level at which VRAM was full is
    remembered: while more is in use, large requests use ``spill`` at once; when enough has been
    freed they use ``fast`` again.

    Cost: one comparison and one call before pressure; under pressure a large request counts the
    used bytes of the fast pool (a pass over its live blocks). Thread-safety: any thread; two
    threads may both detect the pressure.
    """

    def __init__(self, driver: Driver, fast: Malloc, spill: Malloc, fast_pool: CupyPool) -> None:
        self._driver, self._fast, self._spill, self.pool = driver, fast, spill, fast_pool
        self._direct_from = sys.maxsize
        self._full_at_bytes = 0
        self._countdown = PROBE_EVERY

    @property
    def under_pressure(self) -> bool:
        """Tell whether a request has spilled, so that large ones are not tried blindly."""
        return self._direct_from < sys.maxsize

    def malloc(self, nbytes: int) -> Any:
        """Allocate by CuPy's interface.

        Raises:
            CudaOutOfMemoryError: host memory cannot take the spill; nothing was allocated.
        """
        if nbytes >= self._direct_from:
            return self._malloc_under_pressure(nbytes)
        try:
            return self._fast(nbytes)
        except OutOfMemoryError:
            pass  # outside the handler, so that a failing spill reports itself alone
        return self._spill(nbytes) if self.under_pressure else self._first_overflow(nbytes)

    def _first_overflow(self, nbytes: int) -> Any:
        for reclaim in (self._give_back, self._collect):
            reclaim()
            pointer = self._try_fast(nbytes)
            if pointer is not None:
                return pointer
        self._full_at_bytes = self._used_bytes()
        self._direct_from = LARGE_BYTES
        return self._spill(nbytes)

    def _malloc_under_pressure(self, nbytes: int) -> Any:
        """Allocate while VRAM is short: unmanaged if it may fit or a probe is due, else spill."""
        room = self._used_bytes() + nbytes <= self._full_at_bytes
        if not (room or self._probe_is_due()):
            return self._spill(nbytes)
        pointer = self._try_fast(nbytes)
        if pointer is None and room:
            self._give_back()  # room by count, yet no block of that shape
            pointer = self._try_fast(nbytes)
        self._learn(pointer is not None)
        return self._spill(nbytes) if pointer is None else pointer

    def _learn(self, succeeded: bool) -> None:
        used = self._used_bytes()
        self._full_at_bytes = max(self._full_at_bytes, used) if succeeded else used

    def _probe_is_due(self) -> bool:
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = PROBE_EVERY
        return True

    def _try_fast(self, nbytes: int) -> Any:
        try:
            return self._fast(nbytes)
        except OutOfMemoryError:
            return None

    def _used_bytes(self) -> int:
        with self._driver.current():
            return int(self.pool.used_bytes())

    def _give_back(self) -> None:
        for pool in (self.pool, self._driver.default_pool):
            self._driver.flush(pool, waits=False)

    def _collect(self) -> None:
        cuda_driver.collect_garbage()
        self._give_back()


def allocator(policy: Policy, driver: Driver, pools: Pools) -> tuple[Malloc, CupyPool]:
    """Return the allocator to install, and the pool that it uses first.

    Plain `managed`, with or without a limit or a preset, is the pool's own method, the same object
    each time; each preset has its own pool. `unmanaged` is CuPy's default pool, or with a limit a
    pool of umem. `hybrid` is a new `Hybrid`, not yet under pressure, over persistent pools.

    Raises:
        SizeError: arrays already use more than the limit; no pool has changed.
        MissingDependencyError: the policy needs advice or prefetch, on CUDA 13 without cuda-core.
        DeviceError: hybrid's spill is "migrate", but managed memory cannot be oversubscribed.
    """
    _check_limit(policy, pools)
    if policy.mode == "hybrid":
        return _hybrid(policy, driver, pools)
    kind: Kind | None = "managed"
    if policy.mode == "unmanaged":
        kind = None if policy.limit_bytes is None else "unmanaged"
    if policy.preset is not None:
        driver.check_advice()
    malloc = pools.malloc(kind, policy.preset)
    if policy.upstream is not None:
        malloc = GivenAllocator(pools, policy.upstream, policy.limit_bytes)
    if policy.mode == "managed" and policy.prefetch:
        malloc = prefetching(malloc, driver)
    return malloc, pools.pool(kind, policy.preset)


def on_each_gpu(mine: Malloc, driver: Driver, other: Callable[[int], Malloc]) -> Malloc:
    """Return an allocator that uses ``mine`` on its GPU, and ``other`` on the others.

    For modes that count VRAM, which each GPU has separately. Costs a CUDA runtime call an
    allocation; with one visible GPU, it is ``mine`` itself.
    """
    if driver.gpu_count() == 1:
        return mine
    others: dict[int, Malloc] = {}

    def malloc_here(nbytes: int) -> Any:
        if driver.is_current():
            return mine(nbytes)
        here = driver.here()
        if here not in others:
            others[here] = other(here)
        return others[here](nbytes)

    return malloc_here


def prefetching(malloc: Malloc, driver: Driver) -> Malloc:
    """Wrap an allocator so that memory is moved to the GPU before it is returned.

    Costs a driver call an allocation, even if the memory is already resident.
    """
    driver.check_advice()

    def malloc_and_prefetch(nbytes: int) -> Any:
        pointer = malloc(nbytes)
        # A prefetch would end a capture; there the memory is warm from the run before.
        if nbytes and not driver.capturing():
            driver.prefetch_here(pointer.ptr, nbytes)
        return pointer

    return malloc_and_prefetch


def _hybrid(policy: Policy, driver: Driver, pools: Pools) -> tuple[Malloc, CupyPool]:
    kind = _spill_kind(policy, driver)
    if kind == "spill":
        driver.check_advice()
    spill = pools.malloc(kind)
    if policy.prefetch and policy.spill == "migrate":
        spill = prefetching(spill, driver)
    pool = pools.pool("unmanaged")
    return Hybrid(driver, pools.malloc("unmanaged"), spill, pool).malloc, pool


def _spill_kind(policy: Policy, driver: Driver) -> Kind:
    """Return the kind of memory that hybrid spills to.

    Raises:
        DeviceError: managed memory cannot be oversubscribed here.
    """
    problem = driver.managed_problem()
    if problem is None:
        return "spill" if policy.spill == "host" else "managed"
    if policy.spill == "host":
        return "pinned"
    raise DeviceError(
        f"hybrid memory cannot migrate on {driver.name}: {problem}. With spill='host' it spills "
        "to pinned host memory, which the GPU reads over the bus."
    )


def _check_limit(policy: Policy, pools: Pools) -> None:
    """Free free blocks beyond the policy's limit; raises SizeError if arrays use more."""
    kinds: tuple[Kind, ...] = ("managed", "unmanaged")
    for kind in kinds:
        limit = limit_of(policy, kind)
        if limit is not None and pools.used_bytes(kind) > limit:
            raise SizeError(
                f"a limit of {format_bytes(limit)} is below the "
                f"{format_bytes(pools.used_bytes(kind))} of {kind} memory that arrays use now"
            )
        if limit is not None and pools.ledger.reserved()[kind] > limit:
            pools.give_back(kind)
