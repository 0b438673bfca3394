"""Python in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from project import ROOT

SUPPORT = ROOT / "tests" / "support"


def python(
    *words: object, cwd: Path | None = None, timeout: int = 600, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and variables of its environment, and umem on its path."""
    path = [str(ROOT), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **given},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(*words: object, cwd: Path | None = None, **variables: object) -> str:
    """Return what Python prints, which must end well."""
    done = python(*words, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_quietly(*words: object, cwd: Path | None = None, **variables: object) -> str:
    """Return what Python prints, which must end well and say nothing on standard error."""
    done = python(*words, cwd=cwd, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
