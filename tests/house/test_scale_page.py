"""docs/scale.md says what the kept results say, and its example prints what it shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import RESULTS, module, written
from project import ROOT

from umem.compat.installation import find_package

PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
needs_parts = pytest.mark.skipif(
    find_package() is None or find_spec("pymetis") is None,
    reason="needs Chainer and pymetis (umem's extra: mpi)",
)


@needs_parts
def test_the_table_of_the_page_is_that_of_the_kept_result() -> None:
    result = json.loads((RESULTS / "papers100m.json").read_text(encoding="utf-8"))
    assert "\n".join(module("papers100m").page_lines(result)) in PAGE


@needs_parts
@pytest.mark.thorough
def test_the_kept_result_is_what_the_model_says_today() -> None:
    """The halo is that of the result: only cutting large graphs again would measure it."""
    result: dict[str, Any] = json.loads((RESULTS / "papers100m.json").read_text(encoding="utf-8"))
    halos = {row["like"]: row["halo"] for row in result["rows"]}
    again = module("papers100m").simulated(halos)
    for row, kept in zip(again, result["rows"], strict=True):
        for name in ("peak_gib", "sent_gib", "compute_seconds", "exchange_seconds", "seconds"):
            assert row[name] == pytest.approx(kept[name], rel=0.03), (name, row)


@needs_parts
@pytest.mark.thorough
def test_the_script_runs(tmp_path: Path) -> None:
    report, printed = written(tmp_path, "papers100m.py", "--quick")
    assert report["simulated"] is True and "GiB" in printed
    low, high = (row for row in report["rows"] if row["ranks"] == 128)
    assert low["halo"] < high["halo"] and low["seconds"] < high["seconds"]


@needs_parts
def test_the_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    ((code, expected),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
