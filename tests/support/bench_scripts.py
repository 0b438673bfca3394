"""Runs a benchmark in a process of its own, as a user runs it, or imports its module.

The modules of bench/ and of tests/conformance import each other from their own folders, which are
on the path, at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module as module
from pathlib import Path
from typing import Any

from processes import python
from project import ROOT

BENCH = ROOT / "bench"
RESULTS = BENCH / "results"
CONFORMANCE = ROOT / "tests" / "conformance"
for folder in map(str, (BENCH, CONFORMANCE)):
    if folder not in sys.path:
        sys.path.append(folder)
__all__ = ["BENCH", "CONFORMANCE", "RESULTS", "ROOT", "module", "run", "written"]


def run(script: str, *args: str, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    path = next(path for path in (BENCH / script, CONFORMANCE / script) if path.is_file())
    return python(path, *args, cwd=ROOT, timeout=timeout)


def written(folder: Path, script: str, *args: str) -> tuple[dict[str, Any], str]:
    """Return the JSON that a benchmark writes, and what it prints."""
    path = folder / "report.json"
    done = run(script, *args, "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout
