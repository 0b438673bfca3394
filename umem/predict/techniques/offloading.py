"""Saved tensors offloaded to pinned host memory: all of them, or those that a plan chooses.

A plan is made for one link, and so for one GPU: a copy is hidden by the operations that run beside
it, whose times depend on the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, StateError
from umem.planner.link import AHEAD_BYTES, IN_FLIGHT_BYTES, Move, What
from umem.planner.plans import Plan
from umem.planner.problem import Problem
from umem.predict.techniques import small_states
from umem.predict.techniques.gpu_times import SMALLEST_BYTES, link_of
from umem.predict.techniques.on_card import on_card, plans_for_card
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.trace import Trace


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
    """Prepare the step under all that the GPU has to spare, with tensors recomputed or offloaded.

    Raises:
        StateError: the step fits as it is, the GPU has no link, or nothing is quicker than
            recomputing, or than offloading, all that has no room.
        BudgetError: the step fits with no budget. GraphError: there is nothing to plan.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    link_of(gpu)
    if not variants.fits(gpu, on_card(variants, variants.under(None), gpu)):
        raise BudgetError("its first passes, which learn the step, offload nothing, and do not fit")
    trace = variants.with_plans(plans_for_card(variants, gpu, gpu))
    pooled = on_card(variants, trace, gpu)
    seconds = _seconds(variants, gpu, pooled) or inf
    with suppress(BudgetError):
        again = variants.with_plans(plans_for_card(variants, gpu))
        if (_seconds(variants, gpu, on_card(variants, again, gpu)) or inf) <= seconds:
            raise StateError("nothing is quicker than recomputing what has no room")
    return Prepared(trace, 'with umem.chainer.Recompute("card", offload=True):', pooled=pooled)


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


def all_offloaded(problem: Problem) -> Plan:
    """Return the plan that keeps all saved tensors, with all of them offloaded."""
    plan = problem.keep_all.plan
    return replace(plan, moves=tuple(_moves(problem)))


class _Saved(NamedTuple):
    """A saved tensor of a call: when forward uses it last, and backward first."""

    call: int
    what: What
    nbytes: int
    last_use: int
    first_need: int


def _moves(problem: Problem) -> Iterator[Move]:
    """Yield the move of each saved tensor that is large enough, in the order of their last uses.

    As in `umem.chainer.Offload`, copies lag: a tensor stays until `IN_FLIGHT_BYTES` more are on
    their way, and is back `AHEAD_BYTES` before backward needs it.
    """
    saved = sorted(_saved(problem), key=lambda one: one.last_use)
    leaves: dict[_Saved, int] = {}
    going: deque[_Saved] = deque()
    for one in saved:
        going.append(one)
        while sum(each.nbytes for each in going) > IN_FLIGHT_BYTES:
            leaves[going.popleft()] = min(one.last_use + 1, len(problem.calls) - 1)
    fetched: dict[_Saved, int] = {}
    ahead: deque[_Saved] = deque()
    for one in sorted(leaves, key=lambda one: -one.first_need):  # backward
        ahead.append(one)
        while len(ahead) > 1 and sum(each.nbytes for each in ahead) > AHEAD_BYTES:
            ahead.popleft()
        fetched[one] = ahead[0].first_need
    for one, after in leaves.items():
        names = problem.names
        yield Move(names[one.call], one.what, names[after], names[fetched[one]])


def _saved(problem: Problem) -> Iterator[_Saved]:
    """Yield the saved tensors that are large enough."""
    calls = problem.calls
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
    for index, call in enumerate(calls):
        if first[index] >= 0 and call.nbytes >= SMALLEST_BYTES:
            yield _Saved(index, "value", call.nbytes, last[index], first[index])
        if not call.dead and call.stash_bytes >= SMALLEST_BYTES:
            yield _Saved(index, "stash", call.stash_bytes, index, index)
