"""Find Chainer graphs that a program's variables hold and that extend through repeated calls.

A snapshot of memory cannot tell whether a graph grows for ever, or belongs to one long step. It can
tell that one graph has many calls of a function with the same parameters and shapes, like a
recurrent network that is never cut.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

LEAST_CALLS = 4
"""Least number of calls of one function with the same parameters and shapes for a graph to be
reported. A guess that no measurement supports: fewer are common in one step, such as the sides of a
siamese network."""
MOST_OBJECTS = 100_000
"""Most objects to search for Chainer variables, so that the search ends soon. A choice that no
measurement supports."""


class HeldGraph(NamedTuple):
    """A Chainer graph that extends back through repeated calls.

    Attributes:
        nbytes, array_count: bytes and number of the arrays that its functions keep, without
            parameters.
        names: names of the Chainer variables that hold it, as the program writes them.
        where: the scope of these names.
        label, call_count: the function that was called most often with the same parameters and
            shapes, and how often.
        stateful: the names of the links that hold it and have ``reset_state``.
    """

    nbytes: int
    array_count: int
    names: tuple[str, ...]
    where: str
    label: str
    call_count: int
    stateful: tuple[str, ...]

    def __str__(self) -> str:
        """Format the graph in a sentence."""
        names = self.names if len(self.names) <= 2 else (self.names[0], "others")
        return (
            f"the graph behind {' and '.join(names)}, {self.where}: {self.label} was called "
            f"{self.call_count} times in it with the same parameters and shapes"
        )


class _Holder(NamedTuple):
    """A Chainer variable, its name, and the name of the link with ``reset_state`` that holds it."""

    variable: Any
    name: str
    link: str | None


def held_graphs(scopes: Iterable[tuple[Mapping[str, Any], str]]) -> list[HeldGraph]:
    """Return the graphs with repeated calls that variables hold, largest first.

    Args:
        scopes: variables by name, and a text that tells where they are; a graph counts for the
            first scope that holds it.
    """
    chainer = sys.modules.get("chainer")  # without it there are no graphs; umem need not load it
    if chainer is None or not hasattr(chainer, "Variable"):
        return []
    seen: set[int] = set()
    graphs: list[_GraphBehind] = []
    for variables, where in scopes:
        for name, value in variables.items():
            found = [one for one in _variables_in(name, value, seen, chainer) if _maker(one)]
            if found:
                _add(found, where, graphs)
    repeated = [graph.held() for graph in graphs if graph.call_count >= LEAST_CALLS]
    return sorted(repeated, key=lambda graph: -graph.nbytes)


def _variables_in(name: str, value: Any, seen: set[int], chainer: Any) -> Iterator[_Holder]:
    """Yield the Chainer variables in a value, by containers and attributes.

    Runs no code of the objects: attributes are read from ``__dict__`` directly.
    """
    queue: deque[tuple[str, Any, str | None]] = deque([(name, value, None)])
    while queue and len(seen) < MOST_OBJECTS:
        path, one, link = queue.popleft()
        kind = type(one)
        if id(one) in seen or issubclass(kind, (type, type(sys), str, bytes, int, float)):
            continue
        seen.add(id(one))
        if issubclass(kind, chainer.Variable):
            yield _Holder(one, path, link)
        elif issubclass(kind, dict):
            queue.extend((f"{path}[{key!r}]", each, link) for key, each in _items(one))
        elif issubclass(kind, (list, tuple)):
            each_of = enumerate((list if issubclass(kind, list) else tuple).__iter__(one))
            queue.extend((f"{path}[{place}]", each, link) for place, each in each_of)
        else:
            link = path if hasattr(kind, "reset_state") else link
            with suppress(AttributeError, TypeError):
                attributes = _items(object.__getattribute__(one, "__dict__"))
                queue.extend(
                    # The list of a ChainList's links, which the program indexes directly.
                    (path if key == "_children" else f"{path}.{key}", each, link)
                    for key, each in attributes
                )


def _items(mapping: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return ((key, each) for key, each in dict.items(mapping) if type(key) in (str, int))


def _maker(found: _Holder) -> Any:
    """Return the function that made a variable; None for a leaf, and for an array of ChainerX."""
    with suppress(RuntimeError):
        return found.variable.creator_node


class _GraphBehind:
    """A graph so far: its functions, their calls by parameter and shapes, and their arrays."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[_Holder] = []
        self.functions: set[Any] = set()
        self.calls: Counter[tuple[Any, ...]] = Counter()
        self.arrays: dict[int, int] = {}

    @property
    def call_count(self) -> int:
        """Return the most calls of one function with the same parameter and shapes."""
        return max(self.calls.values(), default=0)

    def add_function(self, func: Any) -> None:
        self.functions.add(func)
        shapes = tuple(reference() and reference().shape for reference in func.outputs)
        leaves = [node for node in func.inputs if node.creator_node is None]
        self.calls.update((func.label, id(node), shapes) for node in leaves)
        kept = (node.data for node in func.inputs if node.creator_node is not None)
        self.add_arrays((*kept, *_arrays_of(func)))

    def add_arrays(self, arrays: Iterable[Any]) -> None:
        for array in arrays:
            with suppress(AttributeError):  # None, or an array of the host
                self.arrays[array.data.mem.ptr] = array.data.mem.size

    def absorb(self, other: _GraphBehind) -> None:
        self.found += other.found
        self.functions |= other.functions
        self.calls += other.calls
        self.arrays |= other.arrays

    def held(self) -> HeldGraph:
        """Return the graph as a `HeldGraph`."""
        (label, *_), count = self.calls.most_common(1)[0]
        names = tuple(one.name for one in self.found)
        links = tuple(dict.fromkeys(one.link for one in self.found if one.link is not None))
        nbytes = sum(self.arrays.values())
        return HeldGraph(nbytes, len(self.arrays), names, self.where, label, count, links)


def _add(found: list[_Holder], where: str, graphs: list[_GraphBehind]) -> None:
    """Add the graph behind one variable of the program, merged with graphs that share functions.

    Args:
        found: the Chainer variables in it.
        where: its scope.
        graphs: the graphs so far; changed in place.
    """
    graph = _GraphBehind(where)
    pending = [_maker(one) for one in found]
    while pending:
        func = pending.pop()
        if func is None or func.inputs is None or func in graph.functions:
            continue
        shared = next((one for one in graphs if func in one.functions), None)
        if shared is not None:
            graphs.remove(shared)
            shared.absorb(graph)
            graph = shared
        else:
            graph.add_function(func)
            pending += [node.creator_node for node in func.inputs]
    graph.found += found
    graph.add_arrays([one.variable.array for one in found])
    graphs.append(graph)


def _arrays_of(func: Any) -> Iterator[Any]:
    """Yield the arrays in a function's attributes: retained outputs and other arrays it keeps."""
    for value in vars(func).values():
        yield from value if isinstance(value, tuple) else (value,)
