"""The memory modes: plain, hybrid and managed memory, with nothing else done about the step."""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.predict.techniques.prepared import Prepared
from umem.predict.techniques.subject import Subject


def prepare_unmanaged(subject: Subject, gpu: GpuSpec) -> Prepared:
    """Leave the step in CuPy's plain pool."""
    return Prepared(subject.trace, None)


def prepare_hybrid(subject: Subject, gpu: GpuSpec) -> Prepared:
    """Take plain memory until it is full; the rest is read and written on the host."""
    return Prepared(subject.trace, "with umem.hybrid():", "hybrid")


def prepare_managed(subject: Subject, gpu: GpuSpec) -> Prepared:
    """Take managed memory, whose blocks move as operations touch them."""
    return Prepared(subject.trace, "with umem.managed():", "managed")


def prepare_prefetched(subject: Subject, gpu: GpuSpec) -> Prepared:
    """Take managed memory whose blocks move in as memory is handed out."""
    return Prepared(subject.trace, "with umem.managed(prefetch=True):", "managed", prefetch=True)
