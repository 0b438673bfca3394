"""The memory modes: plain, hybrid and managed memory, the last with prefetch or advice."""

from __future__ import annotations

from collections import Counter

from umem.devices.presets import PRESETS
from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.techniques.step_variants import STEPS, Prepared, StepVariants
from umem.trace.events import Access, Alloc, Event, Free, Hint, Mark, Op
from umem.trace.stacks import innermost
from umem.trace.trace import Trace
from umem.units import format_bytes


def prepare_unmanaged(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in CuPy's plain pool."""
    return Prepared(variants.trace, None)


def prepare_hybrid(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in plain memory until VRAM is full; the rest is accessed on the host."""
    return Prepared(variants.trace, "with umem.hybrid():", "hybrid")


def prepare_managed(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory, whose blocks move as operations touch them."""
    return Prepared(variants.trace, "with umem.managed():", "managed")


def prepare_prefetched(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory, whose blocks move in as memory is allocated."""
    return Prepared(variants.trace, "with umem.managed(prefetch=True):", "managed", prefetch=True)


def prepare_streaming(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in managed memory, with arrays that are read seldom left on the host.

    Of the arrays that outlive the steps, those of which a step touches the fewest bytes for their
    size have the advice of `umem.preset`'s ``"streaming"``: they are read over the bus in place.
    As many have it as leave room in VRAM for all else.

    Raises:
        StateError: the step has functions of Chainer, where parameters and states are advised by
            what they are; all that is reserved has room; or no array outlives the steps.
    """
    if variants.of_chainer:
        raise StateError("advice by array is for programs without Chainer")
    trace = variants.trace
    reserved = variants.replays.step(trace, gpu, "managed").cost.reserved_peak_bytes or 0
    seldom = _seldom_used(trace)
    chosen: list[Alloc] = []
    for alloc in seldom:
        if reserved <= gpu.usable_bytes:
            break
        chosen.append(alloc)
        reserved -= alloc.nbytes
    if not chosen:
        why = "no array outlives the steps" if not seldom else "all that is reserved has room"
        raise StateError(f"no array is advised: {why}")

    def made() -> Trace:
        return trace.with_events(_advised(trace, {alloc.tensor for alloc in chosen}))

    advised = variants.made_once(("streaming", id(trace), gpu.usable_bytes), made)
    line = f'with umem.managed(): umem.preset(arrays, "streaming")  # {_where(chosen)}'
    return Prepared(advised, line, "managed", hintless=trace)


def _seldom_used(trace: Trace) -> list[Alloc]:
    """Return the arrays that the first step has and no step frees, the least used first.

    That is by the bytes that the last step uses, for their size; of arrays used alike the largest
    come first.
    """
    lasting: dict[int, Alloc] = {}
    used: Counter[int] = Counter()
    step_count = 0
    for event in trace.events:
        if isinstance(event, Alloc) and not step_count and event.nbytes:
            lasting[event.tensor] = event
        elif event == Mark("step"):
            step_count += 1
            if step_count < STEPS:
                used.clear()
        elif isinstance(event, Free):
            lasting.pop(event.tensor, None)
        elif isinstance(event, Op):
            for tensor, start, stop in (*event.reads, *event.writes):
                used[tensor] += stop - start
    return sorted(lasting.values(), key=lambda one: (used[one.tensor] / one.nbytes, -one.nbytes))


def _advised(trace: Trace, tensors: set[int]) -> list[Event]:
    """Return a trace's events with the advice of ``"streaming"`` as some tensors are allocated."""
    events: list[Event] = []
    for event in trace.events:
        events.append(event)
        if isinstance(event, Alloc) and event.tensor in tensors:
            whole = (Access(event.tensor, 0, event.nbytes),)
            for advice, place in PRESETS["streaming"]:
                events.append(Hint(advice, whole, "cpu" if place == "cpu" else 0))
    return events


def _where(allocs: list[Alloc]) -> str:
    """Format how many arrays these are, and the lines that allocated them where that is known."""
    lines: Counter[str] = Counter()
    for alloc in allocs:
        lines[innermost(alloc.stack) if alloc.stack else alloc.label] += alloc.nbytes
    places = ", ".join(f"{at} ({format_bytes(nbytes)})" for at, nbytes in lines.most_common(3))
    more = f" and {len(lines) - 3} more lines" if len(lines) > 3 else ""
    return f"{len(allocs)} arrays: {places}{more}"
