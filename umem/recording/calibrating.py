"""Workspace that was measured in one step, given to the same operations of another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from umem.events import Event, Op


class Calibrated(NamedTuple):
    """Events with workspace where a measured step ran the same operations.

    ``missing`` are the indexes of the steps without.
    """

    events: list[Event]
    missing: tuple[int, ...]


def calibrate(
    events: list[Event], ends: Sequence[int], measured: Iterable[Sequence[Op]]
) -> Calibrated:
    """Give each step, which ends before the index in ``ends``, the workspace of a measured one.

    Operations are the same where names, phases, arithmetic and bytes are: a step of another
    order or batch gets nothing. What comes after the last end stays as it is.
    """
    known = [([_key(op) for op in ops], [op.workspace_bytes for op in ops]) for ops in measured]
    found: list[Event] = []
    missing = []
    for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        step = events[start:stop]
        keys = [_key(event) for event in step if isinstance(event, Op)]
        workspace = next((sizes for ops, sizes in known if ops == keys), None)
        if workspace is None:
            missing.append(index)
            found += step
        else:
            found += _filled(step, workspace)
    return Calibrated(found + events[len(found) :], tuple(missing))


def _key(op: Op) -> tuple[str, str, int, int]:
    return op.name, op.phase, op.flops, op.traffic_bytes


def _filled(step: list[Event], workspace: list[int | None]) -> Iterable[Event]:
    sizes = iter(workspace)
    for event in step:
        yield event._replace(workspace_bytes=next(sizes)) if isinstance(event, Op) else event
