"""Small graphs, on which plans are compared with the optimum: some by hand, and random families."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from umem.planner import Graph, Node

MAX_NODES = 24
"""Random graphs have up to so many nodes."""


def small_graphs(quick: bool) -> dict[str, Graph]:
    """Graphs of up to 40 nodes."""
    found = {"chain of 8": chain(8), "random of 8": scattered(8)}
    if not quick:
        found |= {
            "chain of 16": chain(16),
            "random of 12": scattered(12),
            "residual of 18": residual(6),
            "U of 15": u_shape(3),
            "random of 24": scattered(24),
            "chain of 40": chain(40),
            "residual of 39": residual(13),
            "random of 40": scattered(40),
        }
    return found


def chain(count: int) -> Graph:
    names = [f"n{v}" for v in range(count)]
    nodes = [Node(name, 4 + v % 3, 10 if v % 2 else 1) for v, name in enumerate(names)]
    return Graph(nodes, list(pairwise(names)))


def scattered(count: int) -> Graph:
    source = random.Random(count)
    edges = {(v - 1, v) for v in range(1, count)}
    edges |= {(source.randrange(max(0, v - 5), v), v) for v in range(1, count)}
    nodes = [
        Node(f"n{v}", source.randrange(1, 10), source.choice((1, 1, 10))) for v in range(count)
    ]
    return Graph(nodes, [(f"n{x}", f"n{v}") for x, v in sorted(edges)])


def residual(blocks: int) -> Graph:
    """Blocks of a convolution, a sum that nobody saves, and a relu."""
    nodes, edges, last = [], [], None
    for b in range(blocks):
        names = f"conv{b}", f"sum{b}", f"relu{b}"
        nodes += [Node(names[0], 8, 10), Node(names[1], 8, 1, saved=False), Node(names[2], 8, 1)]
        edges += [(names[0], names[1]), (names[1], names[2])]
        edges += [] if last is None else [(last, names[0]), (last, names[1])]
        last = names[2]
    return Graph(nodes, edges)


def u_shape(depth: int) -> Graph:
    """Down and up again, with a skip at each level."""
    down = [(f"down{d}{half}", 16 >> d) for d in range(depth + 1) for half in "ab"]
    up = [(f"{part}{d}", 16 >> d) for d in reversed(range(depth)) for part in ("concat", "up")]
    names = [name for name, _ in (*down, *up)]
    nodes = [Node(name, size, 1 if "concat" in name else 10) for name, size in (*down, *up)]
    edges = list(pairwise(names))
    return Graph(nodes, edges + [(f"down{d}b", f"concat{d}") for d in range(depth)])


# -- random families ---------------------------------------------------------------------------


def random_graphs(count: int) -> Iterator[tuple[str, Graph]]:
    """So many random graphs, of each family in turn, with their names; the same each time."""
    families = list(FAMILIES.items())
    for number in range(count):
        name, make = families[number % len(families)]
        source = random.Random(number)
        graph = _shuffled_sizes(make(source), source)
        for change in source.sample(CHANGES, source.randrange(3)):
            graph = change(graph, source)
        yield f"{name} {number}", graph


def _random_chain(source: random.Random) -> Graph:
    return chain(source.randrange(6, MAX_NODES + 1))


def _random_residual(source: random.Random) -> Graph:
    return residual(source.randrange(2, MAX_NODES // 3 + 1))


def _random_u(source: random.Random) -> Graph:
    return u_shape(source.randrange(1, 6))


def _scattered(width: int) -> Callable[[random.Random], Graph]:
    """Each node reads one or two of the last few, and perhaps nobody reads it."""

    def make(source: random.Random) -> Graph:
        count = source.randrange(6, MAX_NODES + 1)
        edges = {
            (source.randrange(max(0, v - width), v), v)
            for v in range(1, count)
            for _ in range(source.randrange(1, 3))
        }
        nodes = [Node(f"n{v}", 1, 1) for v in range(count)]
        return Graph(nodes, [(f"n{x}", f"n{v}") for x, v in sorted(edges)])

    return make


def _random_tree(source: random.Random) -> Graph:
    """Leaves, and pairs of what is not read yet, up to one root."""
    count = source.randrange(6, MAX_NODES + 1)
    edges: list[tuple[str, str]] = []
    loose: list[str] = []
    for v in range(count):
        if len(loose) > 1 and (source.random() < 0.5 or len(loose) >= count - v):
            edges += [(loose.pop(source.randrange(len(loose))), f"n{v}") for _ in "ab"]
        loose.append(f"n{v}")
    return Graph([Node(f"n{v}", 1, 1) for v in range(count)], edges)


FAMILIES: dict[str, Callable[[random.Random], Graph]] = {
    "chain": _random_chain,
    "residual": _random_residual,
    "U": _random_u,
    "narrow": _scattered(3),
    "wide": _scattered(8),
    "any": _scattered(MAX_NODES),
    "tree": _random_tree,
}


# -- what makes them harder --------------------------------------------------------------------


def _each(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    return Graph([change(node) for node in graph.nodes], graph.edges)


def _shuffled_sizes(graph: Graph, source: random.Random) -> Graph:
    """Some graphs keep their sizes and costs; others get random ones."""
    if source.random() < 0.3 and graph.nodes[0].nbytes > 1:
        return graph
    costs = source.choice(((1,), (1, 1, 10), tuple(range(1, 21))))
    return _each(
        graph, lambda node: replace(node, nbytes=source.randrange(1, 20), cost=source.choice(costs))
    )


def _unsaved(graph: Graph, source: random.Random) -> Graph:
    return _each(graph, lambda node: replace(node, saved=source.random() < 0.6))


def _stashed(graph: Graph, source: random.Random) -> Graph:
    return _each(
        graph,
        lambda node: (
            replace(node, stash_bytes=source.randrange(1, 10))
            if node.alias_of is None and source.random() < 0.4
            else node
        ),
    )


def _workspace(graph: Graph, source: random.Random) -> Graph:
    return _each(
        graph,
        lambda node: replace(
            node,
            workspace_bytes=source.choice((0, source.randrange(20))),
            backward_workspace_bytes=source.choice((0, source.randrange(20))),
        ),
    )


def _stays(graph: Graph, source: random.Random) -> Graph:
    return _each(graph, lambda node: replace(node, stays_bytes=source.choice((0, 1, 3))))


def _pinned(graph: Graph, source: random.Random) -> Graph:
    return _each(graph, lambda node: replace(node, recomputable=source.random() < 0.85))


def _views(graph: Graph, source: random.Random) -> Graph:
    """Some nodes are views of one of their inputs."""
    inputs: dict[str, list[str]] = {}
    for a, b in graph.edges:
        inputs.setdefault(b, []).append(a)
    return _each(
        graph,
        lambda node: (
            replace(node, alias_of=source.choice(inputs[node.name]), stash_bytes=0)
            if node.name in inputs and source.random() < 0.25
            else node
        ),
    )


CHANGES = (_unsaved, _stashed, _workspace, _stays, _pinned, _views)
