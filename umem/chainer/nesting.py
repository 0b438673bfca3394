"""Nested lists, tuples and dicts, taken apart into leaves and put together again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shape = Any
"""How leaves are nested; opaque to everybody but this file."""


def flatten(value: Any) -> tuple[list[Any], Shape]:
    """The leaves of ``value`` from left to right, and how they are nested."""
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves)


def rebuild(leaves: list[Any], shape: Shape) -> Any:
    """What `flatten` took apart, with these leaves."""
    return _put_together(iter(leaves), shape)


def _take_apart(value: Any, leaves: list[Any]) -> Shape:
    if type(value) in (list, tuple):
        return type(value), [_take_apart(item, leaves) for item in value]
    make = getattr(type(value), "_make", None)
    if make is not None and isinstance(value, tuple):
        return make, [_take_apart(item, leaves) for item in value]
    if type(value) is dict:
        keys = list(value)
        return dict, keys, [_take_apart(value[key], leaves) for key in keys]
    leaves.append(value)
    return None


def _put_together(leaves: Iterator[Any], shape: Shape) -> Any:
    if shape is None:
        return next(leaves)
    if shape[0] is dict:
        _, keys, shapes = shape
        return {key: _put_together(leaves, s) for key, s in zip(keys, shapes, strict=True)}
    make, shapes = shape
    return make([_put_together(leaves, s) for s in shapes])
