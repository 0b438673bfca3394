"""bench/planners.py runs, and says what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

needs_chainer = pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer")
ROOT = Path(__file__).resolve().parents[1]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "planners.py"), *args],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@needs_chainer
def test_the_bench_plans_a_network_and_is_never_better_than_the_optimum(tmp_path):
    path = tmp_path / "report.json"
    done = run("--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["bench"] == "planners" and report["simulated"] is True
    (row,) = report["rows"]
    figures = row["figures"]
    assert row["network"] == "GoogLeNet" and abs(row["#V"] - figures["nodes_published"]) <= 1
    for name in ("approx", "chen"):
        for model in ("paper", "saved"):
            peak = figures[f"{model}_{name}_gb"]
            assert 0 < peak < figures[f"{model}_keep_all_gb"]
    assert figures["saved_approx_gb"] < figures["published_approx_gb"]
    optimum = json.loads((tmp_path / "report-optimum.json").read_text())
    for small in optimum["rows"]:
        assert small["overhead"] >= small["bound"] - 1e-6
        if small["status"] == "optimal":
            assert small["overhead"] >= small["optimum"] - 1e-6
    assert "GoogLeNet" in done.stdout and "optimal" in done.stdout


@needs_chainer
def test_nonsense_gets_a_clear_error():
    done = run("--network", "AlexNet")
    assert done.returncode != 0 and "Error" in done.stderr and "Traceback" not in done.stderr
