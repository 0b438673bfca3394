"""bench/dynamic.py runs, and small programs keep the bits of plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_programs_whose_graph_never_comes_back_have_the_bits_of_plain_ones(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "dynamic.py", "--quick")
    rows = report["rows"]
    assert {row["budget"] for row in rows} == {"a tenth more", "half"} and len(rows) == 8
    assert all(row["identical"] == "yes" for row in rows)
    assert all(row["online_count"] > 0 for row in rows)
    assert all(row["peak_of_budget"] < 1.02 for row in rows if row["budget"] == "a tenth more")
    assert "TreeLSTM" in printed
