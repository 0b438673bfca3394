"""Each page of docs/ that shows code runs as it stands, and prints what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from page_runner import blocks_of
from processes import SUPPORT, python
from project import ROOT
from software_programs import needs_software_gpu

from umem.compat import find_package

DOCS = ROOT / "docs"
KINDS = ("tutorials", "how-to", "explanation", "reference")
WORDS = 36_000
"""Of all pages but the reference."""
WORDS_A_PAGE = 1_800
"""Of a page that is read from its top: neither reference nor explanation."""

PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
}
RUN = [
    name
    for name, text in PAGES.items()
    if any(block.kind in ("python", "console") and not block.why for block in blocks_of(text))
]


@pytest.mark.thorough(every_case=True)
@needs_software_gpu
@pytest.mark.skipif(find_package() is None, reason="no Chainer")
@pytest.mark.parametrize("name", RUN)
def test_a_page_prints_what_it_says(name: str, tmp_path: Path) -> None:
    commands = Path(sys.executable).parent
    done = python("-W", "error", SUPPORT / "page_runner.py", DOCS / f"{name}.md", cwd=tmp_path,
                  PATH=f"{commands}{os.pathsep}{os.environ['PATH']}", COLUMNS=80)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def words(name: str) -> int:
    return len(PAGES[name].split())


def test_the_pages_are_short() -> None:
    """Reference and the generated page of hardware are looked up, not read."""
    read = [name for name in PAGES if not name.startswith("reference/") and name != "hardware"]
    assert sum(map(words, read)) <= WORDS
    long = [name for name in read if not name.startswith("explanation/")]
    assert [name for name in long if words(name) > WORDS_A_PAGE] == []


def test_a_tutorial_says_its_minutes_and_versions_first() -> None:
    tutorials = [name for name in PAGES if name.startswith("tutorials/")]
    assert len(tutorials) == 5
    for name in tutorials:
        first = " ".join(PAGES[name].split("\n\n")[1].split())
        assert "minutes" in first and "Python" in first and "simulated" in first, name


def test_each_page_is_of_one_kind() -> None:
    of_none = [name for name in PAGES if name.partition("/")[0] not in KINDS]
    assert of_none == ["design", "hardware", "index", "words"]


def test_home_leads_to_each_page() -> None:
    """In one click: in its own text, not in the navigation beside it."""
    missing = [name for name in PAGES if name != "index" and f"({name}.md" not in PAGES["index"]]
    assert missing == []
