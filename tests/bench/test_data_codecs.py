"""bench/data_codecs.py runs, and what it counts adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

pytestmark = pytest.mark.thorough
pytest.importorskip("blosc2")


def test_chunks_rows_and_ways_are_measured(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "data_codecs.py", "--quick")
    tables = {name: [r for r in report["rows"] if r["table"] == name] for name in TABLES}
    assert {name: len(rows) for name, rows in tables.items()} == TABLES
    for row in tables["chunks"]:
        limit = 0.6 if row["kind"] in ("features", "pixels / 255", "counts") else 0.9
        assert row["ratio"] <= limit and row["decode_gb_a_second"]["one"] > 0
        assert len(row["decode_seconds_a_gb"]["two"]) == 2
    for row in tables["rows"]:
        singly, batch = row["decoded_for_used"]["single"], row["decoded_for_used"]["batch"]
        assert batch <= singly <= row["rows_a_block"] and row["ratio"] <= 1
        assert row["rows_a_block"] > 1 or singly <= 1
    assert "features, pixels / 255 and counts shrink to" in printed


TABLES = {"chunks": 15, "rows": 60, "ways": 14}
