"""docs/how-to/set-up-ci.md: the commands of its workflows run in a fresh environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT
from software_programs import needs_compiler, needs_cupy

PAGE = (ROOT / "docs" / "how-to" / "set-up-ci.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^ *(?:- )?(python -m (?:pip|pytest) .*)$", re.MULTILINE)
SOURCE = "umem[software] @ git+YOUR-URL"
TEST = """
import subprocess, sys
import cupy
def test_sum():
    assert int(cupy.arange(4).sum()) == 6
def test_child():
    subprocess.run([sys.executable, "-c", "import cupy; cupy.zeros(3)"], check=True)
"""


def commands() -> list[list[str]]:
    """Those of each workflow, as shells run them."""
    return [COMMAND.findall(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_both_workflows_install_and_run_alike() -> None:
    github, gitlab = commands()
    assert github == gitlab and len(github) == 3
    assert SOURCE in github[0]
    assert "--software-gpu t4,checked" in github[1] and "--software-gpu-seeds" in github[2]


def repository_of_umem(folder: Path) -> None:
    """Make a repository of the files here as they are, committed or not."""
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, tracked):
        if name.startswith(("umem", "scripts/", "pyproject", "setup.py", "README", "LICENSE")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "as it is"]):
        subprocess.run([*git, *words], check=True)


@pytest.mark.thorough
@needs_cupy
@needs_compiler
def test_the_commands_run_in_a_fresh_environment(kernel_cache: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    project = tmp_path / "project"
    project.mkdir()
    (project / "test_it.py").write_text(TEST)
    repository_of_umem(tmp_path / "umem")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(kernel_cache),
        "CUPY_CACHE_DIR": str(kernel_cache),
    }
    install, *runs = commands()[0]
    assert install.count("YOUR-URL") == 1
    for command in (install.replace("YOUR-URL", f"file://localhost{tmp_path}/umem"), *runs):
        done = subprocess.run(
            command, shell=True, cwd=project, env=environment, capture_output=True, text=True,
            timeout=1800, check=False,
        )  # fmt: skip
        told = done.stdout + done.stderr
        if done.returncode and ("connection broken" in told or "No matching distr" in told):
            pytest.skip("no package index can be reached")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "software GPU: t4 (umem; VRAM, pages and time are simulated)" in done.stdout  # the last
