"""An analysis, and a comparison of two, as plain values, for ``--json`` and for pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umem._common.as_json import named, plain
from umem.trace.analysis import (
    Analysis,
    Comparison,
    Leak,
    RankedTraces,
    Tensor,
    Vram,
    thinned,
    vram_share,
)

TENSORS = 100
"""At most this many tensors alive at the peak are listed."""
POINTS = 1000
"""The timeline has at most this many points, each the maximum of its stretch."""


def summary(analysis: Analysis, name: str, vram: Vram | None = None) -> dict[str, Any]:
    """Return a trace's figures; events count from 0, steps from 1 as in the recorded run.

    Args:
        name: the trace's name.
        vram: the VRAM to compare with the peak.
    """
    trace = analysis.trace
    content = {
        "trace": name,
        **named(trace, ("backend", "meta")),
        "event_count": len(trace),
        **named(analysis, ("op_count", "step_count", "first_step")),
        "tensor_count": len(analysis.reading.tensors),
        "host_seconds": analysis.seconds,
        "host_seconds_per_step": analysis.seconds_per_step,
        "vram": None if vram is None else _vram(vram, analysis.peak.total_bytes / vram.nbytes),
        "caveat": analysis.caveat,
        "cap_advice": analysis.cap_advice,
        "unmeasured_op_count": trace.unmeasured_count,
        "peak": _peak(analysis),
        "operations": analysis.ops_by_seconds(),
        "no_outliving": None if analysis.leaks else analysis.no_leaks,
        "outliving": [_leak(leak, analysis.first_step) for leak in analysis.leaks],
    }
    return {key: plain(value) for key, value in content.items()}


def step_json(analysis: Analysis, name: str, vram: Vram | None = None) -> dict[str, Any]:
    """Return the summary, the largest tensors of the peak, and the timeline."""
    content = summary(analysis, name, vram)
    largest = analysis.peak.tensors[:TENSORS]
    content["peak"]["tensors"] = [_tensor(analysis, tensor) for tensor in largest]
    total = analysis.reading.total
    content["timeline"] = [
        {"event": int(place), "live_bytes": int(total[place])} for place in thinned(total, POINTS)
    ]
    return content


def comparison_json(
    comparison: Comparison, before: str, after: str, vram: Vram | None = None
) -> dict[str, Any]:
    """Return every figure of both traces with its change; null for a missing figure.

    Args:
        before, after: names of the traces.
        vram: the VRAM to compare with both peaks.
    """
    content: Mapping[str, Any] = {
        "before": before,
        "after": after,
        **named(comparison, ("per_step", "common_share")),
        "caveats": dict(zip(("before", "after"), comparison.caveats, strict=True)),
        "vram": None if vram is None else _vram(vram, vram_share(comparison, vram)),
        **named(comparison, ("peak_bytes", "idle_bytes", "outliving_bytes")),
        "host_seconds": comparison.seconds,
        "op_count": comparison.op_count,
        "by_kind": {kind.name: kind for kind in comparison.kinds},
        "operations": comparison.ops,
    }
    return {key: plain(value) for key, value in content.items()}


def ranks_json(found: RankedTraces, vram: Vram | None = None) -> dict[str, Any]:
    """Return the figures of each rank.

    Args:
        found: the ranks.
        vram: the VRAM to compare with the largest peak.
    """
    compared = None if vram is None else _vram(vram, found.largest.peak_bytes / vram.nbytes)
    return {**found.to_json(), "vram": compared}


def _vram(vram: Vram, peak_share: object) -> dict[str, Any]:
    return {"gpu": vram.gpu, "vram_bytes": vram.nbytes, "peak_share": peak_share}


def _leak(leak: Leak, first_step: int) -> dict[str, Any]:
    return {**plain(leak), "steps": [first_step + step for step in leak.steps]}


def _peak(analysis: Analysis) -> dict[str, Any]:
    """Return the peak's figures."""
    peak = analysis.peak
    return {
        "peak_bytes": peak.total_bytes,
        "event": peak.event,
        "step": analysis.first_step + peak.step,
        "op": None if peak.op is None else peak.op.name,
        "phase": None if peak.op is None else peak.op.phase,
        "host_seconds_before": peak.seconds,
        **named(peak, ("workspace_bytes", "idle_bytes", "by_kind")),
        "tensor_count": len(peak.tensors),
    }


def _tensor(analysis: Analysis, tensor: Tensor) -> dict[str, Any]:
    maker = None if tensor.maker is None else analysis.reading.op(tensor.maker)
    return {
        **named(tensor, ("label", "nbytes", "kind")),
        "op": None if maker is None else maker.name,
        "phase": None if maker is None else maker.phase,
        "step": analysis.first_step + tensor.step,
        **named(tensor, ("birth", "death", "last_use", "stack")),
    }
