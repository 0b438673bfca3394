"""bench/advice.py and bench/feature_rows.py run, and what they promise holds there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package


@pytest.mark.thorough
@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
def test_what_half_is_said_to_take_is_what_a_recording_of_half_takes(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "advice.py", "--quick")
    assert "simulated" in printed
    assert [row["halved"] for row in report["rows"]] == [
        "nothing", "batch", "width", "depth", "precision, on NumPy",
    ]  # fmt: skip
    for row in report["rows"]:
        error = 100 * (row["predicted_bytes"] / row["recorded_bytes"] - 1)
        assert row["error_percent"] == pytest.approx(error)
        # NumPy computes halves by float32 copies, which are a tenth of so small a step.
        assert abs(error) <= (12 if row["halved"].startswith("precision") else 1e-6)
    assert len({row["recorded_bytes"] for row in report["rows"]}) == 5


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/io is Linux's")
def test_no_more_is_read_than_the_pages_of_the_rows(tmp_path: Path) -> None:
    report, _ = written(tmp_path, "feature_rows.py", "--quick", "--folder", str(tmp_path))
    if not any(row["umem_bytes"] for row in report["rows"]):
        pytest.skip("this file system keeps its files in memory")
    for row in report["rows"]:
        assert row["row_bytes"] <= row["pages_bytes"]
        assert row["umem_bytes"] <= 1.02 * row["pages_bytes"]
