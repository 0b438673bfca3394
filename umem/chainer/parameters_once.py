"""Parameters of a link: each once, although Chainer lists one twice that two links have registered;
parameters that overlap in memory; and views with other parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import chainer

from umem.trace.recording import address_of


def parameters(link: Any) -> list[Any]:
    """Return a link's parameters, including uninitialised ones, each once."""
    return list({id(one): one for one in link.params()}.values())


def parameter_bytes(*links: Any) -> int:
    """Return the bytes of links' parameters, each counted once."""
    found = {id(one): one for link in links for one in link.params(include_uninit=False)}
    return sum(one.array.nbytes for one in found.values())


class ModelView:
    """A view of a model with other parameters instead of its own, for an optimizer's hooks.

    ``params``, ``namedparams`` and the view's own attributes give these; everything else, including
    attributes of child links, is the model's.

    Args:
        stand_in: gives the replacement of a parameter, which may be itself.
    """

    def __init__(self, model: Any, stand_in: Callable[[Any], Any]) -> None:
        self._model, self._stand_in = model, stand_in

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._stand_in(value) if isinstance(value, chainer.Parameter) else value

    def params(self, include_uninit: bool = True) -> Iterator[Any]:
        """Yield the replacements of the model's parameters."""
        return map(self._stand_in, self._model.params(include_uninit))

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield the replacements of the model's parameters, by name."""
        named = self._model.namedparams(include_uninit)
        return ((name, self._stand_in(parameter)) for name, parameter in named)


def overlapping(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield pairs of different parameters whose arrays overlap in memory, with their names.

    Chainer's ``copy(mode="share")`` makes parameters of one array, and programs make views.
    """
    once = {id(one): (name, one) for name, one in named if one.array is not None}
    spans = sorted((*_span(one.array), name) for name, one in once.values())
    parameters = dict(once.values())
    furthest, before = 0, ""
    for start, end, name in spans:
        if start < furthest:
            yield before, parameters[before], name, parameters[name]
        if end > furthest:
            furthest, before = end, name


def _span(array: Any) -> tuple[int, int]:
    first = address_of(array)
    if not array.size:
        return first, first
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    below, above = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    return first + below, first + above + array.itemsize
