"""Recomputation in CuPy's own pool on a GPU, as `umem.chainer.Recompute` carries it out there.

The pool reserves what the GPU has to spare in one piece. A budget is for what the pool reserves: a
plan has the budget without the gaps between arrays, which are expected at first and then measured,
and which grow after a pass in which memory ran out.

Does not model: arrays dropped in the middle of a pass in which memory runs out.
"""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.devices.virtual.layout import lay_out
from umem.errors import BudgetError
from umem.planner import Plan
from umem.planner.pool_gaps import PoolGaps
from umem.predict.techniques.step_variants import StepVariants
from umem.trace.trace import Alloc, Event, Free, Trace
from umem.trace.walk import allocations
from umem.units import BLOCK_BYTES, format_apart

AMPLE = 4
"""Gaps are measured in a piece of this many times the peak, which is never full."""


def on_card(variants: StepVariants, trace: Trace, gpu: GpuSpec) -> Trace:
    """Return `in_one_piece` of a variant of a step, made once; the trace itself if that fits."""
    if variants.fits(gpu, trace):
        return trace
    key = "one piece", id(trace), gpu.usable_bytes
    return variants.made_once(key, lambda: in_one_piece(trace, gpu))


def in_one_piece(trace: Trace, gpu: GpuSpec) -> Trace:
    """Return a trace whose pool reserves what a GPU has to spare once the first arrays are there.

    The piece is a tensor that is freed at once. The trace itself where nothing is to spare.
    """
    start = _first_step(trace)
    before = lay_out(trace.events[:start])
    spare = gpu.usable_bytes // BLOCK_BYTES - (before.block_count if before else 0)
    return _with_piece(trace, start, spare * BLOCK_BYTES) if spare > 0 else trace


def _first_step(trace: Trace) -> int:
    """Return the index of the first event after the uploads before the first step."""
    events = enumerate(trace.events)
    return next((i for i, e in events if not (isinstance(e, Alloc) and e.uploaded)), len(trace))


def _with_piece(trace: Trace, start: int, nbytes: int) -> Trace:
    piece = 1 + max(allocations(trace.events), default=0)
    reserve: list[Event] = [Alloc(piece, nbytes, "array", "one piece"), Free(piece)]
    return trace.with_events([*trace.events[:start], *reserve, *trace.events[start:]])


def gaps_of(trace: Trace) -> float | None:
    """Return the bytes that a pool of one piece takes from the driver, relative to those in use.

    None for a trace that cannot be laid out.
    """
    start = _first_step(trace)
    nbytes = -(-AMPLE * trace.peak_bytes // BLOCK_BYTES) * BLOCK_BYTES
    layout = lay_out(_with_piece(trace, start, nbytes).events)
    if layout is None or not layout.peak_bytes:
        return None
    [piece] = layout.laid[start].own
    end = piece.address + piece.nbytes
    own = (span for laid in layout.laid[start + 1 :] for span in laid.own)
    tops = (span.address + span.nbytes for span in own if piece.address <= span.address < end)
    unused = end - max(tops, default=piece.address)
    return (layout.block_count * BLOCK_BYTES - unused) / trace.peak_bytes


def plans_for_card(
    variants: StepVariants, gpu: GpuSpec, target: GpuSpec | None = None
) -> list[Plan]:
    """Return the plans under which a step fits a GPU with ``Recompute("card")``.

    Kept tensors may be offloaded over the link of the GPU ``target``.

    Raises:
        BudgetError: the step fits under no plan. GraphError: there is nothing to plan.
    """
    gaps = PoolGaps()
    gaps.expect()
    plans = _within(variants, gpu, gaps, target)
    measured = gaps_of(variants.with_plans(plans))
    if measured is not None and gaps.learn(measured):
        plans = _within(variants, gpu, gaps, target)
    while not variants.fits(gpu, on_card(variants, variants.with_plans(plans), gpu)):
        if not gaps.run_out():
            least, room = format_apart(variants.least_bytes_on(target), gpu.usable_bytes)
            raise BudgetError(
                f"the least budget is {least}, which has no room in {room} of VRAM with the "
                "pool's gaps"
            )
        plans = _within(variants, gpu, gaps, target)
    return plans


def _within(
    variants: StepVariants, gpu: GpuSpec, gaps: PoolGaps, target: GpuSpec | None
) -> list[Plan]:
    """Return plans for all of VRAM without the gaps; those of the least peak where none has room.

    Where a plain step has room, they keep everything.
    """
    problems = variants.problems_on(target)
    most = gpu.usable_bytes
    if gaps.room(most, plain=True) >= max(problem.left_alone_bytes for problem in problems):
        return [problem.keep_all.plan for problem in problems]
    try:
        return variants.plans(gaps.room(most), target)
    except BudgetError:
        return variants.plans(None, target)
