"""Plans of three fates: each value is kept, made again, or moved over a link and back.

For some budgets from the one asked for up to that of keeping all, what would run again there is a
start, and of what it keeps as much is moved as does not fit: with the budget itself that is
recomputation alone, at the other end moving alone. The quickest go on to a local search. After the
hybrid policies of Capuchin (Peng et al., ASPLOS 2020) and PoocH (Ito et al., 2019); times are those
of the referee.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from umem.planner import chains
from umem.planner.easing import eased
from umem.planner.graph import Graph
from umem.planner.link import Link
from umem.planner.moving import Fates, fates_of
from umem.planner.plans import Plan
from umem.planner.reruns import Reruns, in_order_of, reruns_of
from umem.planner.timetable import least_bytes, timetable

BUDGETS = 7
"""So many budgets are looked at for what runs again."""
SHORT = 200
"""In larger graphs what runs again at one budget is eased for larger ones, not planned anew."""


def moved_alone(graph: Graph, budget_bytes: int, link: Link) -> Fates | None:
    """What moves as much as does not fit, and runs nothing again; None: it does not fit."""
    return fates_of(graph, ((),) * len(graph), budget_bytes, link)


def starts(
    graph: Graph, budget_bytes: int, link: Link, known: Sequence[Plan], method: str
) -> list[Fates]:
    """Fates within a budget, the quickest first; none where nothing that is tried fits.

    ``known`` are plans that run calls again and move nothing, whether they fit or not.
    """
    found = [
        fates
        for ordered, reruns in _again(graph, budget_bytes, known, method)
        if (fates := fates_of(ordered, reruns, budget_bytes, link)) is not None
    ]
    return sorted(found, key=lambda fates: fates.seconds)


def tightest(
    graph: Graph, link: Link, known: Sequence[Plan], method: str
) -> tuple[int, list[Fates]]:
    """The least bytes that anything is found for, and what is found for them.

    ``known`` are the plans of least bytes that move nothing.
    """
    tables = [timetable(graph, ((),) * len(graph), link)]
    for plan in known:
        ordered = in_order_of(graph, plan)
        tables.append(timetable(ordered, reruns_of(ordered, plan), link))
    least = min(map(least_bytes, tables))
    found = starts(graph, least, link, known, method)
    while least and (lower := starts(graph, least - 1, link, (), method)):
        best = min(lower, key=lambda fates: least_bytes(fates.table))
        least = least_bytes(best.table)
        again_at = fates_of(best.graph, best.reruns, least, link)
        found = [] if again_at is None else [again_at]
    return least, found


def _again(
    graph: Graph, budget_bytes: int, known: Sequence[Plan], method: str
) -> Iterator[tuple[Graph, Reruns]]:
    """What may run again, each once."""
    nothing: Reruns = ((),) * len(graph)
    found = {(graph, nothing): None}
    for plan in known:
        ordered = in_order_of(graph, plan)
        found[ordered, reruns_of(ordered, plan)] = None
    family = method if method in chains.METHODS else "lower_sets"
    most = max(timetable(graph, nothing).used)
    seeds = [*known]
    for part in range(1, BUDGETS):
        between = budget_bytes + (most - budget_bytes) * part // BUDGETS
        if len(graph) <= SHORT or not seeds:
            seeds = [*known, *chains.plans(graph, between, family, "time", "saved")]
        for plan in seeds:
            ordered = in_order_of(graph, plan)
            found[ordered, eased(ordered, reruns_of(ordered, plan), between)] = None
    yield from found
