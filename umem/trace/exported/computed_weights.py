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

from umem.trace.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.trace.exported.operators import OPERATORS

REPEATING = "ConstantOfShape"
"""The operator that makes an array of one number."""


@dataclass(frozen=True)
class _Origins:
    """Where what follows from the file alone comes from.

    Attributes:
        weighty: for each such tensor, whether a floating-point initialiser is behind it.
        made: floating-point arrays that nodes make of nothing, by name, and their place if the node
            is one of the graph's.
    """

    weighty: dict[str, bool]
    made: dict[str, int | None]


def with_made_weights(graph: OnnxGraph) -> OnnxGraph:
    """A graph in which made weights are parameters, and made statistics are given."""
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
    """Names of what normalisation reads as running statistics, whoever makes it."""
    return {
        node.inputs[place]
        for node in graph.nodes
        for place in OPERATORS[node.op].statistics
        if place < len(node.inputs)
    }


def _origins(graph: OnnxGraph) -> _Origins:
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
    """Whether most products have weights that nodes make of nothing."""
    weights = list(_product_weights(graph))
    made = [name for name in weights if origins.weighty.get(name) is False]
    return 2 * len(made) > sum(name in origins.weighty for name in weights)


def _product_weights(graph: OnnxGraph) -> Iterator[str]:
    for node in graph.nodes:
        if OPERATORS[node.op].products and len(node.inputs) > 1:
            yield node.inputs[1]


def _needed(graph: OnnxGraph, cut: set[int], origins: _Origins) -> list[int]:
    """Places of nodes that still run: not ``cut``, nor what only they have read."""
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
