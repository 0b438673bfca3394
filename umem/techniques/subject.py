"""A step to choose for: what techniques make of its trace, each worked out once."""

from __future__ import annotations

from functools import cached_property

from umem.backends import on_gpu
from umem.devices.specs import GpuSpec
from umem.events import check_figures
from umem.explaining import missing_when_repeated
from umem.planner import Plan
from umem.stepping import settled_step
from umem.techniques.recompute import rewrite
from umem.techniques.settled import settled
from umem.techniques.tape import Tape, tapes_of
from umem.trace import Trace

STEPS = 3
"""The first makes what the next ones find; where blocks move, those take turns."""
Budget = int | float | None
"""Bytes in all, a share of the plain step's peak, or None for the least."""


class Subject:
    """A step on a GPU's terms, repeated until it has settled, and what recomputation makes of it.

    Not thread-safe. Rewritten traces are kept.

    Raises:
        TraceError: the trace has no operation, or bytes that no machine has.
    """

    def __init__(self, trace: Trace) -> None:
        self.caveat = missing_when_repeated(trace)
        corrected = on_gpu(trace)
        check_figures(corrected.events)
        self.trace = settled(corrected, STEPS)
        self._under: dict[Budget, Trace] = {}
        self._by_plan: dict[tuple[object, ...], Trace] = {}
        self._fits: dict[GpuSpec, bool] = {}

    def fits(self, gpu: GpuSpec) -> bool:
        """Whether the step fits a GPU as it is."""
        if gpu not in self._fits:
            self._fits[gpu] = settled_step(self.trace, gpu, "unmanaged").fits
        return self._fits[gpu]

    @cached_property
    def tapes(self) -> list[Tape]:
        """What there is to plan: one for each kind of pass. Raises GraphError without any."""
        return tapes_of(self.trace)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that every pass has a plan for."""
        return max(tape.least_bytes for tape in self.tapes)

    @property
    def plain_bytes(self) -> int:
        """The most that a pass takes as it is; of several kinds of passes, the smallest."""
        return min(tape.plain_bytes for tape in self.tapes)

    def under(self, budget: Budget) -> Trace:
        """The trace under the plans for a budget, as `umem.chainer.Recompute` takes it.

        Raises:
            GraphError: there is nothing to plan.
            BudgetError: there is no plan; names the least that there is one for.
        """
        if budget not in self._under:
            self._under[budget] = self._rewritten([_planned(tape, budget) for tape in self.tapes])
        return self._under[budget]

    def _rewritten(self, plans: list[Plan]) -> Trace:
        """The trace under these plans; one trace for all budgets that give the same."""
        same = tuple((plan.blocks, plan.kept, plan.recomputed, plan.stashed) for plan in plans)
        if same not in self._by_plan:
            trace = self.trace
            for plan in plans:
                trace = rewrite(trace, plan)
            self._by_plan[same] = trace
        return self._by_plan[same]


def _planned(tape: Tape, budget: Budget) -> Plan:
    if budget is None:
        return tape.least
    if isinstance(budget, float):
        budget = round(budget * tape.plain_bytes)
    return tape.within(budget)
