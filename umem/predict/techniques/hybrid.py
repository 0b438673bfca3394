"""Plain memory until it is full, the rest on the host, read and written there."""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step in hybrid memory."""
    return Prepared(subject.trace, "with umem.hybrid():", "hybrid")
