"""What backward needs, one tier down from forward on: `Offload`."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from umem.chainer.offload.mover import Mover
from umem.chainer.saved.tiers.tier import Tier
from umem.chainer.saved.tiers.tiers import Where, only_numpy_moves, open_tier
from umem.chainer.tap import is_told
from umem.errors import StateError
from umem.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Offload"]

_on: list[Offload] = []


class Offload:
    """Send what backward needs down one tier, and bring it back before its use, from now on.

    ``with umem.chainer.Offload("scratch"): ...`` moves what functions save for backward out of the
    way as forward goes, and back as backward goes, from the first step and for graphs that never
    repeat: there is no budget, no plan and nothing to learn. Arrays of NumPy go to a file in a
    folder, CuPy's to pinned host memory, those of a virtual GPU to a simulated one. Losses,
    gradients and statistics are those of plain Chainer, to the bit.

    Memory is sent once, with all arrays that lie on it, when nobody but Chainer's tape holds it:
    what the program, a variable or a view of it holds stays until that is gone, so that an edit
    in place is seen by backward as ever. Parameters, what links keep, inputs from outside and
    arrays below 64 KiB stay too, and what functions of the old style keep on themselves.
    Leaving the block brings back what graphs still need.

    Args:
        to: for NumPy, a folder on a disk, which must exist. The file in it has no name: it is gone
            when the block is left, and after a kill. None: for CuPy, and in a virtual GPU.
        limit: the most that lies there at a time, in bytes or text such as "8GiB"; what has no
            room stays where it is. None: as much as there is room for.

    Cost: a copy of each array down, in a thread or on a stream of its own, and about 15
    microseconds for each function (bench/offload.py). Where the tier is full, slow or refused, an
    `OffloadWarning` says so once, and what does not go down stays.

    Raises:
        StateError: on entering, without a folder where arrays are NumPy's, or inside of another
            Offload or of Recompute, which moves by itself (``Recompute(budget, offload=...)``);
            in forward, a folder for CuPy's arrays; in backward, in a process forked since forward.
            On making it: what it goes to is no folder.
        SizeError: on making it: the limit is no size.
        FileError: on entering, the folder cannot be used; in backward, the file cannot be read,
            and the functions before it have run.

    Thread-safety: it moves what the thread that entered it saves; any thread may go backward.

    >>> import umem.chainer
    >>> with umem.virtual_gpu("t4"), umem.chainer.Offload() as offload:
    ...     pass  # the training loop
    >>> offload.summary()
    'nothing was sent'
    """

    def __init__(
        self, to: str | os.PathLike[str] | None = None, *, limit: int | str | None = None
    ) -> None:
        if to is not None and (not isinstance(to, (str, os.PathLike)) or not os.fspath(to)):
            raise StateError(
                "arrays of NumPy go to a folder on a disk, which is named; those of CuPy go to "
                f"pinned host memory, and None is named; got {to!r}"
            )
        self._where: Where = True if to is None else Path(to)
        self._limit = None if limit is None else parse_bytes(limit, "limit")
        self._mover = Mover(self._open)  # another one each time that it is entered

    def _open(self, array: Any) -> Tier:
        return open_tier(array, self._where, self._limit)

    def __enter__(self) -> Offload:
        self._check()
        self._mover = Mover(self._open)
        if only_numpy_moves(self._where):
            self._mover.tiers[np.ndarray] = self._open(np.empty(0))
        _on.append(self)
        try:
            self._mover.start()
        except BaseException:  # a signal, too
            self._leave()
            raise
        return self

    def _check(self) -> None:
        """Raise StateError where it cannot be entered."""
        if _on:
            raise StateError("an Offload is on already: leave that one first")
        if is_told("PassRunner"):
            raise StateError(
                "a Recompute is on, and keeps, makes again and moves by one plan: "
                'Recompute(budget, offload="scratch") instead of an Offload inside of it'
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self in _on:
            _on.remove(self)
            self._mover.stop()

    def tiers(self) -> tuple[Tier, ...]:
        """Where arrays went: one for each kind of them."""
        return tuple(self._mover.tiers.values())

    def summary(self) -> str:
        """Say in a line what went where, and how long the program waited."""
        if not self._mover.tiers:
            return "nothing was sent"
        return "; ".join(map(_told, self._mover.tiers.values()))


def _told(tier: Tier) -> str:
    return (
        f"{format_bytes(tier.sent_bytes)} went to {tier.name}, "
        f"{format_bytes(tier.fetched_bytes)} came back; "
        f"the program waited {format_seconds(tier.waited_seconds)} for it"
    )
