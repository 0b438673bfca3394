"""bench/recompute.py runs, and what it promises holds on two small networks."""

from __future__ import annotations

from typing import Any

import pytest
from bench_scripts import written

pytestmark = pytest.mark.thorough

PLANNED = ("100%", "half", "min", "min, Chen")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report, printed = written(tmp_path_factory.mktemp("recompute"), "recompute.py", "--quick")
    assert "have the same bits" in printed
    return report


def rows(report: dict[str, Any], *modes: str) -> list[dict[str, Any]]:
    found = [row for row in report["rows"] if row["mode"] in modes]
    assert len(found) == len(modes) * 2
    return found


@pytest.mark.slow
def test_the_report_says_where_it_ran_and_what_it_asks(report):
    assert report["bench"] == "recompute" and report["simulated"] is False
    assert {"machine", "versions", "commit", "options"} <= report.keys()
    assert report["question"].endswith("?")


def test_every_kind_of_step_has_the_bits_of_a_plain_one(report):
    assert [row["differ"] for row in report["rows"]] == [[]] * len(report["rows"])


def test_a_plan_is_between_the_floor_and_plain_chainer(report):
    least = [kind for kind in PLANNED if kind != "100%"]
    assert all(0 <= row["reducible"] < 1 for row in rows(report, *least))
    assert all(abs(row["reducible"] - 1) < 0.02 for row in rows(report, "100%"))


def test_the_least_budget_saves_most_of_what_can_be_saved(report):
    assert all(row["reducible"] < 0.6 for row in rows(report, "min"))


def test_a_given_budget_is_kept_and_predicted(report):
    for row in rows(report, "half"):
        assert row["measured_over_budget"] < 1.02
        assert abs(row["predicted_over_measured"] - 1) < 0.05
