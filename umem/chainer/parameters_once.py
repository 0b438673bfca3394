"""Parameters of a link, each once: Chainer lists one that two links have registered twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from umem.trace.recording import address_of


def parameters(link: Any) -> list[Any]:
    """Yield a link's parameters, uninitialised ones too, each once."""
    return list({id(one): one for one in link.params()}.values())


def parameter_bytes(*links: Any) -> int:
    """Return the bytes of links' parameters, each counted once."""
    found = {id(one): one for link in links for one in link.params(include_uninit=False)}
    return sum(one.array.nbytes for one in found.values())


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
    start = address_of(array)
    steps = zip(array.shape, array.strides, strict=True)
    last = sum((count - 1) * stride for count, stride in steps if stride > 0)
    return start, start + (last + array.itemsize if array.size else 0)
