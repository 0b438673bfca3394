"""Runs chosen cases of CuPy's own tests on the software GPU: a plugin of pytest's.

`cupy_own_tests.py` loads it into a process of its own. It gets a file of what to do by the
environment, and writes a line of JSON for every case as it ends, so that those before a crash
count.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import umem

_job: dict[str, Any] = json.loads(Path(os.environ["CUPY_TESTS_JOB"]).read_text(encoding="utf-8"))
_hard = resource.getrlimit(resource.RLIMIT_AS)[1]
_limit = _job["memory_bytes"] if _hard < 0 else min(_job["memory_bytes"], _hard)
resource.setrlimit(resource.RLIMIT_AS, (_limit, _limit))
umem.software_gpu("t4", "4GiB", force=True)
_lines = Path(_job["results"]).open("a", encoding="utf-8", buffering=1)


def _write(**what: Any) -> None:
    _lines.write(json.dumps(what) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the cases that were asked for; or only say what there is."""
    if _job["cases"] is None:
        for item in items:
            _write(case=item.nodeid, marks=sorted({mark.name for mark in item.iter_markers()}))
        items.clear()
        return
    wanted = set(_job["cases"])
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(case=report.nodeid, broken=str(report.longrepr)[-2000:])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _write(case=nodeid, phase="start")


def pytest_runtest_logreport(report: Any) -> None:
    said = "" if report.passed else str(report.longrepr)[-2000:]
    _write(case=report.nodeid, phase=report.when, outcome=report.outcome, said=said)
