"""Weights that nodes make: which of a graph's tensors are trained, and which are statistics.

Some exporters write weights as Constant nodes, some as numbers that a node repeats. Both look like
the constants of a formula. The products tell: where most of them take their weights from such
nodes, the model has its weights there, and all floating-point arrays that nodes make of nothing are
parameters. Statistics of batch normalisation that are computed from what the file gives, as by a
cast, are state whose makers run once, before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.onnx.exported.operators import OPERATORS

REPEATING = "ConstantOfShape"
"""The operator that fills an array with one number."""


@dataclass(frozen=True)
class _Origins:
    """Sources of tensors that depend on the file alone.

    Attributes:
        weighty: for each such tensor, whether a floating-point initialiser is behind it.
        made: floating-point arrays that nodes make of nothing, by name, and their place if the node
            is one of the graph's.
    """

    weighty: dict[str, bool]
    made: dict[str, int | None]


def with_made_weights(graph: OnnxGraph) -> OnnxGraph:
    """Return the graph with computed weights as parameters, and computed statistics as inputs."""
    origins = _origins(graph)
    statistics = statistics_of(graph)
    makers = {
        name: place
        for place, node in enumerate(graph.nodes)
        for name in node.outputs
        if len(node.outputs) == 1
    }
    given = {name for name in statistics if name in origins.weighty and name in makers}
    trained: set[str] = set()
    if _are_weights(graph, origins):
        trained = origins.made.keys() - statistics
        given |= {name for name in trained if origins.made[name] is not None}
    if not given and not trained:
        return graph
    kept = _needed(graph, {makers[name] for name in given}, origins)
    return replace(
        graph,
        nodes=tuple(graph.nodes[place] for place in kept),
        parameters=graph.parameters | trained,
        constants=graph.constants | given,
    )


def statistics_of(graph: OnnxGraph) -> set[str]:
    """Return the names of normalisations' running statistics."""
    return {
        node.inputs[place]
        for node in graph.nodes
        for place in OPERATORS[node.op].statistics
        if place < len(node.inputs)
    }


def _origins(graph: OnnxGraph) -> _Origins:
    """Find the tensors that depend on the file alone."""
    weighty = {name: name in graph.parameters for name in graph.constants}
    made: dict[str, int | None] = {}

    def note(name: str, place: int | None) -> None:
        kind = graph.tensors[name]
        if kind.is_float and kind.shape and kind.size > 1:
            made[name] = place

    for name in graph.constants - graph.parameters:
        note(name, None)
    for place, node in enumerate(graph.nodes):
        ins = [name for name in node.inputs if name]
        if not ins or not all(name in weighty for name in ins):
            continue  # such as what is drawn, or depends on an input
        weighty.update(dict.fromkeys(node.outputs, any(weighty[name] for name in ins)))
        if node.op == REPEATING:
            note(node.outputs[0], place)
    return _Origins(weighty, made)


def _are_weights(graph: OnnxGraph, origins: _Origins) -> bool:
    """Tell whether most products have weights that nodes compute from nothing."""
    weights = list(_product_weights(graph))
    made = [name for name in weights if origins.weighty.get(name) is False]
    return 2 * len(made) > sum(name in origins.weighty for name in weights)


def _product_weights(graph: OnnxGraph) -> Iterator[str]:
    for node in graph.nodes:
        if OPERATORS[node.op].products and len(node.inputs) > 1:
            yield node.inputs[1]


def _needed(graph: OnnxGraph, cut: set[int], origins: _Origins) -> list[int]:
    """Return the nodes that still run without the ``cut`` ones and those only they used."""
    used = set(graph.outputs)
    kept = []
    for place in reversed(range(len(graph.nodes))):
        node: OnnxNode = graph.nodes[place]
        is_given = all(name in origins.weighty for name in node.outputs)
        if place in cut or (is_given and not used.intersection(node.outputs)):
            continue
        kept.append(place)
        used.update(node.inputs)
    return kept[::-1]
