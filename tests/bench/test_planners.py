"""bench/planners.py, bench/fates.py and bench/planner_speed.py run, and say what they promise."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from bench_scripts import run, written

pytestmark = pytest.mark.thorough

needs_chainer = pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer")


@needs_chainer
def test_the_bench_plans_a_network_and_is_never_better_than_the_optimum(tmp_path):
    report, printed = written(tmp_path, "planners.py", "--quick")
    assert report["bench"] == "planners" and report["simulated"] is True
    (row,) = report["rows"]
    figures = row["figures"]
    assert row["network"] == "GoogLeNet" and abs(row["#V"] - figures["nodes_published"]) <= 1
    for name in ("approx", "chen"):
        for model in ("kusumoto", "saved"):
            peak = figures[f"{model}_{name}_gb"]
            assert 0 < peak < figures[f"{model}_keep_all_gb"]
    assert figures["saved_approx_gb"] < figures["published_approx_gb"]
    optimum = json.loads((tmp_path / "report-optimum.json").read_text())
    for small in optimum["rows"]:
        assert small["overhead"] >= small["bound"] - 1e-6
        if small["status"] == "optimal":
            assert small["overhead"] >= small["optimum"] - 1e-6
    assert "GoogLeNet" in printed and "optimal" in printed


@needs_chainer
def test_nonsense_gets_a_clear_error():
    done = run("planners.py", "--network", "AlexNet")
    assert done.returncode != 0 and "Error" in done.stderr and "Traceback" not in done.stderr


def test_the_time_of_plans_is_measured_under_both_models(tmp_path):
    report, _ = written(tmp_path, "planner_speed.py", "--quick")
    assert report["bench"] == "planner_speed" and report["simulated"] is False
    assert [row["model"] for row in report["rows"]] == ["kusumoto", "saved"]
    for row in report["rows"]:
        assert row["points"] > 1 and 0 < row["least_share_percent"] < 50
        assert min(row[f"{name}_cpu_seconds"] for name in ("first", "half", "pareto")) > 0


def test_plans_of_three_fates_are_between_the_optimum_and_those_of_two(tmp_path):
    report, printed = written(tmp_path, "fates.py", "--quick")
    assert report["bench"] == "fates" and report["simulated"] is True
    for row in [*report["rows"], *report["long"]]:
        alone = [row[key] for key in ("again_alone", "moved_alone") if row[key] is not None]
        assert row["plain"] * (1 - 1e-9) <= row["time"] <= min(alone) * (1 + 1e-9)
    for row in report["rows"]:
        assert row["time"] >= row["bound"] - 1e-6
        if row["status"] == "optimal":
            assert row["time"] >= row["optimum"] - 1e-6
    assert "quicker than recomputation alone" in printed
