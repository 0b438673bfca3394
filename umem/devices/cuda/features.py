"""Describes features of a GPU, its driver and libraries, for `umem.status` and the doctor."""

from __future__ import annotations

import os

from umem._common import host as machine
from umem.devices.base import Feature
from umem.devices.cuda.driver import Driver
from umem.errors import MissingDependencyError
from umem.units import format_bytes

CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"
_PROFILER_ONLY = "CUDA reports it to its profiler only"


def features(driver: Driver, simulated: bool) -> tuple[Feature, ...]:
    """List every feature in reading order.

    Costs about ten driver calls, and at first the import of cuda.core (0.2 s).

    Raises:
        CuPy's error if the driver fails.
    """
    why = "counted by the model (simulated)" if simulated else _PROFILER_ONLY
    return (
        _attribute(driver, "managed memory", "ManagedMemory"),
        _attribute(driver, "concurrent access", "ConcurrentManagedAccess"),
        _oversubscription(driver),
        _spill(driver),
        _pageable(driver),
        _integrated(driver),
        _wsl(),
        _hints(driver),
        _host_check(driver),
        _cupy_limit(),
        *(Feature(name, simulated or None, why) for name in ("resident bytes", "paging")),
    )


def _attribute(driver: Driver, name: str, attribute: str) -> Feature:
    value = driver.attribute(attribute)
    if value is None:
        return Feature(name, None, f"this CuPy does not know the attribute {attribute}")
    return Feature(name, bool(value), f"the driver says {attribute} = {value}")


def _oversubscription(driver: Driver) -> Feature:
    problem = driver.managed_problem()
    if problem is not None:
        return Feature("oversubscription", False, problem)
    if driver.integrated:
        why = "GPU and CPU share one memory, so there is no other memory to use"
        return Feature("oversubscription", False, why)
    return Feature("oversubscription", True, "every visible GPU has concurrent managed access")


def _spill(driver: Driver) -> Feature:
    problem = driver.hybrid_problem()
    if problem is not None:
        return Feature("hybrid's spill", False, problem)
    if driver.managed_problem() is None:
        return Feature("hybrid's spill", True, "to managed memory that stays on the host, or moves")
    why = "to pinned host memory, since managed memory cannot be oversubscribed"
    return Feature("hybrid's spill", True, why)


def _pageable(driver: Driver) -> Feature:
    """Return the feature of pageable memory: ATS, HMM or none."""
    name = "pageable memory"
    value = driver.attribute("PageableMemoryAccess")
    if value is None:
        return Feature(name, None, "this CuPy does not know the attribute PageableMemoryAccess")
    if not value:
        return Feature(name, False, "neither HMM nor ATS: the GPU cannot access memory from malloc")
    if driver.attribute("PageableMemoryAccessUsesHostPageTables"):
        return Feature(name, True, "ATS: the GPU uses the host's page tables; accessed_by is void")
    return Feature(name, True, "HMM: the driver mirrors the host's page tables")


def _integrated(driver: Driver) -> Feature:
    if driver.integrated:
        return Feature("integrated", True, "GPU and CPU share one memory")
    return Feature("integrated", False, f"{format_bytes(driver.vram_bytes)} of VRAM of its own")


def _wsl() -> Feature:
    if machine.is_wsl():
        return Feature("WSL", True, "the kernel is Microsoft's, so Windows' rules apply")
    return Feature("WSL", False, "the kernel is not Microsoft's")


def _hints(driver: Driver) -> Feature:
    """Return the feature of hints, or why they are unavailable."""
    problem = driver.managed_problem()
    if problem is None:
        try:  # an import: versions alone do not tell whether the installed ones work together
            driver.load_hints()
        except MissingDependencyError as error:
            problem = str(error)
    if problem is not None:
        return Feature("hints", False, problem)
    return Feature("hints", True, "prefetch, advice and locations, through cuda-core")


def _host_check(driver: Driver) -> Feature:
    available = driver.host_available_bytes()
    if available is None:
        return Feature("host check", False, "this system does not report available memory")
    return Feature("host check", True, f"{format_bytes(available)} of host memory are available")


def _cupy_limit() -> Feature:
    value = os.environ.get(CUPY_LIMIT)
    if not value:
        return Feature("CuPy's limit", False, f"{CUPY_LIMIT} is not set")
    why = f"{CUPY_LIMIT}={value} limits unmanaged memory, but not managed memory"
    return Feature("CuPy's limit", True, why)
