"""The time of a step with copies: what computes, and a link each way, in order each."""

from __future__ import annotations

from typing import Literal

from umem.planner.link import Link

Key = tuple[Literal["value", "stash"], int]
"""What is copied: the value or the stash of a node, by its number."""


class LinkClock:
    """Three queues that go on side by side: what computes, the link down and the link back.

    A copy begins when it is asked for and the one before it on its way is over. Without a link,
    copies take no time.

    Attributes:
        now: the time at which the last computation is over, waiting included, in units of cost.
        sent_bytes, fetched_bytes: what was copied each way.
    """

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._out = self._in = 0.0
        self._done: dict[Key, float] = {}
        self.now = 0.0
        self.sent_bytes = self.fetched_bytes = 0

    def run(self, cost: float) -> None:
        """Compute for so long."""
        self.now += cost

    def wait(self, key: Key) -> None:
        """Compute nothing before the last copy of something is over."""
        self.now = max(self.now, self._done.get(key, 0.0))

    def send(self, key: Key, nbytes: int) -> float:
        """Ask for a copy down, and say when it will be over."""
        self.sent_bytes += nbytes
        rate = self._link.out_rate if self._link else 0.0
        self._out = self._done[key] = max(self._out, self.now) + _time(nbytes, rate, self._link)
        return self._out

    def fetch(self, key: Key, nbytes: int) -> None:
        """Ask for a copy back."""
        self.fetched_bytes += nbytes
        rate = self._link.in_rate if self._link else 0.0
        self._in = self._done[key] = max(self._in, self.now) + _time(nbytes, rate, self._link)


def _time(nbytes: int, rate: float, link: Link | None) -> float:
    if link is None or not nbytes:
        return 0.0
    return nbytes / rate if rate else float("inf")
