"""What is missing is named by packages that can be installed."""

from __future__ import annotations

import shlex

import pytest
from project import EXTRAS, ROOT

from umem._common import extras


@pytest.mark.parametrize("extra", extras.PACKAGES)
def test_the_packages_are_those_of_pyproject(extra: str) -> None:
    assert list(extras.PACKAGES[extra]) == EXTRAS[extra]
    line, _, named = extras.command(extra).partition(" (")
    if extra == "chainer":  # which pip cannot build with a setuptools of today
        assert line == "umem compat --get-chainer"
    else:
        assert shlex.split(line) == ["pip", "install", *EXTRAS[extra]]
    assert named == f"umem's extra: {extra})"


def test_one_package_of_an_extra() -> None:
    assert extras.command("chainer", "scipy").startswith("pip install 'scipy>=1.10' (")
    assert "'cuda-core[cu13]>=1.1' (" in extras.command("cuda13", "cuda-core")


def test_nobody_is_sent_to_a_package_that_is_not_published() -> None:
    """Until umem is on PyPI; in a clone it is `pip install ".[plot]"`."""
    files = [*ROOT.glob("umem/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    assert len(files) > 100
    assert [
        path
        for path in files
        if 'install "umem' in path.read_text(encoding="utf-8")
        or "umem[" in path.read_text(encoding="utf-8").replace("umem[software] @ git+YOUR-URL", "")
    ] == []
