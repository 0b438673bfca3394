"""The benchmark of the layer's import time runs and writes what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent


def test_compat_import_quick(tmp_path):
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "compat_import.py"), "--quick", "--json", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert [row["condition"] for row in result["rows"]] == ["baseline", "layer"]
    assert all(len(row["seconds"]) == 3 for row in result["rows"])
    assert result["machine"] and result["versions"]["chainer"].startswith("7.8.")
