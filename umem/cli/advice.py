"""What ``umem run`` adds below the error that ended a script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from umem.errors import OutOfMemoryError
from umem.shown import command_line

_NO_GPU = "CUDA environment is not correctly set up"
"""How Chainer begins to say that it has no GPU."""
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
    if any(isinstance(cause, RuntimeError) and str(cause).startswith(_NO_GPU) for cause in causes):
        follows = "" if gpu is None else f", which the virtual {gpu} follows"
        return (
            f"umem: Chainer finds no GPU here. Have the script compute with NumPy{follows}: "
            "most of Chainer's own take -g -1, --gpu -1 or --device -1"
        )
    if any(isinstance(c, TypeError) and _NO_NUMBER.fullmatch(str(c)) for c in causes):
        return (
            "umem: NumPy up to 2.3 took an array of shape (1,) for a number, with a warning; "
            "newer ones do not. Write a.item() for int(a) and float(a), or run the script as it "
            "is with the older one: pip install 'numpy<2.4'"
        )
    return None


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
