"""Several clocks, for several costs or GPUs, for the same blocks and operations."""

from __future__ import annotations

from umem.devices.virtual.clock import BlockMoves, Clock
from umem.trace import ONE_KERNEL, Op

Done = tuple[float, ...]
"""An end on each clock."""


class Clocks(tuple[Clock, ...]):
    """Several clocks that get the same calls; see `Clock`."""

    __slots__ = ()

    def restart(self) -> None:
        """Start at zero."""
        for clock in self:
            clock.restart()

    def launch(
        self, host_seconds: float | None, phase: str = "array", launch_count: int = 1
    ) -> None:
        """Advance the host to the next operation."""
        for clock in self:
            clock.launch(host_seconds, phase, launch_count)

    def launch_and_compute(self, host_seconds: float | None, op: Op) -> None:
        """Issue and run an operation that needs no wait, as most do, in one loop."""
        phase, flops, traffic_bytes, kind = op.phase, op.flops, op.traffic_bytes, op.arithmetic
        launch_count, copied_bytes, *_ = op.kernels or ONE_KERNEL
        for clock in self:
            clock.launch(host_seconds, phase, launch_count)
            clock.compute(flops, traffic_bytes, copied_bytes, kind)

    def move(self, moves: BlockMoves, nbytes: int = 0, *, overlap: bool = False) -> Done:
        """Run a prefetch or an upload; returns its end."""
        return tuple([clock.move(moves, nbytes, overlap=overlap) for clock in self])

    def send(self, nbytes: int) -> Done:
        """Start a copy to pinned host memory; returns its end."""
        return tuple([clock.send(nbytes) for clock in self])

    def fetch(self, nbytes: int) -> Done:
        """Start a copy from pinned host memory; returns its end."""
        return tuple([clock.fetch(nbytes) for clock in self])

    def wait(self, done: Done) -> None:
        """Make each GPU wait until its own time."""
        for clock, seconds in zip(self, done, strict=True):
            clock.wait(seconds)

    def free(self, block_count: int) -> None:
        """Return blocks to the driver."""
        for clock in self:
            clock.free(block_count)

    def synchronize(self) -> None:
        """Make the host wait for the GPU and its copies."""
        for clock in self:
            clock.synchronize()
