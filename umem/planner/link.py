"""The link to the offload target, a plan's moves over it, and the time of copies."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from umem.errors import GraphError
from umem.planner.checks import shown, whole_number
from umem.units import MIB

What = Literal["value", "stash"]
IN_FLIGHT_BYTES = AHEAD_BYTES = 32 * MIB
"""Without a plan, at most so many bytes are being sent to the offload target at a time, and at most
so many are fetched ahead of backward; or one function's bytes if they are more."""


@dataclass(frozen=True)
class Link:
    """A full-duplex link to the offload target, such as pinned host memory.

    Models: a rate in each direction, with one copy at a time in each. Does not model: latency,
    other traffic, an offload target that fills up.

    Args:
        out_rate: bytes sent per unit of cost; zero: no offload.
        in_rate: bytes fetched per unit of cost; zero: no offload.
        smallest_bytes: values with fewer bytes are never offloaded.

    Raises:
        GraphError: a rate is not a finite number of zero or more, or a size is not a count of
            bytes.
    """

    out_rate: float
    in_rate: float
    smallest_bytes: int = 0

    def __post_init__(self) -> None:
        for key in ("out_rate", "in_rate"):
            object.__setattr__(self, key, _rate(key, getattr(self, key)))
        smallest = whole_number(self.smallest_bytes)
        if smallest is None or smallest < 0:
            found = shown(self.smallest_bytes)
            raise GraphError(f"a link's smallest_bytes is {found}, not a count of bytes")
        object.__setattr__(self, "smallest_bytes", smallest)

    @property
    def moves(self) -> bool:
        """True if both rates are above zero."""
        return self.out_rate > 0 and self.in_rate > 0

    def takes(self, nbytes: int) -> bool:
        """Tell whether a value of ``nbytes`` may be offloaded."""
        return self.moves and nbytes > 0 and nbytes >= self.smallest_bytes


def _rate(key: str, value: Any) -> float:
    is_number = isinstance(value, (float, np.floating)) or whole_number(value) is not None
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise GraphError(
            f"a link's {key} is {shown(value)}, not a finite number of bytes per unit of cost, "
            "zero or more"
        )
    return float(value)


class Move(NamedTuple):
    """One value or function state that is offloaded in forward and fetched in backward.

    It is sent after its last use in forward. A value is offloaded with all its views.

    Attributes:
        node: the node that holds the bytes; for a view, its base.
        what: ``value``: the node's outputs; ``stash``: its function state.
        leaves_after: its bytes are freed at the end of this forward call, which waits for the copy.
        fetched_before: its bytes are allocated and its fetch begins before this call's step of
            backward, and before the recomputations for that step.
    """

    node: str
    what: What
    leaves_after: str
    fetched_before: str


Key = tuple[Literal["value", "stash"], int]
"""The value or the function state (``stash``) of a node, by the node's number."""


class LinkClock:
    """Three parallel queues: computations, copies out and copies in.

    A copy begins once it is queued and the earlier copies in its direction are over. Without a
    link, copies take no time.

    Attributes:
        now: the time at which the last computation ends, waiting included, in units of cost.
        sent_bytes, fetched_bytes: the bytes copied in each direction.
    """

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._out = self._in = 0.0
        self._done: dict[Key, float] = {}
        self.now = 0.0
        self.sent_bytes = self.fetched_bytes = 0

    def run(self, cost: float) -> None:
        """Advance by a computation that takes ``cost``."""
        self.now += cost

    def wait(self, key: Key) -> None:
        """Make the next computation wait for the last copy of a value or function state."""
        self.now = max(self.now, self._done.get(key, 0.0))

    def send(self, key: Key, nbytes: int) -> float:
        """Queue a copy out, and return the time at which it will be over."""
        self.sent_bytes += nbytes
        rate = self._link.out_rate if self._link else 0.0
        self._out = self._done[key] = max(self._out, self.now) + _time(nbytes, rate, self._link)
        return self._out

    def fetch(self, key: Key, nbytes: int) -> None:
        """Queue a copy in."""
        self.fetched_bytes += nbytes
        rate = self._link.in_rate if self._link else 0.0
        self._in = self._done[key] = max(self._in, self.now) + _time(nbytes, rate, self._link)


def _time(nbytes: int, rate: float, link: Link | None) -> float:
    if link is None or not nbytes:
        return 0.0
    return nbytes / rate if rate else float("inf")
