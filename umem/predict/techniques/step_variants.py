"""Variants of a step under techniques, each made once from the step's trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
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
from umem.trace.events import ONE_KERNEL, Alloc, check_figures
from umem.trace.trace import Trace
from umem.units import BLOCK_BYTES


@dataclass(frozen=True)
class Prepared:
    """The trace of a step under a technique, and the memory mode of its replay.

    ``line`` is the code that turns the technique on; None if no code is needed. ``hintless`` is
    the trace before hints were added, ``pooled`` the trace with what the pool reserves, to be
    replayed instead (`umem.predict.techniques.on_card`). Where a step has ``more`` micro-batches
    than the trace, all like its last one, ``less`` is the trace with one less: the difference is
    the cost of each.
    """

    trace: Trace
    line: str | None
    mode: Mode = "unmanaged"
    prefetch: bool = False
    hintless: Trace | None = None
    pooled: Trace | None = None
    less: Trace | None = None
    more: int = 0

    @property
    def without_hints(self) -> Trace:
        """Return the trace without the technique's hints."""
        return self.trace if self.hintless is None else self.hintless


_T = TypeVar("_T")
STEPS = 3
"""Steps of a replay: the first leaves tensors that later ones find; where blocks move, these
alternate."""
SLACK = 0.05
"""The share of VRAM that a technique in CuPy's plain pool leaves free: gaps between arrays were up
to 10% of the bytes in use larger than in a replay (bench/choice_live.py, bench/cupy_peak.py)."""
UNCHANGED = Changes()
Budget = int | float | None
"""A budget: bytes of the whole step, a share of the plain step's peak, or None for the least."""


