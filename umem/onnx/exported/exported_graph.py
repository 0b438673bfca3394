"""The graph to plan of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from umem.onnx.exported.exported_step import onnx_step
from umem.planner import Graph
from umem.planner.from_trace import Cost


def graph_of(
    path: str | PathLike[str], sizes: Mapping[str, int] | None = None, cost: Cost = "flops"
) -> Graph:
    """Return the graph of a model's forward pass, for `umem.planner.plan`.

    Args:
        path, sizes: see `onnx_step`.
        cost: see `umem.planner.from_trace`; no time was measured.

    Raises:
        OnnxError, MissingDependencyError: see `onnx_step`. GraphError: ``cost`` is unknown.
    """
    return Graph.from_trace(onnx_step(path, sizes, "none").trace, cost)
