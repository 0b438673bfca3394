"""Nested lists, tuples and dicts, taken apart into leaves and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

Shape = Any
"""How leaves are nested; opaque to everybody but this file."""


def flatten(value: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], Shape]:
    """The leaves of ``value`` from left to right, and how they are nested.

    Lists, tuples, named tuples and dicts of every kind are taken apart where they hold something
    that is wanted; all else is a leaf, and stays the object that it is.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves, wanted)


def rebuild(leaves: list[Any], shape: Shape) -> Any:
    """What `flatten` took apart, with these leaves."""
    return _put_together(iter(leaves), shape)


def _take_apart(value: Any, leaves: list[Any], wanted: Callable[[Any], bool]) -> Shape:
    start = len(leaves)
    shape: Shape = None
    if type(value) in (list, tuple):
        shape = type(value), [_take_apart(item, leaves, wanted) for item in value]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        make: Any = type(value)
        shape = make._make, [_take_apart(item, leaves, wanted) for item in value]
    elif isinstance(value, dict):
        empty = copy(value)  # an OrderedDict stays one, a defaultdict keeps its factory
        empty.clear()
        shapes = [_take_apart(item, leaves, wanted) for item in value.values()]
        shape = empty, list(value), shapes
    if shape is not None and any(map(wanted, leaves[start:])):
        return shape
    leaves[start:] = [value]
    return None


def _put_together(leaves: Iterator[Any], shape: Shape) -> Any:
    if shape is None:
        return next(leaves)
    if isinstance(shape[0], dict):
        empty, keys, shapes = shape
        made = copy(empty)
        for key, inner in zip(keys, shapes, strict=True):
            made[key] = _put_together(leaves, inner)
        return made
    make, shapes = shape
    return make([_put_together(leaves, inner) for inner in shapes])
