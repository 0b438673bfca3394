"""What of a call is a tier below: its outputs or its stash, sent there once and brought back.

Arrays are sent by the memory that they lie in, each piece of it once; they come back as they were
in it. While a program holds an array as a variable, that one is taken, and nothing is brought.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from umem.chainer.recompute.stash import Stash
from umem.chainer.saved.array_layout import ArrayLayout, Ground, is_bytes
from umem.chainer.saved.tiers.tier import Sent, Tier
from umem.trace.recording.storage import address_of, root_of

What = Literal["value", "stash"]
"""The outputs of a call, or what it keeps on itself."""


class _Piece(NamedTuple):
    """Where an array lies: in which piece of memory that was sent, and how."""

    number: int
    layout: ArrayLayout


class Below:
    """Some arrays that were sent a tier down.

    Args:
        sent: the memory that they lie in.
        places: where each of them lies in it.
    """

    def __init__(self, sent: Sequence[Sent], places: Sequence[_Piece]) -> None:
        self._sent, self._places = tuple(sent), tuple(places)

    @classmethod
    def send(cls, tier: Tier, arrays: Sequence[Any]) -> Below | None:
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
        """Hold the arrays no more, once what is below is whole."""
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


class Moving:
    """The part of a call that moves.

    Attributes:
        below: what was sent down, by what it is.
    """

    __slots__ = ("below",)
    below: dict[What, Below]
    stash: Stash
    retained: list[bool]
    func: Any

    def send(self, tier: Tier, what: What) -> None:
        """Begin to send its outputs or its stash down, where all is there and there is room."""
        arrays = self._outputs() if what == "value" else self.stash.arrays(self.func)
        if arrays and what not in self.below:
            below = Below.send(tier, arrays)
            if below is not None:
                self.below[what] = below

    def leave(self, what: What) -> None:
        """Let go what was sent, once it is below; what was not sent stays."""
        if what in self.below:
            self.below[what].let_go()
            self.drop() if what == "value" else self.drop_stash()

    def fetch(self, what: What) -> None:
        """Begin to bring back what was sent."""
        if what in self.below:
            self.below[what].fetch()

    def come_back(self) -> bool:
        """Have back all that is missing, where that is below; whether anything came."""
        if not self.may_come_back:
            return False
        missing = self._missing()
        if not missing:
            self.put_back(self.func, tuple(self._outputs()))  # a variable of the program has them
        for what in missing:
            arrays = self.below[what].arrays()
            if what == "value":
                self.put_back(self.func, tuple(arrays))
            else:
                self.stash.restore(self.func, arrays)
        return True

    def forget_below(self) -> None:
        """Give up what is below."""
        self.below.clear()

    @property
    def may_come_back(self) -> bool:
        """True where something is missing that `come_back` has."""
        if not self.below:
            return False
        return self.is_below if self._missing() else "value" in self.below and self.lacks_own()

    @property
    def is_below(self) -> bool:
        """True where all that is missing is below, or nothing is missing."""
        return all(what in self.below for what in self._missing())

    def _missing(self) -> list[What]:
        own: list[What] = ["stash"] if self.stash.is_dropped else []
        return own if self._outputs() else ["value", *own]

    def _outputs(self) -> list[Any]:
        """Its outputs; none where one of them is missing."""
        found = [self.value(output) for output in range(len(self.retained))]
        return [] if any(array is None for array in found) else found

    # -- of the call -----------------------------------------------------------------------

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
