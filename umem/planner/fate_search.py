"""A local search over fates: one value's at a time is changed, and what is quicker stays.

A change is that something no longer runs again, or runs again instead of being kept or moved, or
moves or no longer does; what then does not fit is moved, and the time of it all is worked out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from umem.planner.easing import without
from umem.planner.graph import Graph, Numbered
from umem.planner.link import Link
from umem.planner.link_clock import Key
from umem.planner.moving import Fates, fates_of, is_best
from umem.planner.reruns import Reruns

WORK = 16_000
"""So many calls are gone through in one search, those of every trial together."""

Change = tuple[Reruns, frozenset[Key], frozenset[Key]]
"""What runs again, what is moved at least, and what must not be moved."""
Open = tuple[tuple[float, int], int, Fates, Iterator[Change]]
"""Fates by their rank and number, and the changes of them that were not tried yet."""


def searched(starts: Sequence[Fates], budget_bytes: int, link: Link) -> Fates:
    """The quickest that is found from some fates on, best first.

    Cost: a share of a second, whatever the size; one trial takes as long as a timetable.
    """
    search = _FateSearch(starts, budget_bytes, link)
    for _ in range(WORK // max(1, len(starts[0].graph))):
        if is_best(search.best) or not search.try_one():
            break
    return search.best


class _FateSearch:
    """All fates that were found, of which the best one is changed next.

    Args:
        starts: the first of them; of one graph, perhaps in several orders of its nodes.
        budget_bytes: the most bytes at once.
        link: what moves goes over.

    Attributes:
        best: the best that was found.
    """

    def __init__(self, starts: Sequence[Fates], budget_bytes: int, link: Link) -> None:
        self._budget, self._link = budget_bytes, link
        self._heap: list[Open] = []
        self._tried: set[tuple[Graph, Change]] = set()
        self._count = 0
        self.best = min(starts, key=_rank)
        for start in starts:
            self._add(start)

    def _add(self, fates: Fates) -> None:
        """Have these changed, too, when their turn comes."""
        self.best = min(self.best, fates, key=_rank)
        self._count += 1
        heapq.heappush(self._heap, (_rank(fates), self._count, fates, _changes(fates)))

    def try_one(self) -> bool:
        """Try the next change that is new; whether there was one."""
        while self._heap:
            fates, changes = self._heap[0][2:]
            change = next(changes, None)
            if change is None:
                heapq.heappop(self._heap)
            elif (fates.graph, change) not in self._tried:
                self._tried.add((fates.graph, change))
                found = fates_of(fates.graph, change[0], self._budget, self._link, *change[1:])
                if found is not None:
                    self._add(found)
                return True
        return False


def _changes(fates: Fates) -> Iterator[Change]:
    """Each change of one fate."""
    none, reruns, moved = frozenset[Key](), fates.reruns, fates.moved
    for one in fates.table.absences:
        if one.key in moved:
            yield reruns, moved - {one.key}, frozenset({one.key})
            yield reruns, moved - {one.key}, none
        else:
            yield reruns, moved | {one.key}, none
    g, each = fates.graph.numbered, _each(reruns)
    for gone in each:
        yield without(g, reruns, {gone}), moved, none
    for node in dict.fromkeys(node for _, node in each):
        yield without(g, reruns, {gone for gone in each if gone[1] == node}), moved, none
    for one in fates.table.absences:
        for deep in (False, True):
            more = _more(g, reruns, one.key, deep=deep)
            if more is not None:
                yield more, moved - {one.key}, none


def _rank(fates: Fates) -> tuple[float, int]:
    """Less time is better, to twelve digits, then fewer bytes over the link."""
    return float(f"{fates.seconds:.12g}"), fates.moved_bytes


def _each(reruns: Reruns) -> list[tuple[int, int]]:
    return [(step, node) for step, rerun in enumerate(reruns) for node in rerun]


def _more(g: Numbered, reruns: Reruns, key: Key, *, deep: bool) -> Reruns | None:
    """With something run again before its first use in backward, from what is there by then.

    What it is made from is kept for that, or where it goes ``deep`` and nobody else keeps it, runs
    again, too. None: something of it must not run twice.
    """
    what, holder = key
    dropped = {v for v in range(len(g.root)) if what == "value" and g.root[v] == holder}
    last = _last_reads(g, reruns)
    found = list(reruns)
    made = set[int]()
    for step in range(len(reruns) - 1, -1, -1):
        runs = set(reruns[step])
        read = {*g.needs[step], *(x for v in runs for x in g.preds[v])}
        todo = [v for v in read if v in dropped]
        if what == "stash" and step == holder:
            todo.append(step)
        while todo:
            v = todo.pop()
            if v in made or v in runs:
                continue
            if not g.recomputable[v]:
                return None
            runs.add(v)
            todo += [x for x in g.preds[v] if x in dropped or (deep and last[x] > step)]
        made |= runs
        found[step] = tuple(sorted(runs))
    return tuple(found)


def _last_reads(g: Numbered, reruns: Reruns) -> list[int]:
    """By value, the last step of backward that reads it; beyond all where none does."""
    found = [len(reruns)] * len(reruns)

    def read(values: Iterable[int], step: int) -> None:
        for x in values:
            found[x] = min(found[x], step)

    for step, rerun in enumerate(reruns):
        read(g.needs[step], step)
        for v in rerun:
            read(g.preds[v], step)
    return found
