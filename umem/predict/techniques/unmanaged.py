"""Nothing is done: CuPy's plain pool."""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step as it is."""
    return Prepared(subject.trace, None)
