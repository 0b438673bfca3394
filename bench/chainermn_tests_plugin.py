"""Runs chosen cases of ChainerMN's own tests under umem: a plugin of pytest's.

`chainermn_own_tests.py` loads it into every rank. It gets a file of what to do by the environment,
and writes a line of JSON for every case as it begins and ends, so that those before a hang count.
"""

from __future__ import annotations

import json
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import umem.chainer  # noqa: F401  (before Chainer)

sys.modules.setdefault("mock", unittest.mock)  # which Chainer's tests know under its old name
_job: dict[str, Any] = json.loads(Path(os.environ["CHAINERMN_TESTS_JOB"]).read_text("utf-8"))
_rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
_lines = Path(_job["results"] + _rank).open("a", encoding="utf-8", buffering=1)


def _write(**what: Any) -> None:
    _lines.write(json.dumps(what) + "\n")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the cases that were asked for; or only say what there is for the CPU."""
    if _job["cases"] is None:
        for item in items:
            if item.get_closest_marker("gpu") is None:
                _write(case=item.nodeid)
        items.clear()
        return
    wanted = set(_job["cases"])
    items[:] = [item for item in items if item.nodeid in wanted]


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(case=report.nodeid, broken=str(report.longrepr)[-2000:])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _write(case=nodeid, outcome="hung")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        said = "" if report.passed else str(report.longrepr)[-2000:]
        _write(case=report.nodeid, outcome=report.outcome, said=said)
