"""bench/overhead.py runs, and compares every condition with nothing on."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from bench_scripts import written

pytestmark = pytest.mark.thorough


def test_every_condition_is_timed_in_turn_beside_nothing(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "overhead.py", "--quick")
    assert [row["workload"] for row in report["rows"]] == ["residual", "lstm"]
    assert [row["op_count"] for row in report["rows"]] == [293, 4995]
    for row in report["rows"]:
        assert set(row["seconds"]) == {"bare", "off", "record", "stacks", "watch", "live"}
        assert {len(seconds) for seconds in row["seconds"].values()} == {3}
        assert row["ratio_to_off"]["off"] == 1
        pairs = zip(row["seconds"]["live"], row["seconds"]["off"], strict=True)
        assert row["ratio_to_off"]["live"] == statistics.median(a / b for a, b in pairs)
    assert "times as long with a recorder" in printed
