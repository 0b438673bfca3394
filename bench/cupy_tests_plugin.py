"""Runs chosen cases of CuPy's own tests on the software GPU: a plugin of pytest's.

`cupy_own_tests.py` loads it into a process of its own, and gives it a file of what to do by the
environment.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

from chosen_cases import ChosenCases

import umem

_job: dict[str, Any] = json.loads(Path(os.environ["CUPY_TESTS_JOB"]).read_text(encoding="utf-8"))
_hard = resource.getrlimit(resource.RLIMIT_AS)[1]
_limit = _job["memory_bytes"] if _hard < 0 else min(_job["memory_bytes"], _hard)
resource.setrlimit(resource.RLIMIT_AS, (_limit, _limit))
umem.software_gpu("t4", "4GiB", force=True, devices=8)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(ChosenCases(_job["cases"], Path(_job["results"])))
