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
        line: what to type to have it: a command that begins with ``umem run``, without the script,
            or a line of Python.
        turn_on: turns it on for the process, before the program begins, until the stack unwinds.
            It runs in a process of its own, which imports it by module and name: a function at the
            top of a module, or a `functools.partial` of one. What it raises is shown as the reason
            why the technique does not apply.
        is_paging: whether the GPU's driver moves memory. Its time depends on addresses, so it is
            measured several times.
        needs_chainer: whether it is for programs with Chainer alone; None: for those without.
    """

    name: str
    line: str
    turn_on: Callable[[ExitStack], None]
    is_paging: bool = False
    needs_chainer: bool | None = True

    def suits(self, *, has_chainer: bool) -> bool:
        """Tell whether it is tried for a program, by whether that uses Chainer."""
        return not has_chainer if self.needs_chainer is None else has_chainer >= self.needs_chainer
