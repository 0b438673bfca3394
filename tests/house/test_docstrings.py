"""Docstrings can be read with the code closed: the rules that a machine can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from project import ROOT

PACKAGES = (ROOT / "umem", ROOT / "umem_software_gpu")
LONG = 10
"""A function of at least this many lines has a docstring."""
NO_BEGINNING = frozenset(
    "As How It Its So Such Than That Those What When Where Whether Which Who Whose".split()
)
"""Words with which a docstring does not say what something does or is."""
NO_VERB = frozenset("A An All Any Both Each Every No None One Some The These This Two".split())
"""Words with which no function's docstring begins, as they are no verbs."""


def files() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every file of the packages, by its path in the repository."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def documented(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, kind and text of each docstring, constants' included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            if text := ast.get_docstring(node):
                yield node.lineno, kind, text
        if isinstance(node, ast.Module) and (text := ast.get_docstring(node)):
            yield 1, "module", text
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        for before, after in pairwise(body):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                    yield after.lineno, "constant", after.value.value


def first_word(text: str) -> str:
    return text.split()[0].rstrip(".,:;")


def owners(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield every node with the node that it stands in."""
    for owner in ast.walk(tree):
        for node in ast.iter_child_nodes(owner):
            yield node, owner


@pytest.mark.thorough
def test_long_functions_say_what_they_do() -> None:
    silent = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in files()
        for node, owner in owners(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 >= LONG
        and not ast.get_docstring(node)
        # what __init__ takes, its class says
        and not (
            node.name == "__init__" and isinstance(owner, ast.ClassDef) and ast.get_docstring(owner)
        )
    ]
    assert not silent


@pytest.mark.thorough
def test_docstrings_begin_with_what_something_does_or_is() -> None:
    wrong = [
        f"{path}:{line} {text[:60]}"
        for path, tree in files()
        for line, kind, text in documented(tree)
        if first_word(text) in NO_BEGINNING or (kind == "function" and first_word(text) in NO_VERB)
    ]
    assert not wrong
