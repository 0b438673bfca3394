"""bench/offload.py runs, and a step under Offload has the bits of a plain one."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_package() is None, reason="Chainer is not installed"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux"),
]


def test_an_offloaded_step_holds_less_and_has_the_same_bits(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "offload.py", "--quick")
    rows = {row["way"]: row for row in report["rows"]}
    assert rows["plain"]["saved_of_plain"] == 1 and rows["plain"]["verdict"] is None
    assert rows["offload"]["identical"] == "yes"
    assert rows["offload"]["saved_mb"] < rows["plain"]["saved_mb"]
    assert "of what a plain step has saved in memory" in printed
