"""bench/smaller_layers.py runs; figures are those of closed formulas where there are any."""

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


def test_bytes_operations_and_accuracies_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "smaller_layers.py", "--quick")
    rows = {(row["network"], row["exchange"]): row for row in report["rows"]}
    assert {network for network, _ in rows} == {"perceptron", "convolutional", "table"}
    for row in rows.values():
        assert len(row["forward_seconds"][0]) == len(row["step_seconds"][1]) == 3
        assert 0.5 < row["plain"][0] <= 1 and 0 <= row["at_once"][0] <= 1
        assert row["parameter_bytes"][1] < row["parameter_bytes"][0]
    weights = 64 * 256 + 256 * 256 + 256 * 10
    low = 16 * (64 + 256 + 256 + 256) + 256 * 10
    row = rows["perceptron", "rank 16"]
    assert row["parameter_bytes"] == [4 * (weights + 522), 4 * (low + 522)]
    assert [round(one) for one in row["operations"]] == [2 * weights + 512, 2 * low + 512]  # ReLU
    tied = rows["table", "layers tied"]
    assert tied["parameter_bytes"][0] - tied["parameter_bytes"][1] == 4 * (128 * 128 + 128)
    assert tied["operations"][0] == tied["operations"][1]
    assert "The exchanges leave" in printed


def test_the_answer_is_of_the_rows() -> None:
    bench = module("smaller_layers").BENCH
    rows = [
        {"network": "one", "exchange": "a", "parameter_bytes": [100, 50], "operations": [10, 5],
         "forward_ratio": 0.5, "plain": [0.9, 0.8], "at_once": [0.5, 0.4],
         "plain_later": [0.9, 0.9], "later": [0.9, 0.88]},
        {"network": "two", "exchange": "b", "parameter_bytes": [100, 20], "operations": [10, 20],
         "forward_ratio": 1.5, "plain": [0.9, 0.8], "at_once": [0.9, 0.8],
         "plain_later": [0.9, 0.9], "later": [0.92, 0.9]},
    ]  # fmt: skip
    assert bench.answer({"rows": rows}) == (
        "The exchanges leave 20.0 % to 50.0 % of the bytes of parameters and 50.0 % to 200 % of "
        "the operations, and take 0.500 to 1.50 of the time of a forward pass; the share of digits "
        "that are read changes by -40.0 to 0 points at once, and by -1.00 to +1.00 once both "
        "were trained on."
    )
    assert bench.notes({"rows": rows}) == [
        "Slower on this CPU, with fewer operations or not: two, b (1.50)."
    ]
