"""What goes where sizes differ and few items fit: every choice is tried on the epochs to come.

Items are next to be used in some order, and by that alone the last one goes (`umem.data.policies`).
Where sizes differ an item that goes late may leave room for two, or for none; with a thousand items
in memory that is lost among the rest, with ten it is not. So where there are few, each choice is
followed through the next epochs, once as `next-use` would go on and once as if nothing more went,
and the best is taken: a rollout (Bertsekas, Tsitsiklis and Wu, "Rollout algorithms for
combinatorial optimization", Journal of Heuristics 3, 1997) with two rules to go on by. A hit counts
the less the later it comes, as nobody knows when training ends.

The fixed subset that comes first is never to hit more. What it has hit is counted beside the
cache, which is *safe* where it leads by the bytes of the subset that it has not, because these are
what it takes to become that subset. A choice has to be safe, or to come to be without falling
behind; until the sizes of all that comes are known only the former counts, and only for orders in
which every item comes once an epoch, so that the first of them has no hits to lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from umem.data.first_comers import FirstComers
from umem.data.next_uses import NextUses
from umem.data.policies import CANDIDATE

EPOCHS_TRIED, EPOCHS_SEEN = 3, 5
"""Epochs that choices are tried on, and those that next uses in these are looked up in."""
MOST_TRIED = 1024
"""Items in memory times those of an epoch, up to which choices are tried: some milliseconds."""


@dataclass(frozen=True)
class Coming:
    """Requests to come.

    Attributes:
        items: of each.
        next_uses: of each, at which of these its item comes again; infinity: at none.
        tried: so many of them are gone through.
        sizes: of every item in them, in bytes; the least there is for one not loaded yet.
        room: bytes in memory.
        is_each_once: every item comes once an epoch.
        are_sizes_known: those of all items.
    """

    items: Sequence[int]
    next_uses: Sequence[float]
    tried: int
    sizes: Mapping[int, int]
    room: int
    is_each_once: bool
    are_sizes_known: bool


@dataclass(frozen=True)
class Rival:
    """A fixed subset beside which a cache is measured: that which comes first.

    Attributes:
        items: in it.
        lead: bytes that the cache has hit more than it.
    """

    items: frozenset[int]
    lead: int

    def short(self, inside: Iterable[int], sizes: Mapping[int, int]) -> int:
        """Bytes of the subset that are not among others."""
        return sum(sizes[item] for item in self.items.difference(inside))


def next_uses(items: Sequence[int]) -> list[float]:
    """Tell of each request at which one its item comes again."""
    found, seen = [inf] * len(items), dict[int, int]()
    for at in range(len(items) - 1, -1, -1):
        found[at] = seen.get(items[at], inf)
        seen[items[at]] = at
    return found


def weighed(
    uses: Mapping[int, float], new: int, over: int, coming: Coming, first: Rival
) -> list[int]:
    """Choose items that go, so that so many bytes are free.

    Args:
        uses: of those in memory and the new one, at which of the requests to come they are used.
        new: the item that has just been loaded.
        over: bytes to be freed.
        coming: with the sizes of all these. first: see there.

    Returns:
        items, the new one as `CANDIDATE`.
    """
    best, chosen = (False, -inf, -inf), frozenset[int]()
    for gone in _choices(uses, new, over, coming.sizes, first):
        stay = {item: use for item, use in uses.items() if item not in gone}
        is_safe = first.lead >= first.short(stay, coming.sizes)
        for is_fixed in (False, True):
            hits, low = _followed(stay, coming, first, is_fixed=is_fixed)
            is_early = coming.is_each_once and not coming.are_sizes_known
            if is_safe or not (is_early or coming.are_sizes_known):
                low = 0
            if (found := (is_safe if is_early else low >= 0, low, hits)) > best:
                best, chosen = found, gone
    return [CANDIDATE if item == new else item for item in chosen]


def _choices(
    uses: Mapping[int, float], new: int, over: int, sizes: Mapping[int, int], first: Rival
) -> Iterable[frozenset[int]]:
    """What may go: what is used last, what is not of those that came first, each one and more."""
    by_use = sorted(uses, key=lambda item: (-uses[item], item != new))
    outside_first = sorted(by_use, key=lambda item: item in first.items)
    each_first = ([item, *(other for other in by_use if other != item)] for item in by_use)
    found = dict.fromkeys(
        frozenset(_enough(order, over, sizes)) for order in (by_use, outside_first, *each_first)
    )
    return list(found)


def _enough(order: Iterable[int], over: int, sizes: Mapping[int, int]) -> list[int]:
    """The first of an order that free so many bytes, without those for whom there is room."""
    gone, freed = list[int](), 0
    for item in order:
        if freed >= over:
            break
        gone.append(item)
        freed += sizes[item]
    kept, spare = list[int](), freed - over
    for item in reversed(gone):
        if sizes[item] <= spare:
            spare -= sizes[item]
        else:
            kept.append(item)
    return kept


def _followed(
    stay: Mapping[int, float], coming: Coming, first: Rival, *, is_fixed: bool
) -> tuple[float, float]:
    """Go through what comes from what is in memory.

    Returns:
        bytes hit, each times the requests left to come; and zero where it comes to be safe before
        it falls behind the first comers, else how far it falls behind or is short in the end.
    """
    inside, sizes, room = dict(stay), coming.sizes, coming.room
    used = sum(sizes[item] for item in inside)
    hits, lead, short = 0, first.lead, first.short(inside, sizes)
    low, is_safe = min(0, lead), lead >= short
    for at in range(coming.tried):
        item = coming.items[at]
        size, is_hit = sizes[item], item in inside
        lead += size * (is_hit - (item in first.items))
        if is_hit:
            hits += size * (coming.tried - at)
            inside[item] = coming.next_uses[at]
        elif size <= room and (not is_fixed or used + size <= room):
            inside[item] = coming.next_uses[at]
            used += size
            short -= size * (item in first.items)
            if used > room:
                by_use: Any = sorted(inside, key=inside.__getitem__, reverse=True)
                for gone in _enough(by_use, used - room, sizes):
                    del inside[gone]
                    used -= sizes[gone]
                    short += sizes[gone] * (gone in first.items)
        if not is_safe:
            low, is_safe = min(low, lead), lead >= short
    return hits, low if is_safe else min(low, lead - short)


class Outlook:
    """Tries choices on what comes, where sizes differ and few items fit.

    Args:
        uses: of the order.
        nbytes: one an item, 0 where that is not known yet.
        first: the subset to be no worse than.
        room: bytes in memory.
    """

    def __init__(self, uses: NextUses, nbytes: Any, first: FirstComers, room: int) -> None:
        self._uses, self._nbytes, self._first, self._room = uses, nbytes, first, room

    def who_goes(self, new: int, over: int, score: Any, at: int) -> list[int] | None:
        """Choose items that go, so that so many bytes are free; see `weighed`.

        Args:
            new: the item that was loaded, for a request at position ``at``; its size is known.
            score: one an item; minus infinity for those that are not in memory.

        Returns:
            items; None: there are too many to try, or all are of one size.
        """
        length = self._uses.length
        if 2 * length > MOST_TRIED:
            return None
        inside = np.flatnonzero(score > -inf).tolist()
        if (len(inside) + 2) * length > MOST_TRIED:
            return None
        if (self._nbytes[inside] == self._nbytes[new]).all():
            return None
        items = self._uses.items_from(at + 1, EPOCHS_SEEN * length)
        first = np.flatnonzero(self._first.is_first).tolist()
        known = int(self._nbytes[self._nbytes > 0].min())
        sizes = {i: int(self._nbytes[i]) or known for i in {*items, *inside, *first, new}}
        coming = Coming(
            items,
            next_uses(items),
            EPOCHS_TRIED * length,
            sizes,
            self._room,
            all(self._uses.is_each_once(at + n * length) for n in range(EPOCHS_SEEN)),
            bool(self._nbytes[items].all()),
        )
        soonest = {item: place for place, item in reversed([*enumerate(items)])}
        uses = {item: soonest.get(item, inf) for item in (*inside, new)}
        return weighed(uses, new, over, coming, Rival(frozenset(first), self._first.lead_bytes))
