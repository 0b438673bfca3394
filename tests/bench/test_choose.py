"""bench/choose.py and bench/choice_live.py run, and say what they promise."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import written

from umem.devices.specs import GPUS
from umem.predict.techniques.registry import TECHNIQUES

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("chainer") is None, reason="Chainer is not installed"),
]


def test_it_times_a_choice_for_one_gpu_and_for_all(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "choose.py", "--quick")
    assert report["bench"] == "choose" and report["simulated"] is True
    assert "simulated" in printed
    one, every = report["rows"]
    assert one["techniques"] == len(TECHNIQUES)
    assert every["techniques"] == len(TECHNIQUES) * len(GPUS)
    assert 0 < one["fit"] < one["techniques"], "with too little VRAM some do not fit"
    assert one["cpu_seconds"] > 0 and every["cpu_seconds"] > 0
    assert one["vram_bytes"] < one["peak_bytes"]
    for row in (one, every):
        assert 0 < row["first_cpu_seconds"] < row["cpu_seconds"]


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
