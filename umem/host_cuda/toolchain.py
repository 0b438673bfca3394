"""A C++ compiler with a cache of its output on disk.

A shared object is compiled once for each source, compiler, options and target processors: its file
name is a digest of them. One of several concurrent processes and threads compiles it, and the
others wait.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from umem.errors import DeviceError, MissingDependencyError
from umem.host_cuda.compile_lock import WAIT_SECONDS, only_maker
from umem.host_cuda.kernel_cache import (
    UNFINISHED,
    headers_folder,
    kernel_cache_limit,
    kernel_folder,
    mark_used,
    trim_kernels,
)
from umem.host_cuda.processors import Processors

COMPILERS = ("g++", "clang++")
OPTIONS = (
    "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-Wl,-Bsymbolic",
    "-Werror=vla",  # CUDA has no arrays of variable length, and under -w g++ says nothing of them
    "-fno-isolate-erroneous-paths-dereference",  # which ends a process that divides by zero
    "-U_FORTIFY_SOURCE",  # which takes a jump to another stack for an error
)  # fmt: skip
MOST_CHARACTERS = 16000
"""The most characters of a compiler's messages in an error (a guess)."""
_ERROR = re.compile(r"^(?=[^\n]*: (?:fatal )?error: )", re.MULTILINE)
PATIENCE_SECONDS = 2.0
"""Total compile time after which a message is shown (a guess)."""
KERNELS_ROOM_BYTES, ROOM_BYTES = 16 << 20, 256 << 20
"""Folders of kernels and of headers with less free space than this count as full (guesses)."""
HEADERS_BYTES = 256 << 20
"""The most bytes of precompiled headers on a machine: ten, of about 25 MiB each (a guess)."""
TRIM_EVERY = 64
"""A process checks the cache's size after this many compilations (a guess)."""
LANGUAGES = {"c": ("-x", "c", "-O1"), "c++": ("-x", "c++", "-std=c++17", "-O3")}
"""C for functions that forward calls; C++ for kernels."""


