"""What was planned and what came of it, for a person."""

from __future__ import annotations

from umem.chainer.recompute.seen import SeenGraph
from umem.planner import simulate
from umem.planner.referee import Simulation
from umem.units import format_bytes

NAMED = 6
"""So many names are written out."""


def describe(seen: SeenGraph) -> str:
    """One graph: predicted and measured, what is kept and what runs again."""
    history, tape, problem = seen.history, seen.tape, seen.problem
    head = f"a graph of {len(tape.observed)} calls: "
    if seen.plan is None:
        why = history.never or history.refused or "it was not seen often enough yet"
        return f"{head}not planned: {why}"
    plan, constant = seen.plan.solution.plan, seen.plan.solution.constant_bytes
    floor, node = problem.floor
    left_alone = "a plain step fits, and is left as it is"
    rerun, again = history.rerun_seconds, [name for block in plan.recomputed for name in block]
    lines = [
        head + (left_alone if seen.plan.fits else f"planned by {plan.method}"),
        f"  peak: {format_bytes(seen.plan.peak_bytes)} predicted, "
        f"{_or_not(history.measured_bytes)}; {format_bytes(seen.plan.plain_bytes)} predicted "
        f"for a plain step; the floor is {format_bytes(floor)} ({node})",
        f"  parameters, state and inputs: {format_bytes(constant)} of it",
        f"  overhead: {_share(plan.overhead, tape.seconds)} of the forward pass predicted, "
        + ("not measured yet" if rerun is None else f"{_share(rerun, tape.seconds)} measured"),
        f"  kept: {_names(list(plan.kept))}",
        f"  run again: {_names(again)}",
    ]
    stay = [n for n, o in zip(problem.names, tape.observed, strict=True) if not o.again]
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


def curves(seen: SeenGraph) -> tuple[list[int], list[int]]:
    """Predicted bytes over the actions of a step: a plain one, and by the plan."""
    assert seen.plan is not None
    constant = seen.problem.constant_bytes(packs=False, plain=True)
    before = _curve(seen.problem.plain_step, constant)
    if seen.plan.fits:
        return before, before
    solution = seen.plan.solution
    return before, _curve(simulate(solution.graph, solution.plan), solution.constant_bytes)


def _curve(simulation: Simulation, constant: int) -> list[int]:
    return [constant + moment.during_bytes for moment in simulation.timeline]
