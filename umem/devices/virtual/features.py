"""Describes the model's features, for `umem.status` and the doctor."""

from __future__ import annotations

from umem._common.specs import GpuSpec
from umem.devices.base import Feature


def features(spec: GpuSpec, problem: str | None) -> tuple[Feature, ...]:
    """List every feature, with the names and order of a CUDA device.

    Args:
        problem: why managed memory is refused, or None.
    """
    shared = spec.host_in_bandwidth is None
    return (
        _managed("managed memory", problem, "modelled in blocks of 2 MiB"),
        _managed("concurrent access", problem, "modelled: the CPU may touch what the GPU uses"),
        _managed("oversubscription", problem, "modelled: blocks move over the host link"),
        _managed("hybrid's spill", problem, "modelled: memory that stays on the host, or moves"),
        Feature("pageable memory", False, "not modelled: the GPU cannot access memory from malloc"),
        Feature("integrated", shared, _sharing(shared)),
        Feature("WSL", False, "modelled as Linux without WSL"),
        _managed("hints", problem, "modelled: prefetch, advice and locations"),
        Feature("host check", False, "not modelled: the virtual GPU's host has unlimited memory"),
        Feature("resident bytes", True, "counted by the model (simulated)"),
        Feature("paging", True, "counted by the model (simulated)"),
    )


def _managed(name: str, problem: str | None, why: str) -> Feature:
    return Feature(name, problem is None, f"{why} (simulated)" if problem is None else problem)


def _sharing(shared: bool) -> str:
    return "GPU and CPU share one memory" if shared else "it has VRAM of its own"
