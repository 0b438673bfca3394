"""The examples of docs/data.md run, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import printed
from project import ROOT

from umem.compat import find_package

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.skipif(find_package() is None, reason="Chainer is not installed")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_prints_what_the_page_says(number: int, tmp_path: Path) -> None:
    code, expected = BLOCKS[number]
    assert printed("-c", code, cwd=tmp_path) == expected


def test_every_example_is_run() -> None:
    assert BLOCKS and len(BLOCKS) == PAGE.count("```python")
