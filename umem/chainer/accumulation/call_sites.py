"""Call sites: the place in the program where each function of a loss is called."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import chainer
from chainer.functions.loss import crf1d, softmax_cross_entropy
from chainer.functions.math import average, basic_math

from umem.chainer import accumulation, tap

_CHAINER = os.path.dirname(chainer.__file__) + os.sep
_FUNCTIONS = os.path.join(_CHAINER, "functions") + os.sep
_OURS = os.path.dirname(accumulation.__file__) + os.sep
_UMEM = os.path.dirname(tap.__file__) + os.sep


Key = tuple[str, int]
"""A call's place in the program, and how many calls from there came before it."""
_NOWHERE = "", 0, 0, "an unknown place", 0


class CallSite(NamedTuple):
    """A call of a Chainer function: its place in the program, and what it divides by.

    Attributes:
        kind: the same for the same place of the program, in other parts and other runs.
        passed: the calls of this kind before it: the time step in a loop.
        order: all calls before it.
        file: of the program.
        line: in it.
        is_division: the program wrote a division.
        is_chainers: the call is made by a function of Chainer's, and not by the program.
        divisor: by what Chainer's function divides there, where it is known.
    """

    kind: str
    passed: int
    order: int
    file: str
    line: int
    is_division: bool = False
    is_chainers: bool = False
    divisor: float | None = None

    @property
    def key(self) -> Key:
        """Return what identifies the call in every part of a batch."""
        return self.kind, self.passed

    @property
    def place(self) -> str:
        """Return file and line."""
        return f"{os.path.basename(self.file)}:{self.line}"


def _of_average(func: Any, found: Any) -> float | None:
    if type(func) is not basic_math.Div:
        return None
    return float(found["divider"].array.ravel()[0])


def _of_crf(func: Any, found: Any) -> float | None:
    return float(found["n_batch"]) if type(func) is basic_math.MulConstant else None


def _of_softmax(func: Any, found: Any) -> float | None:
    if "count" not in found or type(func) not in (basic_math.MulConstant, basic_math.Div):
        return None
    return float(found["in_use"].sum() if found["normalize"] else len(found["x"]))


_DIVIDES: dict[Any, Callable[[Any, Any], float | None]] = {
    average.average.__code__: _of_average,
    crf1d.crf1d.__code__: _of_crf,
    # Private: the form that softmax_cross_entropy calls with enable_double_backprop.
    softmax_cross_entropy._double_backward_softmax_cross_entropy.__code__: _of_softmax,
}
"""Composite functions of Chainer that divide by a count of the batch. They keep it in a local
variable alone, which is read from their frame while they run."""


class CallSites:
    """Records where in the program each function of one part's loss is called. For one thread.

    Args:
        before: the call sites of an earlier part of the same program.
    """

    def __init__(self, before: CallSites | None = None) -> None:
        self._names: dict[tuple[tuple[int, int], ...], str] = before._names if before else {}
        self._codes: list[Any] = before._codes if before else []  # whose ids are in names
        self._found: dict[int, CallSite] = {}
        self._passed: Counter[str] = Counter()
        self._order = 0

    def of(self, func: Any) -> CallSite:
        """Return the call that made a function of the tape; at an unknown place if not noted."""
        return self._found.get(id(func)) or CallSite(*_NOWHERE)

    def note(self, func: Any) -> None:
        """Record a call; called by `Subscriber.apply`.

        Cost: some microseconds, by the frames of the program.
        """
        # CPython's private: inspect.stack() would read the source of every frame.
        frame: Any = sys._getframe(2)
        operator, is_chainers, count, last = "", False, None, None
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(_CHAINER):
                if code.co_filename.startswith(_FUNCTIONS):
                    is_chainers = bool(operator)
                    operator = operator or code.co_name
                    if count is None and code in _DIVIDES:
                        count = _DIVIDES[code](func, frame.f_locals)
                last = frame
            elif last is not None or not code.co_filename.startswith(_UMEM):
                break
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_OURS):
            frame = last or sys._getframe(1)
        kind = self._kind(frame)
        self._found[id(func)] = CallSite(
            kind, self._passed[kind], self._order, frame.f_code.co_filename, frame.f_lineno,
            operator in ("div", "rdiv"), is_chainers, count,
        )  # fmt: skip
        self._passed[kind] += 1
        self._order += 1

    def _kind(self, frame: Any) -> str:
        """Return a hash of the call stack from a frame out to `umem.chainer.accumulation`.

        It is the same in every run and process: of files only the names count, not the folders.
        """
        frames: list[Any] = []
        while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
            frames.append(frame)
            frame = frame.f_back
        where = tuple((id(one.f_code), one.f_lasti) for one in frames)
        name = self._names.get(where)
        if name is None:
            self._codes.append([one.f_code for one in frames])
            told = [_position(one.f_code, one.f_lasti) for one in frames]
            name = self._names[where] = f"{crc32(repr(told).encode()):08x}"
        return name


def _position(code: Any, at: int) -> tuple[Any, ...]:
    """Return the source position of an instruction.

    From Python 3.11 on the place alone would not do: while a call runs, it is that of one or
    another of the call's instructions.
    """
    place: Any = at
    if sys.version_info >= (3, 11):
        place = next(islice(code.co_positions(), at // 2, None))
    return os.path.basename(code.co_filename), code.co_name, code.co_firstlineno, place
