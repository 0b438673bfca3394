"""Offload on one GPU: the link, the times for planning, and the plan that offloads all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from umem._common.specs import COSTS, GpuSpec
from umem.devices.virtual import Clock
from umem.errors import StateError
from umem.planner import (
    AHEAD_BYTES,
    IN_FLIGHT_BYTES,
    Link,
    Move,
    OffloadWindow,
    Plan,
    Problem,
    timetable,
)
from umem.trace import Trace
from umem.units import BLOCK_BYTES

SMALLEST_BYTES = BLOCK_BYTES // 32
"""Smaller tensors are never offloaded, as in `umem.chainer.Offload`."""


def link_of(gpu: GpuSpec) -> Link:
    """Return the link between a GPU and its host, in bytes a second each way.

    Raises:
        StateError: the GPU shares its memory with the host.
    """
    if not gpu.host_out_bandwidth or not gpu.host_in_bandwidth:
        raise StateError(f"{gpu.title} shares its memory with the host: there is no offload target")
    return Link(gpu.host_out_bandwidth, gpu.host_in_bandwidth, SMALLEST_BYTES)


def op_seconds(trace: Trace, gpu: GpuSpec) -> dict[int, float]:
    """Map the id of each operation to the seconds from the end of the last one to its own end.

    They include waiting for the host: if the host is slower than the GPU, the time of an operation
    is the time to issue it.
    """
    clock, found = Clock(gpu, COSTS), dict[int, float]()
    for op in trace.ops:
        before = clock.device_seconds
        clock.launch(None, op.phase)
        clock.compute(op.flops, op.traffic_bytes, 0, op.arithmetic)
        found[id(op)] = clock.device_seconds - before
    return found


def all_offloaded(problem: Problem, link: Link) -> Plan:
    """Return the plan that keeps all saved tensors, and offloads all that the link takes.

    `umem.chainer.Offload` does the same.
    """
    kept = problem.keep_all
    windows = timetable(kept.graph, ((),) * len(problem.calls), link).windows
    return replace(kept.plan, moves=tuple(_moves(problem.names, windows)))


def _moves(names: tuple[str, ...], windows: list[OffloadWindow]) -> Iterator[Move]:
    """Yield the move of each saved tensor, in the order of their last uses.

    As in `umem.chainer.Offload`, copies lag: a tensor stays in memory until `IN_FLIGHT_BYTES` more
    are being copied, and is fetched `AHEAD_BYTES` before backward needs it.
    """
    count = len(names)
    leaves: dict[OffloadWindow, int] = {}
    going: deque[OffloadWindow] = deque()
    for one in sorted(windows, key=lambda one: (one.last, one.key[1], one.key[0] == "stash")):
        going.append(one)
        while sum(each.nbytes for each in going) > IN_FLIGHT_BYTES:
            leaves[going.popleft()] = min(one.last + 1, count - 1)
    before: dict[OffloadWindow, int] = {}
    ahead: deque[OffloadWindow] = deque()
    for one in sorted(leaves, key=lambda one: one.first):
        ahead.append(one)
        while len(ahead) > 1 and sum(each.nbytes for each in ahead) > AHEAD_BYTES:
            ahead.popleft()
        before[one] = 2 * count - 1 - ahead[0].first  # nothing is recomputed in between
    for one, after in leaves.items():
        what, call = one.key
        yield Move(names[call], what, names[after], names[before[one]])
