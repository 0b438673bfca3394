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


def test_live_runs_take_the_time_that_was_predicted(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "choice_live.py", "--quick")
    assert report["bench"] == "choice_live" and report["simulated"] is True
    assert "(simulated)" in printed
    rows = {row["technique"]: row for row in report["rows"]}
    assert {"managed", "hybrid"} <= rows.keys()
    for name in ("managed", "managed, prefetch", "hybrid"):
        steps = rows[name]["simulated_live_steps"]
        assert rows[name]["simulated_live_seconds"] == pytest.approx(sum(steps) / len(steps))
        assert abs(rows[name]["off_percent"]) < 10
