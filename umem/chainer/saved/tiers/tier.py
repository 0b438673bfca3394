"""The interface of offload targets: pinned host memory for a GPU's arrays, files for the host's."""

from __future__ import annotations

import os
from typing import Any, Protocol

from umem.errors import StateError
from umem.units import BLOCK_BYTES

SMALLEST_BYTES = BLOCK_BYTES // 32
"""The least size of an array to offload, 64 KiB: a copy of it takes 5 us on PCIe 3, as long as a
launch, and following a function takes 15 us (bench/offload.py). The number itself is a guess."""


class Process:
    """The process that constructs this object, as distinct from one that is forked from it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_this(self) -> bool:
        """Tell whether the calling process is the one that constructed this object."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise StateError in any other process, such as a forked child."""
        if not self.is_this():
            raise StateError(
                "the arrays that backward needs were offloaded before this process was forked, and "
                "are its parent's: run backward there, or begin a graph after the fork"
            )


class Sent(Protocol):
    """An array that is being offloaded, is in the offload target, or is being fetched.

    A forked child process has none of the threads and streams that transfer it. There an array that
    was not dropped stays, a dropped one is the parent's, and no call waits.

    Attributes:
        nbytes: the bytes of the array.
    """

    nbytes: int

    def is_gone(self) -> bool:
        """Tell whether the copy in the target is complete, so that `release` need not wait."""

    def release(self) -> None:
        """Wait until the copy in the target is complete, and drop the array.

        On a GPU the computing stream waits, never the host.
        """

    def fetch(self) -> None:
        """Begin to fetch the array, concurrently; a second time does nothing."""

    def array(self) -> Any:
        """Return the array with contents, shape, type and strides as sent; wait for its transfer.

        The caller has the only reference. A dropped array may be requested again.
        """

    def forget(self) -> None:
        """Free the room in the target; a second time does nothing."""


class Tier(Protocol):
    """An offload target: the memory or file to which arrays of one class are sent.

    Attributes:
        name: a description, such as "pinned host memory".
        sent_bytes, fetched_bytes: bytes offloaded and fetched so far.
        waited_seconds: how long the program waited for transfers, if that is known.
    """

    name: str
    sent_bytes: int
    fetched_bytes: int
    waited_seconds: float

    def send(self, array: Any) -> Sent | None:
        """Begin to copy an array, which owns dense memory in any order of its axes, to the target.

        None if the target has no room. Otherwise the array must not change until `release`.
        """

    def close(self) -> None:
        """Wait for pending transfers, and free everything; a second time does nothing."""
