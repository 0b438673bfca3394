"""Recomputation within a budget, alone and in managed memory.

Where a step does not fit as it is, the budget is all that the GPU has to spare, or the least: then
the first passes, which learn the step, keep to it as well (bench/choice_live.py). Under a share
they have no bytes to keep to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, StateError
from umem.planner.schedule import actions
from umem.predict.techniques.on_card import on_card, plans_for_card
from umem.predict.techniques.prefetching import DEPTH, lookahead
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.trace import Trace
from umem.units import MIB, format_apart

NEARLY = 0.98
"""The largest budget, as a share of the plain step's peak: `Recompute` does not plan where a plain
step has room, and its estimate of one is this near (bench/recompute.py)."""
TRIES = 6
"""At most this many budgets are tried in the search for the largest that fits."""
NEAR = 1 / 64
"""The search ends when its bounds are within this share of VRAM."""


def prepare(variants: StepVariants, gpu: GpuSpec, budget: str) -> Prepared:
    """Prepare the step under a share of the plain peak as budget, such as ``"50%"``.

    Raises:
        StateError: the step does not fit as it is. BudgetError: no plan has the budget.
        GraphError: there is nothing to plan.
    """
    if not variants.fits(gpu):
        raise StateError(
            "its first passes, which learn the step, have no bytes to keep to: under "
            'Recompute("card") they have'
        )
    return Prepared(_under(variants, budget), f'with umem.chainer.Recompute("{budget}"):')


def prepare_least(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step under the least budget, ``"min"``.

    Raises:
        GraphError: there is nothing to plan.
    """
    trace = variants.under(None)
    pooled = on_card(variants, trace, gpu)
    return Prepared(trace, 'with umem.chainer.Recompute("min"):', pooled=pooled)


def prepare_managed(variants: StepVariants, gpu: GpuSpec, budget: str) -> Prepared:
    """Prepare the step under a budget, in managed memory. Raises as `prepare` does."""
    line = f'with umem.managed(), umem.chainer.Recompute("{budget}"):'
    return Prepared(_under(variants, budget), line, "managed")


def prepare_lookahead(variants: StepVariants, gpu: GpuSpec, budget: str) -> Prepared:
    """Prepare the step under a budget, in managed memory with lookahead prefetch.

    Raises:
        BudgetError, GraphError: as `prepare`. StateError: as `lookahead`.
    """
    line = (
        f'with umem.managed(), umem.chainer.Recompute("{budget}"), '
        f"umem.chainer.LookaheadPrefetch({DEPTH}):"
    )
    return lookahead(variants, _under(variants, budget), gpu, line)


def prepare_largest(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step under a budget of all that the GPU has to spare, ``"card"``.

    Raises:
        StateError: the step fits with everything kept. BudgetError: the step fits with no budget.
        GraphError: there is nothing to plan.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    trace = variants.with_plans(plans_for_card(variants, gpu))
    pooled = on_card(variants, trace, gpu)
    return Prepared(trace, 'with umem.chainer.Recompute("card"):', pooled=pooled)


class ScheduledAction(NamedTuple):
    """An action on one call, see `umem.planner.schedule.Action`."""

    do: str
    node: str


@dataclass(frozen=True)
class Schedule:
    """A plan of recomputation as a list of actions, for another executor; simulated.

    Attributes:
        budget_bytes: the budget of the whole step; None: everything is kept.
        peak_bytes: the peak under the plan, workspace and optimizer state included.
        kept: the calls whose outputs stay from forward into backward.
        recomputed: the calls that are recomputed in backward.
        actions: the actions of forward and backward, in order.
    """

    budget_bytes: int | None
    peak_bytes: int
    kept: tuple[str, ...]
    recomputed: tuple[str, ...]
    actions: tuple[ScheduledAction, ...]
    simulated: Literal[True] = True


def schedule_of(variants: StepVariants, gpu: GpuSpec, names: Sequence[str]) -> Schedule:
    """Return the schedule that fits a GPU with the least recomputation, for a step of one pass.

    Args:
        names: the names of the calls of forward, in order.

    Raises:
        BudgetError: the step fits with no budget. GraphError: there is nothing to plan.
    """
    budget = None if variants.fits(gpu) else largest_budget(variants, gpu)
    problem = variants.problems[0]
    solution = problem.keep_all if budget is None else problem.within(budget)
    by_node = dict(zip(problem.names, names, strict=True))
    plan = solution.plan
    return Schedule(
        budget,
        solution.peak_bytes,
        tuple(by_node[node] for node in plan.kept),
        tuple(by_node[node] for block in plan.recomputed for node in block),
        tuple(ScheduledAction(kind, by_node[n]) for kind, n in actions(solution.graph, plan)),
    )


def largest_budget(variants: StepVariants, gpu: GpuSpec) -> int:
    """Return the largest budget in bytes that was found to fit, in whole MiB or the least of all.

    Raises:
        BudgetError: the step fits with no budget. GraphError: there is nothing to plan.
    """
    low, high = variants.least_bytes, round(NEARLY * variants.plain_bytes)
    least, room = format_apart(low, gpu.usable_bytes)
    if low > gpu.usable_bytes:
        raise BudgetError(f"the least budget is {least}, and {room} of VRAM are usable")
    if not variants.fits(gpu, variants.under(low)):
        raise BudgetError(
            f"the least budget, {least}, has no room in {room} of VRAM: the pool's free pieces "
            "are too small"
        )
    budget = _largest(variants, gpu, -(-low // MIB), min(high, gpu.usable_bytes) // MIB)
    return max(low, budget * MIB)


def _largest(variants: StepVariants, gpu: GpuSpec, low: int, high: int) -> int:
    """Return the largest budget found to fit, in MiB; ``low`` is known to fit.

    A plan for all of VRAM often fits except for the pool's gaps: the search strides down from
    there, in growing strides, to a budget that fits, then bisects up to the last that does not.
    """
    near = max(1, round(NEAR * gpu.usable_bytes / MIB))
    if high <= low or variants.fits(gpu, variants.under(high * MIB)):
        return max(low, high)
    stride, found = near, False
    for _ in range(TRIES - 1):
        if high - low <= near:
            break
        budget = (low + high) // 2
        if not found:
            budget, stride = max(budget, high - stride), 2 * stride
        if variants.fits(gpu, variants.under(budget * MIB)):
            low, found = budget, True
        else:
            high = budget
    return low


def _under(variants: StepVariants, budget: str) -> Trace:
    share = None if budget == "min" else float(budget.removesuffix("%")) / 100
    return variants.under(share)
