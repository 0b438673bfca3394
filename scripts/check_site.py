"""Checks site/ as `make docs` built it: it loads nothing from the network and lacks no public name.

That every link and reference leads somewhere is what `mkdocs build --strict` holds. What a script
fetches while it runs is not seen here: the theme's asks for mermaid alone, where a page has a
diagram of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (
    "umem",
    "umem.chainer",
    "umem.chainer.layers",
    "umem.chainer.optimizers",
    "umem.compat",
    "umem.planner",
    "umem.dask",
    "umem.data",
    "umem.graphs",
    "umem.onnx",
)
"""The packages and modules whose __all__ is the public interface."""
ELSEWHERE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
ELSEWHERE_IN_CSS = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^"')\s]*)""", re.I)
LOADING = {"src", "srcset", "href", "xlink:href", "data", "poster"}


class _Page(HTMLParser):
    """The ids of a page, and what it loads from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = ELSEWHERE_IN_CSS.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if "mermaid" in given.get("class", "").split():
            self.loads.append("mermaid, which the theme fetches")
        if tag == "a" or given.get("rel") == "canonical":
            return
        self.loads += [
            part.strip()
            for name in LOADING & set(given)
            for part in given[name].split(",")
            if ELSEWHERE.match(part)
        ]


def loads(path: Path) -> list[str]:
    """List what an HTML or CSS file loads from the network."""
    text = path.read_text(encoding="utf-8")
    return ELSEWHERE_IN_CSS.findall(text) if path.suffix == ".css" else _Page(text).loads


def public_names() -> Iterator[str]:
    """Yield the full name of everything in an __all__, which is read and not imported."""
    for module in PUBLIC:
        folder = ROOT.joinpath(*module.split("."))
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from (f"{module}.{name}" for name in ast.literal_eval(node.value))


def problems(site: Path) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a built site."""
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]):
        for what in loads(path):
            yield f"{path.relative_to(site)} loads {what}"
    reference = site / "reference" / "python.html"
    ids = _Page(reference.read_text(encoding="utf-8")).ids
    for name in public_names():
        if name not in ids:
            yield f"{reference.name} lacks {name}: write `::: {name}` in docs/reference/python.md"


if __name__ == "__main__":
    found = list(problems(ROOT / "site"))
    sys.exit("\n".join(f"umem: {line}" for line in found) or 0)
