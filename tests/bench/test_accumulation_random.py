"""tests/conformance/accumulation_random.py runs, and a program runs again by its seed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import CONFORMANCE, run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("chainer") is None, reason="no Chainer"),
]
RESULT = CONFORMANCE / "results" / "accumulation_random.json"


def test_some_random_losses_are_judged_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run("accumulation_random.py", "--quick", "--processes", "2", "--json", str(path))
    report = json.loads(path.read_text())
    (row,) = report["rows"]
    judged = sum(each["programs"] + each["skipped"] for each in row["classes"])
    assert judged == 60 == sum(each["programs"] + each["skipped"] for each in row["ways"])
    assert done.returncode == (0 if row["passed"] else 1), done.stderr
    assert "random programs" in done.stdout and len(row["kinds"]) > 20
    assert "Wrong in a later update only: " in done.stdout
    for each in row["failed"]:
        assert each["message"] and each["seed"] < 60


def test_a_program_is_printed_and_run_by_its_seed() -> None:
    first, second = (run("accumulation_random.py", "--program", "3") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout and first.stdout.startswith("# program 3: ")
    assert "def loss(" in first.stdout and "(update" in first.stdout


@pytest.mark.skipif(not RESULT.exists(), reason="the long run has not been made")
def test_the_results_are_of_five_thousand_programs_and_none_fails() -> None:
    (row,) = json.loads(RESULT.read_text())["rows"]
    assert sum(each["programs"] for each in row["classes"]) > 5_000 and row["passed"]
