"""What pages of docs/ show runs, and prints what stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import python
from project import ROOT

from umem.compat import find_package

pytestmark = pytest.mark.skipif(find_package() is None, reason="no Chainer")
COUNTS = {"distillation": 1, "layers": 2, "offload": 4, "quantization": 2, "small-states": 2}
"""Programs of each page."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


BLOCKS = {
    f"{name}-{number}": block
    for name in COUNTS
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page(name), re.DOTALL)
    )
}


@pytest.mark.thorough
@pytest.mark.parametrize(("program", "printed"), BLOCKS.values(), ids=BLOCKS.keys())
def test_the_page_prints_what_it_says(program: str, printed: str, tmp_path: Path) -> None:
    done = python("-W", "error", "-c", program, cwd=tmp_path)
    assert done.stdout == printed, done.stderr


@pytest.mark.parametrize("name", COUNTS)
def test_every_program_of_the_page_is_among_them(name: str) -> None:
    found = sum(key.rpartition("-")[0] == name for key in BLOCKS)
    assert found == page(name).count("```python") == COUNTS[name]
