"""The ``umem`` command as a whole: help, versions, what starting it costs, and ``umem run``."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import umem
from umem.cli import COMMANDS, main

ROOT = Path(umem.__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
    )  # fmt: skip


# -- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_everything_has_help_that_fits_a_terminal(name: str, option: str) -> None:
    # a process of its own: click keeps the names of the option from the first call
    result = python("-m", "umem", *name.split(), option)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: ")
    assert len(result.stdout.splitlines()) > 4
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_group_lists_every_command_with_a_sentence() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    listed = text[text.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(len(line.split()) > 3 for line in listed)


def test_the_module_is_the_command() -> None:
    result = python("-m", "umem", "--version")
    assert (result.returncode, result.stdout) == (0, f"umem, version {umem.__version__}\n")


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.output


def test_help_loads_neither_chainer_nor_cupy() -> None:
    code = (
        "import sys; sys.argv = ['umem', 'demo', '--help']\n"
        "from umem.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([n for n in ('chainer', 'cupy', 'scipy') if n in sys.modules])"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "[]"


# -- run ---------------------------------------------------------------------------------------


def run(tmp_path: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    return python("-m", "umem", "run", *arguments, str(script), "--flag", "x")


def test_run_gives_a_script_its_arguments_and_its_own_exit_code(tmp_path: Path) -> None:
    code = "import sys; print(__name__, sys.argv[1:]); sys.exit(7)"
    result = run(tmp_path, code)
    assert (result.returncode, result.stdout) == (7, "__main__ ['--flag', 'x']\n")


def test_run_shows_the_scripts_own_traceback(tmp_path: Path) -> None:
    result = run(tmp_path, "def f():\n    1 / 0\nf()\n")
    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert "runpy" not in result.stderr
    assert "umem" not in result.stderr
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_run_follows_a_script_with_a_virtual_gpu_and_reports(tmp_path: Path) -> None:
    code = "import umem; print(umem.status().mode, umem.status().device)"
    result = run(
        tmp_path, code, "--virtual", "t4", "--vram", "64MiB", "--mode", "managed", "--report"
    )
    assert (result.returncode, result.stdout) == (0, "managed t4\n")
    assert "(simulated)" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--mode", "mangaed"], 2, "is not one of"),
        (["--limit", "1GiB"], 2, "--limit needs a --mode"),
        (["--prefetch"], 2, "--prefetch needs a --mode"),
        (["--vram", "1GiB"], 2, "--vram needs --virtual"),
        (["--virtual", "v101"], 1, "did you mean"),
        (["--virtual", "t4", "--vram", "0"], 1, "vram must be above zero"),
        (["--virtual", "t4", "--mode", "managed", "--limit", "-1"], 1, "limit must be a size"),
    ],
)
def test_run_refuses_bad_input_before_the_script_runs(
    tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemError")
    result = CliRunner().invoke(main, ["run", *arguments, str(script)])
    assert text in result.output
    assert result.exit_code == code
    assert not umem.status().on


def test_run_refuses_a_script_that_is_not_there(tmp_path: Path) -> None:
    for name in ("nowhere.py", "."):
        result = CliRunner().invoke(main, ["run", str(tmp_path / name)])
        assert result.exit_code == 2
        assert "there is no file" in result.output


# -- what starting costs -----------------------------------------------------------------------


def test_importing_umem_costs_little_more_than_numpy() -> None:
    """At most 150 ms above NumPy's own import: medians of seven runs, in turns."""
    times: dict[str, list[float]] = {"numpy": [], "umem": []}
    for module in (*times, *list(times) * 7):  # the first of each warms the file cache
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, cwd=ROOT)
        times[module].append(time.perf_counter() - start)
    medians = {module: statistics.median(seconds[1:]) for module, seconds in times.items()}
    assert medians["umem"] - medians["numpy"] < 0.150
