"""An analysis as plain values for a JSON file."""

from __future__ import annotations

from typing import Any

from umem.analysis.analysing import Analysis, Vram
from umem.analysis.bands import thinned
from umem.analysis.summarising import summary
from umem.analysis.tensors import Tensor

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
