"""Runs chosen cases of another project's tests, under a limit of memory: a plugin of pytest's.

`foreign_tests.py` loads it into a process of its own, and gives it a file of what to do by the
environment.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from chosen_cases import ChosenCases

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, of linux/prctl.h
ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)  # no tests without who asked for them
_job: dict[str, Any] = json.loads(Path(os.environ["FOREIGN_TESTS_JOB"]).read_text("utf-8"))
_hard = resource.getrlimit(resource.RLIMIT_AS)[1]
_limit = _job["memory_bytes"] if _hard < 0 else min(_job["memory_bytes"], _hard)
resource.setrlimit(resource.RLIMIT_AS, (_limit, _limit))
for _name in _job["imports"]:
    importlib.import_module(_name)


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(ChosenCases(_job["cases"], Path(_job["results"])))


def pytest_collectstart(collector: Any) -> None:
    """Seed the generators, so that a case named by numbers that are drawn has its name again."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
