"""Chainer's record in the table of frameworks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from chainer import Link, Optimizer, Variable

from umem.chainer.source import ChainerSource
from umem.errors import HintError
from umem.memory import is_array
from umem.trace import DATA_CACHE, Framework


def _parts(x: Any) -> Iterable[Any] | None:
    if isinstance(x, Variable):
        # Reading the gradient of an uninitialised parameter raises; only this private says so.
        return x.array, x.grad if getattr(x, "_grad_valid", True) else None
    if isinstance(x, Link):
        return _in_link(x)
    return _in_optimizer(x) if isinstance(x, Optimizer) else None


def _in_link(link: Link) -> Iterator[Any]:
    yield from link.params(include_uninit=False)
    for part in link.links():
        # Saved arrays beside parameters, such as running statistics; no public name lists them.
        for name in getattr(part, "_persistent", ()):
            value = getattr(part, name)
            if is_array(value):
                yield value


def _in_optimizer(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the arrays that only the update reads: states, and float32 copies of parameters.

    Raises:
        HintError: the optimizer is not set up.
    """
    if optimizer.target is None:
        raise HintError(f"{type(optimizer).__name__} has no model yet; call its setup(model) first")
    for param in optimizer.target.params(include_uninit=False):
        # Only half precision has a copy (UpdateRule.use_fp32_update), under a private name.
        copy = getattr(param.update_rule, "_fp32_param", None)
        if copy is not None:
            yield copy.array
        state = getattr(param.update_rule, "state", None) or {}
        yield from (value for value in state.values() if is_array(value))


def _data_caches() -> dict[str, str]:
    """Return the counters of data caches, for `umem.status`; empty without caches."""
    caching = sys.modules.get("umem.data.caching")
    counters = None if caching is None else caching.counted()
    return {} if counters is None else {DATA_CACHE: str(counters)}


CHAINER = Framework("Chainer", ChainerSource(), _parts, _data_caches)
