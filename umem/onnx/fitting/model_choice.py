"""Ways to make a step of an exported model fit a GPU, and their cost (simulated)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple

from umem._common.as_json import named
from umem._common.specs import GpuSpec
from umem.devices import Mode, StepCost
from umem.devices.virtual import VirtualGPU
from umem.errors import BudgetError, GraphError, StateError
from umem.onnx.exported.exported_step import ExportedStep
from umem.onnx.fitting.applying import apply
from umem.onnx.fitting.offloading import all_offloaded, link_of, op_seconds
from umem.onnx.fitting.steady_step import SteadyStep, steady_step
from umem.onnx.fitting.step_problem import problem_of
from umem.planner import Link, Plan, Problem, Solution, actions
from umem.trace import check_figures
from umem.units import MIB, format_bytes

TRIES = 6
"""At most this many budgets are tried in the search for the largest that fits: enough to halve a
range down to a 64th, which is `NEAR`."""
NEAR = 1 / 64
"""The search ends when its bounds are within this share of VRAM. A choice: no bench compares it
with a closer search."""


class ScheduledAction(NamedTuple):
    """An action on one call, see `umem.planner.schedule.Action`."""

    do: str
    node: str


@dataclass(frozen=True)
class Schedule:
    """A plan as a list of actions; simulated.

    Attributes:
        peak_bytes: the peak under the plan, workspace and optimizer state included.
        kept: the calls whose outputs stay from forward into backward, in memory or offloaded.
        recomputed: the calls that are recomputed in backward.
        offloaded: the calls of which outputs or function state are offloaded.
        actions: the actions of forward and backward, in order.
    """

    peak_bytes: int
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...]
    actions: tuple[ScheduledAction, ...]
    simulated: Literal[True] = True


def schedule_of(problem: Problem, solution: Solution, names: Sequence[str]) -> Schedule:
    """Return the schedule of a plan.

    Args:
        problem: the planned problem.
        solution: the plan.
        names: the names of the problem's calls, in order.
    """
    by_node = dict(zip(problem.names, names, strict=True))
    plan = solution.plan
    return Schedule(
        solution.peak_bytes,
        tuple(by_node[node] for node in plan.kept),
        tuple(by_node[node] for block in plan.recomputed for node in block),
        tuple(dict.fromkeys(by_node[move.node] for move in plan.moves)),
        tuple(ScheduledAction(kind, by_node[n]) for kind, n in actions(solution.graph, plan)),
    )


@dataclass(frozen=True)
class ModelOption(StepCost):
    """A way to run a model's step, and its cost in the steady state; simulated.

    If the step does not fit, its figures are None, except ``peak_bytes`` if it could be replayed.
    The host is not checked for ``host_bytes`` of memory.

    Attributes:
        name: the way's name.
        reason: why the step does not fit, or the way has no advantage; None if it fits.
        schedule: the plan that it follows; None for a memory mode.
    """

    name: str
    reason: str | None = None
    schedule: Schedule | None = None
    simulated: Literal[True] = True

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file; the names of simulated figures say so."""
        return named(self, ("name", "reason", *_FIGURES, "schedule"), _FIGURES)


