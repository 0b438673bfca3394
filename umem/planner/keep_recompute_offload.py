"""Plans that keep, recompute or offload each value.

The search starts from the recomputations that are planned for some budgets, from the one asked for
up to that of keeping everything; of the values that such a plan keeps, as many are offloaded as do
not fit. The budget itself gives recomputation alone, the other end offloading alone. From the
quickest, a local search changes the decision on one value at a time. After the hybrid
policies of Capuchin (Peng et al., ASPLOS 2020) and PoocH (Ito et al., 2019); times are those of the
referee.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from umem.planner.chains import METHODS, chains_of
from umem.planner.graph import Graph, Numbered
from umem.planner.link import Key, Link
from umem.planner.link_timetable import least_bytes, timetable
from umem.planner.offload_schedule import Decision, decided, is_best
from umem.planner.plans import Plan, Reruns, reruns_of
from umem.planner.rematerialize import keep_more, without

BUDGETS = 7
"""Number of budgets that are planned for, as starts of the search."""
SHORT = 200
"""At most this many nodes for which every budget is planned anew.

In larger graphs, the plans that are known, or that of one budget, are relaxed for the others.
"""


def starting_decisions(
    graph: Graph, budget_bytes: int, link: Link, known: Sequence[Plan], method: str
) -> list[Decision]:
    """Return decisions that fit a budget, the quickest first; empty if none that is tried fits.

    ``known`` are plans that recompute calls and offload nothing, whether they fit or not.
    """
    found = [
        decision
        for reruns in _candidates(graph, budget_bytes, known, method)
        if (decision := decided(graph, reruns, budget_bytes, link)) is not None
    ]
    return sorted(found, key=lambda decision: decision.seconds)


def least_decisions(
    graph: Graph, link: Link, known: Sequence[Plan], method: str
) -> tuple[int, list[Decision]]:
    """Return the least budget that a decision is found for, and the decisions for it.

    ``known`` are the plans of least bytes that offload nothing.
    """
    tried: list[Reruns] = [((),) * len(graph), *(reruns_of(graph, plan) for plan in known)]
    least = min(least_bytes(timetable(graph, reruns, link)) for reruns in tried)
    found = starting_decisions(graph, least, link, known, method)
    while least and (lower := starting_decisions(graph, least - 1, link, (), method)):
        best = min(lower, key=lambda decision: least_bytes(decision.table))
        least = least_bytes(best.table)
        again_at = decided(best.graph, best.reruns, least, link)
        found = [] if again_at is None else [again_at]
    return least, found


def _candidates(
    graph: Graph, budget_bytes: int, known: Sequence[Plan], method: str
) -> Iterator[Reruns]:
    """Yield candidates of recomputations."""
    nothing: Reruns = ((),) * len(graph)
    found = dict.fromkeys([nothing, *(reruns_of(graph, plan) for plan in known)])
    chains = chains_of(graph, method if method in METHODS else "lower_sets")
    most = max(timetable(graph, nothing).used)
    seeds = [*known]
    for part in range(1, BUDGETS):
        between = budget_bytes + (most - budget_bytes) * part // BUDGETS
        if len(graph) <= SHORT or not seeds:
            chain = chains.plan(between)
            seeds = [*known, *([chain] if chain else [])]
        for plan in seeds:
            found[keep_more(graph, reruns_of(graph, plan), between)] = None
    yield from found


WORK = 16_000
"""At most this many calls are scheduled in one local search, over all its trials."""

Change = tuple[Reruns, frozenset[Key], frozenset[Key]]
"""The recomputations, the keys offloaded in any case, and the keys never offloaded."""
Open = tuple[tuple[float, int], int, Decision, Iterator[Change]]
"""An entry of the heap: rank, running number, decision, and its changes not tried yet."""


def improved(starting_decisions: Sequence[Decision], budget_bytes: int, link: Link) -> Decision:
    """Improve decisions by a local search, value by value; return the quickest that is found.

    Cost: a share of a second, whatever the size; one trial takes as long as a timetable.
    """
    search = _LocalSearch(starting_decisions, budget_bytes, link)
    for _ in range(WORK // max(1, len(starting_decisions[0].graph))):
        if is_best(search.best) or not search.try_one():
            break
    return search.best


class _LocalSearch:
    """Best-first search: of all decisions found, the best with untried changes is changed next.

    Args:
        starting_decisions: one or more; of one graph, perhaps in several orders of its nodes.
        budget_bytes: the most bytes at once.
        link: the link to the offload target.

    Attributes:
        best: the best decision that was found.
    """

    def __init__(
        self, starting_decisions: Sequence[Decision], budget_bytes: int, link: Link
    ) -> None:
        self._budget, self._link = budget_bytes, link
        self._heap: list[Open] = []
        self._tried: set[tuple[Graph, Change]] = set()
        self._count = 0
        self.best = min(starting_decisions, key=_rank)
        for start in starting_decisions:
            self._add(start)

    def _add(self, decision: Decision) -> None:
        """Queue a decision, to be changed when it is the best left."""
        self.best = min(self.best, decision, key=_rank)
        self._count += 1
        heapq.heappush(self._heap, (_rank(decision), self._count, decision, _changes(decision)))

    def try_one(self) -> bool:
        """Schedule the next change that was not tried; return False if there is none."""
        while self._heap:
            decision, changes = self._heap[0][2:]
            change = next(changes, None)
            if change is None:
                heapq.heappop(self._heap)
            elif (decision.graph, change) not in self._tried:
                self._tried.add((decision.graph, change))
                found = decided(decision.graph, change[0], self._budget, self._link, *change[1:])
                if found is not None:
                    self._add(found)
                return True
        return False


def _changes(decision: Decision) -> Iterator[Change]:
    """Yield every change of one value's decision: to keep, recompute or offload it instead."""
    none, reruns, moved = frozenset[Key](), decision.reruns, decision.moved
    for one in decision.table.windows:
        if one.key in moved:
            yield reruns, moved - {one.key}, frozenset({one.key})
            yield reruns, moved - {one.key}, none
        else:
            yield reruns, moved | {one.key}, none
    g = decision.graph.numbered
    each = [(step, node) for step, rerun in enumerate(reruns) for node in rerun]
    for gone in each:
        yield without(g, reruns, {gone}), moved, none
    for node in dict.fromkeys(node for _, node in each):
        yield without(g, reruns, {gone for gone in each if gone[1] == node}), moved, none
    for one in decision.table.windows:
        for deep in (False, True):
            more = _recomputed_instead(g, reruns, one.key, deep=deep)
            if more is not None:
                yield more, moved - {one.key}, none


def _rank(decision: Decision) -> tuple[float, int]:
    """Return the sort key of decisions: seconds to twelve digits, then bytes over the link."""
    return float(f"{decision.seconds:.12g}"), decision.moved_bytes


def _recomputed_instead(g: Numbered, reruns: Reruns, key: Key, *, deep: bool) -> Reruns | None:
    """Return recomputations by which a value or function state is recomputed, not kept.

    It is recomputed before its first use in backward. Its inputs are kept for that; if ``deep``,
    those that nothing else keeps are recomputed, too. None: a call would run that must not be
    recomputed.
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
    """Return by value the last step of backward that reads it; the number of steps if none does."""
    found = [len(reruns)] * len(reruns)

    def read(values: Iterable[int], step: int) -> None:
        for x in values:
            found[x] = min(found[x], step)

    for step, rerun in enumerate(reruns):
        read(g.needs[step], step)
        for v in rerun:
            read(g.preds[v], step)
    return found
