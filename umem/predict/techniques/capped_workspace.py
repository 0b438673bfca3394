"""A cap on the workspace of convolutions and poolings, alone and with recomputation.

Models: memory, and the launches of each part of a convolution; the bytes that they move are those
of a step without a cap. On a GPU with cuDNN, which needs no columns, there is no workspace to cap.
"""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.errors import BudgetError, GraphError, StateError
from umem.predict.techniques.on_card import on_card, plans_for_card
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.analysis.capping import CAPPED, CAPS
from umem.units import MIB

CAP_BYTES = 16 * MIB
"""The cap of combinations of techniques."""


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
        return Prepared(capped.trace, f"with {_line(cap)}:")
    found = None
    for cap, capped in caps:
        found = _in_one_piece(capped, gpu, cap)
        if capped.fits(gpu, found.pooled or found.trace):
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
        return Prepared(capped.trace, f"with {_line(cap)}:")
    trace = capped.with_plans(plans)
    line = f'with {_line(cap)}, umem.chainer.Recompute("card"):'
    return Prepared(trace, line, pooled=on_card(capped, trace, gpu))


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
    return Prepared(trace, line, pooled=on_card(capped, trace, gpu))


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
