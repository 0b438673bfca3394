"""A cap on the workspace of convolutions and poolings, alone and with recomputation.

Models: memory, and the launches of each part of a convolution, a copy for each place of its kernel
among them; what the parts move is taken to be as without a cap. On a GPU with cuDNN, which needs no
columns, there is no workspace to cap.
"""

from __future__ import annotations

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.trace.analysis.capping import CAPPED
from umem.units import MIB

CAP_BYTES = 16 * MIB
LINE = 'umem.chainer.workspace("16MiB")'


def prepare(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with its workspace capped at `CAP_BYTES`.

    Raises:
        StateError: the cap leaves the peak as it is.
    """
    return Prepared(_capped(variants).trace, f"with {LINE}:")


def prepare_least(variants: StepVariants, gpu: GpuSpec) -> Prepared:
    """Prepare the step with its workspace capped, under the least budget of recomputation.

    Raises:
        StateError: the cap leaves the peak as it is. GraphError: there is nothing to plan.
    """
    capped = _capped(variants)
    trace = variants.made_once(("capped", CAP_BYTES), lambda: capped.under(None))
    return Prepared(trace, f'with {LINE}, umem.chainer.Recompute("min"):')


def _capped(variants: StepVariants) -> StepVariants:
    """Return the step with its workspace capped; raise StateError if the peak stays as it is."""
    if any(
        (op.workspace_bytes or 0) > CAP_BYTES and op.name in CAPPED for op in variants.trace.ops
    ):
        capped = variants.changed(cap_bytes=CAP_BYTES)
        if capped.trace.peak_bytes < variants.trace.peak_bytes:
            return capped
    raise StateError(
        "at the peak no convolution or pooling is known to need more than 16 MiB inside"
    )
