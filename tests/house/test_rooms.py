"""The rooms' docstrings: each file that one names is there, and no list of files leaves one out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from project import ROOT

ROOMS = [
    path.parent
    for package in ("umem", "umem_software_gpu")
    for path in sorted((ROOT / package).rglob("__init__.py"))
]
NAMED = re.compile(r"(?<![\w/.-])((?:\w+/)*\w+\.py|(?:\w+/)+)(?![\w/])")
"""A file of Python, or a folder, which ends with a slash; perhaps with the folders it is in."""
ITEM = re.compile(r"^\s*(?:[-*] )?`*\w+(?:\.py|/)`*(?::|  +)", re.MULTILINE)
"""The beginning of a list's line: a file or folder, and behind it a colon or two spaces."""


def docstring(room: Path) -> str:
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""


def named(room: Path) -> set[str]:
    """Return the files and folders that a room's docstring names."""
    return set(NAMED.findall(docstring(room)))


def is_there(room: Path, name: str) -> bool:
    """Tell whether a file is in the room; one with its folders may be elsewhere in the project."""
    has_folders = "/" in name.removesuffix("/")
    places = (room, ROOT / "umem", ROOT) if has_folders else (room,)
    return any((place / name).exists() for place in places)


def contents(room: Path) -> set[str]:
    """Return the modules of a room, and the packages in it."""
    files = {path.name for path in room.glob("*.py")} - {"__init__.py"}
    return files | {f"{path.parent.name}/" for path in room.glob("*/__init__.py")}


def room_name(room: Path) -> str:
    return str(room.relative_to(ROOT))


@pytest.mark.parametrize("room", ROOMS, ids=room_name)
def test_a_room_names_files_that_are_there(room: Path) -> None:
    assert not {name for name in named(room) if not is_there(room, name)}


WITH_LISTS = [room for room in ROOMS if ITEM.search(docstring(room))]


@pytest.mark.parametrize("room", WITH_LISTS, ids=room_name)
def test_a_list_of_files_leaves_none_out(room: Path) -> None:
    assert not contents(room) - named(room)
