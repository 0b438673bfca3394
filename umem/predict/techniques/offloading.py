"""Saved tensors offloaded to pinned host memory: all of them, or those that a plan chooses.

A plan is made for one link, and so for one GPU: a copy is hidden by the operations that run beside
it, whose times depend on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, StateError
from umem.planner.link import Move
from umem.planner.plans import Plan
from umem.planner.problem import Problem
from umem.predict.techniques import small_states
from umem.predict.techniques.gpu_times import SMALLEST_BYTES, link_of
from umem.predict.techniques.recomputation import largest_budget
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.trace import Trace
from umem.units import MIB

SHARES = (0.6, 0.7, 0.8, 0.86, 0.91, 0.96)
"""The budgets that are tried, as shares of the usable VRAM."""
FETCH_AHEAD = 2
"""The fetch of a saved tensor begins this many steps of backward before its use."""


def prepare(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with all saved tensors offloaded.

    Raises:
        StateError: the step fits as it is, or the GPU has no link. GraphError: there is no
            backward.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    link_of(gpu)
    return variants.prepared_with("with umem.chainer.Offload():", _all_offloaded(variants))


def prepare_quickest(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step under the quickest of some budgets, with tensors recomputed or offloaded.

    The largest budget that fits is not always the quickest: with hardly any room the pool gives
    memory back to the driver and allocates it again, while the host waits.

    Raises:
        StateError: the step fits as it is, or the GPU has no link, or recomputing or offloading
            alone is as quick.
        BudgetError: the step fits with no budget. GraphError: there is nothing to plan.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    link_of(gpu)
    found = [
        (seconds, -budget)
        for budget in _budgets(variants, gpu)
        if (seconds := _seconds(variants, gpu, variants.under(budget, gpu))) is not None
    ]
    if not found:
        found = [(inf, -largest_budget(variants, gpu, gpu))]
    seconds, least = min(found)
    with suppress(BudgetError):
        again = variants.under(largest_budget(variants, gpu))
        if (_seconds(variants, gpu, again) or inf) <= seconds:
            raise StateError("nothing is quicker than recomputing what has no room")
    if (_seconds(variants, gpu, variants.with_plans(_all_offloaded(variants))) or inf) <= seconds:
        raise StateError("nothing is quicker than offloading all saved tensors")
    line = f'with umem.chainer.Recompute("{-least // MIB}MiB", offload=True):'
    return Prepared(variants.under(-least, gpu), line)


def prepare_small_states(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step as `prepare_quickest` does, with optimizer states of 8 bits.

    Raises:
        BudgetError, GraphError, StateError: as `prepare_quickest`; StateError also if no state can
            have 8 bits.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    prepared = prepare_quickest(variants.changed(small_states=True), gpu)
    return replace(prepared, line=f"{small_states.LINE}\n{prepared.line}")


def _all_offloaded(variants: StepVariants) -> list[Plan]:
    """Return the plans that offload all saved tensors."""
    return [all_offloaded(problem) for problem in variants.problems]


def _seconds(variants: StepVariants, gpu: GpuSpec, trace: Trace) -> float | None:
    """Return the time of a step in plain memory; None where it does not fit."""
    step = variants.replays.step(trace, gpu, "unmanaged")
    return step.cost.seconds if step.fits else None


def _budgets(variants: StepVariants, gpu: GpuSpec) -> list[int]:
    """Return the budgets to try: shares of VRAM, and the largest that recomputation fits with."""
    least = variants.least_bytes_on(gpu)
    budgets = {round(share * gpu.usable_bytes / MIB) * MIB for share in SHARES}
    with suppress(BudgetError):
        budgets.add(largest_budget(variants, gpu))
    return sorted(budget for budget in budgets if budget >= least)


def all_offloaded(problem: Problem) -> Plan:
    """Return the plan that keeps all saved tensors, with all of them offloaded."""
    plan = problem.keep_all.plan
    return replace(plan, moves=tuple(_moves(problem)))


def _moves(problem: Problem) -> Iterator[Move]:
    """Yield the move of each saved tensor that is large enough, after its last use in forward."""
    calls, names = problem.calls, problem.names
    root = list(range(len(calls)))
    for index, call in enumerate(calls):
        if call.alias is not None:
            root[index] = root[call.alias]
    last, first = list(range(len(calls))), [-1] * len(calls)
    for source, user in problem.edges:
        last[root[source]] = max(last[root[source]], user)
    for index, call in enumerate(calls):
        for need in () if call.dead else call.needs:
            first[root[need]] = max(first[root[need]], index)

    def move(index: int, what: str, last_use: int, first_need: int) -> Move:
        leaves = min(last_use + 1, len(calls) - 1)
        fetched = min(first_need + FETCH_AHEAD, len(calls) - 1)
        return Move(names[index], what, names[leaves], names[fetched])  # type: ignore[arg-type]

    for index, call in enumerate(calls):
        if first[index] >= 0 and call.nbytes >= SMALLEST_BYTES:
            yield move(index, "value", last[index], first[index])
        if not call.dead and call.stash_bytes >= SMALLEST_BYTES:
            yield move(index, "stash", index, index)
