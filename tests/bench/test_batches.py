"""bench/batches.py and bench/axes.py run, and what they promise holds on what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written


@pytest.mark.thorough
def test_the_found_batch_fits_and_the_next_does_not(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "batches.py", "--quick")
    assert "simulated" in printed
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert row["passed"]
        assert row["batch"] == 0 or row["scaled"] == "fits, next not"


@pytest.mark.thorough
def test_a_longer_sequence_is_predicted(tmp_path: Path) -> None:
    report, _ = written(tmp_path, "axes.py", "--quick")
    (row,) = report["rows"]
    error = 100 * (row["predicted_bytes"] / row["recorded_bytes"] - 1)
    assert row["error_percent"] == pytest.approx(error)
    assert abs(error) <= 2
    assert row["flops_equal"]
