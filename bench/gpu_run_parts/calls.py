"""Calls made one after another, each in a try of its own; what they find is kept line by line.

They run in a process of their own, which is watched: one that hangs, that dies, or after which the
GPU does not answer any more costs its own line, and a new process goes on behind it. A line that
says what was begun goes before each call, so that whoever is killed leaves it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

START_SECONDS = 45.0
"""The longest wait for the first call of a process: CuPy's import, and a context."""
SOFTWARE_TIMES = 10
"""How many times longer a call may take on the software GPU, which compiles kernels by g++, and
one that uses the host alone."""
GONE_SECONDS = 5.0
"""The longest wait for a killed process: one may hang in a driver."""
BROKEN = 75
"""Exit code of a process whose GPU answers no more: an error of CUDA's may be there for good."""
FRAMES, MOST_WORDS = 6, 2000
GROUPS = {
    "first_light": ("memory_calls", "chainer_calls"),
    "host": ("host_calls",),
    "pressure": ("pressure",),
    "oversubscribe": ("oversubscribe",),
}
"""Modules of this folder with calls, by what the steps call them; in the order of the calls."""


class Given(NamedTuple):
    """What a call gets.

    Attributes:
        xp, device: CuPy and umem's GPU; None for calls that need none.
        folder: a new one, for files.
        quick: little data.
    """

    xp: Any
    device: Any
    folder: Path
    quick: bool


@dataclass(frozen=True)
class Call:
    """One thing to try.

    Attributes:
        name: of its line.
        run: returns figures, or nothing; an error is a failure.
        covers: public names that it calls.
        needs: modules without which it cannot be tried.
        stand_in: what is not the real thing in it; "" where all is.
        simulated: the same, on the software GPU alone.
        seconds: after which it hangs.
    """

    name: str
    run: Callable[[Given], Any]
    covers: tuple[str, ...]
    needs: tuple[str, ...] = ()
    stand_in: str = ""
    simulated: str = ""
    seconds: float = 15.0


class Calls(list[Call]):
    """The calls of a module, which are added by its decorator."""

    def __call__(self, *covers: str, **how: Any) -> Callable[[Any], Any]:
        """Add a function, which is named as it is; ``covers`` are the public names it calls."""

        def add(function: Any) -> Any:
            self.append(Call(function.__name__, function, covers, **how))
            return function

        return add


def calls_of(group: str) -> list[Call]:
    """Import the calls of a group."""
    modules = (importlib.import_module(f"gpu_run_parts.{name}") for name in GROUPS[group])
    return [call for module in modules for call in module.CALLS]


# -- the process that calls --------------------------------------------------------------------


def make(group: str, path: Path, first: int, quick: bool) -> int:
    """Make the calls from a number on; returns the exit code."""
    gpu: tuple[Any, Any] = (None, None) if group == "host" else opened(group)
    with open(path, "a", encoding="utf-8", buffering=1) as file, TemporaryDirectory() as folder:
        for number, call in enumerate(calls_of(group)):
            if number < first:
                continue
            is_slow = group == "host" or getattr(gpu[1], "simulated", False)
            most = call.seconds * (SOFTWARE_TIMES if is_slow else 1)
            write(file, {"begun": call.name, "number": number, "seconds": most})
            place = Path(folder, str(number))
            place.mkdir()
            line = tried(call, Given(*gpu, place, quick))
            write(file, line)
            if not tidy(gpu[0]):
                return BROKEN
        write(file, {"over": True})
    return 0


def opened(group: str) -> tuple[Any, Any]:
    """Open the GPU; all managed memory is under the guard, but where it is to be too much."""
    import gpu_guard

    from umem.devices.cuda import open_cuda

    device = open_cuda()
    if group != "oversubscribe":
        gpu_guard.guard(device)
    return device.xp, device


