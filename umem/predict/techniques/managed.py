"""Managed memory: blocks move as operations touch them, or as memory is handed out."""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.predict.techniques.subject import Subject
from umem.predict.techniques.technique import Prepared


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step in managed memory."""
    return Prepared(subject.trace, "with umem.managed():", "managed")


def prepare_prefetch(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step in managed memory that is made resident as it is handed out."""
    return Prepared(subject.trace, "with umem.managed(prefetch=True):", "managed", prefetch=True)