_FIGURES = (
    "seconds", "seconds_low", "seconds_high", "peak_bytes", "resident_peak_bytes", "moved_bytes",
    "host_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class ModelChoice:
    """The ways to run a model's step on a GPU; simulated.

    Attributes:
        gpu: the GPU's name in the table; ``title`` in full.
        vram_bytes: its usable VRAM.
        options: the ways in which the step fits, the shortest step first.
        dropped: the ways in which it does not fit, or that have no advantage, with their reasons.
    """

    gpu: str
    title: str
    vram_bytes: int
    options: tuple[ModelOption, ...]
    dropped: tuple[ModelOption, ...]
    simulated: Literal[True] = True


def choose_for_model(step: ExportedStep, gpu: GpuSpec) -> ModelChoice:
    """Try the memory modes, recomputation and offload on a step of an exported model.

    Cost: some replays, and up to a dozen plans.

    Raises:
        SizeError: the GPU's VRAM is smaller than a block. TraceError: sizes exceed any machine's
            memory.
    """
    check_figures(step.trace.events)
    VirtualGPU(gpu)  # refuses VRAM of less than a block
    fitting = _Fitting(step, gpu)
    tried = [fitting.tried(name) for name in (*_MODES, *_PLANS)]
    fit = sorted((one for one in tried if one.reason is None), key=lambda one: one.seconds or inf)
    return ModelChoice(
        gpu.name,
        gpu.title,
        gpu.usable_bytes,
        tuple(fit),
        tuple(one for one in tried if one.reason is not None),
    )


class _Fitting:
    """The ways to run a step on one GPU."""

    def __init__(self, step: ExportedStep, gpu: GpuSpec) -> None:
        self.gpu, self._step = gpu, step
        self._replayed: dict[tuple[object, ...], SteadyStep] = {}

    def tried(self, name: str) -> ModelOption:
        """Try one way; return its figures, or the reason against it."""
        if name not in _ALWAYS and self._replay().reason is None:
            return ModelOption(name, "the step fits with everything kept")
        if name in _MODES:
            found = self._replay(None, *_MODES[name])
            return ModelOption(name, found.reason, **vars(found.cost))
        try:
            solution = _PLANS[name](self)
        except (BudgetError, GraphError, StateError) as error:  # it has nothing to offer
            return ModelOption(name, str(error))
        found = self._replay(solution.plan)
        schedule = schedule_of(self.problem, solution, self._step.names)
        return ModelOption(name, found.reason, schedule, **vars(found.cost))

    def _replay(
        self, plan: Plan | None = None, mode: Mode = "unmanaged", prefetch: bool = False
    ) -> SteadyStep:
        """Replay the step, once for all plans that lead to the same events."""
        key: tuple[object, ...] = mode, prefetch
        if plan is not None:
            key += plan.blocks, plan.kept, plan.recomputed, plan.stashed, plan.moves
        if key not in self._replayed:
            trace = self._step.trace if plan is None else apply(self._step.trace, plan)
            self._replayed[key] = steady_step(trace, self.gpu, mode, prefetch=prefetch)
        return self._replayed[key]

    # -- plans -----------------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        """Return the planning problem for recomputation; raises GraphError if there is none."""
        return problem_of(self._step.trace)

    @cached_property
    def _timed_problem(self) -> Problem:
        """Return the same with costs in this GPU's seconds, to plan offload."""
        seconds = op_seconds(self._step.trace, self.gpu)
        return problem_of(self._step.trace, lambda op: seconds[id(op)])

    def within_vram(self, link: Link | None = None) -> Solution:
        """Return the plan of the largest budget found to fit, in whole MiB or the least of all.

        A plan for all of VRAM often fails only because of the pool's gaps. So the search reduces
        the budget in growing strides until it fits, then bisects between it and the last budget
        that did not.

        Args:
            link: the link to the offload target; None: without offload.

        Raises:
            BudgetError: no budget makes the step fit. GraphError: there is nothing to plan.
        """
        problem = self.problem if link is None else self._timed_problem
        least, room = problem.least(link=link), self.gpu.usable_bytes
        if least.peak_bytes > room or self._replay(least.plan).reason is not None:
            needed, vram = format_bytes(least.peak_bytes), format_bytes(room)
            raise BudgetError(f"the smallest plan needs {needed} of {vram} of VRAM")
        best, low = least, -(-least.peak_bytes // MIB)
        high = max(low, min(room, problem.keep_all.peak_bytes) // MIB)
        near = stride = max(1, round(NEAR * room / MIB))
        has_fit, budget = False, high
        for _ in range(TRIES):
            found = problem.within(max(least.peak_bytes, budget * MIB), link=link)
            if self._replay(found.plan).reason is None:
                best, low, has_fit = found, budget, True
            else:
                high = budget
            if high - low <= near:
                break
            middle = (low + high) // 2
            budget = middle if has_fit else max(middle, high - stride)
            stride *= 2
        return best

    def offloaded(self) -> Solution:
        """Return the plan that offloads every saved tensor."""
        link = link_of(self.gpu)
        return self.problem.keep_all._replace(plan=all_offloaded(self.problem, link))


_MODES: dict[str, tuple[Mode, bool]] = {
    "plain": ("unmanaged", False),
    "hybrid": ("hybrid", False),
    "managed": ("managed", False),
    "managed, prefetch": ("managed", True),
}
"""The ways without a plan: memory modes, and whether they prefetch."""
_PLANS: dict[str, Callable[[_Fitting], Solution]] = {
    "recompute to fit": _Fitting.within_vram,
    "recompute min": lambda step: step.problem.least(),
    "offload": _Fitting.offloaded,
    "recompute, offload to fit": lambda step: step.within_vram(link_of(step.gpu)),
}
"""The ways with a plan, the least work for the user first: equal times keep this order."""
_ALWAYS = ("plain", "recompute min")
"""The ways that are tried even if the step fits unchanged."""
