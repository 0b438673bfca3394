"""Several techniques together, for a step that none of them alone makes fit."""

from __future__ import annotations

from dataclasses import replace

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, ScalingError, StateError
from umem.predict.techniques import changing, half_widths, micro_batches, small_states
from umem.predict.techniques.capped_workspace import CAP_BYTES
from umem.predict.techniques.on_card import on_card
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.trace import Trace
from umem.units import MIB

SMALL, HALF, SPLIT, RERUN, CAP = "8-bit states", "half", "accumulate", "recompute min", "workspace"
_NOTHING = (BudgetError, GraphError, ScalingError, StateError)


def prepare(variants: StepVariants, gpu: GpuSpec, parts: tuple[str, ...]) -> Prepared:
    """Prepare the step under several techniques at once.

    The micro-batch is the largest that fits, of those that halve the batch.

    Raises:
        StateError: the step fits without them or with one of them, or one has nothing to change.
        BudgetError: no micro-batch fits. GraphError: there is nothing to plan.
    """
    if variants.fits(gpu):
        raise StateError("the step fits with everything kept")
    for part in parts:
        if _is_enough(variants, gpu, part):
            raise StateError(f"{part!r} alone makes it fit")
    changed = variants.changed(
        small_states=SMALL in parts,
        half=HALF in parts,
        cap_bytes=CAP_BYTES if CAP in parts else None,
    )
    micro = None
    if SPLIT in parts:
        micro = changing.fitting(
            changed, gpu, lambda one: _made(one, variants, parts), in_piece=RERUN in parts
        )
        changed = changed.changed(micro_batch=micro)
    line = lines(parts, micro, CAP_BYTES, "min" if RERUN in parts else None)
    if RERUN not in parts:
        return changed.prepared(line)
    prepared = changed.prepared_with(line, variants.plans(None))
    return replace(prepared, pooled=on_card(changed, prepared.trace, gpu))


def _made(split: StepVariants, whole: StepVariants, parts: tuple[str, ...]) -> Trace:
    """Return the trace of a split step, recomputed, if asked for, by the whole batch's plans."""
    return split.with_plans(whole.plans(None)) if RERUN in parts else split.trace


def _is_enough(variants: StepVariants, gpu: GpuSpec, part: str) -> bool:
    """Return True if one technique alone makes the step fit."""
    try:
        if part == RERUN:
            return variants.fits(gpu, on_card(variants, variants.under(None), gpu))
        if part == SPLIT:
            return changing.accumulation(variants, gpu) is not None
        fields = {SMALL: "small_states", HALF: "half"}
        if part == CAP:
            return variants.changed(cap_bytes=CAP_BYTES).fits(gpu)
        return variants.changed(**{fields[part]: True}).fits(gpu)
    except _NOTHING:
        return False


def lines(
    parts: tuple[str, ...], micro: int | None, cap_bytes: int | None, budget: str | None
) -> str:
    """Return the code that turns techniques on: first conversions, a line each, then one block."""
    first = [line for part, line in _CONVERSIONS if part in parts]
    blocks = []
    if CAP in parts and cap_bytes is not None:
        blocks.append(f'umem.chainer.workspace("{cap_bytes // MIB}MiB")')
    if micro is not None:
        blocks.append(micro_batches.line(micro))
    if budget is not None:
        blocks.append(f'umem.chainer.Recompute("{budget}")')
    return "\n".join([*first, *([f"with {', '.join(blocks)}:"] if blocks else [])])


_CONVERSIONS = ((HALF, half_widths.LINE), (SMALL, small_states.LINE))
