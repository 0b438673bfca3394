"""The state of objects before a snapshot is loaded, to restore it if the snapshot is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from umem.chainer.resume.random_states import GENERATORS, set_state, state_of
from umem.chainer.step_state import restore_attributes

_LEFT_OUT = frozenset({"dataset", "_dataset", "_datasets", "_comm", "_prefetch_loop", "_pool"})
"""Attributes of Chainer's iterators and datasets that are not followed: data, and other threads'
state."""
_PACKAGES = ("chainer", "chainermn", "umem")


class Rollback:
    """Remembers the attributes and containers of objects, recursively, to restore them.

    Followed are containers, random generators, objects of Chainer and of umem, and any object with
    a method ``serialize``. Contents of arrays are not copied, datasets are omitted.

    Cost: a copy of each object's dictionary, and of each generator's state.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        seen: dict[int, Any] = {}
        to_do = list(objects)
        while to_do:
            value = to_do.pop()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            content = _content(value)
            if content is not None:
                self._kept.append((value, content))
                to_do += _below(value, content)

    def restore(self) -> None:
        """Restore every object, container and generator."""
        for value, content in self._kept:
            if isinstance(value, (dict, list, set, deque)):
                _refill(value, content)
            elif isinstance(value, GENERATORS):
                set_state(value, content)
            elif not isinstance(value, tuple):
                restore_attributes(value, content)


def _content(value: Any) -> Any:
    """Copy an object's attributes, items or state; None for objects that are not followed."""
    if isinstance(value, (dict, list, set, deque)):
        return value.copy()
    if isinstance(value, tuple):
        return value
    if isinstance(value, GENERATORS):
        return state_of(value)
    if isinstance(value, (type, np.ndarray)) or not hasattr(value, "__dict__"):
        return None
    kind = type(value)
    if kind.__module__.partition(".")[0] in _PACKAGES or hasattr(kind, "serialize"):
        return dict(vars(value))
    return None


def _below(value: Any, content: Any) -> Iterator[Any]:
    """Yield the followed objects of another one."""
    if isinstance(value, GENERATORS):
        return
    if isinstance(value, dict):
        yield from content.values()
    elif isinstance(content, dict):
        yield from (each for name, each in content.items() if name not in _LEFT_OUT)
    else:
        yield from content


def _refill(value: Any, content: Any) -> None:
    """Restore a container's former items, if it has others now."""
    if value != content if isinstance(value, set) else not _is_same(value, content):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def _is_same(value: Any, content: Any) -> bool:
    """Compare by identity, because values may be arrays."""
    if len(value) != len(content):
        return False
    pairs = zip(value, content, strict=True)
    if isinstance(value, dict):
        return all(a is b and value[a] is content[b] for a, b in pairs)
    return all(a is b for a, b in pairs)
