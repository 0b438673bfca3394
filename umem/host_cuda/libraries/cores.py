"""Splits work on large arrays among the cores, with the same results as on one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from umem.host_cuda.sharing import usable_cores

Part: TypeAlias = tuple[int, int]
DRAWN = 1 << 18
"""The most numbers that one generator draws; fixed, because results must not depend on the number
of cores. A guess.
"""


def cut(count: int, least: int) -> list[Part]:
    """Split a range into one part for each core, at least ``least`` long; returns their bounds."""
    parts = max(1, min(usable_cores(), count // least))
    bounds = [count * i // parts for i in range(parts + 1)]
    return list(pairwise(bounds))


def side_by_side(work: Callable[[Any], Any], parts: Sequence[Any]) -> None:
    """Call a function that releases the GIL on each part, on all cores."""
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
        rng: draws few numbers itself, or for many the seeds of other generators.
        draw: returns numbers for a generator, a count and parameters.
        parameters: arrays with one element, or with one for each drawn number.
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
