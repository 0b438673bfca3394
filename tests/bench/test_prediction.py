"""bench/prediction.py runs, and what it promises holds on two small models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench_scripts import RESULTS, written

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report, printed = written(tmp_path_factory.mktemp("prediction"), "prediction.py", "--quick")
    assert "of what was measured" in printed
    return report


def test_the_report_says_where_it_ran_and_what_it_asks(report):
    assert report["bench"] == "prediction"
    assert report["question"].startswith("How near is the peak")
    assert {"machine", "versions", "commit", "options"} <= report.keys()


def test_the_peak_of_a_larger_batch_is_predicted_and_not_too_low(report):
    assert len(report["rows"]) == 2
    for row in report["rows"]:
        error = 100 * (row["predicted_bytes"] / row["measured_bytes"] - 1)
        assert row["error_percent"] == pytest.approx(error)
        assert -2 <= error <= 5
        assert row["passed"]


def test_the_results_that_are_shown_keep_the_promise_for_twelve_models_and_more():
    rows = json.loads((RESULTS / "prediction.json").read_text())["rows"]
    assert len(rows) >= 12
    assert all(-2 <= row["error_percent"] <= 5 for row in rows)
