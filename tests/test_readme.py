"""README's code runs as it stands, and its demo output is the demo's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import umem.chainer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_readme_runs(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), names)
    if "total" in names:
        assert float(names["total"]) == 2 * 8192 * 4096  # type: ignore[arg-type]
        return
    printed = capsys.readouterr()
    assert "out of" not in printed.err
    if "memory" in names:  # measured here, within a budget
        memory = names["memory"]
        assert isinstance(memory, umem.chainer.Recompute)
        assert memory.measured_bytes is not None and memory.predicted_bytes is not None
        assert "a graph of 50 calls: planned by" in printed.out
    elif "trace" not in names:  # the diet
        assert printed.out == "Adam8bit 1\n"
    else:
        assert printed.out and all(
            line.startswith("simulated: ") for line in printed.out.splitlines()
        )


def test_the_readme_has_both_commands_and_code_early() -> None:
    first = README.split("## Chainer")[0]
    assert "make demo" in first and "make test" in first
    assert len(BLOCKS) == 5


def test_every_file_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.thorough
def test_the_table_of_the_readme_is_the_demos_own(tmp_path: Path) -> None:
    """Up to the losses, which may differ in their last digit from one BLAS to another."""
    command = [sys.executable, "-m", "umem", "demo", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    printed = {line[:73].rstrip() for line in run.stdout.splitlines()}
    block = README.split("$ make demo\n")[1].split("```")[0]
    table = block[block.index("simulated v100") : block.index("With all of its VRAM")]
    lines = [line[:73].rstrip() for line in table.splitlines() if line.strip()]
    assert len(lines) > 10
    assert not [line for line in lines if line not in printed]
