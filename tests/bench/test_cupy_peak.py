"""bench/cupy_peak.py runs, and what is predicted of a step is what CuPy takes for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench_scripts import RESULTS, written
from software_programs import needs_compiler, needs_cupy

pytestmark = [pytest.mark.thorough, needs_compiler, needs_cupy]
KEYS = "in_use_bytes", "reserved_bytes", "simulated_seconds"


def check(row: dict[str, Any], keys: tuple[str, ...], most: dict[str, float]) -> None:
    for key in keys:
        for place in ("NumPy", "CuPy"):
            error = row[f"{key}_from_{place}"] / row[key] - 1
            assert 100 * error == pytest.approx(row[f"{key}_error_{place}"])
            assert abs(error) <= most[key], (row["network"], row["precision"], key, place)


def test_what_is_predicted_of_a_step_is_what_the_real_cupy_takes(tmp_path):
    report, printed = written(tmp_path, "cupy_peak.py", "--quick")
    assert [row["precision"] for row in report["rows"]] == ["float32", "half"]
    assert report["simulated"] is True and "simulated" in printed
    for row in report["rows"]:
        check(row, KEYS, dict(zip(KEYS, (0.02, 0.08, 0.15), strict=True)))


def test_the_result_that_is_shown_is_of_a_dozen_networks_and_close_for_each():
    rows = json.loads((RESULTS / "cupy_peak.json").read_text())["rows"]
    assert len({row["network"] for row in rows}) >= 12
    for row in rows:
        most = {"in_use_bytes": 0.02 if row["precision"] == "float32" else 0.04}
        check(row, ("in_use_bytes", "simulated_seconds"), {**most, "simulated_seconds": 0.15})
