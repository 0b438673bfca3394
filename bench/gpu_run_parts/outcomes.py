"""A plugin for pytest that writes each test's outcome as a line, so that a cut loses only one.

``-p bench.gpu_run_parts.outcomes``, with the file's name in UMEM_OUTCOMES. For pytest 7 and newer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "UMEM_OUTCOMES"
MOST_WORDS = 2000


def _write(**line: Any) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Say which test begins: one that hangs is known by that."""
    _write(begun=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Write how a test ended; its set-up and its end only where they did not pass."""
    if report.when == "call" or not report.passed:
        why = report.longrepr
        reason = why[2] if isinstance(why, tuple) else str(why or "")
        _write(
            name=report.nodeid,
            state=report.outcome,
            seconds=round(report.duration, 3),
            error=reason[-MOST_WORDS:],
        )


def pytest_collectreport(report: Any) -> None:
    """Write what could not be read: its tests are not run."""
    if report.failed:
        _write(name=report.nodeid, state="failed", error=str(report.longrepr)[-MOST_WORDS:])


def read(path: Path) -> dict[str, Any]:
    """Sort the tests of a file by how they ended; what was begun last may have no end."""
    from gpu_run_parts.calls import read_lines

    found: dict[str, Any] = {"passed": [], "failed": {}, "skipped": {}, "cut": []}
    lines = read_lines(path)
    for line in lines:
        if line.get("state") == "passed":
            found["passed"].append(line["name"])
        elif "state" in line:
            found[line["state"]][line["name"]] = line["error"]
    ended = {line["name"] for line in lines if "name" in line}
    passed = [name for name in found["passed"] if name not in found["failed"]]
    begun = [line["begun"] for line in lines if "begun" in line]
    return {**found, "passed": passed, "cut": [name for name in begun if name not in ended]}
