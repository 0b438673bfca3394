"""The arrays behind Chainer's graph, as far as anybody holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from chainer import Variable

from umem.chainer.function_facts import owner_of
from umem.chainer.saved.slots import held_array


def leaves_of(inputs: Any) -> tuple[Any, ...]:
    """The arrays among inputs that no function has made; None for the others."""
    found = []
    for x in inputs:
        if not isinstance(x, Variable):
            found.append(x)
        elif x._node._creator_node is None:
            found.append(x._data[0])
        else:
            found.append(None)
    return tuple(found)


def _array_of(node: Any) -> Any:
    """What is behind a node, where anybody holds it."""
    return None if node is None else held_array(node)


def inputs_of(func: Any, leaves: Sequence[Any]) -> list[Any]:
    """The inputs of a function that has run; None for what is gone."""
    return [
        _array_of(node) if leaf is None else leaf
        for node, leaf in zip(func.inputs, leaves, strict=True)
    ]


def outputs_of(func: Any) -> list[Any]:
    """Its outputs; None for what is gone."""
    found = [_array_of(reference()) for reference in func.outputs]
    retained = func._retained_output_data
    if retained:
        for place, array in zip(func._output_indexes_to_retain, retained, strict=True):
            found[place] = array
    return found


def held_by(func: Any, stash: Iterable[str]) -> Iterator[Any]:
    """The arrays that a function's outputs and stash are."""
    for array in outputs_of(func):
        if array is not None:
            yield array
    if stash:
        owner = owner_of(func)
        for name in stash:
            array = getattr(owner, name, None)
            if hasattr(array, "base"):
                yield array


def working_bytes(func: Any, outputs: Iterable[Any]) -> int:
    """What a function works on: its inputs, by their shapes, and its outputs."""
    found = 0
    for node in func.inputs:
        if node.dtype is not None:
            found += prod(node.shape) * np.dtype(node.dtype).itemsize
    for node in outputs:
        if node is not None and node.dtype is not None:
            found += prod(node.shape) * np.dtype(node.dtype).itemsize
    return found


def leaf_nodes(funcs: Iterable[Any]) -> Iterator[Any]:
    """The nodes from outside that get a gradient, each once."""
    seen = set()
    for func in funcs:
        for node in func.inputs or ():
            if node._creator_node is None and node._requires_grad and node not in seen:
                seen.add(node)
                yield node
