"""The examples of docs/data.md run, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from umem.compat.installation import find_package

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_prints_what_the_page_says(number: int, tmp_path: Path) -> None:
    code, expected = BLOCKS[number]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def test_every_example_is_run() -> None:
    assert BLOCKS and len(BLOCKS) == PAGE.count("```python")
