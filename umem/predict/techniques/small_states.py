"""States of eight bits, as `umem.chainer.optimizers` keeps them: a code a value, a scale a block.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). What has fewer
than 4,096 values keeps states of 32 bits, and so do embeddings.

Models: memory, and what the update moves. Does not model: its arithmetic, which a GPU does not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.techniques.technique import Prepared
from umem.trace.events import Access, Alloc, Event, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations, with_accesses

if TYPE_CHECKING:
    from umem.predict.techniques.subject import Subject

BLOCK = 256
"""Values that share a scale of 4 bytes."""
LEAST_VALUES = 4096
CHUNK_VALUES = 1 << 15
"""Values that are in 32 bits at a time, on NumPy."""
QUANTIZED = {"Adam": (".m", ".v"), "MomentumSGD": (".v",)}
"""By the name of an update, the ends of its states' labels."""
LINE = "umem.chainer.optimizers.quantize_states(optimizer)"


def prepare(subject: Subject, gpu: GpuSpec) -> Prepared:
    """The step with small states.

    Raises:
        StateError: no state of it can be small.
    """
    return Prepared(subject.changed(small_states=True).trace, LINE)


def with_small_states(trace: Trace) -> Trace:
    """The trace with states of eight bits, where there is a rule with such.

    Raises:
        StateError: there is none.
    """
    sizes = _sizes(trace)
    if not sizes:
        known = " and ".join(QUANTIZED)
        raise StateError(
            f"no state of the step has {LEAST_VALUES:,} values or more of a kind that can be "
            f"quantised: {known}, embeddings aside"
        )
    return trace.map(lambda event: _smaller(event, sizes))


def _smaller(event: Event, sizes: dict[int, int]) -> Event:
    if isinstance(event, Alloc):
        return event._replace(nbytes=sizes.get(event.tensor, event.nbytes))
    if not isinstance(event, Op) or event.phase != "update":
        return event if isinstance(event, Op) else with_accesses(event, lambda a: _cut(a, sizes))
    small = with_accesses(event, lambda accesses: _cut(accesses, sizes))
    assert isinstance(small, Op)
    saved = _bytes(event) - _bytes(small)
    if not saved:
        return small
    traffic = max(0, event.traffic_bytes - saved)
    if event.workspace_bytes is None:
        return small._replace(traffic_bytes=traffic)
    values = sum(a.stop - a.start for a in event.writes) // 4 // len(event.writes)
    share = min(1.0, CHUNK_VALUES / values)
    inside = round(event.workspace_bytes * share) + 4 * min(values, CHUNK_VALUES) * 2
    return small._replace(traffic_bytes=traffic, workspace_bytes=inside)


def _bytes(op: Op) -> int:
    return sum(stop - start for _, start, stop in (*op.reads, *op.writes))


def _cut(accesses: tuple[Access, ...], sizes: dict[int, int]) -> tuple[Access, ...]:
    return tuple(
        Access(tensor, 0, sizes[tensor]) if tensor in sizes else Access(tensor, start, stop)
        for tensor, start, stop in accesses
    )


def _sizes(trace: Trace) -> dict[int, int]:
    """The new size of each state that gets one."""
    allocs = allocations(trace.events)
    embedded = {
        access.tensor
        for op in trace.ops
        if op.name == "EmbedIDFunction"
        for access in op.reads
        if allocs[access.tensor].kind == "parameter"
    }
    sizes: dict[int, int] = {}
    for op in trace.ops:
        ends = QUANTIZED.get(op.name, ()) if op.phase == "update" else ()
        if not embedded.isdisjoint(access.tensor for access in op.writes):
            continue
        for access in op.writes:
            state = allocs[access.tensor]
            values = state.nbytes // 4
            if state.kind == "state" and state.label.endswith(ends) and values >= LEAST_VALUES:
                sizes[access.tensor] = values + 4 * -(-values // BLOCK)
    return sizes
