"""bench/report.py runs, and measures what the views write."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import RESULTS, run, written

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        find_spec("chainer") is None or find_spec("matplotlib") is None,
        reason="no Chainer, or no matplotlib",
    ),
]


def test_the_bench_runs_every_view(tmp_path: Path) -> None:
    report, _ = written(tmp_path, "report.py", "--quick")
    assert report["bench"] == "report" and report["simulated"] is False
    rows = {row["view"]: row for row in report["rows"]}
    assert set(rows) == {"text", "json", "page", "picture", "perfetto", "comparison"}
    for row in rows.values():
        assert row["event_count"] == 2000 and row["passed"] is None  # not of the target's length
        assert row["processor_seconds"] > 0 and row["output_bytes"] > 100
    assert rows["page"]["output_bytes"] < rows["perfetto"]["output_bytes"]


def test_nonsense_gets_a_clear_error() -> None:
    done = run("report.py", "--events", "0")
    assert done.returncode != 0 and "Error" in done.stderr and "Traceback" not in done.stderr


def test_the_results_that_are_shown_met_the_targets_that_the_script_judges() -> None:
    report = json.loads((RESULTS / "report.json").read_text())
    judged = [row for row in report["rows"] if row["passed"] is not None]
    assert len(judged) == 10
    for row in judged:
        assert row["event_count"] == 100_000
        assert row["passed"]
        assert row["view"] != "page" or row["output_bytes"] < 5_000_000
