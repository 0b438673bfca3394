"""The interface of a technique that may make a step fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from umem.devices.specs import GpuSpec
from umem.predict.techniques.step_variants import Prepared, StepVariants


@dataclass(frozen=True)
class Technique:
    """A technique that may make a step fit a GPU, such as recomputation.

    Attributes:
        name: the name in reports; unique.
        exact: whether the results of training are the same bits.
        tolerance: the kind of difference in a word, where results are not the same bits.
        leaves_slack: whether the step has to fit with some VRAM to spare, see
            `umem.predict.techniques.step_variants.with_slack`. False for a plain step, whose fit is
            known to the block, and for other memory than CuPy's plain pool.
        prepare: returns the step under the technique on a GPU. Raises BudgetError, GraphError or
            StateError where the technique does not apply; the message says why.
    """

    name: str
    exact: bool
    prepare: Callable[[StepVariants, GpuSpec], Prepared]
    tolerance: str | None = None
    leaves_slack: bool = True
