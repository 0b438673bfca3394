"""Follows what links change about themselves in a region: new parameters, and vectors."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import link_hook
from chainer.link_hooks import SpectralNormalization

Vectors = list[tuple[Any, Any]]
"""Of each spectral normalisation of a link: u and v, with which a call normalised."""


class FirstCalls(link_hook.LinkHook):
    """Watches the first run: parameters that get their values in it, and spectral vectors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.vectors: list[Vectors] = []
        self._waiting: list[Any] = []

    def forward_preprocess(self, args: Any) -> None:
        """Remember the link's own parameters that have no array yet."""
        self._waiting += [p for p in chainer.Link.params(args.link) if p.array is None]
        if chainer.config.in_recomputing:  # they are there already, and do not stay
            self._remember(args.link)

    def forward_postprocess(self, args: Any) -> None:
        """Remember the vectors that the call has made."""
        if not chainer.config.in_recomputing:
            self._remember(args.link)

    def were_made(self) -> bool:
        """Tell whether parameters got their arrays since this was last asked."""
        before = len(self._waiting)
        if before:
            self._waiting = [p for p in self._waiting if p.array is None]
        return len(self._waiting) < before

    def _remember(self, link: Any) -> None:
        hooks = _spectral(link)
        if hooks:
            self.vectors.append([(getattr(link, h.vector_name).copy(), h.v) for h in hooks])


class SecondCalls(link_hook.LinkHook):
    """Gives each call of the second run the spectral vectors of the first, and takes them back.

    Chainer keeps those of the last call only, and a link may be called several times.
    """

    def __init__(self, name: str, vectors: list[Vectors]) -> None:
        self.name = name
        self._left = iter(vectors)
        self._kept: list[tuple[Any, Any, Any, Any]] = []

    def forward_preprocess(self, args: Any) -> None:
        """Put the vectors of this call in place."""
        hooks = _spectral(args.link)
        for hook, (u, v) in zip(hooks, next(self._left, []) if hooks else [], strict=False):
            self._kept.append((args.link, hook, getattr(args.link, hook.vector_name), hook.v))
            setattr(args.link, hook.vector_name, u)
            hook.v = v

    def forward_postprocess(self, args: Any) -> None:
        """Put back what was there."""
        while self._kept and self._kept[-1][0] is args.link:
            self._put_back()

    def deleted(self, link: Any) -> None:
        """At the end, also where a call failed."""
        while self._kept:
            self._put_back()

    def _put_back(self) -> None:
        link, hook, u, v = self._kept.pop()
        setattr(link, hook.vector_name, u)
        hook.v = v


def _spectral(link: Any) -> list[Any]:
    if not link._n_local_link_hooks:
        return []
    hooks = link.local_link_hooks.values()
    return [hook for hook in hooks if isinstance(hook, SpectralNormalization)]
