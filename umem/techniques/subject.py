"""A step to choose for: what techniques make of its trace, each worked out once."""

from __future__ import annotations

from functools import cached_property

from umem.backends import on_gpu
from umem.errors import BudgetError
from umem.planner import plan
from umem.techniques.recompute import rewrite
from umem.techniques.settled import settled
from umem.techniques.tape import Tape, tape_of
from umem.trace import Trace
from umem.units import format_bytes

STEPS = 3
"""The first makes what the next ones find; where blocks move, those take turns."""


class Subject:
    """A step, repeated until it has settled, and its plans of recomputation.

    Not thread-safe. Rewritten traces are kept.

    Raises:
        TraceError: the trace has no operation.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = settled(on_gpu(trace), STEPS)
        self._under: dict[int, Trace] = {}

    @cached_property
    def tape(self) -> Tape:
        """What there is to plan; raises GraphError where there is nothing."""
        return tape_of(self.trace)

    @cached_property
    def keep_all_bytes(self) -> int:
        """What a step takes in all where everything is kept."""
        kept = plan(self.tape.whole, None, "store_all", model="saved").peak_bytes
        return self.tape.constant_bytes + self.tape.drawn_bytes + kept

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget that has a plan."""
        return self._beside_bytes + plan(self.tape.packing, None, model="saved").peak_bytes

    def under(self, budget_bytes: int) -> Trace:
        """The trace under the plan for a budget in all.

        Raises:
            GraphError: there is nothing to plan.
            BudgetError: no plan fits; names the least that does.
        """
        if budget_bytes < self.least_bytes:
            raise BudgetError(
                f"a budget of {format_bytes(budget_bytes)} is too small: the least that has a "
                f"plan is {format_bytes(self.least_bytes)}"
            )
        if budget_bytes not in self._under:
            found = plan(self.tape.packing, budget_bytes - self._beside_bytes, model="saved")
            self._under[budget_bytes] = rewrite(self.trace, found)
        return self._under[budget_bytes]

    @property
    def _beside_bytes(self) -> int:
        return self.tape.constant_bytes + self.tape.packed_bytes
