"""Recordings of one step at several sizes, laid side by side.

Tensors are matched by the order in which they are allocated, everything else by its order. Frees
may come in another order, because the garbage collector has its own time: a tensor then lives until
the later of its deaths, so that nothing is used after it and no peak is missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

from umem.errors import ScalingError, TraceError
from umem.printable import quoted
from umem.trace.axes import Nodes, Point, in_order, size_of, size_text
from umem.trace.events import Alloc, Event, Free, Hint, Mark, Op
from umem.trace.walk import numbered_by_birth
from umem.units import format_bytes

NEVER = inf
"""Death of a tensor that is never freed."""
VARIED = (
    "Where shapes vary from step to step, as with sentences or trees, pad them to the longest and "
    "let umem.record_at(step, sizes=(4, 8)) run the step on data of one shape at each size."
)
"""Advice for steps whose shapes vary."""
_NUMBER = re.compile(r"(?<![\w.])\d+(\.\d*)?(e[+-]?\d+)?")
"""A number in a name, as in Chainer's ``_ * 0.125`` of a mean that divides by the batch."""


class Sequenced(NamedTuple):
    """One recording without frees, its tensors numbered in order of allocation.

    ``deaths`` is for each tensor before which event of ``events`` it is freed, ``freed`` the order
    of the frees.
    """

    said: str
    events: list[Event]
    deaths: list[float]
    freed: list[int]


@dataclass(frozen=True)
class Aligned:
    """The same events at each of several sizes, and the frees of all of them.

    ``rows`` has for each event one entry a size; ``frees`` the tensors that are freed before each
    event, and after the last.
    """

    sizes: tuple[str, ...]
    rows: list[tuple[Event, ...]]
    frees: list[list[int]]


def align(recordings: Mapping[Point, list[Event]], axes: tuple[str, ...] = ()) -> Aligned:
    """Align recordings event by event, by ascending size, on a grid along ``axes``.

    Raises:
        ScalingError: they do not do the same; the message names the first operation, or else the
            first tensor, that differs.
        TraceError: one of them uses a tensor that is not there.
    """
    try:
        found = [
            _laid_out(size_text(size_of(point, axes)), recordings[point])
            for point in in_order(recordings)
        ]
    except KeyError as error:
        raise TraceError(f"tensor {error} is used or freed, and is not alive") from None
    last = found[-1]
    for recording in found[:-1]:
        _check_operations(recording, last)
        _check_events(recording, last)
    rows = list(zip(*(recording.events for recording in found), strict=True))
    return Aligned(tuple(r.said for r in found), rows, _frees(found))


def _laid_out(said: str, events: list[Event]) -> Sequenced:
    """Separate a recording's frees from its events, and number tensors by birth."""
    kept: list[Event] = []
    deaths: list[float] = []
    freed: list[int] = []
    for event in numbered_by_birth(events):
        if isinstance(event, Free):
            deaths[event.tensor] = len(kept)
            freed.append(event.tensor)
            continue
        if isinstance(event, Alloc):
            deaths.append(NEVER)
        kept.append(event)
    return Sequenced(said, kept, deaths, freed)


def _frees(recordings: list[Sequenced]) -> list[list[int]]:
    last = recordings[-1]
    deaths = [max(each) for each in zip(*(r.deaths for r in recordings), strict=True)]
    order = {tensor: index for index, tensor in enumerate(last.freed)}
    frees: list[list[int]] = [[] for _ in range(len(last.events) + 1)]
    for tensor in sorted(range(len(deaths)), key=lambda t: (order.get(t, NEVER), t)):
        if deaths[tensor] != NEVER:
            frees[int(deaths[tensor])].append(tensor)
    return frees


# -- do they do the same? ----------------------------------------------------------------------


def _check_operations(one: Sequenced, other: Sequenced) -> None:
    """Compare operations first, as a user can find a difference there in the program."""
    ops = [[e for e in recording.events if isinstance(e, Op)] for recording in (one, other)]
    for number in range(max(map(len, ops))):
        pair = [each[number] if number < len(each) else None for each in ops]
        if _kind(pair[0]) != _kind(pair[1]):
            said = ["the end of the step" if op is None else _name(op) for op in pair]
            raise ScalingError(
                f"the step does not do the same at every size: operation {number + 1} is "
                f"{said[0]} at size {one.said} and {said[1]} at size {other.said}. Record a "
                f"step whose operations do not depend on the size. {VARIED}"
            )


def kinds(events: list[Event]) -> list[tuple[str, str]]:
    """List the operations in order: names without numbers, and phases."""
    return [(_NUMBER.sub("", event.name), event.phase) for event in events if isinstance(event, Op)]


def _kind(op: Op | None) -> tuple[str, str] | None:
    return None if op is None else (_NUMBER.sub("", op.name), op.phase)


