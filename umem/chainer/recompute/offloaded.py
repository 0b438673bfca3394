"""Offloading under Recompute: the target of a training run, and a call's offloaded arrays.

A call's outputs or its function state are sent once and fetched. Whole pieces of memory are sent,
each once, and arrays are restored with their layout in it. If the program still holds the outputs
as variables, those are used and no output is transferred back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import chainer
import numpy as np

from umem.chainer.saved.array_layout import ArrayLayout, Ground, is_bytes
from umem.chainer.saved.tiers.tier import Process, Sent, Tier
from umem.chainer.saved.tiers.tiers import Where, link_of, only_numpy_moves, open_tier
from umem.devices import entered_device
from umem.errors import StateError
from umem.planner import Link
from umem.trace.recording import address_of, root_of

What = Literal["value", "stash"]
"""The outputs of a call, or its function state."""


class _Piece(NamedTuple):
    """The number of the sent piece of memory that contains an array, and its layout there."""

    number: int
    layout: ArrayLayout


class Offloaded:
    """Arrays that were sent to the offload target.

    Args:
        sent: the pieces of memory that contain the arrays.
        places: for each array, its piece and its layout there.
    """

    def __init__(self, sent: Sequence[Sent], places: Sequence[_Piece]) -> None:
        self._sent, self._places = tuple(sent), tuple(places)

    @classmethod
    def send(cls, tier: Tier, arrays: Sequence[Any]) -> Offloaded | None:
        """Begin to send arrays; None if the tier lacks room for all, or cannot take one of them."""
        roots: dict[int, int] = {}
        sent: list[Sent] = []
        places = []
        for array in arrays:
            root = root_of(array)
            if id(root) not in roots:
                one = tier.send(root) if is_bytes(root) else None
                if one is None:
                    for other in sent:
                        other.forget()
                    return None
                roots[id(root)] = len(sent)
                sent.append(one)
            places.append(_Piece(roots[id(root)], ArrayLayout.of(array, address_of(root))))
        return cls(sent, places)

    def release(self) -> None:
        """Release the arrays' memory here, once the copy on the target is complete."""
        for one in self._sent:
            one.release()

    def fetch(self) -> None:
        """Begin to fetch the arrays."""
        for one in self._sent:
            one.fetch()

    def arrays(self) -> list[Any]:
        """Return the arrays, after waiting for their transfer."""
        grounds = [Ground.of(one.array()) for one in self._sent]
        return [layout.on(grounds[number]) for number, layout in self._places]

    def __del__(self) -> None:
        for one in self._sent:
            one.forget()


class OffloadTarget:
    """The offload target of a training run, opened once the kind of its arrays is known.

    Args:
        where: a folder for the files of NumPy's arrays; True: pinned host memory for CuPy's.

    Attributes:
        tier: the open target; None before it is opened and after it is closed.
        link: rates and limits of transfers to it and back; None before it is opened.

    Raises:
        StateError: the place is neither.
    """

    def __init__(self, where: object) -> None:
        if where is not True and not (isinstance(where, (str, Path)) and str(where)):
            raise StateError(
                "offload must be True (CuPy's arrays are offloaded to pinned host memory), False, "
                f"or a folder for the files of NumPy's arrays; got {where!r}"
            )
        self._where: Where = True if where is True else Path(str(where))
        self.tier: Tier | None = None
        self.link: Link | None = None
        self._process: Process | None = None
        self._is_early = False

    @property
    def is_among_arrays(self) -> bool:
        """True if offloaded arrays are in NumPy's memory like all others: the GPU is simulated."""
        return self.tier is not None and entered_device() is not None

    def start(self) -> None:
        """Open the target if only NumPy's arrays are possible, to refuse a bad folder at once.

        Raises:
            StateError, FileError: as `open_tier`; nothing was created.
        """
        if only_numpy_moves(self._where):
            self._open(np.empty(0))
            self._is_early = True

    def open(self, inputs: Any) -> None:
        """Open the target for arrays like these; does nothing once it is open, or without arrays.

        A target that `start` opened for NumPy's arrays is replaced if the arrays are of another
        kind.
        """
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        if not arrays:
            return
        is_numpy = only_numpy_moves(self._where) and isinstance(arrays[0], np.ndarray)
        if self._is_early and not is_numpy:
            self.close(())
        self._is_early = False
        if self.tier is None:
            self._open(arrays[0])

    def _open(self, array: Any) -> None:
        tier = open_tier(array, self._where)
        try:
            self.link = link_of(tier, array)
        except BaseException:  # a signal, too
            tier.close()
            raise
        self.tier, self._process = tier, Process()

    def close(self, calls: Sequence[Any]) -> None:
        """Restore the offloaded arrays of live graphs, then close the target.

        In a process that was forked since, nothing is restored: the target is the parent's.

        Raises:
            The tier's error for an array that it cannot fetch; the rest is restored, and the target
            is closed.
        """
        tier, self.tier = self.tier, None
        if tier is None:
            return
        is_ours = self._process is not None and self._process.is_this()
        try:
            if is_ours:
                _bring_back(calls)
        finally:
            for call in calls:
                call.forget_offloaded()
            if is_ours:
                tier.close()


def _bring_back(calls: Sequence[Any]) -> None:
    """Restore all offloaded arrays; raise the first error once the others are restored."""
    errors: list[Exception] = []
    for call in calls:
        try:
            if call.has_func and call.offloaded:
                call.bring_back()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
