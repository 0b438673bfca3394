"""The peak that a step would have if convolutions and poolings worked under a cap.

On NumPy, and on CuPy without cuDNN, Chainer's convolutions make the columns of a whole batch at
once; `umem.chainer.workspace` has them go part by part, and on NumPy batch normalisation and
updates as well. No operation runs here: what one needs only while it runs is taken to be the cap
where it was more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from umem.trace.analysis.updating import chunked_update
from umem.trace.events import Alloc, Event, Op
from umem.trace.trace import Trace
from umem.trace.walk import allocations, used_bytes
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
CAPS = (64 * MIB, 16 * MIB, 4 * MIB, MIB)
"""Caps that are proposed, the fastest first."""
NEARLY = 1.05
"""A larger cap is preferred if its peak is at most this many times the smaller one's."""
WORTHWHILE = 0.95
"""A cap is mentioned only if it leaves at most this share of the peak."""


def under_cap(trace: Trace, cap_bytes: int) -> Trace:
    """Return the step's trace under a cap; unknown workspace stays unknown."""
    allocs = allocations(trace.events)
    return trace.with_events([_capped(event, cap_bytes, allocs) for event in trace.events])


def _capped(event: Event, cap_bytes: int, allocs: Mapping[int, Alloc]) -> Event:
    if not isinstance(event, Op) or not event.workspace_bytes:
        return event
    if event.phase == "update":
        return event._replace(workspace_bytes=chunked_update(event, allocs))
    if event.name in CAPPED and event.workspace_bytes > cap_bytes:
        return event._replace(workspace_bytes=cap_bytes)
    return event


def cap_advice(trace: Trace) -> str | None:
    """Return a sentence such as ``60% of the peak is workspace of convolutions: ...``.

    None where a cap would not change the peak by much. Cost: some passes over the events.
    """
    events = trace.events
    used = list(used_bytes(events))
    peak = max(used, default=0)
    op = events[used.index(peak)] if used else None
    if not isinstance(op, Op) or not op.workspace_bytes:
        return None
    if op.name not in CAPPED and op.phase != "update":
        return None
    peaks = [under_cap(trace, cap).peak_bytes for cap in CAPS]
    columns_bytes = 0 if op.kernels is None else op.kernels.piece_bytes
    return advice(op.name, op.workspace_bytes, peak, peaks, columns_bytes)


def advice(
    name: str, workspace_bytes: int, peak_bytes: int, peaks: Sequence[int], columns_bytes: int = 0
) -> str | None:
    """Choose the cap to propose.

    Args:
        name: of the function, or the update, whose workspace is a part of the peak.
        peaks: the peak under each of `CAPS`.
        columns_bytes: of a convolution, what im2col makes; 0 where that is not known.
    """
    left, cap = next(
        (left, cap) for left, cap in zip(peaks, CAPS, strict=True) if left <= NEARLY * peaks[-1]
    )
    if left > WORTHWHILE * peak_bytes:
        return None
    whose = next((said for names, said in WHOSE if name in names), "the optimizer's update")
    if name in CONVOLUTIONS:
        columns = f"columns of {format_bytes(columns_bytes)}" if columns_bytes else "columns"
        whose = f"{whose} ({columns} by im2col in {name!r})"
    size = format_bytes(cap).replace(".0 ", "")
    return (
        f"{workspace_bytes / peak_bytes:.0%} of the peak is workspace of {whose}: "
        f"umem.chainer.workspace('{size}') would leave {left / peak_bytes:.0%}."
    )
