"""How often the tests reach for what umem keeps to itself: the less, the freer is its inside."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from project import ROOT

pytestmark = pytest.mark.thorough
TESTS = ROOT / "tests"
CONFORMANCE = TESTS / "conformance"
UMEM = ROOT / "umem"
ALLOWED = 40
"""Fewer than these. A name that a test needs can lose its underscore; a result says more."""
OTHERS = ("chainer.", "cupy.", "numpy.", "np.", "L.", "F.")
"""What others' modules are called in tests; their private names may be umem's as well."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def bound(node: ast.AST) -> str:
    """The name that a node defines or assigns to, as a variable or an attribute."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr if ast.unparse(node.value) in ("self", "cls") else ""
    return ""


def private_names(tree: ast.AST) -> set[str]:
    return {name for name in map(bound, ast.walk(tree)) if is_private(name)}


@cache
def names_of_umem() -> frozenset[str]:
    trees = (ast.parse(path.read_text()) for path in UMEM.rglob("*.py"))
    return frozenset().union(*map(private_names, trees))


def accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of every access to a private name of umem's.

    A name of the tests' own, which a class of the same file sets on itself, is none; a string that
    is an argument may be the name of an attribute, as for monkeypatch, or a program.
    """
    own = private_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names_of_umem() - own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("umem"):
            for name in (alias.name for alias in node.names):
                if is_private(name):
                    yield node.lineno, f"from {node.module} import {name}"
        elif isinstance(node, ast.Call):
            for text in (arg.value for arg in node.args if isinstance(arg, ast.Constant)):
                yield from ((node.lineno, found) for found in in_text(str(text), own))


def in_text(text: str, own: set[str]) -> Iterator[str]:
    if "\n" not in text:
        if text.rpartition(".")[2] in names_of_umem() - own:
            yield repr(text)
        return
    try:
        program = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):  # ValueError: characters that no file may have
        return
    yield from (found for _, found in accesses(program))


def found_in(path: Path) -> list[str]:
    return [
        f"{path.name}:{line}: {text}"
        for line, text in accesses(ast.parse(path.read_text()))
        if not text.strip("'").startswith(OTHERS)
    ]


def test_the_tests_look_at_umem_from_outside() -> None:
    paths = [path for path in sorted(TESTS.rglob("*.py")) if CONFORMANCE not in path.parents]
    found = [access for path in paths for access in found_in(path)]
    assert len(found) < ALLOWED, "\n".join(["private names of umem in tests:", *found])


def test_what_is_counted_is_what_reaches_into_umem() -> None:
    name = min(names_of_umem())
    program = f"""
import umem
from umem.memory import {name}
class Own:
    def __init__(self):
        self._mine = chainer.{name}
        umem.x.{name}(self._mine)
monkeypatch.setattr(umem, "{name}", None)
run('''
umem.y.{name}
''')
"""
    texts = [text for _, text in accesses(ast.parse(program))]
    assert sorted(texts) == sorted(
        [
            f"from umem.memory import {name}",
            f"chainer.{name}",
            f"umem.x.{name}",
            repr(name),
            f"umem.y.{name}",
        ]
    )
