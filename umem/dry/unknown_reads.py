"""Reads of memory whose contents a dry run does not know, by the program's line."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from types import FrameType

from umem.trace import is_installed

MOST_READS = 10_000
"""Reads on one line, with nothing else new, after which a loop is taken for one that ends by a
value. Iterative solvers give up earlier: at 1,000 iterations or ten times the unknowns in SciPy's
`cg` and scikit-learn's `Lasso`; 10,000 take a dry run some seconds."""


class EndlessReads(SystemExit):
    """Ends a program that asks for one value again and again; `line` is where."""

    def __init__(self, line: str) -> None:
        super().__init__(1)
        self.line = line


class UnknownReads(Counter[tuple[str, str]]):
    """Counts reads of unknown memory, by line and kernel, and stops a loop that has no end.

    It takes the place of the dry runtime's ``reads``. What Chainer reads to print and to save is
    counted apart: no step depends on it.

    Attributes:
        reported: the number of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._since: Counter[str] = Counter()
        self.reported = 0

    def __setitem__(self, key: tuple[str, str], count: int) -> None:
        """Count a read of unknown memory by line and kernel; those for Chainer's reports, apart.

        Raises:
            EndlessReads: the line reads on and on.
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
        """Note that something new has happened."""
        self._since = Counter()


_REPORTING = tuple(
    os.path.join("chainer", *path)
    for path in (("training", "extensions", ""), ("serializers", ""), ("reporter.py",))
)
"""Parts of Chainer that print, plot and save values: snapshots, logs, mean values of an epoch."""


def _is_for_report() -> bool:
    """Tell whether Chainer reads by itself, inside of the program's innermost line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_installed(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _REPORTING):
            return True
        frame = frame.f_back
    return False


def is_answered(line: str, place: str) -> bool:
    """Tell whether ``--answer`` means a line, by the end of its path, as the runtime does."""
    return line == place or line.endswith(f"/{place}")


def shortest(lines: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each line's path that is no other file's.

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
