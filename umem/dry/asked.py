"""What a program asked of memory whose contents a dry run does not know."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import PurePath
from types import FrameType

from umem.trace.stacks import is_installed

MOST_READS = 10_000
"""Reads on one line, with nothing else new, after which a loop is taken for one that ends by a
value. Iterative solvers give up earlier: at 1,000 iterations or ten times the unknowns in SciPy's
`cg` and scikit-learn's `Lasso`; 10,000 take a dry run some seconds."""


class AskedTooOften(SystemExit):
    """Ends a program that asks for one value again and again; `line` is where."""

    def __init__(self, line: str) -> None:
        super().__init__(1)
        self.line = line


class AskedCounter(Counter[tuple[str, str]]):
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
        if _is_for_report():
            self.reported += 1
            return
        is_new = key not in self
        super().__setitem__(key, count)
        if is_new:
            self.renew()
        self._since[key[0]] += 1
        if self._since[key[0]] > MOST_READS:
            self.renew()
            raise AskedTooOften(key[0])

    def renew(self) -> None:
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


class Answers(dict[str, float]):
    """Values for lines, as the user names them: by the end of a file's path.

    Attributes:
        used: those that were looked up, as the user has them.
    """

    def __init__(self, given: dict[str, float]) -> None:
        super().__init__(given)
        self.used: set[str] = set()

    def _named(self, line: object) -> str | None:
        return next((given for given in self if _is_end(given, str(line))), None)

    def __contains__(self, line: object) -> bool:
        return self._named(line) is not None

    def __getitem__(self, line: str) -> float:
        given = self._named(line)
        if given is None:
            raise KeyError(line)
        self.used.add(given)
        return super().__getitem__(given)

    @property
    def unused(self) -> list[str]:
        """Return those of lines that asked nothing."""
        return [given for given in self if given not in self.used]


def _is_end(one: str, other: str) -> bool:
    """Tell whether the shorter of two paths is the end of the longer."""
    parts, others = PurePath(one).parts, PurePath(other).parts
    most = min(len(parts), len(others))
    return parts[-most:] == others[-most:]
