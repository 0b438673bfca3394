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
        has_gaps: whether its arrays lie in CuPy's plain pool, so that it has to fit with `SLACK`;
            see `umem.predict.techniques.options`.
        prepare: returns the step under the technique on a GPU. Raises BudgetError, GraphError or
            StateError where the technique does not apply; the message says why.
    """

    name: str
    exact: bool
    prepare: Callable[[StepVariants, GpuSpec], Prepared]
    tolerance: str | None = None
    has_gaps: bool = True
