"""bench/cupy_peak.py runs, and what is predicted on NumPy is what CuPy allocates."""

from __future__ import annotations

import json

import pytest
from bench_scripts import RESULTS, written
from software_programs import needs_compiler, needs_cupy

pytestmark = [pytest.mark.thorough, needs_compiler, needs_cupy]


def test_the_peak_that_is_predicted_is_that_of_the_real_cupy(tmp_path):
    report, printed = written(tmp_path, "cupy_peak.py", "--quick")
    (row,) = report["rows"]
    assert row["same_ops"] and report["simulated"] is False and "measured" in printed
    assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.02)


def test_the_result_that_is_shown_is_of_a_dozen_models_and_close_for_each():
    rows = json.loads((RESULTS / "cupy_peak.json").read_text())["rows"]
    assert len(rows) >= 12
    for row in rows:
        assert row["same_ops"]
        error = 100 * (row["predicted_bytes"] / row["measured_bytes"] - 1)
        assert error == pytest.approx(row["error_percent"]) and abs(error) <= 2
