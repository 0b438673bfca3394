"""A dry run of a program under a technique, in a process of its own: the parent's and the child's
side."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from umem._common.stacks import is_installed
from umem.choosing.technique import Technique
from umem.errors import StateError
from umem.host_cuda import VARIABLE
from umem.memory import MEMORY_VARIABLES

if TYPE_CHECKING:
    from umem.devices.cuda import LargeArrays

# -- in the parent process -------------------------------------------------------------------------


UNTOUCHED = "nothing on the GPU"
"""The ``end`` of a dry run that allocates nothing on the GPU."""


@dataclass(frozen=True)
class DryProgram:
    """A program, and the GPU that it is tried on.

    Attributes:
        script: a file, or the name of a module.
        arguments: the program's arguments.
        gpu: a GPU's name in the table.
        vram: usable VRAM instead of the table's figure, such as "8GiB".
        options: options of ``umem run --dry``, such as ``("--answer", "train.py:41=1000")``.
    """

    script: str
    arguments: tuple[str, ...] = ()
    gpu: str = "t4"
    vram: str | None = None
    is_module: bool = False
    options: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Return the program as on a command line."""
        return [*["-m"] * self.is_module, self.script, *self.arguments]


class MadeAt(NamedTuple):
    """Large arrays of a program: the line that made them, and the bytes of the largest."""

    line: str
    nbytes: int


@dataclass(frozen=True)
class DryResult:
    """The result of one dry run under a technique (simulated).

    Attributes:
        seconds: times of the last two steps, which are equal if the program's steps are alike; the
            time of a program without steps; empty if it ended before.
        why_not: why the program does not fit, or why that is unknown; None if it fits.
        missing_bytes: the least number of bytes that were missing; None if that is unknown.
        failed: whether the program ended with an error other than running out of memory.
        line: the program's line that ended it, if any.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    reserved_peak_bytes: int
    moved_bytes: int
    why_not: str | None = None
    missing_bytes: int | None = None
    failed: bool = False
    line: str | None = None
    asked_lines: tuple[str, ...] = ()
    uses_chainer: bool = False
    large_arrays: tuple[MadeAt, ...] = ()
    vram_bytes: int = 0
    title: str = ""
    has_steps: bool = True

    @property
    def is_tight(self) -> bool:
        """Tell whether the program would not fit if the gaps in its pool were twice as large.

        The gaps depend on the order of the pool's chunks, which differs from process to process.
        """
        gaps = self.reserved_peak_bytes - self.peak_bytes
        return self.reserved_peak_bytes + gaps > self.vram_bytes

    @classmethod
    def read(cls, found: dict[str, Any]) -> DryResult:
        """Read the JSON of a dry run."""
        failure = found["failure"]
        steps = found["step_seconds_all"]
        seconds = tuple(steps[-2:] if found["ended"] == "steady" else steps[-1:])
        fits = bool(found["fits"])
        return cls(
            seconds=seconds if fits else (),
            peak_bytes=found["peak_bytes"],
            reserved_peak_bytes=found["reserved_peak_bytes"],
            moved_bytes=found["moved_bytes"],
            why_not=None if fits else _why_not(found),
            missing_bytes=None if failure is None else failure["missing_bytes"],
            failed=not fits and found["ended"] not in ("out of memory", UNTOUCHED),
            line=None if failure is None else failure["line"],
            asked_lines=tuple(dict.fromkeys(one["line"] for one in found["asked"])),
            uses_chainer=found["uses_chainer"],
            large_arrays=tuple(MadeAt(*one) for one in found["large_arrays"]),
            vram_bytes=found["vram_bytes"],
            title=found["title"],
            has_steps=found.get("has_steps", True),
        )


def _why_not(found: dict[str, Any]) -> str:
    """Return why a program does not fit, or why that is unknown."""
    failure, ended = found["failure"], found["ended"]
    if ended == "out of memory":
        return f"out of memory at {failure['line']}{_in_step(found)}"
    if ended == "asked too often":
        line = failure["line"]
        return f"{line} reads values without end. To supply one: --answer {line}=VALUE"
    if failure is not None:
        return f"fails at {failure['line']}{_in_step(found)}: {failure['message']}"
    if ended == UNTOUCHED:
        return UNTOUCHED
    if ended == "interrupted":
        return "interrupted"
    return "exits with a status other than 0"


def _in_step(found: dict[str, Any]) -> str:
    return f", in step {found['failure']['step']}" if found.get("has_steps", True) else ""


def run_dry(program: DryProgram, technique: Technique, stop: Event) -> DryResult:
    """Run a program dry under a technique, in a process of its own; returns the result.

    Args:
        program: the program and the GPU.
        technique: turned on in that process before the program begins.
        stop: an event that ends the process once it is set.

    Raises:
        StateError: the technique cannot be pickled for another process.
    """
    try:
        row = pickle.dumps(technique)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StateError(
            f"the technique {technique.name!r} runs in another process, which must be able to "
            f"import turn_on by module and name: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="umem-choose-") as folder:
        row_file, result, stderr = (Path(folder) / name for name in ("technique", "result", "said"))
        row_file.write_bytes(row)
        given = ["--dry", program.gpu, "--technique", str(row_file), "--json", str(result)]
        given += program.options
        if program.vram is not None:
            given += ["--vram", program.vram]
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "umem", "run", *given, *program.argv()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_environment(),
            )
            try:
                while process.poll() is None and not stop.is_set():
                    stop.wait(0.02)
            finally:
                process.kill()  # nothing where it has ended
                process.wait()
        if result.exists():
            return DryResult.read(json.loads(result.read_text(encoding="utf-8")))
        lines = stderr.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next(filter(None, reversed(lines)), f"exit status {process.returncode}")
    return DryResult((), 0, 0, 0, last.removeprefix("Error: "), failed=True)


def _environment() -> dict[str, str]:
    """Return a child's environment: without umem's mode and GPU, and with this process's path."""
    left_out = (*MEMORY_VARIABLES, VARIABLE)
    found = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# -- in the child process --------------------------------------------------------------------------


class Trial:
    """The technique of this process's dry run, and the facts that the parent reads beside figures.

    Args:
        path: the file with the technique.
    """

    def __init__(self, path: str) -> None:
        self._technique: Technique = pickle.loads(Path(path).read_bytes())
        self._large: LargeArrays | None = None

    def begin(self, stack: ExitStack) -> None:
        """Turn the technique on until the stack unwinds.

        Raises:
            UmemError: the technique does not apply.
        """
        self._technique.turn_on(stack)
        if not self._technique.needs_chainer:
            from umem.devices.cuda import LargeArrays  # imports CuPy

            self._large = stack.enter_context(LargeArrays())

    def facts(self) -> dict[str, Any]:
        """Return the entries of the dry run's JSON beside its figures."""
        made: Counter[str] = Counter() if self._large is None else self._large.made
        return {"uses_chainer": _uses_chainer(), "large_arrays": made.most_common(3)}


def _uses_chainer() -> bool:
    """Tell whether one of the program's own modules has a name from Chainer."""
    return any(
        str(getattr(value, "__module__", None) or getattr(value, "__name__", "")).startswith(
            ("chainer.", "umem.chainer")
        ) or (isinstance(value, ModuleType) and value.__name__ == "chainer")
        for module in _own_modules()
        for value in list(vars(module).values())
    )  # fmt: skip


def _own_modules() -> Iterator[ModuleType]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and not is_installed(file):
            yield module
