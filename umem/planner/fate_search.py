"""A local search over fates: one value's at a time is changed, and what is quicker stays.

A change is that something no longer runs again, or runs again instead of being kept or moved, or
moves or no longer does; what then does not fit is moved, and the time of it all is worked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from umem.planner.graph import Numbered
from umem.planner.link import Link
from umem.planner.link_clock import Key
from umem.planner.moving import Fates, fates_of
from umem.planner.reruns import Reruns

STARTS = 3
"""So many are searched from."""
WORK = 12_000
"""So many calls are gone through in one search, those of every trial together."""
PARTIAL = 1e-9
"""The part of a time that counts as none."""


def searched(starts: Sequence[Fates], budget_bytes: int, link: Link) -> Fates:
    """The quickest that is found from some fates on, which are sorted by their time."""
    found = [FateSearch(start, budget_bytes, link).run() for start in starts[:STARTS]]
    return min(found, key=lambda fates: fates.seconds)


class FateSearch:
    """One search, which goes on until no change is quicker or it has tried as many as it may.

    Args:
        start: where it begins.
        budget_bytes: the most bytes at once.
        link: what moves goes over.
    """

    def __init__(self, start: Fates, budget_bytes: int, link: Link) -> None:
        self.best = start
        self._budget, self._link = budget_bytes, link
        self._left = WORK // max(1, len(start.graph))
        self._tried: set[tuple[Reruns, frozenset[Key]]] = set()

    def run(self) -> Fates:
        """The quickest that was found."""
        while self._go_through():
            pass
        return self.best

    def _go_through(self) -> bool:
        """Try every change once; whether it may go on, as something was better."""
        found = False
        for change in self._changes():
            if self._left <= 0:
                return False
            found |= self._better(*change)
        return found

    def _better(self, reruns: Reruns, keys: frozenset[Key], banned: frozenset[Key]) -> bool:
        if (reruns, keys) in self._tried:
            return False
        self._tried.add((reruns, keys))
        self._left -= 1
        best = self.best
        found = fates_of(best.graph, reruns, self._budget, self._link, keys, banned)
        if found is None or _rank(found) >= _rank(best):
            return False
        self.best = found
        return True

    def _changes(self) -> Iterator[tuple[Reruns, frozenset[Key], frozenset[Key]]]:
        """Each change, from what is best by then; what it moves, and what it must not move."""
        none = frozenset[Key]()
        for one in list(self.best.table.absences):
            moved = self.best.moved
            if one.key in moved:
                yield self.best.reruns, moved - {one.key}, frozenset({one.key})
                yield self.best.reruns, moved - {one.key}, none
            else:
                yield self.best.reruns, moved | {one.key}, none
        g = self.best.graph.numbered
        for step, node in _each(self.best.reruns):
            yield _less(g, self.best.reruns, {(step, node)}), self.best.moved, none
        for node in {node for _, node in _each(self.best.reruns)}:
            gone = {(step, other) for step, other in _each(self.best.reruns) if other == node}
            yield _less(g, self.best.reruns, gone), self.best.moved, none
        for one in list(self.best.table.absences):
            for deep in (False, True):
                more = _more(g, self.best.reruns, one.key, deep=deep)
                if more is not None:
                    yield more, self.best.moved - {one.key}, none


def _rank(fates: Fates) -> tuple[float, int]:
    """Less time is better, then fewer bytes over the link."""
    return round(fates.seconds / PARTIAL) * PARTIAL, fates.moved_bytes


def _each(reruns: Reruns) -> list[tuple[int, int]]:
    return [(step, node) for step, rerun in enumerate(reruns) for node in rerun]


def _less(g: Numbered, reruns: Reruns, gone: set[tuple[int, int]]) -> Reruns:
    """Without some of what runs again, and what ran again for its sake alone."""
    values, stashes = set[int](), set[int]()
    found: list[tuple[int, ...]] = []
    for step, rerun in enumerate(reruns):
        values.update(g.needs[step])
        if g.stash[step]:
            stashes.add(step)
        runs: list[int] = []
        for v in reversed(rerun):
            if (step, v) not in gone and (v in values or v in stashes):
                runs.append(v)
                values.discard(v)
                stashes.discard(v)
                values.update(g.preds[v])
        found.append(tuple(reversed(runs)))
    return tuple(found)


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
