"""Every technique that `umem.choose` tries; a new one of the library is one line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from umem.devices.specs import GpuSpec
from umem.errors import StateError
from umem.predict.techniques import capped_workspace as caps
from umem.predict.techniques import changing
from umem.predict.techniques import combinations as together
from umem.predict.techniques import memory_modes as modes
from umem.predict.techniques import offloading as offload
from umem.predict.techniques import prefetching as lookahead
from umem.predict.techniques import recomputation as budgets
from umem.predict.techniques.step_variants import Prepared, StepVariants
from umem.predict.techniques.technique import Technique

ROUNDING = "rounding"
SMALL, HALF, SPLIT, RERUN = together.SMALL, together.HALF, together.SPLIT, together.RERUN
ALL = (SMALL, HALF, SPLIT, RERUN)


def _both(*parts: str) -> Callable[[StepVariants, GpuSpec], Prepared]:
    return partial(together.prepare, parts=parts)


_exact_fit = partial(Technique, leaves_slack=False)

TECHNIQUES = [
    _exact_fit("nothing", True, modes.prepare_unmanaged),
    _exact_fit("hybrid", True, modes.prepare_hybrid),
    _exact_fit("managed", True, modes.prepare_managed),
    _exact_fit("managed, prefetch", True, modes.prepare_prefetched),
    _exact_fit("managed, streaming", True, modes.prepare_streaming),
    _exact_fit("managed, lookahead", True, lookahead.prepare),
    Technique("accumulate to fit", False, changing.accumulation, ROUNDING),
    Technique("workspace", False, caps.prepare, ROUNDING),
    Technique("recompute to fit", True, budgets.prepare_largest),
    Technique("recompute 75%", True, partial(budgets.prepare, budget="75%")),
    Technique("recompute 50%", True, partial(budgets.prepare, budget="50%")),
    Technique("recompute 25%", True, partial(budgets.prepare, budget="25%")),
    Technique("recompute min", True, budgets.prepare_least),
    Technique("recompute min, workspace", False, caps.prepare_least, ROUNDING),
    Technique("offload", True, offload.prepare),
    Technique("recompute, offload to fit", True, offload.prepare_quickest),
    _exact_fit("recompute 50%, managed", True, partial(budgets.prepare_managed, budget="50%")),
    _exact_fit("recompute min, managed", True, partial(budgets.prepare_managed, budget="min")),
    _exact_fit("recompute 50%, lookahead", True, partial(budgets.prepare_lookahead, budget="50%")),
    _exact_fit("recompute min, lookahead", True, partial(budgets.prepare_lookahead, budget="min")),
    Technique("accumulate, recompute min", False, _both(SPLIT, RERUN), ROUNDING),
    Technique("8-bit states", False, changing.eight_bit_states, "8 bits"),
    Technique("8-bit, accumulate", False, _both(SMALL, SPLIT), "8 bits"),
    Technique("8-bit, recompute min", False, _both(SMALL, RERUN), "8 bits"),
    Technique("8-bit, recompute, offload", False, offload.prepare_small_states, "8 bits"),
    Technique("half precision", False, changing.half_precision, "16 bits"),
    Technique("all together", False, _both(*ALL), "8 and 16 bits"),
]
"""All techniques, the least to do first: options with equal times keep this order."""


def register_technique(technique: Technique) -> None:
    """Have `umem.choose` and ``umem choose`` try one more technique, after all others.

    Raises:
        StateError: a technique of that name is registered; the list is unchanged.
    """
    if any(known.name == technique.name for known in TECHNIQUES):
        raise StateError(f"there is a technique {technique.name!r} already: choose another name")
    TECHNIQUES.append(technique)
