"""README's code runs as it stands, and its demo output is the demo's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_readme_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    if "total" in names:
        assert float(names["total"]) == 2 * 8192 * 4096  # type: ignore[arg-type]
    else:
        assert "out of" not in capsys.readouterr().err
        assert "trace" in names


def test_the_readme_has_both_commands_and_code_early() -> None:
    first = README.split("## Chainer")[0]
    assert "make demo" in first and "make test" in first
    assert len(BLOCKS) == 2


def test_every_file_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
