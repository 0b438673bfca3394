"""The loop of docs/how-to/resume-training.md, run again, continues from its last snapshot."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runner import blocks_of
from project import ROOT

PAGE = (ROOT / "docs/how-to/resume-training.md").read_text(encoding="utf-8")
LOOP = next(block.text for block in blocks_of(PAGE) if "resume_run" in block.text)


def test_the_loop_saves_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(LOOP, "the loop of the page", "exec"), {})
    again: dict[str, object] = {}
    exec(compile(LOOP, "the loop of the page", "exec"), again)
    assert (tmp_path / "out/run/step-20/manifest.json").exists()
    assert again["done"].step == 20  # type: ignore[attr-defined]
