"""A script as ``__main__``, as Python would run it, and the way out of errors that umem knows."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from umem.errors import OutOfMemoryError, StateError, UmemError
from umem.launch import this_rank
from umem.printable import command_line
from umem.trace.stacks import end_at_user


def run_script(
    script: Path,
    source: bytes,
    arguments: tuple[str, ...],
    virtual: str | None,
    vram: str | None,
    whole: bool,
) -> tuple[int | str | None, str | None]:
    """Run the script as ``__main__``, as Python would: its exit code, and what to do about it.

    Its module stays ``__main__``: what runs at exit, or is pickled, looks there.
    """
    path = os.path.abspath(script)
    sys.argv = [str(script), *arguments]
    if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11 on
        sys.path[0] = str(Path(path).resolve().parent)
    module = sys.modules["__main__"] = _main_module(path)
    code: int | str | None = 0
    hint = None
    rank = this_rank()
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        _show(error, path, whole)
        if rank is not None:
            rank.raised(error)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        hint = advice(error, [str(script), *arguments], virtual, vram)
    _wait_for_threads()
    if rank is not None:
        rank.over(code)
    return code, hint


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = path, None
    module.__loader__ = SourceFileLoader("__main__", path)
    return module


def _show(error: BaseException, path: str, whole: bool) -> None:
    """The traceback as Python shows it for the script alone, by the script's own hook if any.

    That of an error of umem's ends at the script's own line, unless the ``whole`` is wanted.
    """
    if isinstance(error, UmemError) and not whole:
        end_at_user(error)
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _wait_for_threads() -> None:
    # Python waits too, but later: they still need what is taken away before.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


_NO_GPU = "CUDA environment is not correctly set up"
"""How Chainer begins to say that it has no GPU."""
_HAS_BUDGET = "a Recompute is on already"
"""How umem begins to say that a Recompute is inside of another."""
_NO_NUMBER = re.compile(
    r"only 0-dimensional arrays can be converted to Python scalars"
    r"|%\w format: a real number is required, not numpy\.ndarray"
)
"""What NumPy says from 2.4 on where an array of one element was taken for a number before."""


def advice(error: BaseException, words: list[str], gpu: str | None, vram: str | None) -> str | None:
    """The way out of an error, where umem knows one; None elsewhere.

    Args:
        words: the script and its arguments.
        gpu: the virtual GPU that the script ran on, if any.
        vram: what it had instead of the table's, if anything.
    """
    causes = list(_causes(error))
    if any(isinstance(cause, OutOfMemoryError) for cause in causes):
        asked = ["--gpu", gpu or "t4", *(["--vram", vram] if vram else [])]
        return _what_it_needs(command_line(*words), command_line(*asked))
    if any(isinstance(c, StateError) and str(c).startswith(_HAS_BUDGET) for c in causes):
        return "umem: the script has a Recompute of its own: run it without --recompute"
    if any(_is_cupys(cause) for cause in causes):
        return (
            "umem: managed memory may be more than the GPU has: umem run --mode managed, with the "
            "same options, and --report to see what moved"
        )
    if any(isinstance(cause, RuntimeError) and str(cause).startswith(_NO_GPU) for cause in causes):
        follows = "" if gpu is None else f", which the virtual {gpu} follows"
        return (
            f"umem: Chainer finds no GPU here. Have the script compute with NumPy{follows}: "
            "most of Chainer's own take -g -1, --gpu -1 or --device -1. Or put host memory under "
            "CuPy: umem run --software t4"
        )
    if any(isinstance(c, TypeError) and _NO_NUMBER.fullmatch(str(c)) for c in causes):
        return (
            "umem: NumPy up to 2.3 took an array of shape (1,) for a number, with a warning; "
            "newer ones do not. Write a.item() for int(a) and float(a), or run the script as it "
            "is with the older one: pip install 'numpy<2.4'"
        )
    return None


def _is_cupys(error: BaseException) -> bool:
    """Whether it is CuPy's own OutOfMemoryError, which is none of umem's."""
    kind = type(error)
    return kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "cupy"


def _what_it_needs(command: str, asked: str) -> str:
    return (
        "umem: what the script would need is told by a recording of two steps, made where there "
        "is room for them (without --virtual, or with --mode managed):\n"
        f"  umem run --record out/run.umem.gz {command}\n"
        f"  umem choose out/run.umem.gz {asked}"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from, each once: a program can tie them in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
