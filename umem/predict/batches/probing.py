"""The search for the largest batch that fits, and the quickest.

A replay runs a step three times through the pool of the virtual GPU in plain memory: rounding,
gaps and blocks that the pool gives back count. The peak of the tensors alone, which takes no
replay, rules out batches that cannot fit.
"""

from __future__ import annotations

from typing import NamedTuple

from umem.devices.base import Policy
from umem.devices.specs import GpuSpec
from umem.devices.virtual import VirtualGPU
from umem.errors import BudgetError, OutOfMemoryError, SizeError
from umem.predict.batches.found_batches import BatchStep
from umem.predict.techniques.steady_state import STEP
from umem.predict.techniques.step_variants import STEPS, StepVariants
from umem.printable import quoted
from umem.trace.axes import StepSize
from umem.trace.trace import Trace
from umem.units import format_apart

MOST_FOR_TIME = 12
"""At most this many replays in the search for the quickest batch."""
KNEE = 0.02
"""A batch counts as quickest if its time a sample is at most this share above the least."""
STRIDE = 64
"""The search for a batch without room tries at most this many times the last batch."""
STRIDES = 64
"""Strides down, after the first, are at least the first batch without room over this."""


class Probe(NamedTuple):
    """A batch that was tried: its step, or the reason why it does not fit."""

    batch: int
    step: BatchStep | None = None
    reason: str | None = None


