"""A cap on the workspace of convolutions and poolings, alone and with recomputation.

Models: memory; and of convolutions that work in parts the operations that each part takes: its
columns are copied, or added to the image, one place of the kernel after another. On a GPU with
cuDNN, which needs no columns, there is no workspace to cap.
Does not model: strides, which make the kernel seem smaller; the parts of poolings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, StateError
from umem.predict.techniques.on_card import on_card, plans_for_card
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.analysis.capping import CAPPED, CAPS, CONVOLUTIONS
from umem.trace.trace import Event, Op, Trace
from umem.units import MIB

CAP_BYTES = 16 * MIB
"""The cap of combinations of techniques."""
ITEM = 4
"""Bytes of a number: Chainer's convolutions are in float32."""


def prepare(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with its workspace under the largest of `CAPS` with which it fits.

    Where it does not fit without a cap, the line has `Recompute` reserve one piece as well: between
    columns of differing sizes a pool of many pieces has gaps that are not known before.

    Raises:
        StateError: no cap lowers the peak.
    """
    caps = _capped(variants)
    if variants.fits(gpu):
        (cap, capped), *_ = caps
        return _prepared(capped, capped.trace, cap, f"with {_line(cap)}:")
    found = None
    for cap, capped in caps:
        found = _in_one_piece(capped, gpu, cap)
        assert found.pooled is not None
        if capped.fits(gpu, found.pooled):
            break
    assert found is not None
    return found


def _in_one_piece(capped: StepVariants, gpu: GpuSpec, cap: int) -> Prepared:
    """Prepare a step under a cap and a budget of all that the GPU has to spare."""
    try:
        plans = plans_for_card(capped, gpu)
    except BudgetError:
        plans = capped.plans(None)
    except GraphError:  # without a backward there is nothing to plan
        return _prepared(capped, capped.trace, cap, f"with {_line(cap)}:")
    trace = capped.with_plans(plans)
    line = f'with {_line(cap)}, umem.chainer.Recompute("card"):'
    return replace(_prepared(capped, on_card(capped, trace, gpu), cap, line), trace=trace)


def _prepared(capped: StepVariants, whole: Trace, cap: int, line: str) -> Prepared:
    """Return a step under a cap, to be replayed with the operations of parts."""
    pooled = capped.made_once(("parts", id(whole), cap), lambda: in_parts(whole, cap))
    return Prepared(whole, line, pooled=pooled)


def prepare_least(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step under the least budget of recomputation, and the largest cap that fits.

    Raises:
        StateError: no cap lowers the peak. GraphError: there is nothing to plan.
    """
    caps = _capped(variants)
    made = ((cap, capped, capped.under(None)) for cap, capped in caps)
    fitting = (one for one in made if one[1].fits(gpu, on_card(one[1], one[2], gpu)))
    cap, capped, trace = next(fitting, (*caps[-1], caps[-1][1].under(None)))
    line = f'with {_line(cap)}, umem.chainer.Recompute("min"):'
    return replace(_prepared(capped, on_card(capped, trace, gpu), cap, line), trace=trace)


def _line(cap: int) -> str:
    return f'umem.chainer.workspace("{cap // MIB}MiB")'


def _capped(variants: StepVariants) -> list[tuple[int, StepVariants]]:
    """Return the caps that lower the peak, the largest first, each with the step under it.

    Raises:
        StateError: there is none.
    """
    most = max(
        (op.workspace_bytes or 0 for op in variants.trace.ops if op.name in CAPPED), default=0
    )
    each = [(cap, variants.changed(cap_bytes=cap)) for cap in CAPS if cap < most]
    found = [one for one in each if one[1].trace.peak_bytes < variants.trace.peak_bytes]
    if not found:
        raise StateError(
            "at the peak no convolution or pooling is known to need more than 1 MiB inside"
        )
    return found


# -- the operations of the parts ----------------------------------------------------------------


class _Sizes(NamedTuple):
    """The bytes of a convolution's images, kernel and outputs, in forward or in backward."""

    images: int
    kernel: int
    outputs: int


def in_parts(trace: Trace, cap_bytes: int) -> Trace:
    """Return a trace under a cap with the further operations that convolutions in parts take."""
    events: list[Event] = []
    for event in trace.events:
        events.append(event)
        if isinstance(event, Op) and event.name in CONVOLUTIONS:
            part = Op(f"{event.name} (part)", "array", (), (), 0, 0, workspace_bytes=0)
            events += [part] * _further_operations(event, cap_bytes)
    return trace.with_events(events)


def _further_operations(op: Op, cap_bytes: int) -> int:
    """Return the operations of a convolution in parts, beyond the one that the trace has.

    For each part a copy for each place of the kernel, and in forward zeros for its border; the
    product, and a copy of outputs (umem/chainer/chunking).
    """
    sizes = next(_sizes(op), None)
    if sizes is None or not op.flops:
        return 0
    positions = 2 * op.flops / sizes.kernel  # 2 operations for each number of the kernel
    outputs = sizes.outputs / ITEM / positions
    rows = sizes.kernel / ITEM / outputs
    kernel_size = max(1, round(rows * positions * ITEM / sizes.images))
    count = -(-int((rows + outputs) * positions * ITEM) // cap_bytes)
    borders = 0 if op.name.startswith("Deconvolution") else kernel_size - 1
    return count * (kernel_size + borders + 2) - 1


def _sizes(op: Op) -> Iterator[_Sizes]:
    """Yield the sizes of a convolution; nothing for another operation."""
    reads = [access.stop - access.start for access in op.reads[:2]]
    writes = [access.stop - access.start for access in op.writes[:1]]
    if len(reads) < 2 or not writes or not all((*reads, *writes)):
        return
    if op.name in ("Convolution2DFunction", "ConvolutionND"):
        yield _Sizes(reads[0], reads[1], writes[0])
    elif op.name in ("Convolution2DGradW", "ConvolutionNDGradW"):
        yield _Sizes(reads[0], writes[0], reads[1])
    elif op.name in ("Deconvolution2DFunction", "DeconvolutionND"):
        yield _Sizes(writes[0], reads[1], reads[0])
