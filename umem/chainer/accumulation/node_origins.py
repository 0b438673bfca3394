"""The origins of a tape's node: parameters, other arrays, and the functions between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chainer.functions.array import broadcast, concat, get_item, stack, transpose
from chainer.functions.math import basic_math

_ELEMENTWISE = (basic_math.Add, basic_math.Sub, basic_math.Mul, basic_math.Div)


def is_of_parameters(node: Any, own: frozenset[int]) -> bool:
    """Tell whether a node depends on parameters only, and on whole ones.

    Rows may be those of the samples.

    Args:
        own: ids of the parameters.
    """
    if any(id(leaf.get_variable_or_none()) not in own for leaf in leaves(node)):
        return False
    return all(type(func) is not get_item.GetItem for func in _functions(node))


def shapes_beside(node: Any, own: frozenset[int]) -> list[tuple[int, ...]]:
    """Return the shapes of a node's leaves that are no parameters."""
    return [leaf.shape for leaf in leaves(node) if id(leaf.get_variable_or_none()) not in own]


def is_of_single_rows(node: Any) -> bool:
    """Tell whether an index or slice of single rows leads to a node.

    A loop over them may be one over samples.
    """
    return any(
        type(func) is get_item.GetItem
        and func.slices
        and isinstance(func.slices[0], (int, slice))
        and func.slices[0] != slice(None)
        for func in _functions(node)
    )


def is_beside_parameters(node: Any, own: frozenset[int]) -> bool:
    """Tell whether a node combines parameters and other arrays element by element.

    Such arrays may be the same for all samples, as in ``F.sum((W - start) ** 2)``.
    """
    found = False
    for func in _functions(node):
        for at, x in enumerate(func.inputs):
            if x.creator_node is None and id(x.get_variable_or_none()) not in own:
                others = [other for i, other in enumerate(func.inputs) if i != at]
                if type(func) not in _ELEMENTWISE or not all(
                    other.shape == x.shape and _is_unbroadcast(other, own) for other in others
                ):
                    return False
                found = True
    return found


def _is_unbroadcast(node: Any, own: frozenset[int]) -> bool:
    kinds = map(type, _functions(node))
    return is_of_parameters(node, own) and broadcast.BroadcastTo not in kinds


def leaves(node: Any) -> Iterator[Any]:
    """Return the nodes without creator that a node depends on."""
    if node.creator_node is None:
        yield node
    for func in _functions(node):
        yield from (x for x in func.inputs if x.creator_node is None)


def _functions(node: Any) -> Iterator[Any]:
    todo, seen = [node], set()
    while todo:
        func = todo.pop().creator_node
        if func is not None and func not in seen:
            seen.add(func)
            yield func
            todo += func.inputs


def is_put_together(node: Any) -> bool:
    """Tell whether stacking or transposing leads to a node, so that its axes may be any."""
    kinds = (stack.Stack, concat.Concat, transpose.Transpose)
    return any(isinstance(func, kinds) for func in _functions(node))
