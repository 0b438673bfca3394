"""A C++ compiler, and what it has compiled, on disk.

A shared object is made once for a source, a compiler and its options: the file's name is a digest
of all three. Processes side by side may make the same one; the last to finish puts its own in the
place of an equal one.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from umem.errors import DeviceError, MissingDependencyError

COMPILERS = ("g++", "clang++")
OPTIONS = (
    "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w", "-Wl,-Bsymbolic",
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an error
)  # fmt: skip
_TELLING = r"vendor_id|cpu family|model\b|flags|Features|CPU (implementer|architecture|part)"
"""Lines of /proc/cpuinfo that -march=native goes by."""
PATIENCE_SECONDS = 2.0
"""How long compiling takes in all before a person is told of it."""
ROOM_BYTES = 256 << 20
"""A folder with less room than this, in which something could not be made, is taken to be full."""
LANGUAGES = {"c": ("-x", "c"), "c++": ("-x", "c++", "-std=c++17")}


def default_folder() -> Path:
    """Where compiled kernels are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "umem" / "software-gpu"


class Toolchain:
    """Compiles, and remembers.

    Args:
        folder: where shared objects are kept; one of the process where it cannot be written or
            is full.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._is_own = False
        self._progress = Progress()
        self.folder = folder or default_folder()
        if not _takes_files(self.folder):
            self.folder = self._elsewhere()

    @cached_property
    def compiler(self) -> str:
        """The compiler's path.

        Raises:
            MissingDependencyError: there is none.
        """
        wanted = os.environ.get("CXX")
        for name in (wanted, *COMPILERS):
            path = shutil.which(name) if name else None
            if path is not None:
                return path
        raise MissingDependencyError(
            "the software GPU compiles kernels for this machine's processor, and finds no C++ "
            "compiler: install g++ (Debian, Ubuntu: apt install g++) or clang++, or name one in CXX"
        )

    @cached_property
    def version(self) -> str:
        """What the compiler says it is, and the processor that it compiles for."""
        return self._run(["--version"]).stdout + _processor()

    def shared_object(self, source: str, language: str, options: Sequence[str] = ()) -> Path:
        """Return the shared object that a source gives; compiled where it is not there yet.

        Raises:
            MissingDependencyError: there is no compiler.
            DeviceError: the compiler refuses the source; what it says is in the message.
        """
        given = (*LANGUAGES[language], *OPTIONS, *options)
        text = "\0".join((source, *given, self.compiler, self.version))
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
        if not path.exists() and not self._is_made(source, given, path):
            return self.shared_object(source, language, options)
        return path

    def preprocessed(self, source: str, options: Sequence[str]) -> str:
        """Return a source of C++ as its preprocessor leaves it.

        Raises:
            DeviceError: the preprocessor refuses it; what it says is in the message.
        """
        done = self._run([*LANGUAGES["c++"], "-w", *options, "-"], source)
        if done.returncode:
            raise DeviceError(f"{self.compiler} refuses a kernel:\n{done.stderr[-4000:]}")
        return done.stdout

    def remarks(self, source: str, language: str, options: Sequence[str] = ()) -> str:
        """Return the warnings that a source gives."""
        given = (*LANGUAGES[language], "-Wall", "-fsyntax-only", *options)
        return self._run([*given, "-"], source).stderr

    def header(self, text: str, options: Sequence[str]) -> Path:
        """Return a header with this text, precompiled for these options where g++ compiles."""
        given = (*LANGUAGES["c++"], *OPTIONS, *options)
        names = "\0".join((text, *given, self.compiler, self.version))
        path = self.text_file(text, f".{hashlib.sha256(names.encode()).hexdigest()[:16]}.h")
        made = path.with_name(f"{path.name}.gch")
        if "clang" not in self.version and not made.exists():
            # With an option for the linker g++ would link, and leave no header.
            told = [option for option in given[2:] if not option.startswith("-Wl,")]
            header = ("-x", "c++-header", *told)
            if not self._is_made("", header, made, str(path)):
                return self.header(text, options)
        return path

    def text_file(self, text: str, suffix: str) -> Path:
        """Return a file of the folder with this text, such as a linker's script."""
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{suffix}"
        if not path.exists():
            try:
                self._write(text, path)
            except OSError:
                if not self._has_moved():
                    raise
                return self.text_file(text, suffix)
        return path

    def _write(self, text: str, path: Path) -> None:
        number, name = tempfile.mkstemp(suffix=path.suffix, dir=self.folder)
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _is_made(self, text: str, given: Sequence[str], path: Path, source: str = "-") -> bool:
        """Compile; False where the folder was full, and is another one now."""
        try:
            with self._progress.one():
                self._compile(text, given, path, source)
        except (DeviceError, OSError):
            if not self._has_moved():
                raise
            return False
        return True

    def _has_moved(self) -> bool:
        """Go on in a folder of the process where this one is full or gone; not a second time."""
        if self._is_own or _room(self.folder) >= ROOM_BYTES:
            return False
        self.folder = self._elsewhere()
        return True

    def _compile(self, text: str, given: Sequence[str], path: Path, source: str) -> None:
        number, name = tempfile.mkstemp(suffix=path.suffix, dir=self.folder)
        os.close(number)
        try:
            done = self._run([*given, "-o", name, source], text)
            if done.returncode:
                said = done.stderr[-4000:] or f"it ends with {done.returncode}"
                raise DeviceError(f"{self.compiler} refuses a kernel:\n{said}")
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _run(self, given: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.compiler, *given], input=text, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise DeviceError(f"the compiler cannot be run: {error}") from error

    def _elsewhere(self) -> Path:
        """Make a folder of the process, which goes when it ends."""
        folder = Path(tempfile.mkdtemp(prefix="umem-software-gpu-"))
        atexit.register(_remove, folder, os.getpid())
        self._is_own = True
        return folder


class Progress:
    """Says on a terminal that kernels are compiled, where that has taken a while in all."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """While one is compiled; nothing of the line is left behind."""
        self._count += 1
        terminal = sys.stderr
        is_shown = self._seconds > PATIENCE_SECONDS and terminal is not None and terminal.isatty()
        start = time.monotonic()
        if is_shown:
            so_far = f"umem: compiling kernels for this machine, once: {self._count} so far"
            print(f"\r{so_far}", end="", file=terminal, flush=True)
        try:
            yield
        finally:
            self._seconds += time.monotonic() - start
            if is_shown:
                print("\r\x1b[K", end="", file=terminal, flush=True)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a child of it
        shutil.rmtree(folder, ignore_errors=True)


def _processor() -> str:
    """What the first processor can do: a folder may be shared by machines of several kinds."""
    try:
        found = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = found.partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if re.match(_TELLING, line))


def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _room(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
