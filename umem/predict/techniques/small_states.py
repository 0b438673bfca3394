"""States of eight bits, as `umem.chainer.optimizers` keeps them: a code a value, a scale a block.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). States of fewer
than 4,096 values keep 32 bits, and so do those of embeddings.

Models: memory, and the traffic of updates. Does not model: their arithmetic, hidden on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import count
from typing import NamedTuple

from umem.errors import StateError
from umem.trace.events import Access, Alloc, Event, Free, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations

BLOCK = 256
"""Values that share a scale of 4 bytes."""
LEAST_VALUES = 4096
CHUNK_VALUES = 1 << 15
"""Values that NumPy converts at a time, without numba."""
CHUNK_BYTES_A_VALUE, CHUNK_BYTES = 33, 32 << 10
"""Workspace of an update without numba, by value and fixed; measured, as `COMPILED_BYTES` is."""
COMPILED_BYTES = 8 << 10
QUANTIZED = {"Adam": (".m", ".v"), "MomentumSGD": (".v",)}
"""For each update rule, the suffixes of the labels of states that can have 8 bits."""
LINE = "umem.chainer.optimizers.quantize_states(optimizer)"


def with_small_states(trace: Trace) -> Trace:
    """Return the trace with states of eight bits, under the rules of `QUANTIZED`.

    Raises:
        StateError: no state can have 8 bits.
    """
    states = _states(trace)
    if not states:
        known = " and ".join(QUANTIZED)
        raise StateError(
            f"no state of the step has {LEAST_VALUES:,} values or more of a kind that can be "
            f"quantised: {known}, embeddings aside"
        )
    whole = embedded(trace)
    renamed = {
        access.tensor for op in trace.ops if _is_quantized(op, whole) for access in op.writes
    }
    events = (_renamed(event, renamed) for event in trace.events)
    return trace.with_events(_smaller(events, states, whole))


def _is_quantized(op: Op, whole: set[int]) -> bool:
    """Return True if an operation is an update by a rule of `QUANTIZED`, not of an embedding."""
    if op.phase != "update" or op.name not in QUANTIZED:
        return False
    return whole.isdisjoint(access.tensor for access in op.writes)


def _renamed(event: Event, tensors: set[int]) -> Event:
    """Return an event, with a state's label under the name of its 8-bit rule."""
    if isinstance(event, Alloc) and event.kind == "state" and event.tensor in tensors:
        rule, _, name = event.label.partition(".")
        return event._replace(label=f"{rule}8bit.{name}")
    return event


class _Small(NamedTuple):
    """A state in 8 bits: the number of its values, and the tensor of its scales."""

    values: int
    scales: int

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the scales, one a block."""
        return 4 * -(-self.values // BLOCK)


def _smaller(
    events: Iterable[Event], states: dict[int, _Small], whole: set[int]
) -> Iterator[Event]:
    """Yield events with states of eight bits, each with its scales."""
    for event in events:
        state = states.get(event.tensor) if isinstance(event, (Alloc, Free)) else None
        if isinstance(event, Op):
            yield _update(event, states) if _is_quantized(event, whole) else event
        elif state is None:
            yield event
        elif isinstance(event, Alloc):
            label, scales = event.label, (state.scales, state.scale_bytes)
            yield event._replace(nbytes=state.values, label=f"{label}_codes")
            yield Alloc(*scales, event.kind, f"{label}_scales", event.uploaded, event.stack)
        else:
            yield event
            yield Free(state.scales)


def _update(op: Op, states: dict[int, _Small]) -> Op:
    """Return an update with states as codes and scales, and the workspace of their conversion."""
    op = op._replace(name=f"{op.name}8bit")
    found = [states[access.tensor] for access in op.writes if access.tensor in states]
    if not found:
        return op
    reads, writes = _of_states(op.reads, states), _of_states(op.writes, states)
    saved = sum(_bytes(a) - _bytes(b) for a, b in ((op.reads, reads), (op.writes, writes)))
    return op._replace(
        reads=reads,
        writes=writes,
        traffic_bytes=max(0, op.traffic_bytes - saved),
        workspace_bytes=None if op.workspace_bytes is None else _inside(found[0].values),
    )


def _inside(values: int) -> int:
    """Return the workspace of an update in bytes, by whether this host has numba."""
    if find_spec("numba") is not None:
        return COMPILED_BYTES
    return CHUNK_BYTES_A_VALUE * min(values, CHUNK_VALUES) + CHUNK_BYTES


def _bytes(accesses: Iterable[Access]) -> int:
    return sum(stop - start for _, start, stop in accesses)


def _of_states(accesses: Iterable[Access], states: dict[int, _Small]) -> tuple[Access, ...]:
    """Return accesses with those of states replaced by codes and scales."""
    found: list[Access] = []
    for access in accesses:
        state = states.get(access.tensor)
        if state is None:
            found.append(access)
        else:
            found.append(Access(access.tensor, 0, state.values))
            found.append(Access(state.scales, 0, state.scale_bytes))
    return tuple(found)


def _states(trace: Trace) -> dict[int, _Small]:
    """Return the states that get 8 bits, by tensor."""
    allocs, whole = allocations(trace.events), embedded(trace)
    fresh = count(1 + max(allocs, default=-1))
    states: dict[int, _Small] = {}
    for op in trace.ops:
        ends = QUANTIZED[op.name] if _is_quantized(op, whole) else ()
        for access in op.writes if ends else ():
            state = allocs[access.tensor]
            values = state.nbytes // 4
            is_large = state.kind == "state" and values >= LEAST_VALUES
            if is_large and state.label.endswith(ends) and access.tensor not in states:
                states[access.tensor] = _Small(values, next(fresh))
    return states


def embedded(trace: Trace) -> set[int]:
    """Return the tensors of the parameters of embeddings."""
    allocs = allocations(trace.events)
    return {
        access.tensor
        for op in trace.ops
        if op.name == "EmbedIDFunction"
        for access in op.reads
        if allocs[access.tensor].kind == "parameter"
    }
