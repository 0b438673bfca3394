"""The times of operations and copies on one GPU, from which offload is planned."""

from __future__ import annotations

from umem.devices.specs import COSTS, GpuSpec
from umem.devices.virtual.clock import Clock
from umem.errors import StateError
from umem.planner.link import Link
from umem.trace.trace import Trace
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

    Waiting for the host is included: where the host is slower than the GPU, the time of an
    operation is that of issuing it.
    """
    clock, found = Clock(gpu, COSTS), dict[int, float]()
    for op in trace.ops:
        before = clock.device_seconds
        clock.launch(None, op.phase)
        clock.compute(op.flops, op.traffic_bytes, 0, op.arithmetic)
        found[id(op)] = clock.device_seconds - before
    return found
