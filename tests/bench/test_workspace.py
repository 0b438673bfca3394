"""bench/workspace.py runs, and what it says of bits holds on a small network."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
]


def test_a_capped_step_takes_less_and_has_the_same_bits_with_a_plan(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "workspace.py", "--quick")
    rows = {(row["mode"], row["cap"]): row for row in report["rows"]}
    assert rows.keys() == {("plain", ""), ("min", ""), ("alone", "64KiB"), ("min", "64KiB")}
    assert all(row["identical"] == "yes" for row in rows.values())
    assert rows["alone", "64KiB"]["of_raw"] < 0.8
    assert rows["min", "64KiB"]["of_raw"] < rows["min", ""]["of_raw"]
    assert 0 < rows["alone", "64KiB"]["apart"] < 1e-3
    assert "small residual" in printed
