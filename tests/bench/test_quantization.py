"""bench/quantization.py runs, and its answer is of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_scripts import module, written

from umem.compat import find_package

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(find_package() is None, reason="no Chainer")]


def test_bytes_accuracy_and_times_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "quantization.py", "--quick")
    parts = {part: [row for row in report["rows"] if row["part"] == part]
             for part in ("whole", "narrow", "time")}  # fmt: skip
    assert {row["network"] for row in parts["whole"]} == {"perceptron", "convolutional"}
    for row in parts["whole"]:
        assert row["asked"] == 360
        # Perceptron: 64 * 256 + 256 * 256 + 2560 weights, biases and scales of 522 rows, 3 inputs.
        small = {"perceptron": 84_480 + 8 * 522 + 24, "convolutional": 52_768 + 8 * 234 + 32}
        assert row["bytes"]["8 bits"]["memory"] == small[row["network"]]
        assert row["bytes"]["8 bits"]["file"] <= 0.27 * row["bytes"]["float32"]["memory"]
        assert abs(row["correct"]["8 bits"] - row["correct"]["float32"]) < 8
    assert len(parts["narrow"]) == 1 and len(parts["time"]) == 4
    assert "In 8 bits a network takes" in printed


def row(part: str, network: str, **more: Any) -> dict[str, Any]:
    return {"part": part, "network": network, "seed": 0, "asked": 100, **more}


def test_the_answer_is_of_the_rows() -> None:
    bench = module("quantization").BENCH
    sizes = {"float32": {"file": 100, "memory": 100}, "8 bits": {"file": 28, "memory": 25}}
    rows = [
        row("whole", "one", correct={"float32": 90, "8 bits": 89}, bytes=sizes),
        row("narrow", "one", width=8,
            correct={"float32": 90, "4 bits": 80, "4 bits, groups": 80, "aware": 84}),
        row("narrow", "one", width=16,
            correct={"float32": 90, "4 bits": 89, "4 bits, groups": 80, "aware": 84}),
        row("time", "one", what="a batch", seconds={"float32": [1.0], "8 bits": [1.5]}),
        row("time", "one", what="a step", seconds={"float32": [1.0], "aware": [1.2]}),
    ]  # fmt: skip
    assert bench.answer({"rows": rows}) == (
        "In 8 bits a network takes 0.280 of a file's bytes and 0.250 of memory's, its accuracy "
        "changes by -1.00 points in the mean of its seeds, and a batch takes 1.50 of the time on "
        "this CPU; with 4 bits, narrow networks that lose 10.0 points by calibration alone get "
        "40.0 % of that back by aware training."
    )
