"""bench/one_budget.py runs, and one plan is never slower there than recomputation alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_one_plan_is_no_slower_than_recomputation(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "one_budget.py", "--quick")
    rows = {(row["model"], row["way"]): row for row in report["rows"]}
    assert all(row["simulated"] for row in rows.values())
    for model in {model for model, _ in rows}:
        again, both = rows[model, "recompute"]["seconds"], rows[model, "one plan"]["seconds"]
        assert both and (again is None or both <= again * (1 + 1e-9))
    for row in rows.values():
        assert row["seconds"] is None or row["seconds"] >= row["bound_seconds"] * (1 - 1e-9)
    assert "(simulated)" in printed
