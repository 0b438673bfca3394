"""What of a pass goes a tier down, and comes back before backward reads it."""

from __future__ import annotations

import heapq

from umem.chainer.recompute.lower import Lower
from umem.chainer.recompute.online.call_bytes import CallBytes

AHEAD = 2
"""So many values are on their way back at a time: one is read while the next comes."""


class GoneBelow:
    """The values of one pass that are below.

    Args:
        lower: the tier below, and the link to it.

    Attributes:
        link: that link; None where nothing moves.
        sent_bytes: what has gone down.
    """

    def __init__(self, lower: Lower) -> None:
        self._tier, self.link = lower.tier, lower.link
        self._gone: list[tuple[int, int, CallBytes]] = []
        self._coming: list[CallBytes] = []
        self.sent_bytes = 0

    def takes(self, nbytes: int) -> bool:
        """Tell whether something of so many bytes may be moved."""
        return self._tier is not None and self.link is not None and self.link.takes(nbytes)

    def send(self, entry: CallBytes) -> bool:
        """Move what is there of a call; False where that stays: there is no room below."""
        nbytes = entry.nbytes
        if self._tier is None or not self.takes(nbytes) or not entry.send(self._tier):
            return False
        self.sent_bytes += nbytes
        heapq.heappush(self._gone, (-entry.read_rank, entry.call.index, entry))
        return True

    def fetch_ahead(self, rank: int, room_bytes: int) -> int:
        """Begin to bring back what is read next; returns how many bytes come.

        What was read before, and has to go once more, comes when it is asked for.

        Args:
            rank: of the step of backward that is about to be taken.
            room_bytes: that what comes may take.
        """
        self._coming = [entry for entry in self._coming if entry.coming_bytes]
        coming = 0
        while self._gone and len(self._coming) < AHEAD:
            entry = self._gone[0][2]
            if entry.read_rank > rank or entry.nbytes or not entry.call.may_come_back:
                heapq.heappop(self._gone)
                continue
            nbytes = entry.below_bytes
            if coming + nbytes > room_bytes:
                break
            heapq.heappop(self._gone)
            entry.fetch()
            coming += nbytes
            self._coming.append(entry)
        return coming
