"""A plan for one trace of a step, carried over to another trace of the same step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from umem.planner import Plan
from umem.predict.recorded_problem import ForwardPass
from umem.trace.events import TapeEntry

Calls = dict[int, tuple[TapeEntry, bool]]
"""By number: what the tape has of a call, and whether its output lies in an input's memory."""


def calls_of(one: ForwardPass) -> Calls:
    entries = [op.entry for op in one.calls]
    made = [any(a.kind != "stash" for a in made) for made in one.made]
    return {e.number: (e, not new) for e, new in zip(entries, made, strict=True) if e is not None}


def places(one: ForwardPass) -> dict[int, int]:
    """By number, the place of a call."""
    return {op.entry.number: place for place, op in enumerate(one.calls) if op.entry is not None}


def matched(ours: Calls, theirs: Calls) -> dict[int, int]:
    """Which call of one step is which of the other, from the last calls on, input by input.

    A view that only one of them has is passed over: an exporter writes some functions as several
    operators, of which all but one are views.
    """
    found: dict[int, int] = {}
    todo = [(max(ours), max(theirs))]
    while todo:
        a, b = todo.pop()
        if a < 0 or b < 0 or a in found:
            continue
        (left, is_view), (right, is_other_view) = ours[a], theirs[b]
        if is_view and not is_other_view:
            todo.append((left.sources[0], b))
        elif is_other_view and not is_view:
            todo.append((a, right.sources[0]))
        else:
            found[a] = b
            mine, others = left.sources, right.sources
            if len(mine) != len(others):
                mine = tuple(s for s in mine if s >= 0)
                others = tuple(s for s in others if s >= 0)
            todo += zip(mine, others, strict=False)
    return found


def transferred(plan: Plan, mine: ForwardPass, other: ForwardPass) -> tuple[Plan, float]:
    """A plan for ``mine`` as one for ``other``, and the share of calls that have a counterpart.

    What has none, such as a view, goes with the call before it.
    """
    found = matched(calls_of(mine), calls_of(other))
    here, there = places(mine), places(other)
    names = {mine.names[here[a]]: other.names[there[b]] for a, b in found.items()}
    block_of = {names[n]: i for i, block in enumerate(plan.blocks) for n in block if n in names}
    blocks: list[list[str]] = [[] for _ in plan.blocks]
    at = 0
    for name in other.names:
        at = block_of.get(name, at)
        blocks[at].append(name)

    def known(some: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[name] for name in some if name in names))

    left = [
        name
        for name, made in zip(other.names, other.made, strict=True)
        if made and name not in block_of
    ]  # such as what has no gradient
    moved = replace(
        plan,
        blocks=tuple(map(tuple, blocks)),
        kept=(*known(plan.kept), *left),
        recomputed=tuple(known(block) for block in plan.recomputed),
        stashed=known(plan.stashed),
    )
    return moved, len(set(names.values())) / len(other.names)
