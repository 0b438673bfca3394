"""bench/host_cost.py runs, and the constants of the virtual GPU are what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import RESULTS, written

from umem._common.specs import COSTS, RANGES

pytestmark = pytest.mark.thorough

PHASES = ("forward", "backward", "update")


def test_a_quick_run_times_every_phase(tmp_path: Path) -> None:
    rows = written(tmp_path, "host_cost.py", "--quick")[0]["rows"]
    assert [row["phase"] for row in rows if row["function"] == "all"] == list(PHASES)
    counts = {(row["function"], row["phase"]): row["op_count"] for row in rows}
    assert counts["relu", "forward"] == counts["relu", "backward"] == 50
    assert counts["MomentumSGD (Linear)", "update"] == 100  # 50 weights and 50 biases
    assert all(row["median_us"] > 0 for row in rows)


@pytest.mark.parametrize("phase", PHASES)
def test_the_constants_are_those_that_were_measured(phase: str) -> None:
    rows: list[dict[str, Any]] = json.loads((RESULTS / "host_cost.json").read_text())["rows"]
    (whole,) = (row for row in rows if (row["function"], row["phase"]) == ("all", phase))
    name = f"python_{phase}"
    assert getattr(COSTS, name) == pytest.approx(1e-6 * whole["median_us"], rel=0.3)
    low, high = RANGES[name]
    assert 0.7 * low <= 1e-6 * whole["low_us"] <= 1e-6 * whole["high_us"] <= 1.3 * high
