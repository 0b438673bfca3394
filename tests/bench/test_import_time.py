"""The benchmark of umem's import runs and writes what it measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

pytestmark = pytest.mark.thorough


def test_import_time_quick(tmp_path: Path) -> None:
    result, _ = written(tmp_path, "import_time.py", "--quick")
    numpy, umem = result["rows"]
    assert [numpy["import"], umem["import"]] == ["numpy", "umem"]
    assert len(numpy["seconds"]) == len(umem["seconds"]) == 3
    assert numpy["added_seconds"] == 0
    assert umem["passed"] == (umem["added_seconds"] <= result["limit_seconds"] == 0.1)
