"""bench/data_cache.py runs, and its optimum is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_scripts import module, written

pytestmark = pytest.mark.thorough


def test_hits_are_mins_and_no_way_is_above_the_optimum(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "data_cache.py", "--quick")
    parts = {part: [r for r in report["rows"] if r["part"] == part] for part in ("equal", "sizes")}
    assert all(row["exact"] == row["cases"] for row in parts["equal"])
    ways = ("next-use", "lru", "cost", "first fixed subset", "best fixed subset")
    assert all(row[way] <= row["optimum"] + 1e-6 for row in parts["sizes"] for way in ways)
    assert "of the optimum's bytes" in printed


def test_the_optimum_for_items_of_one_size_is_beladys_min() -> None:
    bench = module("data_cache")
    rng = np.random.default_rng(0)
    for _ in range(10):
        asked = rng.integers(0, 6, 30).tolist()
        room = int(rng.integers(1, 6))
        found = bench.optimum([100] * 6, asked, 100 * room)
        assert round(found) == 100 * bench.most_hits(asked, room)
