"""A comparison of two traces as plain values for a JSON file."""

from __future__ import annotations

from typing import Any

from umem.analysis.analysing import Vram
from umem.analysis.differences import Comparison, Difference, OpDifference, vram_share


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
