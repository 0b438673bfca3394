"""Every technique that the library has; a new one is one entry here."""

from __future__ import annotations

from functools import partial

from umem.predict.techniques import hybrid, managed, unmanaged
from umem.predict.techniques import prefetching as lookahead
from umem.predict.techniques import recomputation as budgets
from umem.predict.techniques.technique import Technique

TECHNIQUES = (
    Technique("nothing", True, unmanaged.prepare),
    Technique("hybrid", True, hybrid.prepare),
    Technique("managed", True, managed.prepare),
    Technique("managed, prefetch", True, managed.prepare_prefetch),
    Technique("managed, lookahead", True, lookahead.prepare),
    Technique("recompute to fit", True, budgets.prepare_largest),
    Technique("recompute 75%", True, partial(budgets.prepare, budget="75%")),
    Technique("recompute 50%", True, partial(budgets.prepare, budget="50%")),
    Technique("recompute 25%", True, partial(budgets.prepare, budget="25%")),
    Technique("recompute min", True, partial(budgets.prepare, budget="min")),
    Technique("recompute 50%, managed", True, partial(budgets.prepare_managed, budget="50%")),
    Technique("recompute min, managed", True, partial(budgets.prepare_managed, budget="min")),
    Technique("recompute 50%, lookahead", True, partial(budgets.prepare_lookahead, budget="50%")),
    Technique("recompute min, lookahead", True, partial(budgets.prepare_lookahead, budget="min")),
)
"""What is least to do comes first: it goes first where times are equal."""
