"""The state that a function of Chainer keeps on itself: the arrays among its attributes."""

from __future__ import annotations

from collections.abc import Iterable
from gc import get_referents
from typing import Any

import chainer
import numpy as np

from umem.chainer.function_facts import is_array

_PLAIN = frozenset((
    int, float, bool, str, type(None), type, *(type(np.dtype(code)) for code in np.typecodes["All"])
))  # fmt: skip
"""Classes whose instances hold no arrays."""
_PLAIN_OR_TUPLE = _PLAIN | {tuple}
NODE_ATTRIBUTES = frozenset((
    "inputs", "outputs", "rank", "stack", "lazy_grad_sum", "_input_layouts", "_output_layouts",
    "_input_indexes_to_retain", "_output_indexes_to_retain", "_output_count",
    "_retained_output_data", "_use_cudnn", "_local_function_hooks", "_n_local_function_hooks",
))  # fmt: skip
"""Attributes that function nodes have anyway, Chainer's private ones too: graph, layouts, retained
arrays, which are inputs and outputs and followed as those."""


def values_on(func: Any) -> list[Any]:
    """Return the values of a function's attributes, perhaps with its class.

    To ask for ``__dict__`` makes a dictionary of what Python up to 3.12 keeps without one, and
    Chainer's own use of the function slower from then on: about a microsecond an operation.
    """
    values = get_referents(func)
    if dict in map(type, values):  # it has a dictionary already
        values = list(func.__dict__.values())
    return values


def holds_nothing(func: Any) -> bool:
    """Tell cheaply that a function certainly holds no arrays in attributes of its own.

    It is where all that is on it is plain, but for the tuples that `FunctionNode.apply` makes: two
    of layouts, two of a graph, and what was retained, of which indexes may be None.
    """
    kinds = [*map(type, get_referents(func))]
    # Chainer's privates, read because each may be one more tuple; there is no public way to ask.
    tuple_count = 2 if func.inputs is None else 4
    if func._input_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._output_indexes_to_retain.__class__ is tuple:
        tuple_count += 1
    if func._retained_output_data is not None:
        tuple_count += 1
    return kinds.count(tuple) == tuple_count and _PLAIN_OR_TUPLE.issuperset(kinds)


def arrays_on(func: Any) -> list[tuple[str, Any]]:
    """Return the arrays that a function holds as attributes; sparse matrices are taken apart."""
    found: list[tuple[str, Any]] = []
    for key, value in func.__dict__.items():
        if key not in NODE_ATTRIBUTES and value.__class__ not in _PLAIN:
            find_arrays(key, value, found)
    return found


def arrays_in(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the arrays in named values."""
    found: list[tuple[str, Any]] = []
    for key, value in items:
        find_arrays(key, value, found)
    return found


def find_arrays(key: str, value: Any, found: list[tuple[str, Any]]) -> None:
    """Append the arrays in a value to a list, each with its path."""
    if is_array(value):
        found.append((key, value))
    elif isinstance(value, (list, tuple)):
        found += [(key, item) for item in value if item.__class__ not in _PLAIN and is_array(item)]
    elif hasattr(value, "indptr") and hasattr(value, "indices"):
        parts = ("data", "indices", "indptr")
        found += [(f"{key}.{part}", getattr(value, part)) for part in parts]
    elif isinstance(value, chainer.Function):  # an old-style function behind its adapter
        found += arrays_on(value)
    elif isinstance(value, chainer.FunctionNode):  # max pooling, whose gradient reads its indexes
        held = value.__dict__.items()
        found += [
            (name, item) for name, item in held if name not in NODE_ATTRIBUTES and is_array(item)
        ]
