"""Simulated time and running totals: the cost of operations and of moving blocks.

Clocks run concurrently: the host, which launches; the GPU, which runs operations in order; the host
link, which carries one block of managed memory at a time because eviction happens inside the fault
(half duplex); and two engines that copy pinned memory, one for each direction. A step ends when
both host and GPU have finished.

Models: launch time and Chainer's Python time, roofline time of an operation, fault, populate,
prefetch and eviction costs, reads over the bus, prefetches on a separate stream, pinned copies, in
order and concurrent with operations. Does not model: concurrent kernels, throttled clocks, the
memory bandwidth that copies take from operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt

from umem._common.arithmetic import ARITHMETIC, FLOAT32
from umem._common.specs import Costs, GpuSpec, flop_rate
from umem.devices.cost import Sample, StepCost
from umem.units import BLOCK_BYTES


@dataclass(slots=True)
class BlockMoves:
    """Counts of moved, populated and discarded blocks, which a clock converts to time.

    ``dropped`` blocks left VRAM without a copy, because the host's copy was valid.
    """

    hit: int = 0
    migrated_in: int = 0
    populated: int = 0
    migrated_out: int = 0
    dropped: int = 0
    prefetched_out: int = 0
    discarded: int = 0
    released: int = 0
    remote: int = 0

    def add(self, other: BlockMoves) -> None:
        """Add another's counts to these."""
        self.hit += other.hit
        if other.migrated_in or other.populated:
            self.migrated_in += other.migrated_in
            self.populated += other.populated
        if other.migrated_out or other.dropped or other.remote:
            self.migrated_out += other.migrated_out
            self.dropped += other.dropped
            self.remote += other.remote
        if other.prefetched_out or other.discarded or other.released:
            self.prefetched_out += other.prefetched_out
            self.discarded += other.discarded
            self.released += other.released


