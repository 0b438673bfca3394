"""An analysis as plain values for a JSON file."""

from __future__ import annotations

from typing import Any

from umem.trace.analysis.analysis import Analysis, Vram
from umem.trace.analysis.bands import thinned
from umem.trace.analysis.differences import Comparison, Difference, OpDifference, vram_share
from umem.trace.analysis.summary import summary
from umem.trace.analysis.tensors import Tensor

TENSORS = 100
"""How many of the tensors alive at the peak are listed."""
POINTS = 1000
"""How many points the timeline has at most; each is the highest of its stretch."""


def step_json(analysis: Analysis, name: str, vram: Vram | None = None) -> dict[str, Any]:
    """The summary, the largest tensors of the peak, and the timeline."""
    content = summary(analysis, name, vram)
    largest = analysis.peak.tensors[:TENSORS]
    content["peak"]["tensors"] = [_tensor(analysis, tensor) for tensor in largest]
    content["timeline"] = _timeline(analysis)
    return content


def _tensor(analysis: Analysis, tensor: Tensor) -> dict[str, Any]:
    maker = None if tensor.maker is None else analysis.reading.op(tensor.maker)
    return {
        "label": tensor.label,
        "nbytes": tensor.nbytes,
        "kind": tensor.kind,
        "op": None if maker is None else maker.name,
        "phase": None if maker is None else maker.phase,
        "step": analysis.first_step + tensor.step,
        "birth": tensor.birth,
        "death": tensor.death,
        "last_use": tensor.last_use,
        "stack": list(tensor.stack),
    }


def _timeline(analysis: Analysis) -> list[dict[str, int]]:
    total = analysis.reading.total
    places = [int(place) for place in thinned(total, POINTS)]
    return [{"event": place, "live_bytes": int(total[place])} for place in places]


def comparison_json(
    comparison: Comparison, before: str, after: str, vram: Vram | None = None
) -> dict[str, Any]:
    """Every figure of both traces with its change; null where one has none.

    Args:
        before, after: what the traces are called.
        vram: what to compare both peaks with.
    """
    return {
        "before": before,
        "after": after,
        "per_step": comparison.per_step,
        "common_share": comparison.common_share,
        "caveats": dict(zip(("before", "after"), comparison.caveats, strict=True)),
        "vram": None if vram is None else _vram(vram, comparison),
        "peak_bytes": _difference(comparison.peak_bytes),
        "idle_bytes": _difference(comparison.idle_bytes),
        "outliving_bytes": _difference(comparison.outliving_bytes),
        "host_seconds": _difference(comparison.seconds),
        "op_count": _difference(comparison.op_count),
        "by_kind": {kind.name: _difference(kind) for kind in comparison.kinds},
        "operations": [_op(op) for op in comparison.ops],
    }


def _vram(vram: Vram, comparison: Comparison) -> dict[str, Any]:
    share = _difference(vram_share(comparison, vram))
    return {"gpu": vram.gpu, "vram_bytes": vram.nbytes, "peak_share": share}


def _difference(difference: Difference) -> dict[str, float | None]:
    return {"before": difference.before, "after": difference.after, "change": difference.change}


def _op(op: OpDifference) -> dict[str, Any]:
    return {
        "name": op.name,
        "phase": op.phase,
        "count": _difference(op.count),
        "seconds": _difference(op.seconds),
        "allocated_bytes": _difference(op.allocated_bytes),
    }
