"""bench/diet.py runs, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_dieted_steps_are_compared_with_what_was_predicted(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "diet.py", "--quick")
    assert report["bench"] == "diet" and report["simulated"] is False
    rows = [row for row in report["rows"] if not row["error"]]
    assert rows and "dieted steps keep to their budget" in printed
    for row in rows:
        assert row["simulated_bytes"] <= row["budget_bytes"] < row["plain_bytes"]
        assert row["kept"] == (row["measured_bytes"] <= row["budget_bytes"])
        assert row["on"] != "nothing" and row["measured_slower"] > 0


def test_its_answer_follows_its_rows() -> None:
    bench = module("diet")
    row = {"error": None, "kept": True, "measured_bytes": 9, "budget_bytes": 10}
    rows = [
        {**row, "measured_slower": 1.0},
        {**row, "kept": False, "measured_bytes": 11, "measured_slower": 1.5},
        {"error": "nothing fits"},
    ]
    assert bench.answer({"rows": rows}) == (
        "1 of 2 dieted steps keep to their budget (the worst is 10.0% over it), for 1.00 to 1.50 "
        "times the processor time of a plain step; for 1 other budgets nothing was found that fits."
    )
