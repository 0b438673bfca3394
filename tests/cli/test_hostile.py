"""Hostile files, names and places: each command says one sentence and changes nothing."""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from project import ROOT

from umem.cli import main
from umem.trace import Access, Alloc, Op, Trace

HEADER = {"format": "umem-trace", "version": 2, "backend": "numpy", "meta": {}}
ESCAPE = "\x1b[31mred\x1b[0m\n\u202e"
COMMANDS = ("report", "replay")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    x = (Access(0, 0, 4096),)
    events = [Alloc(0, 4096, "input", "x", True), Op("f", "forward", x, ())]
    return Trace(events).save(tmp_path / "t.gz")


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def failure(*args: object, code: int = 1) -> str:
    """The one sentence that is said, with nothing in it that a terminal would obey."""
    result = run(*args)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ") and line.isprintable() and len(line) < 2100
    assert result.output.replace("\n", "").isprintable()
    return line


def process(*args: object, stdout: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umem", *map(str, args)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file_is_no_trace(command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop", ".", "nothing", "/dev/zero"):
        assert "cannot be read as a trace" in failure(command, tmp_path / name)


def test_a_loop_of_links_as_a_file_to_write_is_refused(trace: Path) -> None:
    loop = trace.with_name("loop.png")
    loop.symlink_to("loop.png")
    assert "is a link" in failure("report", trace, "--png", loop, "--force")
    assert loop.is_symlink()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_limits_can_be_raised_and_lowered(command: str, trace: Path) -> None:
    assert "more than 1 events; max_events=, or --max-events" in failure(
        command, trace, "--max-events", 1
    )
    assert "holds more than 10 B; max_bytes=, or --max-bytes" in failure(
        command, trace, "--max-bytes", "10"
    )
    assert run(command, trace, "--max-events", 2, "--max-bytes", "1MiB").exit_code == 0
    assert "--max-bytes must be" in failure(command, trace, "--max-bytes", "lots", code=2)
    assert "--max-events" in failure(command, trace, "--max-events", "0", code=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_bomb_is_answered(command: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    mark = b'["mark","' + b"a" * 9000 + b'"]\n'
    path.write_bytes(gzip.compress(json.dumps(HEADER).encode() + b"\n" + mark * 2000, 1))
    assert "holds more than 1.0 MiB" in failure(command, path, "--max-bytes", "1MiB")
    assert "more than 1,999 events" in failure(command, path, "--max-events", 1999)
    path.write_bytes(gzip.compress(json.dumps(HEADER).encode() + b"\n[" + b"1," * (1 << 20), 1))
    assert "line 2: it is longer than 1.0 MiB" in failure(command, path)


# -- names -------------------------------------------------------------------------------------


def test_names_of_files_are_printed_without_control_characters(trace: Path) -> None:
    strange = trace.rename(trace.with_name(f"t{ESCAPE}.gz"))
    for command in COMMANDS:
        assert "\\x1b[31m" in failure(command, f"{strange}.nothing")
        assert "\\x1b[31m" in failure(command, strange, "--gpu", ESCAPE)
        assert "\\x1b[31m" in failure(command, strange, "--vram", ESCAPE)
        assert "\\x1b[31m" in failure(command, strange, "--max-events", ESCAPE, code=2)
        assert "\\x1b[31m" in failure(command, strange, f"--x{ESCAPE}", code=2)
    assert "\\x1b[31m" in failure("report", trace, "--png", f"x{ESCAPE}.foo", code=2)
    assert "\\x1b[31m" in failure("report", strange, "--png", f"/{ESCAPE}/x.png")
    assert "\\x1b[31m" in failure("replay", strange, "--mode", ESCAPE, code=2)
    assert "\\x1b[31m" in failure(f"no{ESCAPE}", code=2)
    assert "\\x1b[31m" in failure("demo", "--device", ESCAPE, code=2)
    assert "\\x1b[31m" in failure("doctor", "--device", f"virtual:{ESCAPE}")
    assert "\\x1b[31m" in failure("run", f"{ESCAPE}.py", code=2)
    assert "\\x1b[31m" in failure("run", "--record", f"/proc/{ESCAPE}/x.gz", __file__)


def test_what_was_written_and_what_to_do_next_are_printed_so_too(trace: Path) -> None:
    pytest.importorskip("matplotlib")
    strange = trace.rename(trace.with_name(f"t{ESCAPE}.gz"))
    result = run("report", strange, "--png", trace.with_name(f"x{ESCAPE}.png"))
    assert result.exit_code == 0
    assert result.output.replace("\n", "").isprintable()
    assert "Wrote " in result.output and "\\x1b[31m" in result.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_command_that_comes_next_runs_with_any_name(trace: Path, tmp_path: Path) -> None:
    strange = trace.rename(trace.with_name(f"t'{ESCAPE}.gz"))
    result = run("report", strange, "--export", "perfetto", tmp_path / "x.json")
    line = result.output.splitlines()[-1].removeprefix("Next: umem ")
    shell = f"{sys.executable} -m umem {line}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    subprocess.run(["bash", "-c", shell], check=True, env=environment, stdout=subprocess.DEVNULL)
    assert trace.with_name(f"t'{ESCAPE}.html").exists()


def test_texts_of_a_trace_are_short_in_every_view(tmp_path: Path) -> None:
    name = "x\x1b[2J" + "y" * 9000
    events = [
        Alloc(0, 4096, "activation", name, False, (name,)),
        Op(name, "forward", (), (Access(0, 0, 4096),), host_seconds=1.0),
    ]
    path = Trace(events, name, {name: name}).save(tmp_path / "x")
    options = [[], [path]] + ([["--png", tmp_path / "x.png"]] if find_spec("matplotlib") else [])
    for more in options:
        result = run("report", path, *more)
        assert result.exit_code == 0 and len(result.output) < 10_000
        assert result.output.replace("\n", "").isprintable()


# -- a disk that is full, and a reader that has gone -------------------------------------------


@pytest.mark.thorough
@needs_full
@pytest.mark.parametrize(
    "args",
    [
        ["report", "{}"],
        ["report", "{}", "--json"],
        ["replay", "{}"],
        ["--help"],
        ["report", "--help"],
        ["compat", "--json"],
    ],
)
def test_a_full_disk_while_printing_is_one_sentence(args: list[str], trace: Path) -> None:
    with open("/dev/full", "w") as full:
        done = process(*(arg.format(trace) for arg in args), stdout=full)
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the output: no space left on device\n"


@pytest.mark.parametrize("args", [["report", "{}", "--json"], ["replay", "{}"]])
def test_a_reader_that_has_gone_is_no_traceback(args: list[str], trace: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = process(*(arg.format(trace) for arg in args), stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.parametrize("args", [["report", "{}"], ["report", "{}", "--json"], ["replay", "{}"]])
def test_commands_in_one_process_keep_nothing_of_what_they_printed(
    args: list[str], trace: Path
) -> None:
    given = [arg.format(trace) for arg in args]
    for _ in range(2):
        assert run(*given).exit_code == 0

    def growth() -> int:
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(5):
            run(*given)
        gc.collect()
        return len(gc.get_objects()) - before

    # A worker's own threads make objects too, now and then; a leak grows every time.
    assert min(growth() for _ in range(3)) < 5
