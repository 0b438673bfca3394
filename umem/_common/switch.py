"""`Switch`: the one handle of features that are on from a call until they are undone."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from umem.errors import StateError

_Handle = TypeVar("_Handle", bound="Switch")


class Switch:
    """A change that is on from its construction until `undo`, or the end of ``with``.

    A subclass makes the change in its constructor, and undoes it in `_take_back`.

    Attributes:
        is_on: whether the change is still in effect.
        undone: message of the StateError that a second `undo` raises; if empty, it does nothing.
    """

    is_on = True
    undone: ClassVar[str] = ""

    def undo(self) -> None:
        """Undo the change.

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
        """Raise StateError if the change cannot be undone now."""

    def _take_back(self) -> None:
        """Restore the state from before; called once."""
        raise NotImplementedError

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_on:
            self.undo()
