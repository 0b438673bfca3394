"""docs/reference has every public name, and what a page loads from the network is found."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import check_site

from umem.cli import COMMANDS, FILES

PYTHON, COMMANDS_PAGE = (
    (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("python", "command-line")
)


def public_names() -> list[str]:
    modules = check_site.PUBLIC
    return [f"{name}.{part}" for name in modules for part in importlib.import_module(name).__all__]


def test_the_reference_has_every_public_name_once() -> None:
    named = re.findall(r"^::: (umem\S+)$", PYTHON, re.MULTILINE)
    assert sorted(named) == sorted([*public_names(), "umem.errors"])


def test_the_reference_has_every_command_once() -> None:
    named = re.findall(r"^::: mkdocs-click\n    :module: umem\.cli\.(\w+)\n", COMMANDS_PAGE, re.M)
    assert sorted(named) == sorted(FILES.get(name, name) for name in COMMANDS)


def test_public_names_are_found_without_importing_them() -> None:
    assert list(check_site.public_names()) == public_names()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.html", '<link rel="stylesheet" href="https://fonts.example/css">', 1),
        ("a.html", '<script src="//cdn.example/a.js"></script>', 1),
        ("a.html", '<img srcset="a.png 1x, HTTP://example/b.png 2x">', 1),
        ("a.html", "<style>@font-face { src: url( 'https://example/f.woff') }</style>", 1),
        ("a.html", '<p style="background: url(//example/a.png)">', 1),
        ("a.html", '<pre class="mermaid">graph</pre>', 1),
        ("a.css", '@import "https://example/b.css"; a { b: url(http://example/c) }', 2),
        ("a.html", '<a href="https://example/">there</a> https://example/ in the text', 0),
        ("a.html", '<link rel="canonical" href="https://example/"><img src="a.png">', 0),
        ("a.css", "a { b: url(data:image/svg+xml;charset=utf-8,%3Csvg) } c { d: url(e.png) }", 0),
    ],
)
def test_what_comes_from_the_network_is_found(
    tmp_path: Path, name: str, text: str, found: int
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert len(check_site.loads(path)) == found


def test_a_site_that_lacks_a_name_or_loads_a_script_is_told(tmp_path: Path) -> None:
    ids = "".join(f'<h3 id="{name}">' for name in public_names() if name != "umem.enable")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "python.html").write_text(ids, encoding="utf-8")
    (tmp_path / "index.html").write_text('<script src="https://e/a.js">', encoding="utf-8")
    assert list(check_site.problems(tmp_path)) == [
        "index.html loads https://e/a.js",
        "python.html lacks umem.enable: write `::: umem.enable` in docs/reference/python.md",
    ]
