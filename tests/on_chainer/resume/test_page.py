"""docs/resume.md: its code runs, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from project import ROOT

PAGE = (ROOT / "docs/resume.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(number: int) -> None:
    exec(compile(BLOCKS[number], f"docs/resume.md block {number}", "exec"), {})


def test_the_trainer_goes_on_and_says_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(0)
    told = capsys.readouterr()
    assert told.out == "10\n" and told.err.endswith("result/snapshots/step-10\n")


def test_the_loop_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(1)
    run(1)
    assert (tmp_path / "out/run/step-20/manifest.json").exists()
    assert len(BLOCKS) == 2
