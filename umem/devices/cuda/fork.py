"""Refuses CUDA in a process that was forked from one that used it, instead of a crash.

The driver's state belongs to the process that initialised it. A child that calls it gets errors at
best, so umem raises an error with the way out. Importing this module does not import CuPy.
"""

from __future__ import annotations

import os
from typing import Any

from umem.errors import StateError

TEXT = (
    "CUDA cannot be used in this process, because it was forked from one that had used it. Start "
    "worker processes before the first use of the GPU, or with multiprocessing.get_context"
    "('spawn'); a worker that only prepares data on the host may be forked"
)

_used = False
_in_child = False
_kept: list[Any] = []


def remember_use() -> None:
    """Refuse CUDA in children forked from now on."""
    global _used
    _used = True


def is_child() -> bool:
    """Tell whether this is a forked child of a process that used CUDA."""
    return _in_child


def refuse_child() -> None:
    """Raise StateError in a forked child of a process that used CUDA."""
    if _in_child:
        raise StateError(TEXT)


def refuse_allocations() -> None:
    """Make allocations raise StateError in a forked child."""
    import cupy

    try:
        cupy.cuda.set_allocator(_refuse)
    except ValueError:  # inside a block of this thread, whose end puts the old one back
        block = cupy.cuda.using_allocator(_refuse)
        block.__enter__()
        _kept.append(block)  # collecting it would put the old allocator back at any moment


def _refuse(nbytes: int) -> Any:
    raise StateError(TEXT)


def _after_fork() -> None:
    global _in_child
    _in_child = _in_child or _used


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)
