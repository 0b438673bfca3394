"""What a device can do with the memory behind arrays, for those who plan what moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from umem.scopes import Scope


class Paging:
    """Places of managed memory; a device that cannot do a thing does nothing instead.

    Blocks are numbers: an address over 2 MiB.
    """

    @property
    def forgets(self) -> bool:
        """Whether the device discards memory that nobody has, and makes it ready again."""
        return False

    def repeat_places(self, scope: Scope) -> None:
        """Hand out managed memory where the last step had it, until ``scope`` is closed.

        A step ends with an optimizer's update; a second scope adds nothing.
        """

    def next_step(self) -> None:
        """A step is over: the next one gets the places that it had; see `repeat_places`."""

    def address(self, array: Any) -> int | None:
        """Where an array's memory begins; None where it is not managed memory."""
        return None

    def discard_free(self, blocks: Iterable[int]) -> int:
        """Forget what is in those of the blocks that nobody has; returns how many bytes."""
        return 0

    def make_ready(self, blocks: Iterable[int], stream: Any) -> int:
        """Have VRAM for those of the blocks that nobody has, beside the operations."""
        return 0
