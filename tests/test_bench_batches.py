"""bench/batches.py and bench/axes.py run, and what they promise holds in their kept results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import RESULTS, written


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


def kept(name: str) -> list[dict[str, Any]]:
    return list(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"])


def test_no_kept_search_takes_more_than_twelve_replays() -> None:
    rows = kept("batches")
    assert len({row["model"] for row in rows}) == 13
    assert len(rows) == 65
    found = [row for row in rows if row["batch"]]
    assert all(row["replay_count"] <= 12 for row in found)
    assert all(row["scaled"] != "neither fits" for row in found)
    assert sum(row["passed"] for row in found) >= 0.95 * len(found)


def test_the_kept_peaks_over_axes_are_within_two_percent() -> None:
    assert all(abs(row["error_percent"]) <= 2 for row in kept("axes"))
