"""bench/parallel_graph.py runs, and what it says of bits and bytes holds on small graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written
from mpi_programs import needs_ranks

pytest.importorskip("pymetis", reason="a graph is cut by pymetis (umem's extra: mpi)")
pytestmark = [pytest.mark.thorough, needs_ranks]


def test_two_ranks_have_the_bits_of_one_and_send_what_is_planned(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "parallel_graph.py", "--quick")
    names = ("communities", "R-MAT", "half across")
    rows = {(row["graph"], row["ranks"]): row for row in report["rows"]}
    assert rows.keys() == {(name, ranks) for name in names for ranks in (1, 2)}
    assert all(row["identical"] == "yes" and row["as_planned"] == "yes" for row in report["rows"])
    for name in names:
        assert rows[name, 1]["sent_mb"] == 0 < rows[name, 2]["sent_mb"]
        assert rows[name, 2]["of_one"] < 0.9 < rows[name, 1]["of_one"] == 1
        assert len(rows[name, 2]["seconds"]) == 2
    assert "are the same bits in 6 of 6 rows" in printed
