"""bench/distillation.py runs; its student has a quarter of the parameters, and pairs are pairs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from bench_scripts import module, written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="no Chainer"),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="no scikit-learn"),
]


def parameters(width: int) -> int:
    """Of a perceptron of 64 inputs, two hidden layers and 10 outputs."""
    return 65 * width + (width + 1) * width + 10 * (width + 1)


def test_pairs_and_steps_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "distillation.py", "--quick")
    pairs = {row["teacher"]: row for row in report["rows"] if row["part"] == "pairs"}
    assert pairs.keys() == {"one network", "five networks"}
    assert pairs["one network"]["plain"] == pairs["five networks"]["plain"]
    for row in pairs.values():
        assert 0.5 < row["plain"] < 1 and 0.5 < row["of_teacher"] < 1
        assert row["gain"] == pytest.approx(100 * (row["taught"] - row["plain"]))
    steps = {row["way"]: row for row in report["rows"] if row["part"] == "step"}
    assert steps["labels alone"]["ratio"] == 1 and steps["labels alone"]["asked_bytes"] == 0
    assert steps["teacher in float32"]["teacher_bytes"] == 4 * parameters(256)
    assert steps["teacher in float16"]["teacher_bytes"] == 2 * parameters(256)
    layer = 2 * 128 * 256 * 4
    assert layer <= steps["teacher in float32"]["asked_bytes"] < layer + (96 << 10)
    assert "A student with a quarter of the parameters gains" in printed


def test_the_student_has_a_quarter_of_the_parameters_of_the_teacher() -> None:
    bench = module("distillation")
    counts = [sum(p.size for p in bench.made(width, 0).params()) for width in (256, 112)]
    assert counts == [parameters(256), parameters(112)]
    assert 0.24 < counts[1] / counts[0] <= 0.25


def test_the_answer_is_of_the_rows() -> None:
    bench = module("distillation").BENCH
    rows = [
        *(
            {"part": "pairs", "teacher": "one network", "gain": gain, "seed": seed}
            for seed, gain in ((0, 0.4), (3, 0.8))
        ),
        *(
            {"part": "pairs", "teacher": "five networks", "gain": gain, "seed": seed}
            for seed, gain in ((0, 0.1), (3, 0.3))
        ),
        {"part": "step", "way": "labels alone", "ratio": 1.0, "asked_bytes": 0},
        {"part": "step", "way": "teacher in float32", "ratio": 2.0, "asked_bytes": 300 << 10},
        {"part": "step", "way": "teacher in float16", "ratio": 3.0, "asked_bytes": 900 << 10},
    ]
    assert bench.answer({"rows": rows}) == (
        "A student with a quarter of the parameters gains +0.60 points (standard error 0.20) by "
        "one network and +0.20 points (standard error 0.10) by five networks over the same "
        "student on the labels alone, where a step takes 2.00 to 3.00 of the time."
    )
    assert bench.notes({"rows": rows})[:2] == [
        "At least 0.5 points and more than the standard error: one network met; five networks "
        "missed.",
        "Points gained on the seeds that nothing was chosen on: +0.80 by one network; +0.30 by "
        "five networks.",
    ]
