"""The largest batch that fits a GPU, from the trace of a step; all of it is simulated.

Does not model: a last batch that is smaller than the others.
"""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, SizeError, StateError
from umem.memory.limits import Size
from umem.predict.batches.found_batches import FoundBatch, MicroBatch
from umem.predict.batches.probing import BatchSearch
from umem.predict.choosing import gpu_asked_for
from umem.predict.diet_places import PlainPool
from umem.predict.techniques.combinations import lines
from umem.predict.techniques.step_variants import StepVariants
from umem.printable import quoted
from umem.trace.axes import StepSize, check_size
from umem.trace.trace import Trace, check_trace
from umem.units import MIB

LARGEST_BATCH = 1 << 30
"""At most this batch is tried unless a maximum is given."""
MOST_SPLITS = 4
"""At most this many micro-batches are tried that may fit only with recomputation."""
_CANNOT = (BudgetError, GraphError, StateError)


def batches_of(
    trace: Trace,
    gpu: str | GpuSpec = "t4",
    *,
    vram: Size | None = None,
    size: StepSize | None = None,
    effective: int | None = None,
    maximum: int | None = None,
    margin: float = 0.0,
) -> FoundBatch:
    """Find the batches with which a recorded step fits a GPU, without running it; simulated.

    Cost: some 12 replays for the largest batch, at most 12 for the quickest, and some for
    ``effective``.

    Args:
        trace: of several sizes, as `umem.record_at` makes one.
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text.
        size: for a trace along named axes, the sizes other than the batch, ``{"length": 512}``;
            None: the largest recorded.
        effective: a batch to be reached with micro-batches; the micro-batch and the budget of
            recomputation of least time are searched for.
        maximum: no larger batch is tried, such as the size of the data set.
        margin: the share of VRAM that is left free, such as 0.05.

    Raises:
        BudgetError: a batch of one does not fit. UnknownGpuError: see `umem.virtual_gpu`.
        ScalingError: a trace of one size. SizeError: a size, margin or maximum that is not valid.
    """
    check_trace(trace)
    spec = _with_margin(gpu_asked_for(gpu, vram), margin)
    search = BatchSearch(trace, spec, size, _checked_maximum(maximum))
    if effective is not None:
        check_size(effective, "effective")
    largest, failed = search.largest()
    for_largest = search.replay_count
    quickest = search.quickest(largest)
    pair, no_pair = _paired(search, largest.batch, effective)
    return FoundBatch(
        gpu=spec.name,
        title=spec.title,
        vram_bytes=spec.usable_bytes,
        size=search.size(largest.batch),
        largest=largest,
        next_batch=None if failed is None else failed.batch,
        next_reason=None if failed is None else failed.reason,
        quickest=quickest,
        pair=pair,
        no_pair=no_pair,
        replay_count=for_largest,
        all_replay_count=search.replay_count,
        caveat=search.variants(largest.batch).caveat,
    )


def _with_margin(spec: GpuSpec, margin: float) -> GpuSpec:
    if not isinstance(margin, (int, float)) or not 0 <= margin < 1:
        raise SizeError(
            f"margin is a share of VRAM of at least 0 and below 1; got {quoted(margin)}"
        )
    return spec.with_vram(round(spec.usable_bytes * (1 - margin))) if margin else spec


def _checked_maximum(maximum: int | None) -> int:
    if maximum is None:
        return LARGEST_BATCH
    check_size(maximum, "maximum")
    return maximum


# -- a wanted batch ----------------------------------------------------------------------------


def _paired(
    search: BatchSearch, largest: int, effective: int | None
) -> tuple[MicroBatch | None, str | None]:
    """Return the micro-batch and the budget of least time, or the reason why there is none."""
    if effective is None:
        return None, None
    whole = search.variants(effective)
    place = PlainPool(search.spec, whole)
    found: list[MicroBatch] = []
    reason = None
    for micro in _micro_batches(effective, largest):
        if micro < largest and any(pair.budget is None for pair in found):
            continue  # a smaller one is slower than one that fits as it is
        try:
            found.append(_in_micro_batches(whole, place, effective, micro))
        except _CANNOT as error:
            reason = str(error)
    best = min(found, key=lambda pair: pair.seconds, default=None)
    return best, reason if best is None else None


def _micro_batches(effective: int, largest: int) -> list[int]:
    """Return micro-batches to try: the largest that fits as it is, its half, and doubled ones.

    Half of it, because summed gradients take memory; larger ones need recomputation.
    """
    passes = -(-effective // largest)
    counts = [passes, 2 * passes] if passes > 1 else [1]
    while passes > 1 and len(counts) <= MOST_SPLITS:
        passes = -(-passes // 2)
        counts.append(passes)
    return list(dict.fromkeys(-(-effective // count) for count in counts))


def _in_micro_batches(
    whole: StepVariants, place: PlainPool, effective: int, micro: int
) -> MicroBatch:
    """Return the step of a batch in micro-batches, recomputed if it does not fit otherwise.

    Raises:
        BudgetError: no plan of recomputation makes it fit.
        GraphError, StateError: there is nothing to plan, or the batch cannot be split.
    """
    variants = whole if micro == effective else whole.changed(micro_batch=micro)
    budget = None
    fits, peak, seconds, *_ = place.judged(variants, variants.prepared(""))
    if not fits:
        planned = place.recompute_budget(variants)
        budget = planned if isinstance(planned, str) else _text(planned)
        prepared = variants.prepared("", None if isinstance(planned, str) else planned)
        fits, peak, seconds, *_ = place.judged(variants, prepared)
        if not fits:
            raise BudgetError("no plan of recomputation has room")
    line = lines((), None if micro == effective else micro, None, budget)
    return MicroBatch(effective, micro, budget, peak, seconds, line or None)


def _text(nbytes: int) -> str:
    return str(nbytes) if nbytes % MIB else f"{nbytes // MIB}MiB"
