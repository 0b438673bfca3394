"""bench/advice.py and half_peaks.py run, and what they promise holds there."""

from __future__ import annotations

from importlib.util import find_spec
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
        assert abs(error) <= (5 if row["halved"].startswith("precision") else 1e-6)
    assert len({row["recorded_bytes"] for row in report["rows"]}) == 5


@pytest.mark.thorough
@pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")
@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
def test_a_step_in_halves_is_near_what_is_said_of_it(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "half_peaks.py", "--quick")
    assert "simulated" in printed
    assert [row["table"] for row in report["rows"]] == ["NumPy", "NumPy", "CuPy"]
    for row in report["rows"]:
        assert abs(row["predicted_bytes"] / row["found_bytes"] - 1) <= 0.05
