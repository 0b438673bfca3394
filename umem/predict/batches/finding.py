"""The largest batch that fits a GPU, from the trace of a step; all of it is simulated.

Does not model: a last batch that is smaller than the others.
"""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.errors import SizeError
from umem.memory.limits import Size
from umem.predict.batches.found_batches import FoundBatch
from umem.predict.batches.probing import BatchSearch
from umem.predict.choosing import gpu_asked_for
from umem.printable import quoted
from umem.trace.axes import StepSize, check_size
from umem.trace.trace import Trace, check_trace

LARGEST_BATCH = 1 << 30
"""At most this batch is tried unless a maximum is given."""


def batches_of(
    trace: Trace,
    gpu: str | GpuSpec = "t4",
    *,
    vram: Size | None = None,
    size: StepSize | None = None,
    maximum: int | None = None,
    margin: float = 0.0,
) -> FoundBatch:
    """Find the batches with which a recorded step fits a GPU, without running it; simulated.

    Cost: some 12 replays for the largest batch, at most 12 for the quickest.

    Args:
        trace: of several sizes, as `umem.record_at` makes one.
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text.
        size: for a trace along named axes, the sizes other than the batch, ``{"length": 512}``;
            None: the largest recorded.
        maximum: no larger batch is tried, such as the size of the data set.
        margin: the share of VRAM that is left free, such as 0.05.

    Raises:
        BudgetError: a batch of one does not fit. UnknownGpuError: see `umem.virtual_gpu`.
        ScalingError: a trace of one size. SizeError: a size, margin or maximum that is not valid.
    """
    check_trace(trace)
    spec = _with_margin(gpu_asked_for(gpu, vram), margin)
    search = BatchSearch(trace, spec, size, _checked_maximum(maximum))
    largest, failed = search.largest()
    for_largest = search.replay_count
    quickest = search.quickest(largest)
    return FoundBatch(
        gpu=spec.name,
        title=spec.title,
        vram_bytes=spec.usable_bytes,
        size=search.size(largest.batch),
        largest=largest,
        next_batch=None if failed is None else failed.batch,
        next_reason=None if failed is None else failed.reason,
        quickest=quickest,
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
