"""The traces of all ranks of a run, beside each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umem.as_json import named
from umem.errors import TraceError
from umem.predict.ranks.graph_step import AGGREGATIONS
from umem.printable import short
from umem.trace.analysis.analysis import Analysis, OpTotal
from umem.trace.trace import Trace
from umem.trace.walk import allocations

_RANK = re.compile(r"^(?P<before>.*)\.rank(?P<number>\d+)(?P<after>\..*)?$")
START_BYTES = ROW_BYTES = 4
"""Of a number in an index of CSR, and in the list of the rows that are sent."""


@dataclass(frozen=True)
class RankRow:
    """The bytes and seconds of one rank.

    Attributes:
        rank: its number.
        name: of the file.
        peak_bytes: the most that its tensors and workspace held.
        sent_bytes: the rows of the halo that it sent in a step; None where the trace has no
            graph in parts.
        seconds: of a step, as the host measured; None where times were not recorded.
        ops: by operation and phase, over all steps.
    """

    rank: int
    name: str
    peak_bytes: int
    sent_bytes: int | None
    seconds: float | None
    ops: tuple[OpTotal, ...]


@dataclass(frozen=True)
class RankedTraces:
    """All ranks of a run."""

    rows: tuple[RankRow, ...]

    @property
    def largest(self) -> RankRow:
        """The rank that held most."""
        return max(self.rows, key=lambda row: row.peak_bytes)

    @property
    def sent_bytes(self) -> int | None:
        """The bytes that all ranks sent in a step; None where a rank's are unknown."""
        known = [row.sent_bytes for row in self.rows if row.sent_bytes is not None]
        return sum(known) if len(known) == len(self.rows) else None

    def to_json(self) -> dict[str, Any]:
        """Return it for a JSON file."""
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
    """The run that a file is of, and the rank; None where its name has none.

    >>> rank_of(Path("out/run.rank3.umem.gz"))
    ('run.umem.gz', 3)
    """
    found = _RANK.match(path.name)
    if found is None:
        return None
    return f"{found['before']}{found['after'] or ''}", int(found["number"])


def rank_files(paths: Sequence[Path]) -> list[Path] | None:
    """The files of all ranks of one run, in order; None where these are no ranks.

    Args:
        paths: files; or one folder, in which ``umem run -n N --record`` wrote.

    Raises:
        TraceError: there are files of several runs, or a rank is missing.
    """
    if len(paths) == 1 and paths[0].is_dir():
        found = sorted(path for path in paths[0].iterdir() if rank_of(path) is not None)
        if not found:
            return None
    else:
        found = list(paths)
    ranks = [rank_of(path) for path in found]
    named_ranks = [rank for rank in ranks if rank is not None]
    is_folder = len(paths) == 1 and paths[0].is_dir()
    if len(named_ranks) < len(found) or (len(found) < 2 and not is_folder):
        return None
    _check_whole(named_ranks)
    return [path for _, path in sorted(zip((rank for _, rank in named_ranks), found, strict=True))]


def _check_whole(ranks: Sequence[tuple[str, int]]) -> None:
    """Refuse traces of several runs, or of some ranks only."""
    runs = sorted({run for run, _ in ranks})
    if len(runs) > 1:
        names = ", ".join(map(short, runs))
        raise TraceError(f"traces of ranks of several runs: {names}; name those of one")
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
    """The rows of the halo that a rank sent in a step; None where it had no graph in parts.

    Each product with the adjacency sends the rows of the rank's list once.
    """
    allocs = allocations(trace.events).values()
    starts = [a.nbytes for a in allocs if a.label == "PartAggregation.starts"]
    if not starts:
        return None
    nodes = starts[0] // START_BYTES - 1
    rows = sum(a.nbytes for a in allocs if a.label == "PartAggregation.sent") // ROW_BYTES
    made = [op.writes[0] for op in trace.ops if op.name in AGGREGATIONS and op.writes]
    widths = sum((access.stop - access.start) // max(1, nodes) for access in made)
    return rows * widths // max(1, trace.step_count)
