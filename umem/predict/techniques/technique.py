"""A technique: something that can be done about a step that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from umem.devices.specs import GpuSpec
from umem.predict.techniques.step_variants import Prepared, StepVariants


@dataclass(frozen=True)
class Technique:
    """Something that can be done about a step that does not fit.

    Attributes:
        name: for a person.
        exact: whether the results of training are the same bits.
        tolerance: in a word, by what they differ where they are not.
        prepare: the step under it on a GPU. Raises an `umem.errors.UmemError` where it has
            nothing to offer; the message says why.
    """

    name: str
    exact: bool
    prepare: Callable[[StepVariants, GpuSpec], Prepared]
    tolerance: str | None = None