class Toolchain:
    """A C++ compiler with a cache on disk.

    Args:
        folder: the folder of shared objects; if it is not writable, full, or mounted noexec, a
            folder of the process. Shared objects in a folder that is not writable are still used.
        target: target processors, instead of ``UMEM_KERNEL_TARGET``.

    Attributes:
        made: the shared objects that it has compiled.

    Raises:
        DeviceError: ``UMEM_KERNEL_TARGET`` is not a target, or not for this processor; or no
            writable folder allows programs to run.
        SizeError: ``UMEM_KERNEL_CACHE_SIZE`` is not a size.
    """

    def __init__(self, folder: Path | None = None, target: Processors | None = None) -> None:
        self._is_own = False
        self._progress = Progress()
        self.target = target or Processors.wanted()
        self._limit = kernel_cache_limit()
        self._made_count = 0
        self.made: set[Path] = set()
        self.folder = folder or kernel_folder()
        self._first = self.folder
        if not takes_files(self.folder) or _room(self.folder) < KERNELS_ROOM_BYTES:
            self.folder = self._elsewhere()
        elif not _may_run(self.folder):
            self._first = self.folder = self._elsewhere()

    @cached_property
    def compiler(self) -> str:
        """Return the compiler's path.

        Raises:
            MissingDependencyError: there is no compiler.
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
        """Return the compiler's version and its target processors."""
        return self._run(["--version"]).stdout + self.target.processors()

    @cached_property
    def label(self) -> str:
        """Return the prefix of shared objects from this compiler and for this target."""
        return f"{self.target.name}-{_digest(self.compiler, self.version)[:8]}"

    def shared_object(
        self,
        source: str,
        language: str,
        options: Sequence[str] = (),
        places: Callable[[], Sequence[str]] = tuple,
    ) -> Path:
        """Return a source's shared object; compile it if not cached.

        Args:
            source: source code in the language.
            language: ``"c"`` or ``"c++"``.
            options: more compiler options.
            places: returns options for the paths of headers, whose contents ``options`` identify.

        Raises:
            MissingDependencyError: there is no compiler.
            DeviceError: the compiler refuses the source; what it says is in the message.
        """
        given = (*LANGUAGES[language], *OPTIONS, *self.target.options)
        name = f"{self.label}-{_digest(source, *given, *options)[:32]}.so"
        for path in {self._first / name, self.folder / name}:
            if path.exists():
                mark_used(path)
                return path
        path = self.folder / name
        self._make(source, (*given, *places(), *options), path)
        if not self._is_own and self._made_count % TRIM_EVERY == 1:
            trim_kernels(self.folder, self._limit)
        return path

    def preprocessed(self, source: str, options: Sequence[str]) -> str:
        """Return a C++ source after preprocessing.

        Raises:
            DeviceError: the preprocessor refuses it; the message contains the preprocessor's.
        """
        done = self._run([*LANGUAGES["c++"], "-w", *options, "-"], source)
        if done.returncode:
            raise DeviceError(f"{self.compiler} refuses a kernel:\n{_first_error(done.stderr)}")
        return done.stdout

    def remarks(self, source: str, language: str, options: Sequence[str] = ()) -> str:
        """Return the compiler's warnings on a source."""
        given = (*LANGUAGES[language], *self.target.options, "-Wall", "-fsyntax-only", *options)
        return self._run([*given, "-"], source).stderr

    def header(self, text: str, options: Sequence[str]) -> Path:
        """Return a header file, precompiled for these options if the compiler is g++.

        Precompiled headers are large, and useless on other machines, so all caches share them.
        """
        given = (*LANGUAGES["c++"], *OPTIONS, *self.target.options, *options)
        folder = self._headers
        path = self.text_file(text, f".{_digest(text, self.label, *given)[:16]}.h", folder)
        made = path.with_name(f"{path.name}.gch")
        if "clang" in self.version:
            return path
        if made.exists():
            mark_used(made)
            return path
        # With an option for the linker g++ would link, and leave no header.
        compiling = [option for option in given[2:] if not option.startswith("-Wl,")]
        self._make("", ("-x", "c++-header", *compiling), made, str(path))
        trim_kernels(path.parent, HEADERS_BYTES)
        return path

    @cached_property
    def _headers(self) -> Path | None:
        """Return this user's folder of precompiled headers; None if it cannot be made."""
        if self._is_own:
            return None
        folder = headers_folder()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            return None
        is_ours = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
        has_room = takes_files(folder) and _room(folder) >= ROOM_BYTES
        return folder if is_ours and stat.S_ISDIR(found.st_mode) and has_room else None

    def text_file(self, text: str, suffix: str, folder: Path | None = None) -> Path:
        """Write text, such as a linker script, to a file in the cache's folder."""
        path = (folder or self.folder) / f"{_digest(text)[:32]}{suffix}"
        if not path.exists():
            self._write(text, path)
        return path

    def remembered(self, key: str, make: Callable[[], str]) -> str:
        """Return a text that is made once, and kept in the cache's folder under a key."""
        path = self.folder / f"{_digest(key)[:32]}.map"
        if not path.exists():
            self._write(make(), path)
        return path.read_text()

    def _write(self, text: str, path: Path) -> None:
        number, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _make(self, text: str, given: Sequence[str], path: Path, source: str = "-") -> None:
        """Compile, or wait for another process to."""
        with only_maker(path) as is_to_make:
            if is_to_make:
                self._made_count += 1
                self.made.add(path)
                with self._progress.one():
                    self._compile(text, given, path, source)

    def _compile(self, text: str, given: Sequence[str], path: Path, source: str) -> None:
        """Compile to a temporary file, and rename it when complete.

        Raises:
            DeviceError: the compiler refuses the source.
        """
        start = f"{path.name}{UNFINISHED}"
        for left in path.parent.glob(f"{glob.escape(start)}*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > WAIT_SECONDS:
                left.unlink(missing_ok=True)
        number, name = tempfile.mkstemp(prefix=start, suffix=path.suffix, dir=path.parent)
        os.close(number)
        try:
            done = self._run([*given, "-o", name, source], text)
            if done.returncode:
                errors = _first_error(errors_in(done.stderr)) or f"it exits with {done.returncode}"
                raise DeviceError(f"{self.compiler} refuses a kernel:\n{errors}")
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
        """Make a temporary folder, which is removed when the process ends.

        Raises:
            DeviceError: programs cannot run there.
        """
        folder = Path(tempfile.mkdtemp(prefix="umem-software-gpu-"))
        atexit.register(_remove, folder, os.getpid())
        if not _may_run(folder):
            raise DeviceError(
                f"programs cannot run in {folder} (noexec): set TMPDIR to a folder that allows it"
            )
        self._is_own = True
        return folder


class Progress:
    """Shows after some time on a terminal that kernels are being compiled."""

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Show the message while one kernel compiles, then clear it."""
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


_REMARK = re.compile(r"[^\s:]+:\d+:(?:\d+:)? (fatal error|error|warning|note|sorry)\b")
_PLACE = re.compile(r"(In file included|\s+) from \S+:\d+|[^\s:]+: (In|At) ")
"""Lines of g++'s errors and their locations."""


def errors_in(text: str) -> str:
    """Return a compiler's messages without its warnings."""
    kept: list[str] = []
    places: list[str] = []
    is_kept = True
    for line in text.splitlines(keepends=True):
        if found := _REMARK.match(line):
            is_kept = is_kept if found[1] == "note" else found[1] != "warning"
            kept += places if is_kept else []
            places = []
        elif _PLACE.match(line):
            places.append(line)
            continue
        if is_kept:
            kept.append(line)
    return "".join(kept)


def _first_error(errors: str) -> str:
    """Return a compiler's messages from the first error on, which is the one to fix."""
    found = _ERROR.search(errors)
    return errors[found.start() if found else 0 :][:MOST_CHARACTERS]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _may_run(folder: Path) -> bool:
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


def _room(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
