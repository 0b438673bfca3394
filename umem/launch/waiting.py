"""Whether a rank waits for others in MPI: from outside that looks like computing.

Open MPI waits by asking again and again, with all of a core's time. So the rank says it itself,
from a thread, and only when it is asked, once another rank is over.
"""

from __future__ import annotations

import ast
import ctypes
import linecache
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umem.launch.seats import Seat

MISSED_SECONDS = 5.0
"""How long after a rank's end the others may be in MPI_Init."""
_Pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_OTHERS_THINGS = ("File",)
"""Classes of mpi4py whose calls may take long and wait for no rank."""


class MainThreadBack:
    """Whether the main thread has left the call into C that it was in when this was made.

    It runs a pending call of Python's as soon as it is back. A call that holds Python's lock is
    no wait in MPI, which lets go of it; while it is held, nobody can look here at all.
    """

    def __init__(self) -> None:
        self.came = False
        self._began = time.monotonic()
        self._notice = _Pending(self._on_return)  # kept until it has run
        ctypes.pythonapi.Py_AddPendingCall(self._notice, None)

    @property
    def seconds(self) -> float:
        """How long ago this was made."""
        return time.monotonic() - self._began

    def _on_return(self, _: Any) -> int:
        self.came = True
        return 0


def main_thread_call() -> str | None:
    """Name the method of MPI that the main thread is calling, such as ``Allreduce (a.py:12)``.

    None where it calls anything else. Cost: the source of one file is parsed, once.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else mpi_call(frame)


def mpi_call(frame: FrameType) -> str | None:
    """Name the method of MPI that a frame is in; its source must be at hand."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    for call in _calls(source):
        if _is_running(call, frame):
            method = _method(call.func, frame)
            if method is not None:
                name = Path(frame.f_code.co_filename).name
                return f"{method} ({name}:{frame.f_lineno})"
    return None


def _method(called: ast.expr, frame: FrameType) -> str | None:
    """Name the method of MPI that an expression is; None where it is none, or not known."""
    if isinstance(called, ast.Attribute):
        of_mpi = _is_of_mpi(_value(called.value, frame)) or _is_request(called.value, frame)
        return called.attr if of_mpi else None
    value = _value(called, frame)  # such as receive = comm.recv
    if isinstance(value, partial):
        value = value.func
    of_mpi = _is_of_mpi(getattr(value, "__self__", None))
    return getattr(value, "__name__", None) if of_mpi else None


def _is_request(node: ast.expr, frame: FrameType) -> bool:
    """Whether an expression is such as ``comm.irecv(...)``, which gives a request."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner, begun = _value(node.func.value, frame), node.func.attr
    return begun[0] in "iI" and _is_of_mpi(owner) and hasattr(owner, _waiting(begun))


def _waiting(begun: str) -> str:
    """The call that waits, of one that only begins: recv of irecv, Allreduce of Iallreduce."""
    return begun[1:] if begun[0] == "i" else begun[1:].capitalize()


@lru_cache(8)
def _calls(source: str) -> list[ast.Call]:
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return []


def _is_running(call: ast.Call, frame: FrameType) -> bool:
    """Whether the frame's instruction is this call; before Python 3.11, whether its line is."""
    if sys.version_info < (3, 11):
        return call.lineno <= frame.f_lineno <= (call.end_lineno or call.lineno)
    _, line, _, column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return (line, column) == (call.end_lineno, call.end_col_offset)


def _value(node: ast.expr, frame: FrameType) -> Any:
    """What a name, or an attribute of one, is in a frame; None for what would have to be run."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr, None)
    if isinstance(node, ast.Subscript):
        return _item(_value(node.value, frame), node.slice, frame)
    return None


def _item(owner: Any, index: ast.expr, frame: FrameType) -> Any:
    """What stands in a list, a tuple or a dictionary; None where code of the script would run."""
    key = index.value if isinstance(index, ast.Constant) else _value(index, frame)
    if type(owner) not in (list, tuple, dict) or type(key) not in (int, str):
        return None
    try:
        return owner[key]
    except (LookupError, TypeError):
        return None


def _is_of_mpi(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__ not in _OTHERS_THINGS and any(
        base.__module__ == "mpi4py.MPI" for base in kind.__mro__
    )


# -- all ranks together ---------------------------------------------------------------------------


def missed(seats: Sequence[Seat], now: float) -> tuple[Seat, str] | None:
    """Find the rank that is over while all that are left wait for others in MPI.

    They are asked as soon as one is over. A rank that computes says nothing, however long: only
    where every rank that is left waits can nothing happen any more.
    """
    over = [seat for seat in seats if seat.over_at is not None or seat.ended == 0]
    left = [seat for seat in seats if seat not in over]
    if not over or not left:
        return None
    for seat in left:
        if seat.has_mpi and not seat.is_asked:
            seat.is_asked = True
            seat.order(ask=True)
    first = min(over, key=lambda seat: seat.over_at or now)
    calls = [seat.waits or _in_init(seat, now) for seat in left]
    if not all(calls):
        return None
    return first, f"ended (status 0) while rank {left[0].rank} waits for others in {calls[0]}"


def _in_init(seat: Seat, now: float) -> str | None:
    begun = seat.begins_mpi_at
    if begun is None or seat.has_mpi or now - begun < MISSED_SECONDS:
        return None
    return "MPI_Init"
