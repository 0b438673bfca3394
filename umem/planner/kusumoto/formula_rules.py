"""A step by the rules of Kusumoto et al.: the bytes that count, and the reads of backward."""

from __future__ import annotations

from dataclasses import replace

from umem.planner.graph import Graph, Numbered


def bare(graph: Graph) -> Graph:
    """Return a graph with the bytes that the formula counts: values and their gradients."""
    nodes = [
        replace(node, stash_bytes=0, workspace_bytes=0, backward_workspace_bytes=0, stays_bytes=0)
        for node in graph.nodes
    ]
    return Graph(nodes, graph.edges)


def read_by(g: Numbered, v: int) -> list[int]:
    """Return the values that a node's backward reads: the inputs of all of its users.

    The gradient of its output is computed from its users' gradients.
    """
    return sorted({x for w in g.succs[v] for x in g.preds[w]})
