"""bench/eight_bit.py runs, and finds what it promises where that does not hang on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, run, written

from umem.compat.installation import find_package

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_package() is None, reason="no Chainer")]


def test_states_codes_and_losses_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "eight_bit.py", "--quick")
    parts = {part: [row for row in report["rows"] if row["part"] == part] for part in
             ("update", "training", "codes")}  # fmt: skip
    for row in parts["update"]:
        assert len(row["seconds"]) == 3 and row["ratio"] > 0
        if row["path"] != "Chainer":
            most = 2.05 if row["rule"] == "Adam" else 1.03
            assert row["state_bytes"] <= most * row["elements"]
            assert row["temporary_bytes"] < 2 << 20
    assert {row["network"] for row in parts["training"]} == {"language", "pictures"}
    for row in parts["training"]:
        assert row["small"] != row["whole"] and abs(row["change"]) < 0.02
        assert row["quantized_share"] > 0.9
    assert [row["wrong"] for row in parts["codes"]] == [0, 0]
    assert min(row["ties"] for row in parts["codes"]) > 20
    assert "Adam8bit keeps 2.03 bytes an element" in printed


def test_a_python_without_bitsandbytes_is_said() -> None:
    done = run("eight_bit.py", "--quick", "--bitsandbytes", "/usr/bin/false")
    assert done.returncode == 1 and "bitsandbytes does not run there" in done.stderr


def test_the_answer_is_of_the_rows() -> None:
    bench = module("eight_bit").BENCH
    rows = [
        {"part": "update", "rule": "Adam", "path": "NumPy", "ratio": 2.5, "count": 1,
         "state_bytes": 20, "elements": 10},
        {"part": "training", "network": "one", "seed": 0, "whole": 1.0, "small": 1.02,
         "change": 0.02},
        {"part": "codes", "values": 1000, "wrong": 3},
    ]  # fmt: skip
    assert bench.answer({"rows": rows}) == (
        "Adam8bit keeps 2.00 bytes an element and takes 2.50 without of the time of Chainer's "
        "Adam; over the seeds the loss on what is held out changes by +2.0 % in the mean (+2.0 % "
        "for a seed); 3 of 1,000 codes are not the nearest."
    )
    assert bench.notes({"rows": rows}) == ["Mean loss within 1.0 % over the seeds: one missed."]
