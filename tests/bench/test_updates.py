"""bench/updates.py runs, and compares every rule with itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_scripts import written

from umem.compat.installation import find_package
from umem.trace.analysis.updating import CHUNKED_RULES

pytestmark = pytest.mark.thorough


@pytest.mark.skipif(find_package() is None, reason="no Chainer")
def test_every_rule_is_updated_whole_and_in_chunks(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "updates.py", "--quick")
    assert {*CHUNKED_RULES, "AMSBound"} <= {row["rule"] for row in report["rows"]}
    for row in report["rows"]:
        assert len(row["seconds"]["whole"]) == len(row["seconds"]["chunked"]) == 3
        assert row["workspace_bytes"]["chunked"] < 1.5 * 2**20
        assert row["workspace_bytes"]["whole"] >= row["parameter_bytes"]
    assert "Adam takes" in printed
