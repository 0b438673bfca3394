"""Which allocator a policy means on CUDA."""

from __future__ import annotations

from typing import Any

from umem.devices.base import Policy
from umem.devices.cuda.bounds import limit_of
from umem.devices.cuda.driver import Driver, Malloc, Pool
from umem.devices.cuda.hybrid import Hybrid
from umem.devices.cuda.ledger import Kind
from umem.devices.cuda.pools import Pools
from umem.errors import DeviceError, SizeError
from umem.units import format_bytes


def allocator(policy: Policy, driver: Driver, pools: Pools) -> tuple[Malloc, Pool]:
    """The allocator to install, and the pool that it draws on first.

    Plain `managed`, with or without a limit or a preset, is the pool's own method, the same
    object each time; a preset has a pool of its own. `unmanaged` is CuPy's default pool, with a
    limit a pool of ours. `hybrid` is a new `Hybrid`, which knows of no pressure yet, over the
    pools that stay.

    Raises:
        SizeError: the limit is below what arrays use already; no pool has changed.
        MissingDependencyError: CUDA 13 without cuda-core, for what needs advice or prefetch.
        DeviceError: hybrid's spill is to migrate, and managed memory cannot be oversubscribed.
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
    if policy.mode == "managed" and policy.prefetch:
        malloc = prefetching(malloc, driver)
    return malloc, pools.pool(kind, policy.preset)


def prefetching(malloc: Malloc, driver: Driver) -> Malloc:
    """``malloc``, with every allocation moved to the GPU before it is handed out.

    Costs a call to the driver an allocation, also where the memory is there already.
    """
    driver.check_advice()

    def malloc_and_prefetch(nbytes: int) -> Any:
        pointer = malloc(nbytes)
        # A prefetch would end a capture; there the memory is warm from the run before.
        if nbytes and not driver.capturing():
            driver.prefetch_here(pointer.ptr, nbytes)
        return pointer

    return malloc_and_prefetch


def _hybrid(policy: Policy, driver: Driver, pools: Pools) -> tuple[Malloc, Pool]:
    kind = _spill_kind(policy, driver)
    if kind == "spill":
        driver.check_advice()
    spill = pools.malloc(kind)
    if policy.prefetch and policy.spill == "migrate":
        spill = prefetching(spill, driver)
    pool = pools.pool("unmanaged")
    return Hybrid(driver, pools.malloc("unmanaged"), spill, pool).malloc, pool


def _spill_kind(policy: Policy, driver: Driver) -> Kind:
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
    kinds: tuple[Kind, ...] = ("managed", "unmanaged")
    for kind in kinds:
        limit = limit_of(policy, kind)
        if limit is not None and pools.used_bytes(kind) > limit:
            raise SizeError(
                f"a limit of {format_bytes(limit)} is below the "
                f"{format_bytes(pools.used_bytes(kind))} of {kind} memory that arrays use now"
            )
