"""Workspace in a step's peak that `umem.chainer.workspace` caps.

On NumPy, and on CuPy without cuDNN, Chainer's convolutions make the columns of a whole batch at
once; under a cap they work in parts, and on NumPy so do batch normalisation and updates. To measure
a capped peak, run the step under the cap, as `umem.choose` does.
"""

from __future__ import annotations

from umem.trace.events import Op
from umem.trace.trace import Trace
from umem.trace.walk import used_bytes
from umem.units import MIB, format_bytes

CONVOLUTIONS = frozenset((
    "Convolution2DFunction", "Convolution2DGradW", "ConvolutionND", "ConvolutionNDGradW",
    "Deconvolution2DFunction", "DeconvolutionND",
))  # fmt: skip
POOLINGS = frozenset((
    "AveragePooling2D", "AveragePooling2DGrad", "AveragePoolingND", "AveragePoolingNDGrad",
    "MaxPoolingND", "MaxPoolingNDGrad", "MaxPoolingNDWithIndexes",
))  # fmt: skip
NORMALIZATIONS = frozenset(("BatchNormalization", "BatchNormalizationGrad"))
CAPPED = CONVOLUTIONS | POOLINGS | NORMALIZATIONS
"""Chainer's functions that a cap affects; normalisations on NumPy only."""
WHOSE = ((CONVOLUTIONS, "convolutions"), (POOLINGS, "poolings"), (NORMALIZATIONS, "normalisations"))
WORTHWHILE = 0.05
"""A cap is mentioned only if at least this share of the peak is workspace. A choice: no measurement
supports it."""


def cap_advice(trace: Trace) -> str | None:
    """Return a sentence such as ``60% of the peak is workspace of convolutions: ...``.

    None if a cap does not affect the operation at the peak. Cost: a pass over the events.
    """
    events = trace.events
    used = list(used_bytes(events))
    peak = max(used, default=0)
    op = events[used.index(peak)] if used else None
    if not isinstance(op, Op) or (op.name not in CAPPED and op.phase != "update"):
        return None
    columns_bytes = 0 if op.kernels is None else op.kernels.piece_bytes
    return advice(op.name, op.workspace_bytes or 0, peak, columns_bytes)


def advice(name: str, workspace_bytes: int, peak_bytes: int, columns_bytes: int = 0) -> str | None:
    """Name the cap for the workspace of a function, or of an update, at the peak.

    None for 1 MiB and less, and for less than `WORTHWHILE` of the peak.

    Args:
        name: the function, or the update's rule.
        workspace_bytes: the workspace at the peak.
        peak_bytes: the peak.
        columns_bytes: the bytes of a convolution's columns (im2col); 0 if unknown.
    """
    if workspace_bytes <= max(MIB, WORTHWHILE * peak_bytes):
        return None
    owner = next((owner for names, owner in WHOSE if name in names), "the optimizer's update")
    if name in CONVOLUTIONS:
        columns = f"columns of {format_bytes(columns_bytes)}" if columns_bytes else "columns"
        owner = f"{owner} ({columns} by im2col in {name!r})"
    share = workspace_bytes / peak_bytes
    return f"{share:.0%} of the peak is workspace of {owner}: umem.chainer.workspace caps it."
