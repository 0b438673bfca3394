"""`Switch`: the one handle of features that are on from a call until they are undone."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from umem.errors import StateError

_Handle = TypeVar("_Handle", bound="Switch")


class Switch:
    """A change that is on from when this is made until `undo`, or the end of ``with`` it.

    A subclass turns it on as it is made, and takes it back in `_take_back`.

    Attributes:
        is_on: whether it was not undone yet.
        undone: says in the StateError of a second `undo` how things are; empty: it does nothing.
    """

    is_on = True
    undone: ClassVar[str] = ""

    def undo(self) -> None:
        """Take it back.

        Raises:
            StateError: it was undone before, or cannot be undone now; nothing has changed.
        """
        if self.is_on:
            self._refuse()
            self.is_on = False
            self._take_back()
        elif self.undone:
            raise StateError(self.undone)

    def _refuse(self) -> None:
        """Raise StateError where it cannot be taken back now."""

    def _take_back(self) -> None:
        """Restore what was there before; called once."""
        raise NotImplementedError

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_on:
            self.undo()
