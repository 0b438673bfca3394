"""bench/planners.py and planner_constants.py run, and say what they promise."""

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
def test_each_constant_is_halved_and_doubled(tmp_path):
    report, printed = written(tmp_path, "planner_constants.py", "--quick")
    assert report["bench"] == "planner_constants" and report["simulated"] is True
    values = {(row["constant"], row["value"] / row["usual"]) for row in report["rows"]}
    assert values == {(f"beam.{name}", by) for name in ("WIDTH", "PROTECTED") for by in (0.5, 2)}
    assert all(row["most_lost"] >= row["mean_change"] for row in report["rows"])
    assert "beam.WIDTH" in printed


@needs_chainer
def test_nonsense_gets_a_clear_error():
    done = run("planners.py", "--network", "AlexNet")
    assert done.returncode != 0 and "Error" in done.stderr and "Traceback" not in done.stderr
