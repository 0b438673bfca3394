"""scripts/setup: what it says and does, with a Python that installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ROOT

PYTHON = """#!/bin/sh
# A Python that makes environments of itself, and whose pip notes what it was asked for.
case "$*" in
    *sys.version_info\\[:2\\]*) echo {version} ;;
    *'(3, 10)'*) {recent} ;;
    *ensurepip,*) {environments} ;;
    '-m venv .venv') mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    '-m umem '*) echo "$*" >>asked ;;
    '-m pip '*)
        echo "$*" >>asked
        ! grep -q "${{FAILS-nothing}}" asked || {{ echo "${{WHY-why}}"; exit 1; }} ;;
    --version) echo Python {version} ;;
esac
"""
INSTALLED = {"demo": "-e .[plot]", "test": "-e .[plot,fast,test,dev]", "docs": "-e .[docs]"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What scripts/setup needs of a clone, and two Pythons, of which one is too old."""
    for name in ("scripts/setup", "pyproject.toml", "umem/compat/chainer_installer.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    kinds = {
        "new": ("3.12", "true", "true"),
        "old": ("3.9", "false", "true"),
        "bare": ("3.11", "true", "false"),
    }
    for name, (version, recent, environments) in kinds.items():
        python = tmp_path / name
        python.write_text(PYTHON.format(version=version, recent=recent, environments=environments))
        python.chmod(0o755)
    return tmp_path


def setup(clone: Path, name: str, python: str = "new", **variables: str) -> list[str]:
    """Set up; returns what was said and, in the last line, the exit status."""
    environment = {**os.environ, "PYTHON": str(clone / python), **variables}
    done = subprocess.run(
        ["sh", "scripts/setup", name],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return [*done.stdout.splitlines(), str(done.returncode)]


def asked(clone: Path) -> str:
    """What pip was asked for since the last look."""
    found = (clone / "asked").read_text() if (clone / "asked").exists() else ""
    (clone / "asked").unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("name", INSTALLED)
def test_it_installs_the_extras_and_then_has_nothing_to_do(clone: Path, name: str) -> None:
    said = setup(clone, name)
    assert said[0] == "umem: making .venv with Python 3.12"
    assert said[-2:] == ["umem: .venv is ready", "0"]
    wanted = asked(clone)
    assert INSTALLED[name] in wanted
    assert ("cupy-cuda12x>=14.0 cuda-core" in wanted) == (name == "test")
    assert ("-m umem compat --get-chainer" in wanted) == (name != "docs")
    assert setup(clone, name) == ["0"]
    assert asked(clone) == ""


def test_the_tests_include_the_demo_and_the_documentation_keeps_both(clone: Path) -> None:
    setup(clone, "test")
    setup(clone, "docs")
    asked(clone)
    for name in INSTALLED:
        assert setup(clone, name) == ["0"]
    assert asked(clone) == ""


def test_the_package_is_what_is_set_up_again_not_the_tools_settings(clone: Path) -> None:
    setup(clone, "docs")
    asked(clone)
    project = clone / "pyproject.toml"
    project.write_text(project.read_text() + "\n[tool.other]\n")
    assert setup(clone, "docs") == ["0"]
    project.write_text("# more is needed\n" + project.read_text())
    assert setup(clone, "docs")[0] == "umem: installing umem[docs]"
    assert INSTALLED["docs"] in asked(clone)


def test_what_failed_is_shown_and_starts_again(clone: Path) -> None:
    said = setup(clone, "docs", FAILS="docs")
    assert said[-3:] == ["why", "umem: that failed; the end of .venv/setup.log is above", "1"]
    assert setup(clone, "docs")[0] == (
        "umem: starting again: an earlier set-up of .venv was not finished, or its Python is gone"
    )
    assert setup(clone, "docs") == ["0"]


def test_a_missing_network_is_named(clone: Path) -> None:
    said = setup(clone, "docs", FAILS="docs", WHY="Retrying after connection broken by")
    assert said[-2:] == ["umem: no package index could be reached: a set-up needs the network", "1"]


def test_cupy_may_be_missing(clone: Path) -> None:
    said = setup(clone, "test", FAILS="cupy")
    assert said[-3:] == [
        "umem: CuPy does not install here (see .venv/setup.log): its tests are skipped",
        "umem: .venv is ready",
        "0",
    ]


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("old", "{clone}/old is Python 3.9"),
        ("nowhere", "none was found"),
        (
            "bare",
            "{clone}/bare (3.11) cannot make environments "
            "(Debian, Ubuntu: apt install python3-venv)",
        ),
    ],
)
def test_a_python_that_does_not_do_is_told(clone: Path, python: str, why: str) -> None:
    assert setup(clone, "test", python) == [
        f"umem: needs Python 3.10 or newer; {why.format(clone=clone)}. "
        "Name one: make PYTHON=/path/to/python3",
        "1",
    ]
    assert not (clone / ".venv").exists()


def test_what_it_does_not_know_is_refused(clone: Path) -> None:
    assert setup(clone, "all") == ["usage: scripts/setup demo|test|docs", "2"]


def test_an_environment_of_the_users_own_is_kept(clone: Path) -> None:
    """Only one that was made here is ever removed."""
    (clone / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone / "new", clone / ".venv/bin/python")
    (clone / ".venv/mine").touch()
    setup(clone, "docs")
    assert (clone / ".venv/mine").exists()
