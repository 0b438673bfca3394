"""Eviction when memory is full: the item with the highest score.

next-use    the position of its next use: the item used latest is evicted first, or, if it is the
            new item, not stored (Belady, "A study of replacement algorithms for a
            virtual-storage computer", IBM Systems Journal 5, 1966, with the choice not to
            store). For items of one size no policy has more hits. For other sizes the rule is
            the same, and would be optimal if parts of items could be stored.
lru         the time since its last use.
cost        GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX
            1997): the lowest sum of its seconds to load a byte and the value of the item
            evicted last.
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
        score: each item's score; minus infinity for items not in memory.
        nbytes: each item's bytes.
        over_bytes: the bytes to free.
        candidate: score and bytes of the new item if it may be left out; it is `CANDIDATE` in the
            result, and counts as freed bytes. Among items of several sizes, none is then evicted
            that has room in the end.

    Returns:
        The items in order of eviction; fewer bytes than ``over_bytes`` if there are no more.
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
    """Drop from the list the victims that still fit, the one used soonest first."""
    kept = []
    for each in reversed(chosen):
        if each[2] <= spare:
            spare -= each[2]
        else:
            kept.append(each)
    return kept[::-1]
