"""The benchmark of umem's import runs and writes what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[1]


def test_import_time_quick(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/import_time.py"), "--quick", "--json", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    numpy, umem = result["rows"]
    assert [numpy["import"], umem["import"]] == ["numpy", "umem"]
    assert len(numpy["seconds"]) == len(umem["seconds"]) == 3
    assert numpy["added_seconds"] == 0
    assert umem["passed"] == (umem["added_seconds"] <= result["limit_seconds"] == 0.1)
