"""State outside a region that its two runs must share: random numbers, links' own vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import chainer
import numpy as np
from chainer import link_hook
from chainer.link_hooks import SpectralNormalization

from umem.chainer.step_state import cupy_generator, numpy_generator_restored


class RandomState:
    """The state of NumPy's and CuPy's global generators at the start of a region.

    NumPy's is restored for the second run. CuPy's cannot be copied, so the region draws from a new
    one each time, with a seed from the current one; the host waits for that seed.

    Does not model: ``random`` of the standard library, the user's own generators. Other threads may
    draw from NumPy's generator meanwhile; `differs` detects that.
    """

    def __init__(self, leaves: Iterable[Any] = ()) -> None:
        self._cupy = cupy_random(leaves)
        self._seed = 0 if self._cupy is None else int(self._cupy.randint(2**31 - 1))
        self._start: Any = np.random.get_state(legacy=False)
        self._end: int | None = None
        self._jumps: dict[int, Any] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the first run in the block; NumPy's generator behaves as without a checkpoint."""
        with self._own_cupy():
            yield
        self._end = _fingerprint(np.random.get_state(legacy=False))
        if self._end == _fingerprint(self._start):
            self._start = None  # nothing was drawn: the second run leaves the generator alone

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the second run in the block; afterwards the generators are restored."""
        if self._start is None:
            with self._own_cupy():
                yield
            return
        with numpy_generator_restored(), self._own_cupy():
            np.random.set_state(self._start)
            yield

    def mark(self, index: int) -> None:
        """Save the generator's state before function ``index`` of the first run.

        Called if parameters were initialised: only the first run draws their values.
        """
        self._jumps[index] = np.random.get_state(legacy=False)
        self._reseed(index)

    def jump(self, index: int) -> bool:
        """Set the generator to the state it had before function ``index`` of the first run."""
        state = self._jumps.get(index)
        if state is None:
            return False
        np.random.set_state(state)
        self._reseed(index)
        return True

    def differs(self) -> bool:
        """Tell whether the second run drew other random numbers than the first."""
        if self._start is None:
            return False
        now = _fingerprint(np.random.get_state(legacy=False))
        return now != self._end and now != _fingerprint(self._start)

    def _own_cupy(self) -> AbstractContextManager[None]:
        """Return a block with a new CuPy generator, with the region's seed."""
        return cupy_generator(self._cupy, lambda: self._generator(-1))

    def _generator(self, index: int) -> Any:
        return self._cupy.RandomState(self._seed + 1 + index)

    def _reseed(self, index: int) -> None:
        if self._cupy is not None:
            self._cupy.set_random_state(self._generator(index))


def _fingerprint(state: Any) -> int:
    return hash(_frozen(state))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_frozen(item) for item in value.values())
    return value.tobytes() if isinstance(value, np.ndarray) else value


def cupy_random(leaves: Iterable[Any]) -> Any:
    """Return CuPy's random module; None if all arguments of the region are NumPy's."""
    if "cupy" not in sys.modules or not chainer.backends.cuda.available:
        return None
    arrays = [getattr(leaf, "array", leaf) for leaf in leaves]
    kinds = {type(array).__module__.split(".")[0] for array in arrays if hasattr(array, "dtype")}
    return None if kinds and "cupy" not in kinds else sys.modules["cupy"].random


# -- links --------------------------------------------------------------------------------------


Vectors = list[tuple[Any, Any]]
"""For each spectral normalisation of a link: the vectors u and v of one call."""


class FirstCalls(link_hook.LinkHook):
    """Link hook of the first run: records initialised parameters and spectral vectors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.vectors: list[Vectors] = []
        self._waiting: list[Any] = []

    def forward_preprocess(self, args: Any) -> None:
        """Record the link's uninitialised parameters."""
        self._waiting += [p for p in chainer.Link.params(args.link) if p.array is None]
        if chainer.config.in_recomputing:  # they exist already, and are not kept
            self._remember(args.link)

    def forward_postprocess(self, args: Any) -> None:
        """Record the spectral vectors of the call."""
        if not chainer.config.in_recomputing:
            self._remember(args.link)

    def were_made(self) -> bool:
        """Tell whether parameters were initialised since the last call of this method."""
        before = len(self._waiting)
        if before:
            self._waiting = [p for p in self._waiting if p.array is None]
        return len(self._waiting) < before

    def _remember(self, link: Any) -> None:
        hooks = _spectral(link)
        if hooks:
            self.vectors.append([(getattr(link, h.vector_name).copy(), h.v) for h in hooks])


class SecondCalls(link_hook.LinkHook):
    """Link hook of the second run: applies the first run's spectral vectors, and restores the
    present ones.

    Chainer keeps only the last call's, and a link may be called several times.
    """

    def __init__(self, name: str, vectors: list[Vectors]) -> None:
        self.name = name
        self._left = iter(vectors)
        self._kept: list[tuple[Any, Any, Any, Any]] = []

    def forward_preprocess(self, args: Any) -> None:
        """Apply the vectors of this call."""
        hooks = _spectral(args.link)
        for hook, (u, v) in zip(hooks, next(self._left, []) if hooks else [], strict=False):
            self._kept.append((args.link, hook, getattr(args.link, hook.vector_name), hook.v))
            setattr(args.link, hook.vector_name, u)
            hook.v = v

    def forward_postprocess(self, args: Any) -> None:
        """Restore the present vectors."""
        while self._kept and self._kept[-1][0] is args.link:
            self._put_back()

    def deleted(self, link: Any) -> None:
        """Restore the present vectors, also after a call that failed."""
        while self._kept:
            self._put_back()

    def _put_back(self) -> None:
        link, hook, u, v = self._kept.pop()
        setattr(link, hook.vector_name, u)
        hook.v = v


def _spectral(link: Any) -> list[Any]:
    # Asked first, because the public local_link_hooks would make a dictionary on every link.
    if not link._n_local_link_hooks:
        return []
    hooks = link.local_link_hooks.values()
    return [hook for hook in hooks if isinstance(hook, SpectralNormalization)]
