"""docs/design.md is read in ten minutes, and names what is there."""

from __future__ import annotations

import re

from project import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
WALKS = re.findall(r"^## (A\w* .*)\n((?:.+\n|\n(?=\|))+)", PAGE, re.MULTILINE)
NAMES = {path.name for path in ROOT.glob("umem*/**/*") if path.suffix in (".py", ".h")}


def test_it_is_read_in_ten_minutes() -> None:
    assert len(PAGE.split()) <= 1600
    assert len(WALKS) == 3
    for title, walk in WALKS:
        assert 1 < len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 12, title
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert 1 < len(rows) <= 11  # the first is the head


def test_every_file_that_it_names_is_there() -> None:
    paths = re.findall(r"`((?:umem\w*|tests)/[\w./]+\.py)`", PAGE)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [name for name in re.findall(r"`(\w+\.py)`", PAGE) if name not in NAMES] == []


def test_every_room_is_in_it() -> None:
    rooms = {path.parent.name for path in ROOT.glob("umem/*/__init__.py")}
    assert [
        room for room in sorted(rooms) if not re.search(rf"(^  |\*\*){room}\b", PAGE, re.M)
    ] == []
