"""The state of objects before loading, to restore it or compare with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from umem._common.printable import quoted
from umem.errors import SnapshotError

_LEFT_OUT = frozenset({"dataset", "_dataset", "_datasets", "_comm", "_prefetch_loop", "_pool"})
"""Attributes of Chainer's iterators and datasets that are not copied: data, and state of other
threads."""
_PACKAGES = ("chainer", "chainermn", "umem")
_CHECKED = ("chainer.training", "chainer.optimizer", "chainer.reporter", "chainer.iterators",
            "chainer.link", "umem.chainer.optimizers")  # fmt: skip
"""Prefixes of modules whose objects keep each attribute's kind."""
_OF_ANY_NUMBER = frozenset({"Summary", "Hyperparameter"})
"""Classes of Chainer whose integers may become floats: sums, and learning rates."""
_SHARES = ("beta", "rho", "momentum")
_MOST = 2**63
_ABSENT = object()


class Rollback:
    """Remembers the attributes and containers of objects, recursively, to restore them.

    Followed are containers, objects of Chainer and of umem, and whatever has a method
    ``serialize``. Contents of arrays are not copied, random generators and datasets are left out.

    Cost: a copy of each object's dictionary.
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

    def put_back(self) -> None:
        """Restore every object and container."""
        for value, content in self._kept:
            if isinstance(value, (dict, list, set, deque)):
                _refill(value, content)
            elif not isinstance(value, tuple):
                _set_attributes(vars(value), content)

    def check(self) -> None:
        """Check that loaded attributes of Chainer's objects kept their kind.

        Raises:
            SnapshotError: an attribute is not.
        """
        for value, content in self._kept:
            kind = type(value)
            if kind.__module__.startswith(_CHECKED) and hasattr(value, "__dict__"):
                now = vars(value)
                for name, was in content.items():
                    wrong = _difference(kind.__name__, name, was, now.get(name, _ABSENT))
                    if wrong is not None:
                        raise SnapshotError(f"{name!r} of {kind.__name__} would be {wrong}")


def _content(value: Any) -> Any:
    """Copy an object's attributes or items; None for objects that are not followed."""
    if isinstance(value, (dict, list, set, deque)):
        return value.copy()
    if isinstance(value, tuple):
        return value
    if isinstance(value, (type, np.ndarray)) or not hasattr(value, "__dict__"):
        return None
    kind = type(value)
    if kind.__module__.partition(".")[0] in _PACKAGES or hasattr(kind, "serialize"):
        return dict(vars(value))
    return None


def _below(value: Any, content: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from content.values()
    elif isinstance(content, dict):
        yield from (each for name, each in content.items() if name not in _LEFT_OUT)
    else:
        yield from content


def _refill(value: Any, content: Any) -> None:
    if value != content if isinstance(value, set) else not _is_same(value, content):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(content)


def _is_same(value: Any, content: Any) -> bool:
    """Compare by identity, as values may be arrays."""
    if len(value) != len(content):
        return False
    pairs = zip(value, content, strict=True)
    if isinstance(value, dict):
        return all(a is b and value[a] is content[b] for a, b in pairs)
    return all(a is b for a, b in pairs)


def _set_attributes(now: dict[str, Any], content: dict[str, Any]) -> None:
    for name in now.keys() - content.keys():
        del now[name]
    for name, was in content.items():
        if now.get(name, _ABSENT) is not was:
            now[name] = was


def _difference(owner: str, name: str, was: Any, now: Any) -> str | None:
    """Describe what is wrong with a loaded attribute; None if nothing is."""
    if now is was or now is _ABSENT:
        return None
    if isinstance(was, (bool, np.bool_)):
        if owner == "Hyperparameter":  # AMSGrad has another state than Adam
            return None if now == was and isinstance(now, (bool, np.bool_)) else quoted(now)
        return None if isinstance(now, (bool, np.bool_)) else quoted(now)
    if isinstance(was, (int, float, np.number)):
        return _wrong_number(owner, name, was, now)
    if isinstance(was, np.ndarray):
        alike = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (was.shape, was.dtype)
        return None if alike else quoted(now)
    if isinstance(was, (str, list, dict, tuple)):
        return None if isinstance(now, type(was)) else quoted(now)
    return quoted(now) if was is None and isinstance(now, (str, list, tuple)) else None


def _wrong_number(owner: str, name: str, was: Any, now: Any) -> str | None:
    """Return a loaded number quoted if it is out of its attribute's range; None if it is valid."""
    if isinstance(now, (bool, np.bool_)) or np.ndim(now) or np.asarray(now).dtype.kind not in "iuf":
        return quoted(now)
    if owner == "Summary":  # of losses, which may be NaN
        return None
    if isinstance(was, (int, np.integer)) and owner not in _OF_ANY_NUMBER:
        least = -1 if name == "_previous_iteration" else min(int(was), 0)  # -1: Chainer's "unknown"
        is_whole = isinstance(now, (int, np.integer))
        return None if is_whole and least <= now < _MOST else quoted(now)
    low: float = -np.inf
    high = np.inf
    if owner == "Hyperparameter":
        low = 0 if was >= 0 else low
        high = 1 if name.startswith(_SHARES) else high  # of a mean that moves; 1 divides by zero
    return None if np.isfinite(float(now)) and low <= now < high else quoted(now)
