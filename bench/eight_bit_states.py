"""What an optimizer with states of eight bits would make of a recorded step.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): one byte a
value and a scale for each block of 2048 values; embeddings keep states of 32 bits, and so does
what has fewer than 4096 values.
"""

from __future__ import annotations

from umem.trace import Access, Alloc, Event, Op, Trace

BLOCK = 2048
LEAST_VALUES = 4096


def with_small_states(trace: Trace) -> Trace:
    """The trace with the sizes that Adam's states would have; times are as they were."""
    sizes = _sizes(trace)

    def shorter(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            Access(tensor, 0, sizes[tensor]) if tensor in sizes else Access(tensor, start, stop)
            for tensor, start, stop in accesses
        )

    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Alloc) and event.tensor in sizes:
            event = event._replace(nbytes=sizes[event.tensor])
        elif isinstance(event, Op):
            event = event._replace(reads=shorter(event.reads), writes=shorter(event.writes))
        events.append(event)
    return Trace(events, trace.backend, trace.meta)


def _sizes(trace: Trace) -> dict[int, int]:
    """The new size of each of Adam's states that gets one."""
    lives = trace.lifetimes()
    embedded = {
        access.tensor
        for op in trace.ops
        if op.name == "EmbedIDFunction"
        for access in op.reads
        if lives[access.tensor].alloc.kind == "parameter"
    }
    sizes = {}
    for op in trace.ops:
        if op.phase != "update" or op.writes[0].tensor in embedded:
            continue
        for access in op.writes:
            state = lives[access.tensor].alloc
            values = state.nbytes // 4
            if state.label.endswith((".m", ".v")) and values >= LEAST_VALUES:
                sizes[access.tensor] = values + 4 * -(-values // BLOCK)
    return sizes
