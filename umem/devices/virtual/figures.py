"""What a virtual GPU counts; all of it simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from umem.devices.cost import Sample, StepCost
from umem.devices.virtual.clock import BlockMoves, Clock
from umem.units import BLOCK_BYTES

__all__ = ["Counters", "Sample", "StepCost"]
SAMPLE_LIMIT = 20_000


@dataclass
class Counters:
    """The running totals behind a `StepCost`."""

    moves: BlockMoves = field(default_factory=BlockMoves)
    fault_count: int = 0
    remote_bytes: int = 0
    uploaded_bytes: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    resident_peak_count: int = 0
    step_ends: list[float] = field(default_factory=list)
    timeline: list[Sample] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def restart(self) -> None:
        """Count from here; what is held stays held, and what it took at most."""
        self.moves = BlockMoves()
        self.fault_count = self.remote_bytes = self.uploaded_bytes = 0
        self.step_ends.clear()
        self.timeline.clear()

    def hold(self, nbytes: int, extra: int = 0) -> None:
        """Count that tensors hold ``nbytes`` more, and a workspace of ``extra`` for a moment."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra)

    def hold_vram(self, resident_count: int) -> None:
        """Count that so many blocks of VRAM are in use."""
        if resident_count > self.resident_peak_count:
            self.resident_peak_count = resident_count

    def sample(self, seconds: float, resident_count: int) -> None:
        """Add a point to the timeline, thinning it out when it grows too long."""
        self.hold_vram(resident_count)
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.timeline.append(Sample(seconds, self.live_bytes, resident_count * BLOCK_BYTES))
        if len(self.timeline) >= SAMPLE_LIMIT:
            del self.timeline[::2]
            self._stride *= 2

    def figures(self, clock: Clock) -> StepCost:
        """Sum up the totals as they stand."""
        moves, ends = self.moves, self.step_ends
        return StepCost(
            seconds=clock.seconds,
            step_seconds=tuple(b - a for a, b in zip([0.0, *ends], ends, strict=False)),
            peak_bytes=self.peak_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            resident_peak_bytes=self.resident_peak_count * BLOCK_BYTES,
            migrated_in_bytes=moves.migrated_in * BLOCK_BYTES,
            migrated_out_bytes=(moves.migrated_out + moves.prefetched_out) * BLOCK_BYTES,
            populated_bytes=moves.populated * BLOCK_BYTES,
            remote_bytes=self.remote_bytes,
            uploaded_bytes=self.uploaded_bytes,
            fault_count=self.fault_count,
            compute_seconds=clock.compute_seconds,
            stall_seconds=clock.stall_seconds,
        )