class Clock:
    """The simulated time of one GPU."""

    def __init__(self, spec: GpuSpec, costs: Costs) -> None:
        self._spec, self._costs = spec, costs
        self.restart()
        self._flop_rates = {kind: flop_rate(spec, costs, kind) for kind in ARITHMETIC}
        self._byte_rate = costs.memory_efficiency * spec.memory_bandwidth
        self._block_in = _seconds(BLOCK_BYTES, spec.host_in_bandwidth)
        self._block_out = _seconds(BLOCK_BYTES, spec.host_out_bandwidth)
        self._launch = costs.launch
        self._python = {
            "array": 0.0,
            "forward": costs.python_forward,
            "backward": costs.python_backward,
            "update": costs.python_update,
        }

    def restart(self) -> None:
        """Start at zero, with host, GPU and link idle."""
        self.host_seconds = 0.0
        self.device_seconds = 0.0
        self.link_seconds = 0.0
        self.sent_seconds = self.fetched_seconds = 0.0
        self.compute_seconds = 0.0
        self.stall_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the time at which all work so far has finished."""
        return max(self.host_seconds, self.device_seconds)

    def launch(
        self, host_seconds: float | None, phase: str = "array", launch_count: int = 1
    ) -> None:
        """Advance the host by the time of issuing an operation.

        Without a measurement this is the launch time of its kernels plus the time of Chainer's
        Python for an operation of that phase. A measured time is used if it is shorter: a longer
        one may include waits for the GPU that recorded it.
        """
        usual = self._python[phase] + launch_count * self._launch
        self.host_seconds += usual if host_seconds is None else min(usual, host_seconds)

    def run(
        self,
        flops: int,
        traffic_bytes: int,
        remote_seconds: float,
        moves: BlockMoves,
        pattern: str,
        ready_seconds: float,
        copied_bytes: int = 0,
        arithmetic: str = FLOAT32,
    ) -> None:
        """Run one operation on the GPU, with its page faults.

        ``ready_seconds`` is the end of the last prefetch that it must wait for.
        """
        start = max(self.device_seconds, self.host_seconds, ready_seconds)
        compute = max(flops / self._flop_rates[arithmetic], traffic_bytes / self._byte_rate)
        compute += copied_bytes / self._byte_rate
        self.compute_seconds += compute
        stall = remote_seconds
        if moves.migrated_in or moves.populated or moves.migrated_out:
            stall += self._fault_seconds(moves, pattern)
        if not stall:
            self.device_seconds = start + compute
            return
        self.stall_seconds += stall
        self.device_seconds = max(start, self._link_free(moves)) + compute + stall
        self.link_seconds = self.device_seconds

    def compute(
        self, flops: int, traffic_bytes: int, copied_bytes: int = 0, arithmetic: str = FLOAT32
    ) -> None:
        """Run one operation on the GPU whose blocks are all resident.

        Other kernels before and after the main one move ``copied_bytes``.
        """
        work, traffic = flops / self._flop_rates[arithmetic], traffic_bytes / self._byte_rate
        seconds = work if work > traffic else traffic
        if copied_bytes:
            seconds += copied_bytes / self._byte_rate
        self.compute_seconds += seconds
        start = (
            self.device_seconds if self.device_seconds > self.host_seconds else self.host_seconds
        )
        self.device_seconds = start + seconds

    def free(self, block_count: int) -> None:
        """Return blocks to the driver; the host waits for the GPU, as ``cudaFree`` does."""
        if block_count:
            self.synchronize()
            self.host_seconds += block_count * self._costs.allocation

    def synchronize(self) -> None:
        """Make the host wait for the GPU and its copies."""
        self.host_seconds = max(self.seconds, self.sent_seconds, self.fetched_seconds)

    def send(self, nbytes: int) -> float:
        """Copy to pinned host memory, after earlier operations and concurrent with later ones.

        Returns its end, as does `fetch`. Each direction has one copy at a time.
        """
        self.sent_seconds = self._copied(self.sent_seconds, nbytes, self._spec.host_out_bandwidth)
        return self.sent_seconds

    def fetch(self, nbytes: int) -> float:
        """Copy from pinned host memory, after earlier operations and concurrent with later ones."""
        engine, bandwidth = self.fetched_seconds, self._spec.host_in_bandwidth
        self.fetched_seconds = self._copied(engine, nbytes, bandwidth)
        return self.fetched_seconds

    def wait(self, seconds: float) -> None:
        """Make the GPU wait until a time before its next operation."""
        now = max(self.device_seconds, self.host_seconds)
        if seconds > now:
            self.stall_seconds += seconds - now
            self.device_seconds = seconds

    def move(self, moves: BlockMoves, nbytes: int = 0, *, overlap: bool = False) -> float:
        """Run a prefetch, or an upload of ``nbytes`` from pinned host memory.

        Returns its end. With ``overlap`` it runs on a separate stream.
        """
        cost = self._prefetch_seconds(moves) + _seconds(nbytes, self._spec.host_in_bandwidth)
        start = max(self._link_free(moves, nbytes), self.host_seconds)
        if overlap:
            self.link_seconds = start + cost
            return self.link_seconds
        self.link_seconds = self.device_seconds = max(start, self.device_seconds) + cost
        self.stall_seconds += cost
        return self.device_seconds

    def remote_seconds(self, read_bytes: float, written_bytes: float, pattern: str) -> float:
        """Return the time of accessing host memory over the bus, without migration."""
        efficiency = self._costs.remote_efficiency
        if pattern == "random":
            efficiency = self._costs.remote_scattered
        return _seconds(read_bytes / efficiency, self._spec.host_in_bandwidth) + _seconds(
            written_bytes / efficiency, self._spec.host_out_bandwidth
        )

    def _copied(self, engine_seconds: float, nbytes: int, bandwidth: float | None) -> float:
        start = max(self.device_seconds, self.host_seconds, self.link_seconds, engine_seconds)
        return start + _seconds(nbytes, bandwidth)

    def _link_free(self, moves: BlockMoves, nbytes: int = 0) -> float:
        """Return when blocks can use the link, after other blocks and copies in their direction."""
        free = self.link_seconds
        if self.fetched_seconds > free and (moves.migrated_in or nbytes):
            free = self.fetched_seconds
        if self.sent_seconds > free and (moves.migrated_out or moves.prefetched_out):
            free = self.sent_seconds
        return free

    def _fault_seconds(self, moves: BlockMoves, pattern: str) -> float:
        """Return the time of faults, population and eviction, depending on the access pattern."""
        costs = self._costs
        fault = costs.fault_stream
        if pattern == "strided":
            fault = costs.fault_strided
        elif pattern == "random" and moves.migrated_out:
            fault = costs.fault_random
        return (
            moves.migrated_in * (self._block_in + fault)
            + moves.populated * costs.populate_fault
            + moves.migrated_out * self._block_out
        )

    def _prefetch_seconds(self, moves: BlockMoves) -> float:
        costs = self._costs
        return (
            moves.migrated_in * (self._block_in + costs.prefetch)
            + moves.populated * costs.populate_prefetch
            + moves.migrated_out * self._block_out
            + moves.prefetched_out * (self._block_out + costs.prefetch)
        )


class Prefetches:
    """Prefetches that may still run concurrently with operations: their blocks and ends.

    Not thread-safe. Costs a pass over the running prefetches for each requested range.
    """

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks
        self._running: list[tuple[int, int, tuple[float, ...]]] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    def add(self, start: int, stop: int, done: tuple[float, ...]) -> None:
        """Add a prefetch of blocks ``start`` to ``stop``, with its end on each clock."""
        self._running.append((start, stop, done))

    def of(self, start: int, stop: int) -> list[tuple[float, ...]]:
        """Return the ends, on each clock, of running prefetches of these blocks."""
        now = [clock.device_seconds for clock in self._clocks]
        self._running = [job for job in self._running if any(map(gt, job[2], now))]
        return [done for low, high, done in self._running if low < stop and high > start]


def _seconds(nbytes: float, bandwidth: float | None) -> float:
    return 0.0 if not bandwidth else nbytes / bandwidth


__all__ = ["Counters", "Sample", "StepCost"]
SAMPLE_LIMIT = 20_000


@dataclass
class Counters:
    """The running totals of a `StepCost`."""

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
        """Restart all counts, but keep the held bytes and their peak."""
        self.moves = BlockMoves()
        self.fault_count = self.remote_bytes = self.uploaded_bytes = 0
        self.step_ends.clear()
        self.timeline.clear()

    def restart_peaks(self, reserved_bytes: int, resident_count: int) -> None:
        """Restart the peaks at the current levels."""
        self.peak_bytes = self.live_bytes
        self.reserved_peak_bytes, self.resident_peak_count = reserved_bytes, resident_count

    def hold(self, nbytes: int, extra: int = 0) -> None:
        """Add ``nbytes`` to the bytes held by tensors, and ``extra`` to the peak only."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra)

    def hold_vram(self, resident_count: int) -> None:
        """Set the number of VRAM blocks in use."""
        if resident_count > self.resident_peak_count:
            self.resident_peak_count = resident_count

    def sample(self, seconds: float, resident_count: int) -> None:
        """Add a point to the timeline; thin it out if it is too long."""
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
        """Return the totals."""
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
