"""Lower sets as bit masks, and the costs of every step between them.

Costs are whole numbers of units, so that dynamic programming can index its tables by time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
INFINITE = 1 << 61
LEVELS = 4000
"""Costs that must be rounded are rounded to one part in this many of their sum.

With half as many, plans of long chains have up to 2 points of a forward pass more overhead; twice
as many win 0.3 at the most, and take 1.2 times the planning (bench/planner_constants.py).
"""
FINE = LEVELS // 4
"""At most this many costs are each rounded to the nearest level; more, up or down in turn."""
GOLDEN = (5**0.5 - 1) / 2
"""A number whose multiples modulo one are spread evenly, also over every n-th of them."""


# -- masks ---------------------------------------------------------------------------------------


def numbers(mask: int) -> list[int]:
    """List the node numbers in a mask, ascending; cost: the span from lowest to highest."""
    if not mask:
        return []
    low = (mask & -mask).bit_length() - 1
    digits = bin(mask >> low)[:1:-1]  # as text, because each shift of a long number copies it
    return [v for v, digit in enumerate(digits, low) if digit == "1"]


def mask_of(nodes: Iterable[int]) -> int:
    """Make the mask that holds some node numbers."""
    mask = 0
    for v in nodes:
        mask |= 1 << v
    return mask


def bits(masks: tuple[int, ...], width: int) -> npt.NDArray[np.bool_]:
    """Unpack masks to booleans of the shape [masks, width]."""
    nbytes = (width + 7) // 8
    raw = b"".join(mask.to_bytes(nbytes, "little") for mask in masks)
    rows = np.frombuffer(raw, np.uint8).reshape(len(masks), nbytes)
    return np.unpackbits(rows, axis=1, bitorder="little", count=width).astype(bool)


def nested(inside: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return booleans [target, source]: True if the source is a proper subset of the target.

    Rows must be distinct and sorted by size.
    """
    missing = (~inside).astype(np.float32) @ inside.T.astype(np.float32)
    found: npt.NDArray[Any] = np.tril(missing == 0, -1)
    return found


def by_size(masks: Iterable[int]) -> tuple[int, ...]:
    """Sort masks by size, without duplicates: then every step leads to a larger number."""
    return tuple(sorted(set(masks), key=lambda mask: (mask.bit_count(), mask)))


# -- costs ---------------------------------------------------------------------------------------


def units(costs: tuple[float, ...], *, exact: bool) -> npt.NDArray[Any]:
    """Count costs in units of their greatest common divisor.

    Costs that are not whole numbers, or are too many units, are rounded to one of ``LEVELS`` levels
    of their sum, unless ``exact``. More than ``FINE`` of them are rounded up or down in turn.
    """
    if all(float(cost).is_integer() for cost in costs):
        whole = [int(cost) for cost in costs]
        unit = gcd(*whole) or 1
        if sum(whole) // unit <= 4 * LEVELS:
            return np.array([cost // unit for cost in whole], np.int64)
        if exact and sum(whole) < 1 << 62:
            return np.array(whole, np.int64)
    if exact:
        return np.array(costs, np.float64)
    level = max(sum(costs) / LEVELS, sys.float_info.min * sys.float_info.epsilon)  # not zero
    if len(costs) <= FINE:
        return np.array([round(cost / level) for cost in costs], np.int64)
    # Each may be less than half a level: rounded up or down in turn, so that sums hold.
    turns = np.arange(len(costs)) * GOLDEN % 1
    found: Ints = np.floor(np.array([cost / level for cost in costs]) + turns).astype(np.int64)
    return found


class Segment(NamedTuple):
    """A block's nodes by numbers: all, kept, recomputed, and with kept function state."""

    nodes: tuple[int, ...]
    kept: tuple[int, ...]
    rerun: tuple[int, ...]
    stashed: tuple[int, ...]


class Hop(NamedTuple):
    """A step of a chain: from a lower set to a larger one, by numbers, in one of its kinds."""

    source: int
    target: int
    kind: int


Chain = tuple[Hop, ...]


@dataclass(frozen=True)
class Table:
    """The costs of every step: arrays of [kind, target, source].

    Attributes:
        sets: the lower sets as bit masks, sorted by size, from the empty set to all nodes.
        peak: the peak of the step's block, above the bytes cached before it; INFINITE if there is
            no such step.
        cached: the bytes that the step's block keeps for backward.
        time: its overhead, in units.
        total: the cost of all nodes, in units.
    """

    sets: tuple[int, ...]
    peak: Ints
    cached: Ints
    time: npt.NDArray[Any]
    total: float

    def longest_first(self) -> Table:
        """Return a table in which the chain of the most overhead is the best one."""
        return replace(self, time=-self.time)

    @cached_property
    def least(self) -> int:
        """Return the smallest budget that fits a chain; computed once.

        Backwards over the lower sets: the rest of the budget when a chain reaches a set must hold
        the next step's peak, and the bytes that the step caches together with the needs of all
        later steps.
        """
        count = len(self.sets)
        needed = np.zeros(count, np.int64)
        for source in range(count - 2, -1, -1):
            cached = self.cached[:, source + 1 :, source] + needed[source + 1 :]
            needed[source] = np.maximum(self.peak[:, source + 1 :, source], cached).min()
        return int(needed[0])


def peak_of(table: Table, chain: Chain) -> int:
    """Return the peak of a chain, in bytes."""
    cached = peak = 0
    for source, target, kind in chain:
        peak = max(peak, cached + int(table.peak[kind, target, source]))
        cached += int(table.cached[kind, target, source])
    return peak


def time_of(table: Table, chain: Chain) -> float:
    """Return the overhead of a chain, in units."""
    return float(sum(table.time[kind, target, source].item() for source, target, kind in chain))
