"""The traces of all ranks of a run: one row of figures a rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem._common.as_json import named
from umem._common.printable import short
from umem.errors import TraceError
from umem.trace.analysis.analysis import Analysis, OpTotal
from umem.trace.trace import Trace
from umem.trace.walk import allocations

_RANK = re.compile(r"^(?P<before>.*)\.rank(?P<number>\d+)(?P<after>\..*)?$")
START_BYTES = ROW_BYTES = 4
"""Bytes of an integer in a CSR row pointer, and in the list of sent rows."""


@dataclass(frozen=True)
class RankRow:
    """The bytes and seconds of one rank.

    Attributes:
        rank: the rank's number.
        name: the name of the trace's file.
        peak_bytes: the most bytes of its tensors and workspace.
        sent_bytes: bytes of the halo that it sent in a step; None for a trace without a graph in
            parts.
        seconds: host time of a step; None if times were not recorded.
        ops: totals by operation and phase, over all steps.
    """

    rank: int
    name: str
    peak_bytes: int
    sent_bytes: int | None
    seconds: float | None
    ops: tuple[OpTotal, ...]


@dataclass(frozen=True)
class RankedTraces:
    """The figures of all ranks of a run."""

    rows: tuple[RankRow, ...]

    @property
    def largest(self) -> RankRow:
        """Return the row of the rank with the largest peak."""
        return max(self.rows, key=lambda row: row.peak_bytes)

    @property
    def sent_bytes(self) -> int | None:
        """Return the bytes that all ranks sent in a step; None if one rank's are unknown."""
        known = [row.sent_bytes for row in self.rows if row.sent_bytes is not None]
        return sum(known) if len(known) == len(self.rows) else None

    def to_json(self) -> dict[str, Any]:
        """Return a dict for a JSON file."""
        return {
            "rank_count": len(self.rows),
            "largest_rank": self.largest.rank,
            "peak_bytes": self.largest.peak_bytes,
            "sent_bytes": self.sent_bytes,
            "ranks": [
                named(row, ("rank", "name", "peak_bytes", "sent_bytes", "seconds"))
                | {"operations": row.ops}
                for row in self.rows
            ],
        }


def rank_of(path: Path) -> tuple[str, int] | None:
    """Return the run and the rank in a file's name; None for a name without a rank.

    >>> rank_of(Path("out/run.rank3.umem.gz"))
    ('run.umem.gz', 3)
    """
    found = _RANK.match(path.name)
    if found is None:
        return None
    return f"{found['before']}{found['after'] or ''}", int(found["number"])


def rank_files(paths: Sequence[Path]) -> list[Path] | None:
    """Return the files of all ranks of one run, in order; None for files without ranks.

    Args:
        paths: files; or one folder, written by ``umem run -n N --record``.

    Raises:
        TraceError: the files belong to several runs, or a rank is missing or repeated.
    """
    is_folder = len(paths) == 1 and paths[0].is_dir()
    found = sorted(filter(rank_of, paths[0].iterdir())) if is_folder else list(paths)
    ranks = [rank_of(path) for path in found]
    named_ranks = [rank for rank in ranks if rank is not None]
    if len(named_ranks) < len(found) or len(found) < (1 if is_folder else 2):
        return None
    _check_whole(named_ranks)
    return [path for _, path in sorted(zip((rank for _, rank in named_ranks), found, strict=True))]


def _check_whole(ranks: Sequence[tuple[str, int]]) -> None:
    """Raise TraceError for traces of several runs, or if a rank is missing or repeated."""
    runs = sorted({run for run, _ in ranks})
    if len(runs) > 1:
        names = ", ".join(map(short, runs))
        raise TraceError(f"the traces belong to several runs: {names}; name one run's traces")
    numbers = {number for _, number in ranks}
    missing = sorted(set(range(max(numbers) + 1)) - numbers)
    if missing or len(numbers) < len(ranks):
        which = ", ".join(map(str, missing)) or "none, but one is named twice"
        raise TraceError(f"traces of {len(ranks)} ranks of {short(runs[0])}; missing: {which}")


def ranked(analyses: Sequence[Analysis], paths: Sequence[Path]) -> RankedTraces:
    """Return a row for each rank, from its analysis and the name of its file."""
    pairs = zip(analyses, paths, strict=True)
    return RankedTraces(tuple(_row(analysis, path) for analysis, path in pairs))


def _row(analysis: Analysis, path: Path) -> RankRow:
    """Return the row of one rank."""
    found = rank_of(path)
    steps = max(1, analysis.step_count)
    seconds = None if analysis.seconds is None else analysis.seconds / steps
    return RankRow(
        0 if found is None else found[1],
        path.name,
        analysis.peak.total_bytes,
        sent_bytes(analysis.trace),
        seconds,
        analysis.ops,
    )


def sent_bytes(trace: Trace) -> int | None:
    """Return the bytes of the halo that a rank sent in a step; None without a graph in parts.

    Each product with the adjacency sends every row of the rank's list once.
    """
    allocs = allocations(trace.events).values()
    starts = [a.nbytes for a in allocs if a.label == "PartAggregation.starts"]
    if not starts:
        return None
    nodes = starts[0] // START_BYTES - 1
    rows = sum(a.nbytes for a in allocs if a.label == "PartAggregation.sent") // ROW_BYTES
    made = [op.writes[0] for op in trace.ops if op.name == "PartAggregation" and op.writes]
    widths = sum((access.stop - access.start) // max(1, nodes) for access in made)
    return rows * widths // max(1, trace.step_count)
