"""README's code runs as it stands, and its demo output is the demo's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import printed
from project import ROOT

import umem.chainer

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_start_for_a_gpu_runs_on_the_virtual_one(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    with umem.virtual_gpu("v100-16gb", vram="256MiB"):
        exec(compile(BLOCKS[0], "README block 0", "exec"), names)
    assert float(names["total"]) == 2 * 8192 * 4096
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["umem", "on"] in told and ["mode", "managed,", "limit", "8.0", "GiB"] in told
    assert ["umem", "off"] not in told and not umem.status().on


def test_the_start_for_a_chainer_model_keeps_to_its_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], "README block 1", "exec"), names)
    memory = names["memory"]
    assert memory.measured_bytes is not None and memory.predicted_bytes is not None
    printed = capsys.readouterr()
    assert "a graph of 50 calls: planned by" in printed.out and "out of" not in printed.err


def test_the_readme_is_short_and_its_starts_are_eight_lines() -> None:
    assert len(README.splitlines()) <= 150
    assert "make demo" in README[:600] and "make test" in README[:600]
    assert len(BLOCKS) == 2
    assert all(len(list(filter(str.strip, block.splitlines()))) <= 8 for block in BLOCKS)


def test_every_file_the_readme_links_to_exists() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.thorough
def test_the_table_of_the_readme_is_the_demos_own(tmp_path: Path) -> None:
    """Up to the losses, which may differ in their last digit from one BLAS to another."""
    text = printed("-m", "umem", "demo", "--out", tmp_path / "out", COLUMNS=80)
    said = {line[:73].rstrip() for line in text.splitlines()}
    block = README.split("$ make demo\n")[1].split("```")[0]
    table = block[block.index("simulated v100") : block.index("With all of its VRAM")]
    lines = [line[:73].rstrip() for line in table.splitlines() if line.strip()]
    assert len(lines) > 10
    assert not [line for line in lines if line not in said]
