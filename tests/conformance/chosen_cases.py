"""A plugin of pytest's that runs chosen cases, and writes a line of JSON as each begins and ends.

So those before a crash or a hang count. A file says what to do: which ``cases``, or None to only
list what there is, and where the ``results`` go.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest


def name_of(nodeid: str) -> str:
    """Return a case's name without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", nodeid)


def _ending(longrepr: object) -> str:
    """Return the end of a failure's text, without where this machine keeps its packages."""
    return str(longrepr).replace(f"{sys.prefix}/", "")[-2000:]


class ChosenCases:
    """Keeps the cases that were asked for.

    Args:
        cases: their names; None for a list of all.
        results: the file of lines.
    """

    def __init__(self, cases: list[str] | None, results: Path) -> None:
        self._wanted = None if cases is None else set(cases)
        self._lines = results.open("a", encoding="utf-8", buffering=1)

    def _write(self, **what: Any) -> None:
        self._lines.write(json.dumps(what) + "\n")

    @pytest.hookimpl(trylast=True)  # after the options -k and -m
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._wanted is None:
            for item in items:
                marks = sorted({mark.name for mark in item.iter_markers()})
                self._write(case=name_of(item.nodeid), marks=marks)
            items.clear()
        else:
            items[:] = [item for item in items if name_of(item.nodeid) in self._wanted]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(case=report.nodeid, broken=_ending(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._write(case=name_of(nodeid), phase="start")

    def pytest_runtest_logreport(self, report: Any) -> None:
        said = "" if report.passed else _ending(report.longrepr)
        self._write(
            case=name_of(report.nodeid),
            phase=report.when,
            outcome=report.outcome,
            said=said,
            seconds=round(report.duration, 3),
        )
