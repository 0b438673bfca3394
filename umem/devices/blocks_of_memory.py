"""The interface of devices to planned paging: blocks, places, discards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from umem._common.scopes import Scope


class Paging:
    """Placement of managed memory; methods that a device does not support do nothing.

    Blocks are numbers: an address over 2 MiB.
    """

    @property
    def forgets(self) -> bool:
        """Tell whether the device discards free memory and makes it resident again."""
        return False

    def repeat_places(self, scope: Scope) -> None:
        """Reuse the previous step's addresses for managed memory, until ``scope`` is closed.

        A step ends with an optimizer's update; a second scope adds nothing.
        """

    def next_step(self) -> None:
        """End a step, so that the next one reuses its addresses; see `repeat_places`."""

    def address(self, array: Any) -> int | None:
        """Return the address of a managed array; None for other arrays."""
        return None

    def discard_free(self, blocks: Iterable[int]) -> int:
        """Discard the contents of unused blocks; returns their bytes."""
        return 0

    def make_ready(self, blocks: Iterable[int], stream: Any) -> int:
        """Make free blocks resident, concurrently with operations; returns their bytes."""
        return 0
