"""The user's part of a call stack: captured cheaply, formatted later."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

STACK_DEPTH = 16
"""Most frames to keep of a stack, from the user's innermost on."""
USER_DEPTH = 5
"""Most places to keep of a stack in a recording."""
_LIBRARIES = ("umem", "chainer", "cupy", "cupyx", "cupy_backends", "numpy")

Places = tuple[Any, ...]
"""A stack as code, instruction, code, instruction, ..., innermost first."""


class Frame(NamedTuple):
    """A place in the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return self.seen_from(_current_folder())

    def seen_from(self, folder: str) -> str:
        """Return the frame as text, with files relative to ``folder`` if they are below it."""
        return f"{self.file.removeprefix(folder)}:{self.line} {self.function}"


def innermost(stack: Sequence[str]) -> str:
    """Return the file's name and the line of the innermost place of a recorded stack."""
    return os.path.basename(stack[0].partition(" ")[0])


def _current_folder() -> str:
    """Return the current folder with a slash at its end; empty if it was deleted or is the root."""
    try:
        folder = os.path.join(os.getcwd(), "")
    except OSError:
        return ""
    return "" if folder == os.sep else folder


def places() -> Places:
    """Return the calling stack, without library frames at its inner end.

    Costs a few microseconds: it formats, looks up and hashes nothing. It keeps no frames, which
    would keep their variables alive.
    """
    first = sys._getframe(1)
    frame: FrameType | None = first
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:  # only libraries are on the stack: keep them
        frame = first
    found: list[Any] = []
    while frame is not None and len(found) < 2 * STACK_DEPTH:
        found += (frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return tuple(found)


def user_places(skip: int = 1) -> Places:
    """Return the calling stack without any library frames.

    If the training script calls Chainer, and Chainer a model's ``forward``, both of the user's
    places are returned. Empty if only libraries are on the stack. Ignores the ``skip`` innermost
    frames. Costs as much as `places`.
    """
    found: list[Any] = []
    libraries = _library_files
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file not in libraries and (file in _known or not _is_library(file)):
            found += (code, frame.f_lasti)
            if len(found) >= 2 * USER_DEPTH:
                break
            if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
                break  # the frames outside of it only started the script
        frame = frame.f_back
    return tuple(found)


def program_line(*, whole_path: bool = False) -> str:
    """Return ``"file:line"`` of the program: the innermost line outside of all libraries.

    Libraries are installed packages, Python's own modules, and umem. For an installed program it is
    the line of the module that was started; if only libraries are on the stack, the outermost line.

    Args:
        whole_path: return the file's whole path instead of its name.
    """
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_beside(frame):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file if whole_path else os.path.basename(file)}:{frame.f_lineno}"


def _is_beside(frame: FrameType) -> bool:
    """Tell whether a frame is not the program's, by its file and module."""
    file = frame.f_code.co_filename
    if file.endswith(".pyx"):  # CuPy's own files, whose paths are relative
        return True
    return is_installed(file) and frame.f_globals.get("__name__") != "__main__"


def error_line(error: BaseException) -> str:
    """Return the program's innermost line in an error's traceback, as `program_line` does.

    If the traceback has only libraries, it is their innermost line.
    """
    found = own = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        found = f"{os.path.basename(frame.f_code.co_filename)}:{traceback.tb_lineno}"
        if not _is_beside(frame):
            own = found
        traceback = traceback.tb_next
    return own or found or "?"


def is_own_work(ignored: Sequence[str] = ()) -> bool:
    """Tell whether umem itself uses arrays at the moment, not the program or Chainer.

    Args:
        ignored: prefixes of umem's files that the array library itself calls.
    """
    root = os.path.dirname(sys.modules["umem"].__file__ or "") + os.sep
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root) and not file.startswith(tuple(ignored)):
            return True
        if not (file.startswith(root) or any(part in file for part in _ARRAY_LIBRARIES)):
            return False
        frame = frame.f_back
    return False


_ARRAY_LIBRARIES = "/cupy/", "/cupyx/", "/numpy/", "/chainer/_backend.py", "/chainer/backends/"


def end_at_user(error: BaseException) -> None:
    """Drop library frames from the inner end of an error's traceback.

    For errors whose message is sufficient: the traceback then ends at the user's own line. If only
    libraries are on the stack, it stays whole.
    """
    last, traceback = None, error.__traceback__
    while traceback is not None:
        if not _is_library(traceback.tb_frame.f_code.co_filename):
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


class Reader:
    """Turns places into frames, each looked up once.

    Texts have paths relative to the folder in which the reader was made.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[int, int], Frame] = {}
        self._folder = _current_folder()

    def texts(self, places: Places) -> tuple[str, ...]:
        """Return the frames as text, innermost first."""
        return tuple(frame.seen_from(self._folder) for frame in self.read(places))

    def read(self, places: Places) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first."""
        pairs = zip(places[::2], places[1::2], strict=True)
        return tuple(self._frame(code, instruction) for code, instruction in pairs)

    def _frame(self, code: CodeType, instruction: int) -> Frame:
        key = id(code), instruction  # hashing code reads all of it
        if key not in self._frames:
            self._frames[key] = Frame(code.co_filename, _line(code, instruction), code.co_name)
        return self._frames[key]


@cache
def is_installed(file: str) -> bool:
    """Tell whether a file belongs to an installed package, to Python or to umem."""
    inside = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
    own = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
    return file.startswith(own) or any(one in file for one in inside) or _is_library(file)


_known: dict[str, bool] = {}
_library_files: set[str] = set()
"""Known files that belong to libraries."""


def _is_library(file: str) -> bool:
    known = _known.get(file)
    if known is None:
        modules = [sys.modules.get(name) for name in _LIBRARIES]
        roots = [os.path.dirname(m.__file__) + os.sep for m in modules if m and m.__file__]
        known = _known[file] = file.startswith(tuple(roots))
        if known:
            _library_files.add(file)
    return known


def _line(code: CodeType, instruction: int) -> int:
    for start, stop, line in code.co_lines():
        if start <= instruction < stop and line is not None:
            return line
    return code.co_firstlineno
