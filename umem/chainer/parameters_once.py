"""Parameters of a link, each once: Chainer lists one that two links have registered twice."""

from __future__ import annotations

from typing import Any


def parameters(link: Any) -> list[Any]:
    """List the parameters of a link, those without an array too, each once."""
    return list({id(one): one for one in link.params()}.values())


def parameter_bytes(*links: Any) -> int:
    """Count the bytes of the parameters of links, each once, whoever holds it."""
    found = {id(one): one for link in links for one in link.params(include_uninit=False)}
    return sum(one.array.nbytes for one in found.values())
