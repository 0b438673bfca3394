"""Copies to pinned host memory and back, concurrent with operations, and the waits for them."""

from __future__ import annotations

from umem.devices.virtual.clocks import Clocks, Done
from umem.trace import Access, Op


class Copies:
    """Copies of tensors to and from pinned memory that may still run, and their totals.

    Models: a sent tensor is neither freed nor written before its copy ends; a fetched tensor is
    neither used nor freed before. The GPU waits, never the host. Does not model: data on the host,
    or a limit of its pinned memory.

    Attributes:
        are_running: whether an operation may have to wait.

    Not thread-safe.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self.sent_bytes = self.fetched_bytes = 0
        self.are_running = False
        self._sent: dict[int, Done] = {}
        self._fetched: dict[int, Done] = {}

    def begin(self, action: str, access: Access) -> None:
        """Start sending or fetching a part of a tensor."""
        done = self.run(action, access.stop - access.start)
        (self._sent if action == "send" else self._fetched)[access.tensor] = done
        self.are_running = True

    def run(self, action: str, nbytes: int) -> Done:
        """Send or fetch bytes; returns the end, which no operation waits for."""
        if action == "send":
            self.sent_bytes += nbytes
            return self._clocks.send(nbytes)
        self.fetched_bytes += nbytes
        return self._clocks.fetch(nbytes)

    def wait_before(self, op: Op) -> None:
        """Make the GPU wait for copies of the tensors that an operation uses."""
        for tensor, _, _ in (*op.reads, *op.writes) if self._fetched else ():
            self._wait(self._fetched.pop(tensor, None))
        for tensor, _, _ in op.writes if self._sent else ():
            self._wait(self._sent.pop(tensor, None))

    def wait_for(self, tensor: int) -> None:
        """Make the GPU wait for all copies of a tensor that is about to be freed."""
        self._wait(self._sent.pop(tensor, None))
        self._wait(self._fetched.pop(tensor, None))

    def is_sent(self, tensor: int) -> bool:
        """Tell whether a tensor's copy has ended on the host's clock."""
        done = self._sent.get(tensor)
        return done is None or self._clocks[0].host_seconds >= done[0]

    def restart(self) -> None:
        """Restart, when the clocks do."""
        self.sent_bytes = self.fetched_bytes = 0
        self._sent.clear()
        self._fetched.clear()
        self.are_running = False

    def _wait(self, done: Done | None) -> None:
        if done is not None:
            self._clocks.wait(done)
            self.are_running = bool(self._sent or self._fetched)
