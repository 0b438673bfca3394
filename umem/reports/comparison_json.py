"""A comparison of two traces as plain values for a JSON file."""

from __future__ import annotations

from typing import Any

from umem.analysis.differences import Comparison, Difference, OpDifference


def comparison_json(comparison: Comparison, before: str, after: str) -> dict[str, Any]:
    """Every figure of both traces with its change; null where one has none."""
    return {
        "before": before,
        "after": after,
        "per_step": comparison.per_step,
        "peak_bytes": _difference(comparison.peak_bytes),
        "idle_bytes": _difference(comparison.idle_bytes),
        "outliving_bytes": _difference(comparison.outliving_bytes),
        "host_seconds": _difference(comparison.seconds),
        "op_count": _difference(comparison.op_count),
        "by_kind": {kind.name: _difference(kind) for kind in comparison.kinds},
        "operations": [_op(op) for op in comparison.ops],
    }


def _difference(difference: Difference) -> dict[str, float | None]:
    return {
        "before": difference.before,
        "after": difference.after,
        "change": difference.change,
    }


def _op(op: OpDifference) -> dict[str, Any]:
    return {
        "name": op.name,
        "phase": op.phase,
        "count": _difference(op.count),
        "seconds": _difference(op.seconds),
        "allocated_bytes": _difference(op.allocated_bytes),
    }
