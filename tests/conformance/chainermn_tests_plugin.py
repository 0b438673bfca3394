"""Runs chosen cases of ChainerMN's own tests under umem: a plugin of pytest's.

`chainermn_own_tests.py` loads it into every rank, and gives it a file of what to do by the
environment. Some cases ask for ChainerX, a C++ library that Chainer's wheel has not, at once or
after the same on NumPy: they end there, and are said to.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainer_tests_start  # noqa: F401  (before Chainer)
import pytest
from chosen_cases import ChosenCases

ASKS_FOR_CHAINERX = "asked for ChainerX"
_job: dict[str, Any] = json.loads(Path(os.environ["CHAINERMN_TESTS_JOB"]).read_text("utf-8"))
_rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(ChosenCases(_job["cases"], Path(_job["results"] + _rank)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    result = yield
    report = result.get_result()
    if report.failed and _is_for_chainerx(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", ASKS_FOR_CHAINERX


def _is_for_chainerx(error: BaseException) -> bool:
    """Tell what Chainer raises without ChainerX, whose module there is, but empty."""
    if isinstance(error, AttributeError):
        return getattr(error.obj, "__name__", None) == "chainerx"
    return isinstance(error, RuntimeError) and "ChainerX is not available" in str(error)
