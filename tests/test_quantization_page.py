"""What docs/quantization.md shows runs, and prints what stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from umem.compat.installation import find_package

pytestmark = pytest.mark.skipif(find_package() is None, reason="no Chainer")
PAGE = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("program", "printed"), BLOCKS)
def test_the_page_prints_what_it_says(program: str, printed: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == printed, done.stderr


def test_every_program_of_the_page_is_among_them() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 2
