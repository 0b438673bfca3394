"""The interface of a technique that ``umem choose`` tries: a row of its table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass


@dataclass(frozen=True)
class Technique:
    """A technique that may make a program fit a GPU, such as recomputation.

    Attributes:
        name: the name in reports; unique.
        line: the line that turns it on: a command that begins with ``umem run``, without the
            script, or a line of Python.
        turn_on: turns it on for the process, before the program begins, until the stack unwinds.
            Another process imports it by module and name, so it must be a top-level function of a
            module, or a `functools.partial` of one. An error that it raises is shown as the reason
            why the technique does not apply.
        is_paging: whether the GPU's driver moves memory. The time then depends on addresses, so the
            technique runs several times.
        needs_chainer: True: only for programs with Chainer; None: only for programs without it;
            False: for both.
    """

    name: str
    line: str
    turn_on: Callable[[ExitStack], None]
    is_paging: bool = False
    needs_chainer: bool | None = True

    def suits(self, *, has_chainer: bool) -> bool:
        """Tell whether it is tried for a program that uses Chainer, or does not."""
        return not has_chainer if self.needs_chainer is None else has_chainer >= self.needs_chainer
