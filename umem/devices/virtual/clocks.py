"""Clocks side by side: of several costs, or of several GPUs, for the same blocks and operations."""

from __future__ import annotations

from umem.devices.virtual.clock import BlockMoves, Clock
from umem.trace.events import Op

Done = tuple[float, ...]
"""When something is over on each clock."""


class Clocks(tuple[Clock, ...]):
    """Some clocks that are told the same; see `Clock` for what each method does."""

    __slots__ = ()

    def restart(self) -> None:
        """Begin at zero."""
        for clock in self:
            clock.restart()

    def launch(self, host_seconds: float | None, phase: str = "array") -> None:
        """Let the host issue the next operation."""
        for clock in self:
            clock.launch(host_seconds, phase)

    def compute(self, flops: int, traffic_bytes: int) -> None:
        """Run an operation for which everything is where it has to be."""
        for clock in self:
            clock.compute(flops, traffic_bytes)

    def launch_and_compute(self, host_seconds: float | None, op: Op) -> None:
        """Issue and run an operation that waits for nothing: what most are, in one loop."""
        phase, flops, traffic_bytes = op.phase, op.flops, op.traffic_bytes
        for clock in self:
            clock.launch(host_seconds, phase)
            clock.compute(flops, traffic_bytes)

    def move(self, moves: BlockMoves, nbytes: int = 0, *, overlap: bool = False) -> Done:
        """Run a prefetch or an upload; returns when it is done."""
        return tuple([clock.move(moves, nbytes, overlap=overlap) for clock in self])

    def send(self, nbytes: int) -> Done:
        """Begin a copy to pinned host memory; returns when it is over."""
        return tuple([clock.send(nbytes) for clock in self])

    def fetch(self, nbytes: int) -> Done:
        """Begin a copy from pinned host memory; returns when it is over."""
        return tuple([clock.fetch(nbytes) for clock in self])

    def wait(self, done: Done) -> None:
        """Have each GPU wait until its own time."""
        for clock, seconds in zip(self, done, strict=True):
            clock.wait(seconds)

    def free(self, block_count: int) -> None:
        """Give blocks back to the driver."""
        for clock in self:
            clock.free(block_count)

    def synchronize(self) -> None:
        """Have the host wait for the GPU and its copies."""
        for clock in self:
            clock.synchronize()
