"""bench/choose_ranks.py runs: what ranks need and send is what was said."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written
from mpi_programs import needs_ranks

pytestmark = [pytest.mark.thorough, needs_ranks]


def test_bytes_are_exact_and_peaks_near(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "choose_ranks.py", "--quick", "--only", "R-MAT")
    assert [row["ranks"] for row in report["rows"]] == [2, 4]
    for row in report["rows"]:
        assert row["bytes_exact"] == "yes"
        # of graphs so small 0.2 MB of Python's own objects are a part that shows
        assert -0.25 < row["said_mb"] - row["peak_mb"] < 0.05
    assert "bytes sent were exact in 2" in printed
