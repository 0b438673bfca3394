"""Weights that nodes make: finds a graph's trained tensors, and its statistics.

Some exporters write weights as Constant nodes, some as a number that a node repeats. Both look like
the constants of a formula; the products decide. If most products take their weights from such
nodes, all floating-point arrays that nodes make without inputs are parameters. Statistics of batch
normalisation that are computed from the file alone, for example by a cast, are state; the nodes
that make them run once, before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from umem.onnx.exported.onnx_graph import OnnxGraph, OnnxNode
from umem.onnx.exported.operators import OPERATORS

REPEATING = "ConstantOfShape"
"""The operator that fills an array with one number."""


def with_made_weights(graph: OnnxGraph) -> OnnxGraph:
    """Return the graph with computed weights as parameters, and computed statistics as inputs."""
    # For each tensor that depends on the file alone: does it come from a trained initialiser?
    has_weight = {name: name in graph.parameters for name in graph.constants}
    made = graph.constants - graph.parameters  # of nothing
    makers: dict[str, OnnxNode] = {}
    for node in graph.nodes:
        ins = [name for name in node.inputs if name]
        if ins and all(name in has_weight for name in ins):  # drawn from nothing is another matter
            has_weight.update(dict.fromkeys(node.outputs, any(has_weight[name] for name in ins)))
            if len(node.outputs) == 1:
                makers[node.outputs[0]] = node
            if node.op == REPEATING:
                made |= {node.outputs[0]}
    statistics = statistics_of(graph)
    given = statistics & makers.keys()
    trained: set[str] = set()
    if _are_weights(graph, has_weight):
        kinds = {name: graph.tensors[name] for name in made - statistics}
        trained = {n for n, kind in kinds.items() if kind.is_float and kind.shape and kind.size > 1}
        given |= trained & makers.keys()
    if not given and not trained:
        return graph
    cut = [makers[name] for name in given]
    used = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        is_given = all(name in has_weight for name in node.outputs)
        if node not in cut and not (is_given and used.isdisjoint(node.outputs)):
            kept.append(node)
            used.update(node.inputs)
    return replace(
        graph,
        nodes=tuple(reversed(kept)),
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


def _are_weights(graph: OnnxGraph, has_weight: Mapping[str, bool]) -> bool:
    """Tell whether most products have weights that nodes compute from nothing."""
    found = [has_weight[name] for name in _product_weights(graph) if name in has_weight]
    return 2 * found.count(False) > len(found)


def _product_weights(graph: OnnxGraph) -> Iterator[str]:
    for node in graph.nodes:
        if OPERATORS[node.op].products and len(node.inputs) > 1:
            yield node.inputs[1]
