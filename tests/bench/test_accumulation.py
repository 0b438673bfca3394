"""bench/accumulation.py runs, and its networks are within what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = pytest.mark.thorough


@pytest.mark.skipif(find_package() is None, reason="no Chainer")
def test_parts_are_near_the_whole_and_the_fault_of_2024_is_refused(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "accumulation.py", "--quick")
    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert max(row["float64"]) <= 1e-12 and max(row["float32"]) <= 1e-5
        assert row["mean_of_means"] > 0.01 and row["refused"]
    assert "4 of 4 networks are within" in printed
