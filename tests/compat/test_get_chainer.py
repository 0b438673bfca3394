"""``umem compat --get-chainer``: Chainer into an environment, whatever its setuptools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from project import ROOT

from umem.cli import main
from umem.compat import chainer_installer
from umem.compat.installation import find_package
from umem.errors import CompatError


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of ours without Chainer."""
    monkeypatch.setattr(chainer_installer.installation, "find_package", lambda: None)
    monkeypatch.setattr(chainer_installer.sys, "prefix", "/somewhere/venv")
    monkeypatch.setattr(chainer_installer.os, "access", lambda path, mode: True)


def pip_that(monkeypatch: pytest.MonkeyPatch, status: int, said: str, fails_at: str) -> list[str]:
    """Have pip fail, and say something, where its arguments have a word; returns the calls."""
    calls: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(" ".join(command[3:]))
        failed = status if fails_at in calls[-1] else 0
        return subprocess.CompletedProcess(command, failed, said if failed else "")

    monkeypatch.setattr(chainer_installer.subprocess, "run", run)
    return calls


def test_where_it_is_all_there_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_package() is None:
        pytest.skip("no Chainer")
    calls = pip_that(monkeypatch, 1, "", "")
    found = CliRunner().invoke(main, ["compat", "--get-chainer"])
    assert found.exit_code == 0 and found.output.startswith("Installed Chainer 7.8.")
    assert calls == []


@pytest.mark.usefixtures("missing")
def test_an_environment_that_cannot_be_written_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = pip_that(monkeypatch, 0, "", "nothing")
    monkeypatch.setattr(chainer_installer.os, "access", lambda path, mode: False)
    with pytest.raises(CompatError, match=r"cannot be written\. Nothing was installed\. Make an"):
        chainer_installer.get_chainer(print)
    assert calls == []


@pytest.mark.usefixtures("missing")
def test_a_python_of_the_systems_own_packages_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(chainer_installer.sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(chainer_installer.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(CompatError, match="managed by the system's own packages"):
        chainer_installer.get_chainer(print)


@pytest.mark.usefixtures("missing")
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Retrying after connection broken by 'NewConnectionError'", "no package index could be"),
        (
            "No matching distribution found",
            "pip wheel failed, and Chainer was not installed:\nNo m",
        ),
    ],
)
def test_what_pip_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    calls = pip_that(monkeypatch, 1, said, "wheel --wheel-dir")
    with pytest.raises(CompatError, match=expected):
        chainer_installer.get_chainer(print)
    assert "--target" in calls[1] and "setuptools<81" in calls[1]
    assert "--no-build-isolation" in calls[2] and len(calls) == 3


@pytest.mark.usefixtures("missing")
def test_an_environment_without_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pip_that(monkeypatch, 1, "", "--version")
    with pytest.raises(CompatError, match=r"has no pip: python -m ensurepip"):
        chainer_installer.get_chainer(print)


@pytest.mark.slow
def test_chainer_comes_into_a_fresh_environment_with_todays_setuptools(tmp_path: Path) -> None:
    """Needs the network."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv/bin/python")
    shutil.copytree(ROOT / "umem", tmp_path / "src/umem")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "src")
    pip = [python, "-m", "pip", "install", "-q"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "setuptools>=82", str(tmp_path / "src")], check=True, env=alone)
    subprocess.run([python, "-m", "umem", "compat", "--get-chainer"], check=True, env=alone)
    code = "import umem.chainer, chainer; print(chainer.__version__)"
    found = subprocess.run(
        [python, "-W", "ignore", "-c", code], cwd=tmp_path, env=alone, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith("7.8.")
