"""What was planned and what came of it, for a person."""

from __future__ import annotations

from umem.chainer.recompute.learning import Learned
from umem.chainer.recompute.planning import floor_of, graph_of, plain
from umem.planner import simulate
from umem.planner.referee import Simulation
from umem.units import format_bytes

NAMED = 6
"""So many names are written out."""


def describe(learned: Learned) -> str:
    """One graph: predicted and measured, what is kept and what runs again."""
    head = f"a graph of {len(learned.observed)} calls: "
    if learned.plan is None:
        why = learned.never or learned.refused or "it was not seen often enough yet"
        return f"{head}not planned: {why}"
    plan = learned.plan
    constant = learned.constant(learned.packs)
    size, node = floor_of(learned)
    lines = [
        head
        + (
            "a plain step fits, and is left as it is"
            if learned.fits
            else f"planned by {plan.method}"
        ),
        f"  peak: {format_bytes(learned.peak_bytes or 0)} predicted, "
        f"{_or_not(learned.measured_bytes)}; {format_bytes(learned.keep_all_bytes)} predicted "
        f"for a plain step; the floor is {format_bytes(constant + size)} ({node})",
        f"  parameters, state and inputs: {format_bytes(constant)} of it",
        f"  overhead: {_share(plan.overhead, learned.seconds)} of the forward pass predicted, "
        + (
            "not measured yet"
            if learned.rerun_seconds is None
            else f"{_share(learned.rerun_seconds, learned.seconds)} measured"
        ),
    ]
    again = [name for block in plan.recomputed for name in block]
    lines.append(f"  kept: {_names(list(plan.kept))}")
    lines.append(f"  run again: {_names(again)}")
    stay = [n for n, o in zip(learned.names, learned.observed, strict=True) if not o.again]
    if stay:
        lines.append(f"  cannot run again, and are kept: {_names(stay)}")
    return "\n".join(lines)


def _or_not(count: int | None) -> str:
    return "not measured yet" if count is None else f"{format_bytes(count)} measured"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _names(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = len(names) - NAMED
    text = ", ".join(names[:NAMED])
    return f"{len(names)} calls ({text}{f' and {more} more' if more > 0 else ''})"


def curves(learned: Learned) -> tuple[list[int], list[int]]:
    """Predicted bytes over the actions of a step: a plain one, and by the plan."""
    assert learned.plan is not None
    before = plain(learned)
    if learned.fits:
        return (_curve(before, learned.constant(False)),) * 2
    after = simulate(graph_of(learned, packs=learned.packs), learned.plan)
    return (_curve(before, learned.constant(False)), _curve(after, learned.constant(learned.packs)))


def _curve(simulation: Simulation, constant: int) -> list[int]:
    return [constant + moment.during_bytes for moment in simulation.timeline]
