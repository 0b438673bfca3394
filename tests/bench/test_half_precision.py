"""bench/half_precision.py runs, and finds what does not hang on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, written

from umem.compat.installation import find_package

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_package() is None, reason="no Chainer")]


def test_memory_times_and_losses_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "half_precision.py", "--quick")
    parts = {part: [row for row in report["rows"] if row["part"] == part] for part in
             ("step", "training", "recovery")}  # fmt: skip
    assert len(parts["step"]) == 6
    for row in parts["step"]:
        assert len(row["seconds"]) == 1 and row["ratio"] > 0
        if row["technique"] == "saved in bfloat16":
            assert row["less"] > 0
    for row in parts["training"]:
        assert row["losses"]["half precision"] != row["losses"]["float32"]
        assert abs(row["changes"]["half precision"]) < 0.1
    for row in parts["recovery"]:
        assert row["skipped_steps"] + row["count"] == row["steps"]
        assert row["skipped_steps"] > 20 and row["last"] < row["first"]
    assert "Half precision takes" in printed


def test_the_answer_is_of_the_rows() -> None:
    bench = module("half_precision").BENCH
    rows = [
        {"part": "step", "network": "one", "technique": "half precision", "ratio": 1.25,
         "less": 0.4},
        {"part": "step", "network": "one", "technique": "saved in bfloat16", "ratio": 1.1,
         "less": 0.3},
        {"part": "training", "network": "one", "losses": {"float32": 2.0, "half precision": 2.1}},
    ]  # fmt: skip
    assert bench.answer({"rows": rows}) == (
        "Half precision takes 40.0 % less memory at the peak and 1.25 of the time of float32 on "
        "this CPU, activations saved in bfloat16 30.0 % less and 1.10 of the time; over the seeds "
        "the mean loss on what is held out changes by +5.0 %."
    )
