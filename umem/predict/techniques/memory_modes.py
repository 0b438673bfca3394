"""The memory modes: plain, hybrid and managed memory, without any other technique."""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.predict.techniques.step_variants import Prepared, StepVariants


def prepare_unmanaged(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in CuPy's plain pool."""
    return Prepared(variants.trace, None)


def prepare_hybrid(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in plain memory until VRAM is full; the rest is accessed on the host."""
    return Prepared(variants.trace, "with umem.hybrid():", "hybrid")


def prepare_managed(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory, whose blocks move as operations touch them."""
    return Prepared(variants.trace, "with umem.managed():", "managed")


def prepare_prefetched(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory, whose blocks move in as memory is allocated."""
    return Prepared(variants.trace, "with umem.managed(prefetch=True):", "managed", prefetch=True)
