"""How long does a CuPy project wait for its tests on the software GPU, from `pip install` to green?

A project of fifteen tests in a fresh environment: umem of this checkout is installed with CuPy,
pytest and pytest-xdist, and two workers run the tests, first with an empty cache of kernels and
without precompiled headers, then again. Every call of the compiler is written down: two of them
for one kernel would be one too many. What pip has downloaded before it takes from its own cache.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import common
from report_tables import count, counted, figure, quantity, text

COLD_LIMIT_SECONDS, WARM_LIMIT_SECONDS = 60.0, 5.0
INSTALL, COLD, WARM = ("pip install", "tests, cold", "tests, warm")
TESTS = common.HERE / "software_project_tests.py"
SOURCES = ("umem", "scripts/", "pyproject", "setup.py", "README", "LICENSE")
"""How the files begin that make umem's wheel."""
_MADE = re.compile(r"-o (\S+?)\.part-")


class Spent(NamedTuple):
    """Seconds of the clock, and of the processor in all processes."""

    seconds: float
    processor_seconds: float


def spent(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str]) -> Spent:
    """Run a command, and return what it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise click.ClickException(f"{done.stdout}{done.stderr}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(seconds, processor)


def copied(folder: Path) -> Path:
    """Copy what makes umem's wheel: setuptools writes beside its sources."""
    asked = ["git", "ls-files", "-z"]
    tracked = subprocess.check_output(asked, cwd=common.HERE.parent, text=True).split("\0")
    for name in tracked:
        if name.startswith(SOURCES):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(common.HERE.parent / name, folder / name)
    return folder


def compiler(folder: Path) -> tuple[Path, Path]:
    """Write a compiler that notes what it is asked; return it and its notes."""
    real, script, notes = shutil.which("g++"), folder / "g++", folder / "notes"
    if real is None:
        raise click.ClickException("there is no g++")
    script.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {real} "$@"\n')
    script.chmod(0o755)
    notes.touch()
    return script, notes


def measure(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Measure each step in a folder; ``quick`` runs three tests in this environment."""
    project, python = folder / "project", Path(sys.executable)
    project.mkdir()
    shutil.copy(TESTS, project / "test_project.py")
    script, notes = compiler(folder)
    rows = []
    if not quick:
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        python = folder / "env" / "bin" / "python"
        wanted = [f"{copied(folder / 'umem')}[software]", "pytest", "pytest-xdist"]
        install = [python, "-m", "pip", "install", "-q", *wanted]
        rows.append(row(INSTALL, [spent(install, project, os.environ)]))
    caches = dict.fromkeys(("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "TMPDIR"), str(folder))
    environment = {**os.environ, **caches, "CXX": str(script)}
    run = [python, "-m", "pytest", "-n", "2", "--software-gpu", "t4,force"]
    run += ["-k", "elementwise or child or raw"] if quick else []
    for step, repeats in ((COLD, 1), (WARM, 1 if quick else 3)):
        notes.write_text("")
        spents = [spent(run, project, environment) for _ in range(repeats)]
        made = Counter(_MADE.findall(notes.read_text()))
        twice = sum(number > 1 for number in made.values())
        rows.append(row(step, spents) | {"kernel_count": len(made), "twice_count": twice})
    return rows


def row(step: str, spents: list[Spent]) -> dict[str, Any]:
    seconds, processor = zip(*spents, strict=True)
    median, low, high = common.summary(seconds)
    return {
        "step": step, "seconds": median, "low": low, "high": high,
        "processor_seconds": common.summary(processor).median, "repeats": seconds,
    }  # fmt: skip


def answer(result: common.Result) -> str:
    rows = {row["step"]: row for row in result["rows"]}
    first = [rows[step] for step in (INSTALL, COLD) if step in rows]
    whole = sum(row["seconds"] for row in first)
    worked = sum(row["processor_seconds"] for row in first)
    warm, cold = rows[WARM]["seconds"], rows[COLD]
    made, twice = cold["kernel_count"], cold["twice_count"]
    return (
        f"{figure(whole)} s from `pip install` to green with nothing compiled, where "
        f"{figure(COLD_LIMIT_SECONDS)} were aimed at ({verdict(whole, COLD_LIMIT_SECONDS)}), and "
        f"{figure(warm)} s after that, where {figure(WARM_LIMIT_SECONDS)} were "
        f"({verdict(warm, WARM_LIMIT_SECONDS)}); of {count(made)} files {count(twice)} were "
        f"compiled twice, the processor worked {figure(worked)} s and then "
        f"{figure(rows[WARM]['processor_seconds'])} s, and others had put a load of "
        f"{figure(result['load'])} on the cores when it began."
    )


def verdict(seconds: float, limit: float) -> str:
    return "met" if seconds <= limit else "missed"


COLUMNS = (
    text("step", "step"),
    quantity("time", "seconds", "s"),
    quantity("least", "low", "s"),
    quantity("most", "high", "s"),
    quantity("of the processor", "processor_seconds", "s"),
    counted("compiled", "kernel_count"),
    counted("twice", "twice_count"),
)
BENCH = common.Bench("software_project", __doc__, answer, COLUMNS)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Three tests, in this environment.")
@common.json_option
def main(quick: bool, path: Path | None) -> None:
    common.writable(path)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), quick)
    BENCH.finish(rows, path, simulated=False, options={"quick": quick}, load=load)


if __name__ == "__main__":
    main()
