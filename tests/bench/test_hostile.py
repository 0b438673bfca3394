"""tests/conformance/hostile_traces.py runs, finds what is broken, and its results hold."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import CONFORMANCE, ROOT, run, written

pytestmark = pytest.mark.skipif(
    find_spec("chainer") is None or find_spec("matplotlib") is None,
    reason="no Chainer, or no matplotlib",
)
RESULT = CONFORMANCE / "results" / "hostile_traces.json"
BREAK = """
import sys
sys.path[:0] = [".", "tests/conformance"]
import hostile_traces, umem.cli.report as report
def broken(*_, **__):
    raise KeyError("a fault")
report.analyse = broken
hostile_traces.main(["--count", "12"])
"""


@pytest.mark.thorough
def test_some_hostile_traces_break_nothing(tmp_path: Path) -> None:
    (row,) = written(tmp_path, "hostile_traces.py", "--quick")[0]["rows"]
    assert row["traces"] == 60 and row["commands"] == 120
    assert 20 < row["accepted"] < 110  # some can be read, some cannot
    assert set(row["changes"]) == {"bytes", "text", "values", "sense"}


@pytest.mark.thorough
def test_a_case_runs_again_by_its_number() -> None:
    first, second = (run("hostile_traces.py", "--case", "3") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == second.stdout.splitlines()[0]
    assert first.stdout.startswith("case 3: ") and "-- replay: status " in first.stdout


@pytest.mark.thorough
def test_a_fault_is_found() -> None:
    command = [sys.executable, "-c", BREAK]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 1 and "traceback: KeyError" in done.stdout


@pytest.mark.skipif(not RESULT.exists(), reason="the long run has not been made")
def test_the_results_are_of_twenty_thousand_traces_and_none_broke_anything() -> None:
    report = json.loads(RESULT.read_text())
    (row,) = report["rows"]
    assert row["traces"] >= 20_000 and row["commands"] == 2 * row["traces"]
    assert row["tracebacks"] == row["too_slow"] == row["too_large"] == row["other"] == 0
    assert row["failed"] == []