def tried(call: Call, given: Given) -> dict[str, Any]:
    """Make one call; its line."""
    on_software = bool(getattr(given.device, "simulated", False))
    stand_in = call.stand_in or call.simulated * on_software
    line: dict[str, Any] = {"name": call.name, "covers": call.covers, "stand_in": stand_in}
    absent = [name for name in call.needs if not is_there(name)]
    if absent:
        return {**line, "state": "missing", "error": f"not installed: {', '.join(absent)}"}
    start = time.perf_counter()
    try:
        found = call.run(given)
        if given.xp is not None:
            given.xp.cuda.Device().synchronize()  # errors of kernels come here
        line |= {"state": "passed", "found": found}
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:MOST_WORDS]
        if type(error).__name__ == "MissingDependencyError":
            return {**line, "state": "missing", "error": message}
        where = traceback.format_tb(error.__traceback__)[-FRAMES:]
        line |= {"state": "failed", "error": message, "where": "".join(where)}
    return {**line, "seconds": round(time.perf_counter() - start, 4)}


def is_there(module: str) -> bool:
    """Tell whether a module can be found, without importing more than its packages."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def tidy(xp: Any) -> bool:
    """Switch off what a call has left on; False where the GPU does not answer any more."""
    import umem

    with contextlib.suppress(Exception):
        umem.disable()
    gc.collect()
    if xp is None:
        return True
    try:
        xp.get_default_memory_pool().set_limit(size=0)
        xp.get_default_memory_pool().free_all_blocks()
        return int((xp.arange(4) + 1).sum()) == 10
    except Exception:
        return False


def write(file: Any, line: dict[str, Any]) -> None:
    """Write a line as one piece."""
    file.write(json.dumps(line, default=str) + "\n")


# -- the process that watches ------------------------------------------------------------------


def watch(command: list[str], path: Path) -> int:
    """Have all calls of a group made, in as many processes as that takes.

    Args:
        command: what makes the calls, but for the number of the first.
        path: of the lines.

    Returns:
        0 where no call failed.
    """
    path.touch()
    first, started = 0, 0
    while True:
        process = subprocess.Popen([*command, str(first)], stdin=subprocess.DEVNULL)
        started += 1
        why = waited(process, path)
        lines = read_lines(path)
        if lines and lines[-1].get("over"):
            return int(any(line["state"] not in ("passed", "missing") for line in results(path)))
        begun = [line for line in lines if "begun" in line]
        if not begun or begun[-1]["number"] < first:  # not one call was begun
            with open(path, "a", encoding="utf-8") as file:
                write(file, {"name": "start", "covers": (), "state": "failed", "error": why})
            return 1
        if "begun" in lines[-1]:
            line = {"name": begun[-1]["begun"], "covers": (), "state": why.split()[0], "error": why}
            with open(path, "a", encoding="utf-8") as file:
                write(file, line)
        first = begun[-1]["number"] + 1


def waited(process: subprocess.Popen[bytes], path: Path) -> str:
    """Wait for a process that makes calls, and end it where one hangs; says why it ended."""
    size, end = -1, time.monotonic() + START_SECONDS
    while process.poll() is None:
        if path.stat().st_size != size:
            size = path.stat().st_size
            last = (read_lines(path) or [{}])[-1]
            end = time.monotonic() + max(GONE_SECONDS, last.get("seconds", 0))
            end += 0 if "begun" in last else START_SECONDS
        if time.monotonic() > end:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GONE_SECONDS)
            return "hung and was killed"
        time.sleep(0.02)
    code = process.returncode
    return f"died of signal {-code}" if code < 0 else f"died with exit code {code}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines that are whole: the last may be cut."""
    found = []
    with contextlib.suppress(OSError):
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    found.append(line)
    return found


def results(path: Path) -> list[dict[str, Any]]:
    """Read the results; what was begun and has none was cut off."""
    lines = read_lines(path)
    found = [line for line in lines if "state" in line]
    begun = [line["begun"] for line in lines if "begun" in line]
    for name in begun[len(begun) - 1 :]:
        if name not in [line["name"] for line in found]:
            found.append({"name": name, "covers": (), "state": "cut"})
    return found


def main(arguments: Iterable[str]) -> int:
    """``GROUP FILE [--quick]`` watches; with a number behind it, makes the calls from there on."""
    group, file, *rest = arguments
    quick = "--quick" in rest
    numbers = [int(word) for word in rest if word.isdigit()]
    if numbers:
        code = make(group, Path(file), numbers[0], quick)
        sys.stdout.flush()
        os._exit(code)  # a broken context may hang at the end of the interpreter
    command = [sys.executable, sys.argv[0], "--calls", group, file, *["--quick"] * quick]
    return watch(command, Path(file))
