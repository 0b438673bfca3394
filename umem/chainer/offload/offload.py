"""`Offload`: every saved tensor offloaded from forward on, without a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from umem.chainer.offload.mover import Mover
from umem.chainer.saved.tiers.tier import Tier
from umem.chainer.saved.tiers.tiers import Where, only_numpy_moves, open_tier
from umem.chainer.tap import is_subscribed
from umem.errors import StateError
from umem.units import format_bytes, format_seconds, parse_bytes

__all__ = ["Offload"]

_on: list[Offload] = []


class Offload:
    """Offload saved tensors in forward, and prefetch them in backward, while the block is entered.

    In ``with umem.chainer.Offload("scratch"): ...`` tensors that functions save for backward are
    offloaded during forward and prefetched during backward, from the first step on. It needs no
    budget, no plan and no learning, and works for graphs that never repeat. NumPy's arrays are
    offloaded to a file in a folder, CuPy's to pinned host memory, a virtual GPU's to simulated
    pinned memory. Losses, gradients and statistics equal plain Chainer's to the bit.

    A piece of memory is offloaded once, with all arrays in it, when only Chainer's tape refers to
    it. While the program, a variable or a view refers to it, it stays, so that backward sees
    in-place edits as in plain Chainer. Never offloaded are parameters, persistent arrays of links,
    inputs of the program, arrays below 64 KiB, and the function state of old-style functions.
    Leaving the block restores the saved tensors of live graphs.

    Args:
        to: for NumPy, an existing folder on a disk. The file in it has no name: the system removes
            it when the block is left, and after a kill. None: for CuPy, and on a virtual GPU.
        limit: the most that is offloaded at a time, in bytes or text such as "8GiB"; tensors beyond
            it stay in memory. None: as much as the target has room for.

    Cost: a copy of each array, in a separate thread or stream, and about 15 microseconds for each
    function (bench/offload.py). If the target is full or slow or a write fails, one
    `OffloadWarning` is given, and tensors that cannot be written stay in memory.

    Raises:
        StateError: on construction, ``to`` is not a path. On entering, no folder was given and
            arrays are NumPy's, or another Offload is on, or a Recompute, which offloads by itself
            (``Recompute(budget, offload=...)``). In forward, a folder was given and arrays are
            CuPy's. In backward, the process was forked since forward.
        SizeError: on construction, the limit is not a size.
        FileError: on entering, the folder cannot be used; in backward, the file cannot be read,
            and the functions before it have run.
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
                "to= must be a folder on a disk for arrays of NumPy, or None for arrays of CuPy, "
                f"which are offloaded to pinned host memory; got {to!r}"
            )
        self._where: Where = True if to is None else Path(to)
        self._limit = None if limit is None else parse_bytes(limit, "limit")
        self._mover = Mover(self._open)  # opens a new target each time it is entered

    def _open(self, array: Any) -> Tier:
        return open_tier(array, self._where, self._limit)

    def __enter__(self) -> Offload:
        """Open the target, and follow the calling thread.

        Raises:
            StateError, FileError: see `Offload`; nothing is turned on.
        """
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
        """Raise StateError inside of another Offload or of a Recompute."""
        if _on:
            raise StateError("an Offload is on already: leave that one first")
        if is_subscribed("PassRunner"):
            raise StateError(
                "a Recompute is on, which plans keeping, recomputing and offloading together: use "
                'Recompute(budget, offload="scratch") instead of an Offload inside it'
            )

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self in _on:
            _on.remove(self)
            self._mover.stop()

    def tiers(self) -> tuple[Tier, ...]:
        """Return the offload targets in use, one for each class of arrays."""
        return tuple(self._mover.tiers.values())

    def summary(self) -> str:
        """Describe in a line the bytes offloaded and fetched, by target, and the seconds waited."""
        if not self._mover.tiers:
            return "nothing was sent"
        return "; ".join(map(_totals, self._mover.tiers.values()))


def _totals(tier: Tier) -> str:
    return (
        f"{format_bytes(tier.sent_bytes)} offloaded to {tier.name}, "
        f"{format_bytes(tier.fetched_bytes)} fetched; "
        f"the program waited {format_seconds(tier.waited_seconds)} for it"
    )
