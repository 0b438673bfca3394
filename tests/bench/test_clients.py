"""The script that runs other projects' tests counts them, and refuses other versions of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from bench_scripts import module
from software_programs import needs_compiler, needs_cupy

pytestmark = pytest.mark.thorough
CASES = """
import os
import cupy
import pytest

@pytest.mark.parametrize("array_module", ["cupy", "numpy"])
def test_passes(array_module):
    assert cupy.arange(3).sum() == 3

def test_asks_for_no_gpu():
    pass

def test_cupy_is_not_used():
    assert os.environ["WANTED"] == "yes"

def test_cupy_fails():
    assert cupy.arange(3).sum() == 4

@pytest.mark.skip(reason="not here")
def test_cupy_skips(): ...

def test_cupy_wants_a_network(): ...

def test_cupy_crashes():
    os.abort()
"""
REASONS = {"CuPy's own fault", "the project's own fault", "a network", "another package"}


@needs_cupy
@needs_compiler
def test_a_project_has_a_row_of_its_gpu_cases(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    clients = module("clients")
    (tmp_path / "list").write_text("toy | a network | *network\nother | a network | *\n")
    monkeypatch.setattr(clients, "LEFT_OUT", tmp_path / "list")
    (tmp_path / "test_toy.py").write_text(CASES)
    toy = module("client_projects").Client(
        "toy", (), ("test_toy.py",), options=("-k", "cupy"), environment={"WANTED": "yes"}
    )
    how = {"sample": None, "seed": 0, "chunk": 9, "seconds": 120.0}
    row = clients.examined(
        toy, sys.executable, tmp_path, tests=None, gpu="t4", kept=tmp_path, **how
    )
    assert row["all_count"] == 6 and row["left_out_by_reason"] == {"a network": 1}
    assert row["passed_count"] == 2 and row["skipped_count"] == 1 and row["failed_count"] == 2
    assert row["died_count"] == 1 and row["used_count"] == 2
    assert set(row["failures"]) == {
        "test_toy.py::test_cupy_fails", "test_toy.py::test_cupy_crashes",
    }  # fmt: skip


def test_a_checkout_at_another_commit_is_refused(tmp_path: Path) -> None:
    clients, client = module("clients"), module("client_projects").CLIENTS["sigpy"]
    with pytest.raises(click.ClickException, match="--tests needs a checkout sigpy at 5da0e86"):
        clients.root_of(client, sys.executable, tmp_path)
    git = ["git", "-C", str(tmp_path / "sigpy"), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path / "sigpy")], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    with pytest.raises(click.ClickException, match="sigpy: sigpy is at"):
        clients.root_of(client, sys.executable, tmp_path)


def test_every_project_is_pinned_and_every_case_left_out_has_a_reason_that_is_allowed() -> None:
    clients = module("clients")
    for client in clients.CLIENTS.values():
        assert all("==" in requirement for requirement in client.requires), client.name
        for line in clients.left_out(client):
            assert line.partition("|")[0].strip() in REASONS
    lines = clients.LEFT_OUT.read_text().splitlines()
    named = {line.partition("|")[0].strip() for line in lines if line and not line.startswith("#")}
    assert named <= set(clients.CLIENTS)
