"""A C++ compiler, and what it has compiled, on disk.

A shared object is made once for a source, a compiler and its options: the file's name is a digest
of all three. Processes side by side may make the same one; the last to finish puts its own in the
place of an equal one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from umem.errors import DeviceError, MissingDependencyError

COMPILERS = ("g++", "clang++")
OPTIONS = ("-O2", "-fPIC", "-shared", "-w")
LANGUAGES = {"c": ("-x", "c"), "c++": ("-x", "c++", "-std=c++17")}


def default_folder() -> Path:
    """Where compiled kernels are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "umem" / "software-gpu"


class Toolchain:
    """Compiles, and remembers.

    Args:
        folder: where shared objects are kept; one of the process where it cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _writable(folder or default_folder())

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
        """What the compiler says it is."""
        asked = [self.compiler, "--version"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout

    def shared_object(self, source: str, language: str, options: Sequence[str] = ()) -> Path:
        """Return the shared object that a source gives; compiled where it is not there yet.

        Raises:
            MissingDependencyError: there is no compiler.
            DeviceError: the compiler refuses the source; what it says is in the message.
        """
        given = (*LANGUAGES[language], *OPTIONS, *options)
        text = "\0".join((source, *given, self.compiler, self.version))
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
        if not path.exists():
            self._compile(source, given, path)
        return path

    def remarks(self, source: str, language: str, options: Sequence[str] = ()) -> str:
        """Return the warnings that a source gives."""
        given = (*LANGUAGES[language], "-Wall", "-fsyntax-only", *options)
        asked = [self.compiler, *given, "-"]
        return subprocess.run(
            asked, input=source, capture_output=True, text=True, check=False
        ).stderr

    def header(self, text: str, options: Sequence[str]) -> Path:
        """Return a header with this text, precompiled for these options where g++ compiles."""
        given = (*LANGUAGES["c++"], *OPTIONS, *options)
        names = "\0".join((text, *given, self.compiler, self.version))
        path = self.text_file(text, f".{hashlib.sha256(names.encode()).hexdigest()[:16]}.h")
        made = path.with_name(f"{path.name}.gch")
        if "clang" not in self.version and not made.exists():
            header = ("-x", "c++-header", *given[2:])
            self._compile("", header, made, str(path))
        return path

    def text_file(self, text: str, suffix: str) -> Path:
        """Return a file of the folder with this text, such as a linker's script."""
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}{suffix}"
        if not path.exists():
            number, name = tempfile.mkstemp(suffix=suffix, dir=self.folder)
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.replace(name, path)
        return path

    def _compile(self, text: str, given: Sequence[str], path: Path, source: str = "-") -> None:
        number, name = tempfile.mkstemp(suffix=path.suffix, dir=self.folder)
        os.close(number)
        try:
            done = subprocess.run(
                [self.compiler, *given, "-o", name, source],
                input=text,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise DeviceError(f"{self.compiler} refuses a kernel:\n{done.stderr[-4000:]}")
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="umem-software-gpu-"))
