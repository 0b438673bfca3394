"""Reads of memory with unknown contents in a dry run, by the program's line."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from types import FrameType

from umem._common.stacks import is_installed

MOST_READS = 10_000
"""Reads on one line, with no other event, after which a loop counts as waiting for a value.
Iterative solvers give up earlier: SciPy's `cg` after ten iterations an unknown, scikit-learn's
`Lasso` after 1,000. A dry run makes 10,000 reads in some seconds."""


class EndlessReads(SystemExit):
    """Ends a program that reads one value again and again, on the line `line`."""

    def __init__(self, line: str) -> None:
        super().__init__(1)
        self.line = line


class UnknownReads(Counter[tuple[str, str]]):
    """Counts reads of unknown memory, by line and kernel, and stops an endless loop.

    It replaces the dry runtime's ``reads``. Chainer's reads to print and save values are counted
    separately, because no step depends on them.

    Attributes:
        reported: the number of Chainer's reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since: Counter[str] = Counter()
        self.reported = 0

    def __setitem__(self, key: tuple[str, str], count: int) -> None:
        """Count a read of unknown memory by line and kernel; Chainer's for reports separately.

        Raises:
            EndlessReads: the line reads without end.
        """
        if _is_for_report():
            self.reported += 1
            return
        is_new = key not in self
        super().__setitem__(key, count)
        if is_new:
            self.restart_counts()
        self._since[key[0]] += 1
        if self._since[key[0]] > MOST_READS:
            self.restart_counts()
            raise EndlessReads(key[0])

    def restart_counts(self) -> None:
        """Restart the counts, because another event has happened."""
        self._since = Counter()


_REPORTING = tuple(
    os.path.join("chainer", *path)
    for path in (("training", "extensions", ""), ("serializers", ""), ("reporter.py",))
)
"""Parts of Chainer that print, plot and save values: snapshots, logs, mean values of an epoch."""


def _is_for_report() -> bool:
    """Tell whether Chainer itself reads, inside the program's innermost line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_installed(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _REPORTING):
            return True
        frame = frame.f_back
    return False


def is_answered(line: str, place: str) -> bool:
    """Tell whether ``--answer`` names a line, by the end of its path, as the runtime does."""
    return line == place or line.endswith(f"/{place}")


def shortest(lines: Iterable[str]) -> dict[str, str]:
    """Return for each line the shortest end of its path that no other file shares.

    >>> shortest(["/a/b/train.py:3", "/a/c/train.py:3", "/a/c/train.py:5", "/a/net.py:1"]).values()
    dict_values(['b/train.py:3', 'c/train.py:3', 'c/train.py:5', 'net.py:1'])
    """
    paths = {line: PurePath(line.rpartition(":")[0]).parts for line in lines}
    found = {}
    for line, parts in paths.items():
        others = {other for other in paths.values() if other != parts}
        count = next(
            (n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)),
            len(parts),
        )
        found[line] = "/".join(parts[-count:]) + ":" + line.rpartition(":")[2]
    return found
