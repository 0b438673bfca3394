"""All lower sets of a graph: Kusumoto et al., NeurIPS 2019, section 4.2.

With all of them, dynamic programming finds the best chain there is. Their number can be
exponential in the graph's width.
"""

from __future__ import annotations

from umem.errors import GraphError
from umem.planner.graph import Graph
from umem.planner.masks import by_size, mask_of
from umem.planner.plans import Model

LIMITS: dict[Model, int] = {"kusumoto": 3000, "saved": 350}
"""The most lower sets: one step between two of them costs more under the model ``saved``.

There, twice as many are allowed if each is a run of the node order from its beginning.
"""


def family(graph: Graph, model: Model) -> tuple[int, ...]:
    """All lower sets, sorted by size.

    Raises:
        GraphError: there are more than the model's limit.
    """
    limit = LIMITS[model]
    found = lower_sets(graph, limit)
    if found is None and model == "saved" and len(graph) < 2 * limit:
        found = lower_sets(graph, len(graph) + 1)  # as many as there are runs
    if found is None:
        raise GraphError(
            f"the graph has more than {limit} lower sets, too many for "
            f'method="lower_sets_exact" with model={model!r}; use method="lower_sets"'
        )
    return found


def lower_sets(graph: Graph, limit: int) -> tuple[int, ...] | None:
    """All lower sets, sorted by size; None where there are more than the limit."""
    needs = [mask_of(preds) for preds in graph.numbered.preds]
    found = [0]
    for v, mask in enumerate(needs):  # the sets of the nodes before v, with v and without it
        found += [held | 1 << v for held in found if mask & ~held == 0]
        if len(found) > limit:
            return None
    return by_size(found)
