"""A time that no step gets below in so much VRAM, whatever is kept, run again, moved or paged.

When forward is over, each byte that backward needs has room, or is below, or was dropped and its
call runs again. Relaxed, so that nothing is shut out: parts of values move or run again, what runs
again finds its inputs there, copies never wait for each other, no operation needs room for itself,
and neither of GPU and host ever waits for the other's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from umem.devices.specs import COSTS, GpuSpec
from umem.devices.virtual.clock import Clock
from umem.planner import Graph
from umem.planner.problem import Problem
from umem.predict.recorded_problem import problems_of
from umem.predict.techniques.gpu_times import link_of
from umem.predict.techniques.step_variants import STEPS, StepVariants
from umem.trace import Alloc, Op

HALVINGS = 60
HOST_SECONDS = COSTS.launch + COSTS.python_backward
"""What the host takes to run a call again."""


class Again(NamedTuple):
    """A call whose bytes backward needs, and what running it again takes."""

    nbytes: int
    gpu: float
    host: float


class Pass(NamedTuple):
    """What a pass needs when its forward is over, and seconds of the GPU's operations."""

    calls: Sequence[Again]
    outside_bytes: int
    forward: float
    backward: float


def least_seconds(subject: StepVariants, gpu: GpuSpec, plain_seconds: float) -> float:
    """The time below which no step gets in a GPU's VRAM; with room for all it takes the plain one.

    Copies of what backward needs go down in forward, and each way beside the other; or pages of
    anything go down and back at any time, one at a time.
    """
    gpu_seconds, host_seconds = _works(subject, gpu)
    passes = list(_passes(subject, gpu))
    rates = gpu.host_out_bandwidth or 1, gpu.host_in_bandwidth or 1
    paging = 1 / (1 / rates[0] + 1 / rates[1])
    inputs = _input_bytes(subject)  # they come in, and never go out

    def is_possible(seconds: float) -> bool:
        for one in passes:
            copied = min(rates[0] * (seconds - one.backward), rates[1] * (seconds - one.forward))
            need = one.outside_bytes + sum(call.nbytes for call in one.calls) - gpu.usable_bytes
            need -= max(copied, paging * seconds + inputs)
            again = [_again(one.calls, need, by) for by in (1, 2)]
            if gpu_seconds + again[0] > seconds or host_seconds + again[1] > seconds:
                return False
        return True

    low, high = plain_seconds, 1e3 * plain_seconds
    if is_possible(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _again(calls: Sequence[Again], need: float, by: int) -> float:
    """The least seconds in which calls run again that make so many bytes, parts of them too."""
    spent = 0.0
    for call in sorted(calls, key=lambda call: call[by] / call.nbytes):
        if need <= 0:
            return spent
        spent += call[by] * min(1.0, need / call.nbytes)
        need -= call.nbytes
    return spent if need <= 0 else float("inf")


def _input_bytes(subject: StepVariants) -> int:
    found = (event for event in subject.trace.events if isinstance(event, Alloc))
    return sum(alloc.nbytes for alloc in found if alloc.kind == "input")


def _works(subject: StepVariants, gpu: GpuSpec) -> tuple[float, float]:
    """What a plain step takes the GPU, and the host."""
    clock, backend = Clock(gpu, COSTS), subject.trace.backend
    for op in subject.trace.ops:
        clock.launch(op.host_seconds if backend == "cupy" else None, op.phase)
        clock.compute(op.flops, op.traffic_bytes)
    return clock.compute_seconds / STEPS, clock.host_seconds / STEPS


def _passes(subject: StepVariants, gpu: GpuSpec) -> Iterator[Pass]:
    def seconds(op: Op) -> float:
        clock = Clock(gpu, COSTS)
        clock.compute(op.flops, op.traffic_bytes)
        return clock.compute_seconds

    timed = problems_of(subject.trace, seconds)
    for problem, times in zip(subject.problems_on(gpu), timed, strict=True):
        solution = problem.least(link=link_of(gpu))
        yield Pass(
            list(_needed(solution.graph, times)),
            solution.constant_bytes,
            sum(call.cost for call in times.calls),
            sum(call.backward_cost or 0 for call in times.calls),
        )


def _needed(graph: Graph, times: Problem) -> Iterator[Again]:
    """By call, the bytes that backward needs of it."""
    g = graph.numbered
    needed = {g.root[x] for needs in g.needs for x in needs}
    for v, name in enumerate(g.names):
        nbytes = g.stash[v] + (g.size[v] if v in needed else 0)
        cost = times.calls[int(name.rpartition("#")[2])].cost
        if nbytes and g.recomputable[v]:
            yield Again(nbytes, cost, HOST_SECONDS)
        elif nbytes:
            yield Again(nbytes, float("inf"), float("inf"))
