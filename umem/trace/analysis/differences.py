"""The differences between two analyses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from umem._common.as_json import named
from umem.trace.analysis.analysis import Analysis, OpTotal, Vram


@dataclass(frozen=True)
class Difference:
    """A figure of two traces; None if a trace does not have it."""

    name: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """Return the second figure minus the first; None if one is missing."""
        return None if self.before is None or self.after is None else self.after - self.before

    def to_json(self) -> dict[str, Any]:
        """Return both figures and the change as JSON values."""
        return named(self, ("before", "after", "change"))


@dataclass(frozen=True)
class OpDifference:
    """The operations of one name and phase in two traces, per step.

    An operation that is missing in one trace counts 0 there.
    """

    name: str
    phase: str
    count: Difference
    seconds: Difference
    allocated_bytes: Difference


@dataclass(frozen=True)
class Comparison:
    """The differences between two traces.

    ``totals`` are per step if both traces have steps (``per_step``), otherwise of the whole traces.
    ``kinds`` are bytes at each trace's own peak. ``common_share`` is the share of operations in
    both, by name and phase: 1.0 if all are. ``caveats`` name the memory that each peak leaves out;
    None for a complete peak.
    """

    per_step: bool
    peak_bytes: Difference
    idle_bytes: Difference
    outliving_bytes: Difference
    seconds: Difference
    op_count: Difference
    kinds: tuple[Difference, ...]
    ops: tuple[OpDifference, ...]
    common_share: float
    caveats: tuple[str | None, str | None]


def compare(before: Analysis, after: Analysis) -> Comparison:
    """Compare two traces; the operations that changed most come first."""
    per_step = bool(before.step_count and after.step_count)
    steps = (before.step_count, after.step_count) if per_step else (1, 1)
    ops = _ops(before, after, steps)
    return Comparison(
        per_step=per_step,
        peak_bytes=Difference("peak", before.peak.total_bytes, after.peak.total_bytes),
        idle_bytes=Difference("not used again", before.peak.idle_bytes, after.peak.idle_bytes),
        outliving_bytes=Difference("outlives its step", _leaked(before), _leaked(after)),
        seconds=_each("host time", [before.seconds, after.seconds], steps),
        op_count=_each("operations", [before.op_count, after.op_count], steps),
        kinds=_kinds(before, after),
        ops=ops,
        common_share=_common_share(ops),
        caveats=(before.caveat, after.caveat),
    )


def vram_share(comparison: Comparison, vram: Vram) -> Difference:
    """Return each peak as a share of a GPU's memory."""
    peak = comparison.peak_bytes
    before, after = ((value or 0) / vram.nbytes for value in (peak.before, peak.after))
    return Difference(f"share of {vram.gpu}'s VRAM", before, after)


def _leaked(analysis: Analysis) -> int:
    return sum(leak.total_bytes for leak in analysis.leaks)


def _each(name: str, pair: Sequence[float | None], steps: tuple[int, int]) -> Difference:
    before, after = (
        None if value is None else value / count for value, count in zip(pair, steps, strict=True)
    )
    return Difference(name, before, after)


def _kinds(before: Analysis, after: Analysis) -> tuple[Difference, ...]:
    first = {kind.kind: kind.total_bytes for kind in before.peak.by_kind}
    second = {kind.kind: kind.total_bytes for kind in after.peak.by_kind}
    kinds = dict.fromkeys((*first, *second))
    return tuple(Difference(kind, first.get(kind, 0), second.get(kind, 0)) for kind in kinds)


def _ops(before: Analysis, after: Analysis, steps: tuple[int, int]) -> tuple[OpDifference, ...]:
    first = {(op.name, op.phase): op for op in before.ops}
    second = {(op.name, op.phase): op for op in after.ops}
    timed = before.seconds is not None, after.seconds is not None
    found = [
        _op(key, (first.get(key), second.get(key)), steps, timed)
        for key in dict.fromkeys((*first, *second))
    ]
    return tuple(sorted(found, key=_size, reverse=True))


def _common_share(ops: Sequence[OpDifference]) -> float:
    counts = [(op.count.before or 0, op.count.after or 0) for op in ops]
    every = sum(map(max, counts))
    return sum(map(min, counts)) / every if every else 1.0


def _size(op: OpDifference) -> tuple[float, float]:
    return abs(op.seconds.change or 0), abs(op.allocated_bytes.change or 0)


def _op(
    key: tuple[str, str],
    pair: tuple[OpTotal | None, OpTotal | None],
    steps: tuple[int, int],
    timed: tuple[bool, bool],
) -> OpDifference:
    """Compare the operations of one name and phase, per step."""
    seconds = [
        (op.seconds if op is not None else 0.0) if has else None
        for op, has in zip(pair, timed, strict=True)
    ]
    return OpDifference(
        *key,
        _each("count", [op.count if op else 0 for op in pair], steps),
        _each("seconds", seconds, steps),
        _each("allocated", [op.allocated_bytes if op else 0 for op in pair], steps),
    )
