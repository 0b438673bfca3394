"""Plans of three fates: each value is kept, made again, or moved over a link and back.

For some budgets from the one asked for up to that of keeping all, what today's planner would run
again there is the start, and of what it keeps as much is moved as does not fit: with all of the
budget that is recomputation alone, at the other end moving alone. The quickest goes on to a local
search. After the hybrid policies of Capuchin (Peng et al., ASPLOS 2020) and PoocH (Ito et al.,
2019); times are those of the referee.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from umem.planner import chains
from umem.planner.easing import eased
from umem.planner.fate_search import Search
from umem.planner.graph import Graph
from umem.planner.link import Link
from umem.planner.moving import Fates, fates_of
from umem.planner.plans import Plan
from umem.planner.reruns import Reruns, in_order_of, plan_of, reruns_of

STARTS = 3
BUDGETS = 7
"""So many budgets are looked at for what runs again."""


def quickest(
    graph: Graph, budget_bytes: int, link: Link, known: Sequence[Plan], method: str
) -> Fates | None:
    """The quickest fates that are found within a budget; None: there are none.

    ``known`` are plans that run calls again and move nothing, whether they fit or not.
    """
    found = [
        fates
        for ordered, reruns in _starts(graph, budget_bytes, known, method)
        if (fates := fates_of(ordered, reruns, budget_bytes, link)) is not None
    ]
    if not found:
        return None
    found.sort(key=lambda fates: fates.seconds)
    may_rerun = method not in chains.METHODS
    searched = [
        Search(start, budget_bytes, link, may_rerun=may_rerun).run() for start in found[:STARTS]
    ]
    return min(searched, key=lambda fates: fates.seconds)


def _starts(
    graph: Graph, budget_bytes: int, known: Sequence[Plan], method: str
) -> Iterator[tuple[Graph, Reruns]]:
    """What may run again, each once."""
    nothing: Reruns = ((),) * len(graph)
    found = {(graph, nothing): None}
    for plan in known:
        ordered = in_order_of(graph, plan)
        found[ordered, reruns_of(ordered, plan)] = None
    family = method if method in chains.METHODS else "lower_sets"
    most = plan_of(graph, nothing, None, "").peak_bytes
    for part in range(1, BUDGETS):
        between = budget_bytes + (most - budget_bytes) * part // BUDGETS
        for plan in chains.plans(graph, between, family, "time", "saved"):
            ordered = in_order_of(graph, plan)
            found[ordered, eased(ordered, reruns_of(ordered, plan), between)] = None
    yield from found
