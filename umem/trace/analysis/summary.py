"""An analysis as plain values: what --json prints and the page carries."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from umem.trace.analysis.analysis import Analysis, Vram
from umem.trace.analysis.leaks import Leak


def summary(analysis: Analysis, name: str, vram: Vram | None = None) -> dict[str, Any]:
    """The figures of a trace; events are counted from 0, steps from 1 as in the run recorded.

    Args:
        name: what the trace is called.
        vram: what to compare the peak with.
    """
    return {
        "trace": name,
        "backend": analysis.trace.backend,
        "meta": dict(analysis.trace.meta),
        "sizes": list(analysis.trace.sizes),
        "event_count": len(analysis.trace),
        "op_count": analysis.op_count,
        "step_count": analysis.step_count,
        "first_step": analysis.first_step,
        "tensor_count": len(analysis.reading.tensors),
        "host_seconds": analysis.seconds,
        "host_seconds_per_step": analysis.seconds_per_step,
        "vram": None if vram is None else _vram(vram, analysis),
        "caveat": analysis.caveat,
        "unmeasured_op_count": analysis.trace.unmeasured_count,
        "peak": _peak(analysis),
        "operations": [asdict(op) for op in analysis.ops_by_seconds()],
        "no_outliving": None if analysis.leaks else analysis.no_leaks,
        "outliving": [_leak(leak, analysis.first_step) for leak in analysis.leaks],
    }


def _vram(vram: Vram, analysis: Analysis) -> dict[str, Any]:
    share = analysis.peak.total_bytes / vram.nbytes
    return {"gpu": vram.gpu, "vram_bytes": vram.nbytes, "peak_share": share}


def _leak(leak: Leak, first_step: int) -> dict[str, Any]:
    steps = [first_step + step for step in leak.steps]
    return {**asdict(leak), "stack": list(leak.stack), "steps": steps}


def _peak(analysis: Analysis) -> dict[str, Any]:
    peak = analysis.peak
    return {
        "peak_bytes": peak.total_bytes,
        "event": peak.event,
        "step": analysis.first_step + peak.step,
        "op": None if peak.op is None else peak.op.name,
        "phase": None if peak.op is None else peak.op.phase,
        "host_seconds_before": peak.seconds,
        "workspace_bytes": peak.workspace_bytes,
        "idle_bytes": peak.idle_bytes,
        "by_kind": [asdict(kind) for kind in peak.by_kind],
        "tensor_count": len(peak.tensors),
    }
