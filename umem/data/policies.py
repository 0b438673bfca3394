"""Eviction when memory is full: the item with the highest score.

next-use    the position of its next use: what is used last goes first, a new item included
            (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
            Systems Journal 5, 1966, with the choice not to keep). For items of one size no
            choice has more hits. Where sizes differ it is the same rule, which would be best
            if an item could be kept in part.
lru         how long ago it was used.
cost        GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX
            1997): seconds to load for each byte, above that of the last one that went.
"""

from __future__ import annotations

from math import inf
from typing import Any

POLICIES = ("next-use", "lru", "cost")
CANDIDATE = -1
"""In a list of victims: the new item itself, which is then not stored."""


def victims(
    score: Any, nbytes: Any, over_bytes: int, candidate: tuple[float, int] | None
) -> list[int]:
    """Choose items to evict, by score, until enough bytes are free.

    Args:
        score: one an item; minus infinity for those that are not there.
        nbytes: one an item.
        over_bytes: to be freed.
        candidate: score and bytes of the new item where it may stay out; it is `CANDIDATE` then,
            and its bytes are freed by not being taken. Items of several sizes are then chosen
            so that no one goes for whom there is room in the end.

    Returns:
        items, the first to go first; fewer bytes than asked for where there are no more.
    """
    chosen: list[tuple[int, float, int]] = []
    freed, out = 0, False
    while freed < over_bytes:
        item = int(score.argmax()) if len(score) else 0
        found = float(score[item]) if len(score) else -inf
        if candidate is not None and not out and candidate[0] >= found:
            chosen.append((CANDIDATE, *candidate))
            freed, out = freed + candidate[1], True
        elif found == -inf:
            break
        else:
            chosen.append((item, found, int(nbytes[item])))
            freed += int(nbytes[item])
            score[item] = -inf
    for item, found, _ in chosen:
        if item != CANDIDATE:
            score[item] = found
    if candidate is not None:
        chosen = _without_room_to_spare(chosen, freed - over_bytes)
    return [item for item, _, _ in chosen]


def _without_room_to_spare(
    chosen: list[tuple[int, float, int]], spare: int
) -> list[tuple[int, float, int]]:
    """Drop victims from the list that fit after all, the one used soonest first."""
    kept = []
    for each in reversed(chosen):
        if each[2] <= spare:
            spare -= each[2]
        else:
            kept.append(each)
    return kept[::-1]
