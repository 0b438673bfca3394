"""Half precision, 8-bit states and micro-batches, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, StateError
from umem.predict.techniques import half_widths, micro_batches, small_states
from umem.predict.techniques.on_card import on_card
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.axes import batch_of
from umem.trace.trace import Trace


def half_precision(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step in half precision.

    Raises:
        StateError: no parameter could have 16 bits.
    """
    return Prepared(variants.changed(half=True).trace, half_widths.LINE)


def eight_bit_states(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with optimizer states of 8 bits.

    Raises:
        StateError: no state can have 8 bits.
    """
    return Prepared(variants.changed(small_states=True).trace, small_states.LINE)


def accumulation(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with the largest micro-batch that fits, of those that halve the batch.

    Raises:
        StateError: the step fits whole, or cannot be split. BudgetError: no micro-batch fits.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with its whole batch")
    micro = fitting(variants, gpu, lambda split: split.trace)
    return variants.changed(micro_batch=micro).prepared(f"with {micro_batches.line(micro)}:")


def fitting(
    variants: StepVariants,
    gpu: GpuSpec,
    made: Callable[[StepVariants], Trace],
    *,
    in_piece: bool = False,
) -> int:
    """Return the largest micro-batch with which a step fits, of those that halve the batch.

    Bisection leaves out micro-batches whose tensors alone have no room; the others are replayed.

    Args:
        made: returns the trace to fit of a split step.
        in_piece: whether the pool reserves one piece, as under `umem.chainer.Recompute`.

    Raises:
        StateError: the batch cannot be split. BudgetError: no micro-batch fits.
    """

    def has_room(micro: int) -> bool:
        peak = made(variants.changed(micro_batch=micro)).peak_bytes
        return peak <= gpu.usable_bytes

    sizes = list(smaller_batches(variants))
    low, high = 0, len(sizes)
    if sizes and has_room(sizes[-1]):
        high -= 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if has_room(sizes[middle]) else (middle + 1, high)
        for micro in sizes[low:]:
            split = variants.changed(micro_batch=micro)
            trace = made(split)
            if split.fits(gpu, on_card(split, trace, gpu) if in_piece else trace):
                return micro
    raise BudgetError("with a micro-batch of one sample the step does not fit either")


def smaller_batches(variants: StepVariants) -> Iterator[int]:
    """Yield the micro-batches to try, halves rounded up, from half of the batch down to one.

    Raises:
        StateError: the step cannot be split, or was recorded at one size.
    """
    micro_batches.check_splits(variants.recorded)
    size = variants.size
    if size is None or not variants.recorded.sizes:
        raise StateError(
            "the step was recorded at one size, so that a smaller batch is not known: "
            "umem.record_at(step, sizes=(4, 8)) records it at two"
        )
    batch = batch_of(size)
    while batch > 1:
        batch = -(-batch // 2)
        yield batch