def _name(op: Op) -> str:
    return f"{quoted(op.name)} {op.phase}"


def _check_events(one: Sequenced, other: Sequenced) -> None:
    """Raise ScalingError for the first event in which two recordings differ in more than
    figures.
    """
    done = "the start"
    for index in range(max(len(one.events), len(other.events))):
        pair = [r.events[index] if index < len(r.events) else None for r in (one, other)]
        shapes = [_shape(event) for event in pair]
        if shapes[0] != shapes[1]:
            said = [_describe(event) for event in pair]
            raise ScalingError(
                f"the step does not use memory the same way at every size: after {done} comes "
                f"{said[0]} at size {one.said} and {said[1]} at size {other.said}. Record a step "
                f"whose operations do not depend on the size. {VARIED}"
            )
        if isinstance(pair[0], Op):
            done = _name(pair[0])


def _shape(event: Event | None) -> tuple[Any, ...]:
    """Return the properties of an event that must be equal at every size."""
    if isinstance(event, Alloc):
        return "alloc", event.kind, _NUMBER.sub("", event.label)
    if isinstance(event, Op):
        return "op", [a.tensor for a in event.reads], [a.tensor for a in event.writes]
    if isinstance(event, Hint):
        tensors = [a.tensor for a in event.accesses]
        return "hint", event.action, event.place, event.unset, event.overlap, tensors
    return ("mark", event.label) if isinstance(event, Mark) else ("end",)


def _describe(event: Event | None) -> str:
    if isinstance(event, Alloc):
        return f"a tensor {quoted(event.label)} ({event.kind})"
    if isinstance(event, Op):
        return f"{_name(event)} on {len(event.reads)} and {len(event.writes)} tensors"
    if isinstance(event, Hint):
        return f"a hint ({event.action})"
    return f"the mark {quoted(event.label)}" if isinstance(event, Mark) else "nothing more"


# -- does one follow from the other? -----------------------------------------------------------


def check_growth(aligned: Aligned, nodes: Nodes) -> None:
    """Raise ScalingError unless recordings can be of one step at these sizes.

    Args:
        aligned: the recordings.
        nodes: the sizes along each axis.

    Raises:
        ScalingError: two of them are the same but for times and workspace, one is of a larger
            size and does less, or the workspace of an operation was measured in some only.
    """
    _check_workspace(aligned)
    for axis, place, larger in _neighbours(nodes):
        said = [aligned.sizes[place], aligned.sizes[larger]]
        one, other = ([row[n] for row in aligned.rows] for n in (place, larger))
        if [*map(_figures, one)] == [*map(_figures, other)]:
            raise ScalingError(
                f"nothing of the step depends on {axis}: at {said[0]} and {said[1]} it is the "
                "same. Is it one recording twice, or a step that does not use its size?"
            )
        least, most = (sum(map(_handled_bytes, events)) for events in (one, other))
        if most < least:
            raise ScalingError(
                f"the step shrinks as {axis} grows: it allocates and moves {format_bytes(least)} "
                f"at size {said[0]} and {format_bytes(most)} at size {said[1]}. Are the sizes "
                "swapped?"
            )


def _neighbours(nodes: Nodes) -> Iterator[tuple[str, int, int]]:
    """Yield pairs of neighbouring sizes along each axis, at the largest size of the others."""
    stride = prod(map(len, nodes.values()))
    last = stride - 1
    for axis, sizes in nodes.items():
        stride //= len(sizes)
        for count in range(len(sizes) - 1, 0, -1):
            said = quoted(axis) if axis else "the size"
            yield said, last - count * stride, last - (count - 1) * stride


def _figures(event: Event) -> tuple[Any, ...]:
    """Return an event's figures that may depend on the size; times and workspace always vary."""
    if isinstance(event, Alloc):
        return (event.nbytes,)
    if isinstance(event, Op):
        return event.reads, event.writes, event.flops, event.traffic_bytes
    return (event.accesses,) if isinstance(event, Hint) else ()


def _handled_bytes(event: Event) -> int:
    if isinstance(event, Alloc):
        return event.nbytes
    return event.traffic_bytes if isinstance(event, Op) else 0


def _check_workspace(aligned: Aligned) -> None:
    """Raise ScalingError for an operation whose workspace was measured at some sizes only."""
    for row in aligned.rows:
        known = [isinstance(op, Op) and op.workspace_bytes is not None for op in row]
        if isinstance(row[0], Op) and any(known) and not all(known):
            with_, without = aligned.sizes[known.index(True)], aligned.sizes[known.index(False)]
            raise ScalingError(
                f"the workspace of {_name(row[0])} was measured at size {with_} and not at "
                f"size {without}. `umem run --record` measures it in the steps after those that it "
                "keeps, if the run comes to that and they do the same on the same shapes. "
                f"{VARIED}"
            )
