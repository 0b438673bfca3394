"""`find_batch`: the batch that fits, without a trial; one live step confirms it on a device."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chainer.backends import cuda

import umem
from umem.devices.open import entered_device
from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.memory.limits import Size
from umem.predict.batches.finding import batches_of
from umem.predict.batches.found_batches import FoundBatch
from umem.trace.axes import StepSize, size_text
from umem.trace.trace import Trace
from umem.units import format_bytes

if TYPE_CHECKING:
    from umem.devices.cuda.pool_meter import PoolMeter

__all__ = ["find_batch"]
ON_A_DEVICE = ("cupy", "software")
"""Backends of traces that were recorded on a GPU, real or software."""
LIVE_STEPS = 2
"""Live steps of the confirmation: the second starts with the first one's gradients."""


def find_batch(
    step: Callable[..., Any] | Trace,
    gpu: str | GpuSpec = "t4",
    vram: Size | None = None,
    *,
    sizes: Sequence[int] | Mapping[str, Sequence[int]] = (4, 8),
    size: StepSize | None = None,
    maximum: int | None = None,
    margin: float = 0.0,
    confirm: bool | None = None,
) -> FoundBatch:
    """Find the largest batch that fits a GPU, and the one with least time a sample, without a
    trial.

    The step is recorded at two small sizes, which trains it six times on them, and taken to others
    by replays on the model of the GPU, with its pool's rounding and gaps: simulated. The largest
    batch fits, and the next one does not. Whether a batch fits may depend on how it divides the
    pool's pieces, so that now and then a larger one fits again: what is found is the last before
    the first failure that the search came to.

    Cost: besides the recording some 12 replays for the largest batch, at most 12 for the quickest.
    What gives a larger batch, micro-batches or recomputation, `umem.choose` says of its size.

    Args:
        step: makes its input for a size and runs one training step on it, an update included; or
            the trace of one, as `umem.record_at` makes it.
        gpu: a name of the table, such as ``"v100-16gb"``.
        vram: usable VRAM instead of the table's figure, as an int or text.
        sizes: where the step is recorded; see `umem.record_at`. The axis ``batch``, or else the
            first, is the batch.
        size: where the step has several axes, the other sizes, ``{"length": 512}``; None: the
            largest recorded.
        maximum: the largest batch that is asked for, such as the size of the data set.
        margin: the share of VRAM that is left free, such as 0.05.
        confirm: run two steps of the largest batch where the step runs on a device, real or
            software GPU; None: if it does. Running out of memory there is survived and said, and
            what it held is freed.

    Raises:
        BudgetError: a batch of one does not fit; says what it needs and what could help.
        StateError: ``confirm`` without a device. ScalingError, SizeError, UnknownGpuError, and
        what the step raises: see `umem.record_at`, `umem.replay`.
    """
    trace = step if isinstance(step, Trace) else umem.record_at(step, sizes)
    if isinstance(step, Trace) and confirm:
        raise StateError("a trace cannot be run to confirm it: give the step itself")
    has_device = trace.backend in ON_A_DEVICE or (confirm and entered_device() is not None)
    if confirm and not has_device:
        raise StateError(
            "there is no device to confirm a batch on: the step ran on NumPy. Run it on a GPU or "
            "a umem.software_gpu, or leave confirm out"
        )
    found = batches_of(trace, gpu, vram=vram, size=size, maximum=maximum, margin=margin)
    if isinstance(step, Trace) or confirm is False or not has_device:
        return found
    confirmed, said = _confirmed(step, found.size)
    return replace(found, confirmed=confirmed, confirmation=said)


def _confirmed(step: Callable[..., Any], size: StepSize) -> tuple[bool, str]:
    """Run two steps of a size on the device; return whether they had the memory, and a sentence.

    The sentence says that they ran, or why not. An out-of-memory error is caught, and the arrays
    that its frames hold are freed; other errors of the step are raised.
    """
    what = f"size {size_text(size)}"
    _let_go()
    try:
        with _metered() as meter:
            for _ in range(LIVE_STEPS):
                step(**size) if isinstance(size, Mapping) else step(size)
            return True, f"Confirmed: {what} ran on the device{_held(meter)}."
    except MemoryError as error:
        said = str(error).partition("\n")[0]
        _forget(error)
    finally:
        _let_go()
    return False, f"Not confirmed: {what} ran out of memory on the device: {said}"


def _metered() -> AbstractContextManager[PoolMeter | None]:
    """Return a meter of CuPy's pools; one of nothing on a virtual GPU."""
    if not cuda.available:
        return nullcontext()
    from umem.devices.cuda.pool_meter import PoolMeter  # imports CuPy, which need not be there

    return PoolMeter()


def _held(meter: PoolMeter | None) -> str:
    """Format what the pools had, for the end of a sentence; empty without them."""
    if meter is None:
        return ""
    peak, reserved = format_bytes(meter.held().peak), format_bytes(meter.pools.reserved())
    unknown = meter.why_not()
    used = f"arrays used {peak} at most and " if unknown is None else ""
    return f": {used}the pools have reserved {reserved}"


def _forget(error: BaseException) -> None:
    """Clear the frames of an error and its causes, which hold arrays."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__


def _let_go() -> None:
    gc.collect()
    if cuda.available:
        cuda.cupy.cuda.Device().synchronize()  # cudaFree promises no wait
        cuda.cupy.get_default_memory_pool().free_all_blocks()
