"""Work on large arrays that the cores share; each part is done as one core would do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from umem.host_cuda.sharing import usable_cores

Part: TypeAlias = tuple[int, int]
DRAWN = 1 << 18
"""One generator draws at most this many numbers; fixed, as results must not depend on the number of
cores. A guess."""


def cut(count: int, least: int) -> list[Part]:
    """Split a range into one part a core, each at least ``least`` long; returns their bounds."""
    parts = max(1, min(usable_cores(), count // least))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))


def side_by_side(work: Callable[[Any], Any], parts: Sequence[Any]) -> None:
    """Call a function that releases the GIL for each part, on all cores."""
    threads = min(usable_cores(), len(parts))
    if threads < 2:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))


def drawn(
    rng: np.random.Generator, found: Any, draw: Callable[..., Any], parameters: Sequence[Any] = ()
) -> None:
    """Fill a flat array with random numbers, on all cores.

    Args:
        rng: draws a few, and the seeds of other generators that draw many.
        draw: returns numbers, given a generator, a count and parameters.
        parameters: arrays with one element, or as many as are drawn.
    """
    if len(found) <= DRAWN:
        found[...] = draw(rng, len(found), *parameters)
        return
    starts = range(0, len(found), DRAWN)
    seeds = rng.integers(0, 1 << 63, len(starts))

    def part(which: tuple[int, Any]) -> None:
        start, seed = which
        here = found[start : start + DRAWN]
        own = np.random.Generator(np.random.SFC64(int(seed)))
        given = (x if len(x) == 1 else x[start : start + DRAWN] for x in parameters)
        here[...] = draw(own, len(here), *given)

    side_by_side(part, list(zip(starts, seeds, strict=True)))