class StepVariants:
    """A step repeated until its steady state, and its variants under changes, sizes and plans.

    Plans of recomputation and traces under them do not depend on the GPU: they are made once, and
    cached until `forget`. Not thread-safe.

    Args:
        recorded: one step or more.
        gpus: the GPUs to choose for; replays are shared among them.
        size: the size to scale the step to, such as a batch; None: as it was recorded.
        change: the changes of the step.
        replays: a cache of replays to share; None: one of its own.
        correct: the correction of a trace recorded on NumPy; see `on_gpu`.

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
        every = (*self.gpus, *map(with_slack, self.gpus))
        self.replays = Replays(every) if replays is None else replays
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
        """Return the step under further changes, given as fields of `Changes`; made once.

        Raises:
            StateError: a change has nothing to change.
            ScalingError, SizeError: see `Trace.at`.
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
        """Return the step to be replayed, under a budget of recomputation unless ``"none"``.

        Micro-batches beyond `Changes.shown` are left out, and counted in `Prepared.more`.

        Raises:
            BudgetError, GraphError: as `under`.
        """
        if budget == "none":
            return self._shown(line, self.trace, lambda less: less.trace)
        return self._shown(
            line, self.under(budget), lambda less: less.rewritten(self.plans(budget))
        )

    def prepared_with(self, line: str, plans: list[Plan]) -> Prepared:
        """Return the step to be replayed, under plans of the unchanged step, as of a whole batch.

        These are plans of the changed step, too, and are not planned anew.
        """
        return self._shown(line, self.with_plans(plans), lambda less: less.with_plans(plans))

    def with_plans(self, plans: list[Plan]) -> Trace:
        """Return the trace under plans, made once."""
        same = _same(plans)
        self._shared.add(same)
        return self.made_once(same, lambda: self.rewritten(plans))

    def _shown(self, line: str, trace: Trace, less_of: Callable[[StepVariants], Trace]) -> Prepared:
        more = self.change.passes(self.size) - self.change.shown
        if more <= 0:
            return Prepared(trace, line)
        less = self.changed(shown=self.change.shown - 1)
        return Prepared(trace, line, less=less_of(less), more=more)

    @property
    def of_chainer(self) -> bool:
        """True if the step has functions of Chainer, and not operations on arrays alone."""
        return any(op.phase != "array" for op in self.trace.ops)

    def fits(self, gpu: GpuSpec, trace: Trace | None = None) -> bool:
        """Return True if the step, or another trace of it, fits a GPU's plain memory."""
        return self.replays.step(self.trace if trace is None else trace, gpu, "unmanaged").fits

    @property
    def problems(self) -> list[Problem]:
        """Return the planning problems, one for each kind of pass; raise GraphError without any."""
        return self.problems_on(None)

    def problems_on(self, gpu: GpuSpec | None) -> list[Problem]:
        """Return the planning problems; for a GPU with costs in its seconds, to plan offload."""
        gpu = _any_vram(gpu)
        if gpu not in self._problems:
            self._problems[gpu] = _or_error(lambda: self._planned_on(gpu))
        return _given(self._problems[gpu])

    def _planned_on(self, gpu: GpuSpec | None) -> list[Problem]:
        if gpu is None:
            return problems_of(self.trace)
        _ = self.problems  # raises where there is nothing to plan
        seconds = op_seconds(self.trace, gpu)
        return problems_of(self.trace, lambda op: seconds[id(op)])

    @property
    def least_bytes(self) -> int:
        """Return the smallest budget in bytes for which every pass has a plan."""
        return self.least_bytes_on(None)

    def least_bytes_on(self, gpu: GpuSpec | None) -> int:
        """Return the smallest budget with a plan, with offload over the link of a GPU if given."""
        link = None if gpu is None else link_of(gpu)
        return max(problem.least(link=link).peak_bytes for problem in self.problems_on(gpu))

    @property
    def plain_bytes(self) -> int:
        """Return the peak of a pass with everything kept; of several kinds, the smallest peak."""
        return min(problem.plain_bytes for problem in self.problems)

    def under(self, budget: Budget, target: GpuSpec | None = None) -> Trace:
        """Return the trace under the plans for a budget of `umem.chainer.Recompute`.

        Kept tensors may be offloaded over the link of the GPU ``target``.

        Raises:
            GraphError: there is nothing to plan.
            BudgetError: no plan has the budget; names the least that one has.
        """
        plans = self.plans(budget, target)
        # One trace for all budgets that give the same.
        same = _same(plans)
        if (budget is None or isinstance(budget, float)) and target is None:
            self._shared.add(same)
        return self.made_once(same, lambda: self.rewritten(plans))

    def plans(self, budget: Budget, target: GpuSpec | None = None) -> list[Plan]:
        """Return the plans for a budget, one for each kind of pass. Raises as `under` does."""
        key = budget, _any_vram(target)
        if key not in self._plans:
            problems = self.problems_on(target)
            link = None if target is None else link_of(target)
            self._plans[key] = _or_error(lambda: [_planned(one, budget, link) for one in problems])
        return _given(self._plans[key])

    def rewritten(self, plans: list[Plan]) -> Trace:
        """Return the trace with a list of plans applied, one for each kind of pass."""
        trace = self.trace
        for plan in plans:
            trace = apply(trace, plan)
        return trace

    def made_once(self, key: tuple[object, ...], make: Callable[[], Trace]) -> Trace:
        """Return the result of ``make``, cached under a key until `forget`."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def forget(self) -> None:
        """Drop the traces that were made for one size of VRAM, and their replays."""
        self.replays.forget(self._kept())

    def _kept(self) -> list[Trace]:
        """Return the traces that do not depend on VRAM, of this step and its variants."""
        self._made = {key: trace for key, trace in self._made.items() if key in self._shared}
        changed = [one for one in self._changed.values() if isinstance(one, StepVariants)]
        of_changed = [trace for one in changed for trace in one._kept()]
        return [self.trace, *self._made.values(), *of_changed]


def with_slack(gpu: GpuSpec, largest_bytes: int = 0) -> GpuSpec:
    """Return a GPU with as much VRAM as a technique in CuPy's plain pool may fill.

    The rest stays free for gaps that a replay does not know: a share of `SLACK`, at least a block,
    and at least half of the largest array, whose place in the pool a smaller array may split.
    """
    blocks = gpu.usable_bytes // BLOCK_BYTES
    slack = max(1, ceil(SLACK * blocks), ceil(largest_bytes / 2 / BLOCK_BYTES))
    return gpu.with_vram(max(1, blocks - slack) * BLOCK_BYTES)


def largest_array(trace: Trace) -> int:
    """Return the bytes of the largest array, or piece of workspace, that a step allocates.

    Uploaded arrays do not count; workspace counts in the pieces that the operation's kernels take.
    0 if nothing is allocated.
    """
    pieces = [
        piece
        for op in trace.ops
        if op.workspace_bytes
        for piece in (op.kernels or ONE_KERNEL).pieces(op.workspace_bytes)
    ]
    arrays = (e.nbytes for e in trace.events if isinstance(e, Alloc) and not e.uploaded)
    return max((*arrays, *pieces), default=0)


def _any_vram(gpu: GpuSpec | None) -> GpuSpec | None:
    """Return a GPU with its VRAM set to 0, as a key for times that do not depend on VRAM."""
    return None if gpu is None else gpu.with_vram(0)


def _or_error(make: Callable[[], _T]) -> _T | UmemError:
    """Return the result of ``make``, or the `UmemError` that it raises, to be cached likewise."""
    try:
        return make()
    except UmemError as error:
        return error


def _given(found: _T | UmemError) -> _T:
    if isinstance(found, UmemError):
        raise found.with_traceback(None)
    return found


def _same(plans: Iterable[Plan]) -> tuple[object, ...]:
    """Return a key that is equal for lists of plans that make the same trace."""
    return tuple((one.blocks, one.kept, one.recomputed, one.stashed, one.moves) for one in plans)


def _planned(problem: Problem, budget: Budget, link: Link | None) -> Plan:
    if isinstance(budget, float):
        budget = round(budget * problem.plain_bytes)
    return problem.within(budget, link=link).plan
