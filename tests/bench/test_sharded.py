"""bench/sharded_state.py runs, and finds what it promises where that does not hang on the size."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import module, written
from mpi_programs import needs_ranks

pytestmark = [pytest.mark.thorough, needs_ranks]


def test_shares_and_bits_are_reported(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "sharded_state.py", "--quick")
    assert [row["optimizer"] for row in report["rows"]] == ["Adam", "MomentumSGD", "Adam8bit"]
    for row in report["rows"]:
        assert row["identical"] == "yes" and 0 <= row["over"] <= 0.02
        assert row["resuming_share"] < 0.9
    assert "The largest rank keeps of the whole state 50.0 % on 2 ranks" in printed


def test_the_answer_is_of_the_rows() -> None:
    bench = module("sharded_state").BENCH
    row = {"ranks": 2, "share": 0.6, "over": 0.1, "identical": "no"}
    said = bench.answer({"rows": [row | {"saving_share": 0.1, "resuming_share": 0.5}]})
    assert "60.0 % on 2 ranks" in said and "10.00% of it" in said and "0 of 1 rows" in said
