"""bench/choice_live.py runs, and says what it promises."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import written

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed"),
]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
def test_lines_that_are_said_to_fit_are_trained_on_cupy(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "choice_live.py", "--quick")
    assert report["bench"] == "choice_live" and report["simulated"] is True
    assert "(simulated)" in printed
    (row,) = report["rows"]
    assert row["said"] == len(row["lines"]) > 3 and row["trained"] == row["said"]
    for line in row["lines"]:
        assert line["error"] is None and line["simulated_live_seconds"] > 0