class BatchSearch:
    """The search for batches that fit: replays of a step at different batches, each made once.

    Args:
        trace: a step recorded at several sizes.
        spec: the GPU.
        size: for a trace along named axes, the sizes other than the batch; None: the largest
            recorded.
        maximum: no larger batch is tried.

    Raises:
        ScalingError: the trace has one size. SizeError: less VRAM than a block, wrong sizes.
    """

    def __init__(self, trace: Trace, spec: GpuSpec, size: StepSize | None, maximum: int) -> None:
        if not trace.sizes:
            trace.at(1)  # raises, and says how to record at several sizes
        VirtualGPU(spec)  # refuses VRAM of less than a block
        self.trace, self.spec, self.maximum = trace, spec, maximum
        self._others = _others(trace, size)
        self._axis = "batch" if "batch" in trace.axes else next(iter(trace.axes), None)
        self._probes: dict[int, Probe] = {}
        self._peaks: dict[int, int] = {}
        self._last: tuple[int, StepVariants] | None = None

    @property
    def replay_count(self) -> int:
        """Return the number of batches that were replayed."""
        return len(self._probes)

    def size(self, batch: int) -> StepSize:
        """Return the step's sizes with a batch; the batch alone where axes have no names."""
        if self._axis is None:
            return batch
        size = {**self._others, self._axis: batch}
        return {axis: size[axis] for axis in self.trace.axes if axis in size} | size

    def variants(self, batch: int) -> StepVariants:
        """Return the step with a batch; the last one is cached."""
        if self._last is None or self._last[0] != batch:
            self._last = batch, StepVariants(self.trace, [self.spec], self.size(batch))
        return self._last[1]

    def peak(self, batch: int) -> int:
        """Return the peak in bytes of a batch's tensors and workspace, without a replay."""
        if batch not in self._peaks:
            self._peaks[batch] = self.variants(batch).trace.peak_bytes
        return self._peaks[batch]

    def probe(self, batch: int) -> Probe:
        """Return the replay of the step with a batch, made once."""
        if batch not in self._probes:
            self._probes[batch] = _replayed(self.variants(batch).trace, self.spec, batch)
        return self._probes[batch]

    # -- the largest ---------------------------------------------------------------------------

    def largest(self) -> tuple[BatchStep, Probe | None]:
        """Find a batch that fits, and the next one, which does not; None: the maximum fits.

        Searches down in growing strides from the first batch whose tensors alone have no room,
        then by bisection.

        Raises:
            BudgetError: a batch of one does not fit.
        """
        low, high = 0, self._ceiling()
        least = max(1, high // STRIDES)
        stride = 1
        while high - low > 1:
            guess = (low + high) // 2 if low else max(1, high - stride)
            if self.probe(guess).step is None:
                high, stride = guess, max(2 * stride, least)
            else:
                low = guess
        fits = self._probes[low].step if low else None
        if fits is None:
            raise BudgetError(self._too_little())
        return fits, None if high > self.maximum else self._failed(high)

    def _failed(self, batch: int) -> Probe:
        if batch in self._probes:
            return self._probes[batch]
        needed, room = format_apart(self.peak(batch), self.spec.usable_bytes)
        return Probe(batch, None, f"its tensors take {needed}, and {room} of VRAM are usable")

    def _ceiling(self) -> int:
        """Return the first batch whose tensors alone have no room, or the maximum plus one.

        Takes the peak to be a convex function of the batch.
        """
        room, low, high = self.spec.usable_bytes, 0, 1
        while high <= self.maximum and self.peak(high) <= room:
            low, high = high, min(self._beyond(low, high), self.maximum + 1)
        is_line = True
        while low and high - low > 1:
            guess = self._on_the_line(low, high) if is_line else (low + high) // 2
            low, high = (guess, high) if self.peak(guess) <= room else (low, guess)
            is_line = not is_line or guess in (low + 1, high - 1)
        return high

    def _beyond(self, low: int, high: int) -> int:
        """Return a batch without room by the line through two peaks, or `STRIDE` times ``high``."""
        grows = self.peak(high) - self.peak(low) if low else 0
        if grows <= 0:
            return 2 * high
        room = self.spec.usable_bytes - self.peak(high)
        return min(STRIDE * high, high + room * (high - low) // grows + 1)

    def _on_the_line(self, low: int, high: int) -> int:
        """Return the last batch between two that has room on the line through their peaks."""
        share = (self.spec.usable_bytes - self.peak(low)) * (high - low)
        return min(high - 1, low + max(1, share // max(1, self.peak(high) - self.peak(low))))

    def _too_little(self) -> str:
        """Return the message of the error for a batch of one that does not fit."""
        room = self.spec.usable_bytes
        needed, usable = format_apart(self.peak(1), room)
        gaps = "" if self.peak(1) > room else ", and the pool's free pieces are too small"
        return (
            f"a batch of one does not fit: it needs {needed}, and {usable} of VRAM are usable "
            f"(simulated){gaps}. umem.choose(trace, {self.spec.name!r}, size={self.size(1)}, "
            f"vram={room}) says what "
            "makes it fit: recomputation, 8-bit states, half precision, managed memory"
        )

    # -- the quickest --------------------------------------------------------------------------

    def quickest(self, largest: BatchStep) -> BatchStep:
        """Find by bisection a small batch whose time a sample is within `KNEE` of the least."""
        most = self.replay_count + MOST_FOR_TIME
        best, low = largest, 0
        while best.batch - low > max(1, best.batch // 16) and self.replay_count < most:
            tried = max(low + 1, best.batch // 2) if not low else (low + best.batch) // 2
            step = self.probe(tried).step
            if step is not None and step.seconds_per_sample <= (1 + KNEE) * self._least(largest):
                best = step
            else:
                low = tried
        return best

    def _least(self, largest: BatchStep) -> float:
        steps = [probe.step for probe in self._probes.values() if probe.step is not None]
        return min(step.seconds_per_sample for step in [largest, *steps])


def _others(trace: Trace, size: StepSize | None) -> dict[str, int]:
    """Return sizes of the named axes, as given or the largest recorded; empty without names."""
    recorded = trace.sizes[-1]
    if not isinstance(recorded, dict):
        if size is not None:
            raise SizeError(
                f"size is for the other axes of a step that has several; got {quoted(size)}"
            )
        return {}
    if size is None:
        return recorded
    if not isinstance(size, dict):
        raise SizeError(f"size names the other axes, such as {{'length': 512}}; got {quoted(size)}")
    return {**size}


def _replayed(trace: Trace, spec: GpuSpec, batch: int) -> Probe:
    """Return a replay through the pool of a virtual GPU in plain memory, or why it does not fit."""
    device = VirtualGPU(spec, backend=trace.backend)
    device.install(Policy("unmanaged"), everywhere=True)
    ends = [0.0]
    try:
        for event in trace.events:
            device.on_event(event)
            if event == STEP:
                device.model.synchronize()  # as a program does that reads its loss
                ends.append(device.model.clock.seconds)
    except OutOfMemoryError as error:
        return Probe(batch, None, str(error).partition(";")[0])
    finally:
        device.model.driver.residency.forget()
    figures = device.figures
    first, *later = ends[-STEPS:]
    return Probe(
        batch,
        BatchStep(
            batch=batch,
            peak_bytes=figures.peak_bytes or 0,
            reserved_bytes=figures.resident_peak_bytes or 0,
            seconds=(later[-1] - first) / len(later),
        ),
    )
