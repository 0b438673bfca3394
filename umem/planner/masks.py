"""Lower sets as bit masks, and the nodes of a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Segment(NamedTuple):
    """A block's nodes by numbers: all, kept, recomputed, those whose function state is kept."""

    nodes: tuple[int, ...]
    kept: tuple[int, ...]
    rerun: tuple[int, ...]
    stashed: tuple[int, ...]


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
