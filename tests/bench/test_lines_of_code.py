"""bench/lines_of_code.py counts what holds code, and who imports whom."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import module, run, written

pytestmark = pytest.mark.thorough

lines_of_code = module("lines_of_code")

SOURCE = '''"""A docstring
of two lines."""

from os import path  # 1

# a comment

LIMIT = 3  # 2
"""What it is for."""


def first(x):  # 3
    """One line."""

    text = """a string

    that is no docstring"""  # 4, 5, 6
    return (  # 7
        text,  # 8

        x,  # 9
    )  # 10


def second(): "says so on its line"  # 11


class Third:  # 12
    """Größe: letters of two bytes."""; x = 1  # 13
    if LIMIT:  # 14
        "a statement"
    else:  # 15
        pass  # 16
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    assert lines_of_code.code_lines(SOURCE) == 16
    assert lines_of_code.code_lines("") == lines_of_code.code_lines('"""Only this."""\n') == 0


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A repository with a package of five modules."""
    sources = {
        "__init__.py": "from pack.a import x\n",
        "a.py": SOURCE + "x = 1\n",
        "b.py": "import pack.a\nfrom .inner import deep\n",
        "inner/__init__.py": "",
        "inner/deep.py": "from .. import b\n",
    }
    for name, text in sources.items():
        file = tmp_path / "pack" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path / "pack"


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def by_folder(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["folder"]: row for row in report["rows"]}


def test_folders_modules_and_lone_users_are_counted(package: Path, tmp_path: Path) -> None:
    report, printed = written(tmp_path, "lines_of_code.py", str(package))
    found = by_folder(report)
    assert {name: (row["code_lines"], row["modules"]) for name, row in found.items()} == {
        "(top)": (20, 3),
        "inner": (1, 2),
        "all": (21, 5),
    }
    # a.py has two users, b.py and inner/deep.py have each other, no package is imported itself
    assert (found["(top)"]["used_once"], found["inner"]["used_once"]) == (1, 1)
    assert found["all"]["longest"] == "a.py"
    assert found["all"]["longest_lines"] == len(SOURCE.splitlines()) + 1
    assert "21 lines of code in 5 modules; 2 modules are imported by exactly one other" in printed


def test_quick_counts_what_lies_directly_in_the_folder(package: Path, tmp_path: Path) -> None:
    report, _ = written(tmp_path, "lines_of_code.py", str(package), "--quick")
    found = by_folder(report)
    assert set(found) == {"(top)", "all"} and found["all"]["code_lines"] == 20


def test_a_revision_is_counted_beside_it(package: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "pack")
    git(tmp_path, "commit", "-q", "-m", "before")
    (package / "a.py").write_text("x = 1\n")
    (package / "inner" / "deep.py").unlink()
    (package / "inner" / "__init__.py").unlink()
    report, printed = written(tmp_path, "lines_of_code.py", str(package), "--against", "HEAD")
    found = by_folder(report)
    assert (found["all"]["code_lines"], found["all"]["code_lines_before"]) == (4, 21)
    assert (found["inner"]["code_lines"], found["inner"]["code_lines_before"]) == (0, 1)
    assert (found["all"]["modules"], found["all"]["modules_before"]) == (3, 5)
    assert f"81.0 % fewer than the 21 in 5 at {report['against']}" in printed
    assert len(report["against"]) == 12


@pytest.mark.parametrize("revision", ["nonsense", "--output=/tmp/x"])
def test_a_revision_that_is_none_gets_a_clear_error(package: Path, revision: str) -> None:
    git(package.parent, "init", "-q")
    done = run("lines_of_code.py", str(package), f"--against={revision}")
    assert done.returncode == 1 and done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_what_is_not_python_gets_a_clear_error(package: Path) -> None:
    (package / "b.py").write_text("def (:\n")
    done = run("lines_of_code.py", str(package))
    assert done.returncode == 1 and "Error: not Python" in done.stderr
