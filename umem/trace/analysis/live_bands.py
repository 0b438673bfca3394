"""Memory over a trace as bands: one for each large tensor, one for all small ones of a kind."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from umem.trace.analysis.tensors import KINDS, WORKSPACE, Reading, Tensor

Curve = np.ndarray[Any, np.dtype[np.int64]]


class Change(NamedTuple):
    """A change, at an event, of the bytes of one kind's small tensors (an index into `KINDS`)."""

    event: int
    kind: int
    nbytes: int


@dataclass(frozen=True)
class Bands:
    """The bands of a memory chart in stacking order, long-lived ones at the bottom.

    After any event, the live drawn tensors and the changes so far add up to all live bytes.
    """

    drawn: tuple[Tensor, ...]
    folded: tuple[Change, ...]


def bands(reading: Reading, count: int = 20_000, share: float = 1e-3) -> Bands:
    """Select the tensors that get a band of their own: at least ``share`` of the peak each.

    So few of them are alive at once. ``count`` only keeps a page of a very long trace small.
    """
    peak = int(reading.total.max(initial=0))
    smallest = max(1, round(share * peak))
    large = [tensor for tensor in reading.tensors if tensor.nbytes >= smallest]
    drawn = heapq.nlargest(count, large, key=lambda tensor: tensor.nbytes)
    births = {tensor.birth for tensor in drawn}
    small = [tensor for tensor in reading.tensors if tensor.birth not in births and tensor.nbytes]
    order = {kind: rank for rank, kind in enumerate(KINDS)}
    drawn.sort(key=lambda tensor: (order[tensor.kind], tensor.birth))
    return Bands(tuple(drawn), tuple(_changes(small, order)))


def _changes(small: list[Tensor], order: dict[str, int]) -> list[Change]:
    born = [Change(t.birth, order[t.kind], t.nbytes) for t in small]
    dead = [Change(t.death, order[t.kind], -t.nbytes) for t in small if t.death is not None]
    return sorted(born + dead)


def kind_curves(reading: Reading) -> dict[str, Curve]:
    """Compute the bytes of each occurring kind after each event, workspace last."""
    changes = {kind: np.zeros(len(reading.live), np.int64) for kind in KINDS}
    for tensor in reading.tensors:
        changes[tensor.kind][tensor.birth] += tensor.nbytes
        if tensor.death is not None:
            changes[tensor.kind][tensor.death] -= tensor.nbytes
    curves = {kind: np.cumsum(change) for kind, change in changes.items()}
    curves[WORKSPACE] = reading.total - reading.live
    return {kind: curve for kind, curve in curves.items() if curve.any()}


def thinned(total: Curve, count: int) -> Curve:
    """Return at most ``count`` indexes of a curve in order: the maximum of each stretch."""
    if len(total) <= count:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), count + 1).astype(np.int64)
    return np.array([low + total[low:high].argmax() for low, high in pairwise(edges)])
