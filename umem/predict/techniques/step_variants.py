"""The variants of a step that techniques make of its trace, each made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from umem.devices.base import Mode
from umem.devices.specs import GpuSpec
from umem.errors import UmemError
from umem.planner import Plan
from umem.planner.link import Link
from umem.planner.problem import Problem
from umem.predict.applying import apply
from umem.predict.cupy_differences import Correct, on_gpu
from umem.predict.recorded_problem import problems_of
from umem.predict.stepping import Replays
from umem.predict.techniques.changes import Changes
from umem.predict.techniques.gpu_times import link_of, op_seconds
from umem.predict.techniques.steady_state import steady
from umem.trace.analysis.capping import cap_advice
from umem.trace.analysis.explain import missing_when_repeated
from umem.trace.axes import Point, StepSize, point_of
from umem.trace.events import check_figures
from umem.trace.trace import Trace


@dataclass(frozen=True)
class Prepared:
    """A step under a technique, and how it is replayed.

    ``line`` is the code that turns it on; None where nothing is to be done. ``hintless`` is the
    trace that hints were added to. Where a step has ``more`` micro-batches than the trace, all like
    its last one, ``less`` is the trace with one less, which says what each of them costs.
    """

    trace: Trace
    line: str | None
    mode: Mode = "unmanaged"
    prefetch: bool = False
    hintless: Trace | None = None
    less: Trace | None = None
    more: int = 0

    @property
    def without_hints(self) -> Trace:
        """The trace as it would be without the technique's hints."""
        return self.trace if self.hintless is None else self.hintless


_T = TypeVar("_T")
STEPS = 3
"""The first makes what the next ones find; where blocks move, those take turns."""
UNCHANGED = Changes()
Budget = int | float | None
"""Bytes in all, a share of the plain step's peak, or None for the least."""


