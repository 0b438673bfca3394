"""The figure of docs/words.md is drawn from a step, whose figures are in the order it shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from project import ROOT

pytest.importorskip("umem.chainer")
pytest.importorskip("matplotlib")

DOCS = ROOT / "docs"


@pytest.mark.thorough
def test_the_words_stand_in_the_order_of_the_figure(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("words", DOCS / "images" / "words.py")
    assert spec is not None and spec.loader is not None
    words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(words)
    found = words.measure()
    planned = max(mib for _, mib in found.planned)
    assert found.floor < planned <= found.least < found.peak <= found.reserved
    assert max(mib for _, mib in found.plain) == pytest.approx(found.peak)
    words.draw(found, tmp_path / "words.png")
    assert (tmp_path / "words.png").read_bytes().startswith(b"\x89PNG")


def test_every_word_of_the_page_is_in_the_figure() -> None:
    page = (DOCS / "words.md").read_text(encoding="utf-8")
    figure = (DOCS / "images" / "words.py").read_text(encoding="utf-8")
    for word in ("plain step", "peak", "reserved", "least budget", "floor"):
        assert f"| {word} |" in page and word in figure
