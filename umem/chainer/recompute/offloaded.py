"""Offload under Recompute: the target of a training run, and what of a call is there.

A call's outputs or its stash are sent once and brought back. Arrays are sent by the memory that
they lie in, each piece of it once; they come back as they were in it. While a program holds an
array as a variable, that one is taken, and nothing is brought.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import chainer
import numpy as np

from umem.chainer.saved.array_layout import ArrayLayout, Ground, is_bytes
from umem.chainer.saved.slots import Stash
from umem.chainer.saved.tiers.tier import Process, Sent, Tier
from umem.chainer.saved.tiers.tiers import Where, link_of, only_numpy_moves, open_tier
from umem.devices.open import entered_device
from umem.errors import StateError
from umem.planner.link import Link
from umem.trace.recording.storage import address_of, root_of

What = Literal["value", "stash"]
"""The outputs of a call, or what it keeps on itself."""


class _Piece(NamedTuple):
    """Where an array lies: in which piece of memory that was sent, and how."""

    number: int
    layout: ArrayLayout


class Offloaded:
    """Some arrays that were sent to the offload target.

    Args:
        sent: the memory that they lie in.
        places: where each of them lies in it.
    """

    def __init__(self, sent: Sequence[Sent], places: Sequence[_Piece]) -> None:
        self._sent, self._places = tuple(sent), tuple(places)

    @classmethod
    def send(cls, tier: Tier, arrays: Sequence[Any]) -> Offloaded | None:
        """Begin to send arrays; None where the tier has no room for all, or cannot have one."""
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

    def let_go(self) -> None:
        """Hold the arrays no more, once it is whole on the target."""
        for one in self._sent:
            one.let_go()

    def fetch(self) -> None:
        """Begin to bring them back."""
        for one in self._sent:
            one.fetch()

    def arrays(self) -> list[Any]:
        """The arrays; waits for them."""
        grounds = [Ground.of(one.array()) for one in self._sent]
        return [layout.on(grounds[number]) for number, layout in self._places]

    def __del__(self) -> None:
        for one in self._sent:
            one.forget()


class Movable:
    """The part of a call that moves.

    Attributes:
        offloaded: what was sent down, by what it is.
    """

    __slots__ = ("offloaded",)
    offloaded: dict[What, Offloaded]
    stash: Stash
    retained: list[bool]
    func: Any

    def send(self, tier: Tier, what: What) -> None:
        """Begin to send its outputs or its stash down, where all is there and there is room."""
        arrays = self._outputs() if what == "value" else self.stash.arrays(self.func)
        if arrays and what not in self.offloaded:
            offloaded = Offloaded.send(tier, arrays)
            if offloaded is not None:
                self.offloaded[what] = offloaded

    def leave(self, what: What) -> None:
        """Let go what was sent, once it is there; what was not sent stays."""
        if what in self.offloaded:
            self.offloaded[what].let_go()
            self.drop() if what == "value" else self.drop_stash()

    def fetch(self, what: What) -> None:
        """Begin to bring back what was sent."""
        if what in self.offloaded:
            self.offloaded[what].fetch()

    def come_back(self) -> bool:
        """Have back all that is missing, where that is offloaded; whether anything came."""
        if not self.may_come_back:
            return False
        missing = self._missing()
        if not missing:
            self.put_back(self.func, tuple(self._outputs()))  # a variable of the program has them
        for what in missing:
            arrays = self.offloaded[what].arrays()
            if what == "value":
                self.put_back(self.func, tuple(arrays))
            else:
                self.stash.restore(self.func, arrays)
        return True

    def forget_offloaded(self) -> None:
        """Give up what is offloaded."""
        self.offloaded.clear()

    @property
    def may_come_back(self) -> bool:
        """True where something is missing that `come_back` has."""
        if not self.offloaded:
            return False
        return (
            self.is_offloaded if self._missing() else "value" in self.offloaded and self.lacks_own()
        )

    @property
    def is_offloaded(self) -> bool:
        """True where all that is missing is offloaded, or nothing is missing."""
        return all(what in self.offloaded for what in self._missing())

    def _missing(self) -> list[What]:
        own: list[What] = ["stash"] if self.stash.is_dropped else []
        return own if self._outputs() else ["value", *own]

    def _outputs(self) -> list[Any]:
        """Its outputs; none where one of them is missing."""
        found = [self.value(output) for output in range(len(self.retained))]
        return [] if any(array is None for array in found) else found

    # -- of the call -----------------------------------------------------------------------

    @property
    @abstractmethod
    def has_func(self) -> bool:
        """True where the function is alive."""

    @abstractmethod
    def value(self, output: int) -> Any:
        """An output where it is there."""

    @abstractmethod
    def drop(self) -> None:
        """Let the outputs go."""

    @abstractmethod
    def drop_stash(self) -> None:
        """Let go what the function keeps on itself."""

    @abstractmethod
    def lacks_own(self) -> bool:
        """Tell whether outputs that it retains, or what it keeps on itself, were dropped."""

    @abstractmethod
    def put_back(self, func: Any, outputs: tuple[Any, ...]) -> None:
        """Put outputs back where they were."""


def checked_place(offload: object) -> Where:
    """Read what a user gives.

    Raises:
        StateError: it is neither a folder nor a truth value.
    """
    if isinstance(offload, bool):
        return offload
    if isinstance(offload, (str, Path)) and str(offload):
        return Path(offload)
    raise StateError(
        "offload is True (CuPy's arrays go to pinned host memory), False, or a folder for the "
        f"files of NumPy's arrays; got {offload!r}"
    )


class OffloadTarget:
    """The offload target, opened as soon as it is known what arrays there are.

    Args:
        where: where it is; False: nothing moves.

    Attributes:
        tier: what is open.
        link: the way there and back.
    """

    def __init__(self, where: Where) -> None:
        self._where = where
        self.tier: Tier | None = None
        self.link: Link | None = None
        self._process: Process | None = None
        self._is_early = False

    @property
    def is_wanted(self) -> bool:
        """True where arrays may be moved."""
        return self._where is not False

    @property
    def is_among_arrays(self) -> bool:
        """True where what is offloaded is memory of NumPy's all the same: a GPU is simulated."""
        return self.tier is not None and entered_device() is not None

    def start(self) -> None:
        """Open it where only NumPy's arrays can come, so that a bad folder is refused at once.

        Raises:
            StateError, FileError: as `open_tier`; nothing was made.
        """
        if self.is_wanted and only_numpy_moves(self._where):
            self._open(np.empty(0))
            self._is_early = True

    def open(self, inputs: Any) -> None:
        """Open it for arrays like these; once it is open, or where there are none, do nothing."""
        arrays = [x.array if isinstance(x, chainer.Variable) else x for x in inputs]
        if not self.is_wanted or not arrays:
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

    def close(self, calls: Sequence[Movable]) -> None:
        """Have back what graphs that are alive have offloaded; then nothing is there any more.

        In a process that was forked since, nothing comes back: it is the parent's.

        Raises:
            what the tier raises where it cannot bring something back; the rest is back.
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


def _bring_back(calls: Sequence[Movable]) -> None:
    """Have all of it back that can come; raises the first error once the rest is there."""
    errors: list[Exception] = []
    for call in calls:
        try:
            if call.has_func:
                call.come_back()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