class StepVariants:
    """A step repeated until its steady state, and its variants under changes, sizes and plans.

    Plans and traces under them do not depend on the GPU: they are made once, and kept. Not
    thread-safe.

    Args:
        recorded: one step or more.
        gpus: the GPUs to choose for; replays are shared among them.
        size: what the step is taken to, such as a batch; None: as it was recorded.
        change: what is done to it.
        replays: those of another variants, to be shared.
        correct: whether a trace of NumPy is taken to a GPU; see `on_gpu`.

    Raises:
        TraceError: the trace has no operation, or bytes that no machine has.
        ScalingError, SizeError: see `Trace.at`. StateError: the change has nothing to change.
    """

    def __init__(
        self,
        recorded: Trace,
        gpus: Iterable[GpuSpec] = (),
        size: StepSize | None = None,
        change: Changes = UNCHANGED,
        replays: Replays | None = None,
        correct: Correct = "auto",
    ) -> None:
        self._correct = correct
        self.recorded, self.gpus, self.size, self.change = recorded, tuple(gpus), size, change
        self._at: dict[Point, StepVariants] = {}
        self._changed: dict[Changes, StepVariants | UmemError] = {}
        trace = change.of(recorded, size)
        self.caveat = missing_when_repeated(trace)
        self.cap_advice = None if change != UNCHANGED else cap_advice(trace, on_gpu)
        corrected = change.on_device(on_gpu(trace, correct))
        check_figures(corrected.events)
        self.trace = steady(corrected, STEPS)
        self.replays = Replays(self.gpus) if replays is None else replays
        self._plans: dict[tuple[Budget, GpuSpec | None], list[Plan] | UmemError] = {}
        self._problems: dict[GpuSpec | None, list[Problem] | UmemError] = {}
        self._made: dict[tuple[object, ...], Trace] = {}
        self._shared: set[tuple[object, ...]] = set()

    def at(self, size: StepSize) -> StepVariants:
        """Return the same step at another size, such as a smaller batch; made once.

        Raises:
            ScalingError, SizeError: see `Trace.at`.
        """
        point = point_of(size, self.recorded.axes)
        if point not in self._at:
            self._at[point] = StepVariants(self.recorded, self.gpus, size)
        return self._at[point]

    def changed(self, **fields: Any) -> StepVariants:
        """Return the step under more changes, by the fields of `Changes`; made once.

        Raises:
            StateError: there is nothing to change.
        """
        change = replace(self.change, **fields)
        if change not in self._changed:
            self._changed[change] = _or_error(
                lambda: StepVariants(
                    self.recorded, self.gpus, self.size, change, self.replays, self._correct
                )
            )
        return _given(self._changed[change])

    def prepared(self, line: str, budget: Budget | Literal["none"] = "none") -> Prepared:
        """Return the step as it is to be replayed, under a budget if there is one.

        Of a step of many micro-batches some are left out; how many is said.
        """
        if budget == "none":
            return self._shown(line, self.trace, lambda less: less.trace)
        return self._shown(
            line, self.under(budget), lambda less: less.rewritten(self.plans(budget))
        )

    def prepared_with(self, line: str, plans: list[Plan]) -> Prepared:
        """The same under plans that were made without the change, such as for a whole batch.

        They are plans of the changed step, too, and are not made again for it.
        """
        return self._shown(line, self.with_plans(plans), lambda less: less.with_plans(plans))

    def with_plans(self, plans: list[Plan]) -> Trace:
        """The trace under plans, made once."""
        same = _same(plans)
        self._shared.add(same)
        return self.made_once(same, lambda: self.rewritten(plans))

    def _shown(self, line: str, trace: Trace, less_of: Callable[[StepVariants], Trace]) -> Prepared:
        more = self.change.passes(self.size) - self.change.shown
        if more <= 0:
            return Prepared(trace, line)
        less = self.changed(shown=self.change.shown - 1)
        return Prepared(trace, line, less=less_of(less), more=more)

    def fits(self, gpu: GpuSpec, trace: Trace | None = None) -> bool:
        """Tell whether the step, or what was made of it, fits a GPU's plain memory."""
        return self.replays.step(self.trace if trace is None else trace, gpu, "unmanaged").fits

    @property
    def problems(self) -> list[Problem]:
        """The problems to plan: one for each kind of pass. Raises GraphError without any."""
        return self.problems_on(None)

    def problems_on(self, gpu: GpuSpec | None) -> list[Problem]:
        """Return the same with costs in seconds on a GPU, for plans that offload over its link."""
        gpu = _any_vram(gpu)
        if gpu not in self._problems:
            self._problems[gpu] = _or_error(lambda: self._planned_on(gpu))
        return _given(self._problems[gpu])

    def _planned_on(self, gpu: GpuSpec | None) -> list[Problem]:
        if gpu is None:
            return problems_of(self.trace)
        _ = self.problems  # that there is nothing to plan is found out once
        seconds = op_seconds(self.trace, gpu)
        return problems_of(self.trace, lambda op: seconds[id(op)])

    @property
    def least_bytes(self) -> int:
        """The smallest budget that every pass has a plan for."""
        return self.least_bytes_on(None)

    def least_bytes_on(self, gpu: GpuSpec | None) -> int:
        """Return the same where kept values may be offloaded over the link of a GPU."""
        link = None if gpu is None else link_of(gpu)
        return max(problem.least(link=link).peak_bytes for problem in self.problems_on(gpu))

    @property
    def plain_bytes(self) -> int:
        """The most that a pass takes as it is; of several kinds of passes, the smallest."""
        return min(problem.plain_bytes for problem in self.problems)

    def under(self, budget: Budget, target: GpuSpec | None = None) -> Trace:
        """The trace under the plans for a budget, as `umem.chainer.Recompute` takes it.

        Kept values may be offloaded over the link of the GPU ``target``.

        Raises:
            GraphError: there is nothing to plan.
            BudgetError: there is no plan; names the least that there is one for.
        """
        plans = self.plans(budget, target)
        # One trace for all budgets that give the same.
        same = _same(plans)
        if (budget is None or isinstance(budget, float)) and target is None:
            self._shared.add(same)
        return self.made_once(same, lambda: self.rewritten(plans))

    def plans(self, budget: Budget, target: GpuSpec | None = None) -> list[Plan]:
        """The plans for a budget, one for each kind of pass. Raises as `under` does."""
        key = budget, _any_vram(target)
        if key not in self._plans:
            problems = self.problems_on(target)
            link = None if target is None else link_of(target)
            self._plans[key] = _or_error(lambda: [_planned(one, budget, link) for one in problems])
        return _given(self._plans[key])

    def rewritten(self, plans: list[Plan]) -> Trace:
        """The trace under the plans of all of its passes."""
        trace = self.trace
        for plan in plans:
            trace = apply(trace, plan)
        return trace

    def made_once(self, key: tuple[object, ...], make: Callable[[], Trace]) -> Trace:
        """Return what ``make`` returns, and remember it until `forget`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def forget(self) -> None:
        """Let go of the traces that were made for one size of VRAM."""
        self.replays.forget(self._kept())

    def _kept(self) -> list[Trace]:
        """Return the traces that do not depend on VRAM, of this step and its variants."""
        self._made = {key: trace for key, trace in self._made.items() if key in self._shared}
        changed = [one for one in self._changed.values() if isinstance(one, StepVariants)]
        of_changed = [trace for one in changed for trace in one._kept()]
        return [self.trace, *self._made.values(), *of_changed]


def _any_vram(gpu: GpuSpec | None) -> GpuSpec | None:
    """The GPU by what its operations and copies take, whatever its memory."""
    return None if gpu is None else gpu.with_vram(0)


def _or_error(make: Callable[[], _T]) -> _T | UmemError:
    """Return what is made, or why it cannot be, which is as dear to find out."""
    try:
        return make()
    except UmemError as error:
        return error


def _given(found: _T | UmemError) -> _T:
    if isinstance(found, UmemError):
        raise found.with_traceback(None)
    return found


def _same(plans: Iterable[Plan]) -> tuple[object, ...]:
    """Return a key that is equal for plans that make the same trace."""
    return tuple((one.blocks, one.kept, one.recomputed, one.stashed, one.moves) for one in plans)


def _planned(problem: Problem, budget: Budget, link: Link | None) -> Plan:
    if isinstance(budget, float):
        budget = round(budget * problem.plain_bytes)
    return problem.within(budget, link=link).plan
