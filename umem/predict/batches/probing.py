"""Replays of a step with one batch and another, and which to try next.

A replay takes a step, three times over, through the pool of the virtual GPU in plain memory:
rounding, gaps and what the pool gives back count. What tensors alone take says which batches
cannot fit. Where a replay is short of memory it is lent some, so that it says how much all of
the step needs, and where to look next.
"""

from __future__ import annotations

from typing import NamedTuple

from umem.devices.base import Policy
from umem.devices.specs import GpuSpec
from umem.devices.virtual import VirtualGPU
from umem.errors import BudgetError, OutOfMemoryError, SizeError
from umem.predict.batches.found_batches import BatchStep
from umem.predict.techniques.steady import STEP
from umem.predict.techniques.subject import STEPS, Subject
from umem.printable import quoted
from umem.trace.axes import StepSize
from umem.trace.events import Alloc, Event, Op
from umem.trace.trace import Trace
from umem.units import BLOCK_BYTES, format_apart

MOST_REPLAYS = 12
"""How many replays the search for the largest batch takes at most."""
MOST_FOR_TIME = 12
"""How many more the search for the quickest takes at most."""
KNEE = 0.02
"""A batch is as quick as the quickest where a sample takes at most so much longer."""
STRIDE = 64
"""How many times as large a batch is tried next at most."""
ASIDE = 16
"""How near to where a line says it ends the end is looked for: a share of what is left."""
ROUND = 512
"""Of a batch that fits and is a multiple of this the next one is tried at once."""


class Probe(NamedTuple):
    """A batch that was tried: its step, or why it does not fit and how many bytes it was short."""

    batch: int
    over_bytes: int = 0
    step: BatchStep | None = None
    reason: str | None = None


class BatchSearch:
    """Replays of a step with one batch and another, each made once.

    Args:
        trace: of several sizes.
        spec: the GPU.
        size: the other sizes of a trace along axes; None: the largest recorded.
        maximum: the largest batch that is asked for.

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
        self._last: tuple[int, Subject] | None = None
        self._lasting = 0  # bytes that do not grow with the batch
        self._low = self._high = self._stride = 0
        self._by_line = self._is_beside = False

    @property
    def replay_count(self) -> int:
        """How many batches were replayed."""
        return len(self._probes)

    def size(self, batch: int) -> StepSize:
        """The step's sizes with a batch."""
        if self._axis is None:
            return batch
        size = {**self._others, self._axis: batch}
        return {axis: size[axis] for axis in self.trace.axes if axis in size} | size

    def subject(self, batch: int) -> Subject:
        """The step with a batch; the last one is kept."""
        if self._last is None or self._last[0] != batch:
            self._last = batch, Subject(self.trace, [self.spec], self.size(batch))
        return self._last[1]

    def peak(self, batch: int) -> int:
        """The most bytes that a step's tensors and workspace hold."""
        if batch not in self._peaks:
            self._peaks[batch] = self.subject(batch).trace.peak_bytes
        return self._peaks[batch]

    def probe(self, batch: int) -> Probe:
        """Replay a step."""
        if batch not in self._probes:
            self._probes[batch] = _replayed(self.subject(batch).trace, self.spec, batch)
        return self._probes[batch]

    # -- the largest ---------------------------------------------------------------------------

    def largest(self) -> tuple[BatchStep, Probe | None]:
        """Find a batch that fits, and the next one, which does not; None: there is no more.

        Raises:
            BudgetError: a batch of one does not fit.
        """
        self._low, self._high = 0, self._ceiling()
        guess = self._high - 1
        while guess and self.replay_count < MOST_REPLAYS:
            if self.probe(guess).step is None:
                self._high = guess
            else:
                self._low = guess
            guess = self._next(guess) if self._high - self._low > 1 else 0
        fits = self._probes[self._low].step if self._low else None
        if fits is None:
            raise BudgetError(self._too_little())
        return fits, None if self._high > self.maximum else self._failed(self._high)

    def _next(self, last: int) -> int:
        """The batch to be tried next, between one that fits and one that does not."""
        low, high = self._low, self._high
        if not low:
            return self._below(high)
        if last % ROUND == 0 and high - low > 1:
            return low + 1 if last == low else high - 1
        left, halves = MOST_REPLAYS - self.replay_count, (high - low - 1).bit_length()
        if halves == left:  # what is sure, while it is
            return (low + high) // 2
        guess = self._gamble(last, low, high, 1 if halves > left else max(1, (high - low) // 4))
        return guess if low < guess < high else (low + high) // 2

    def _gamble(self, last: int, low: int, high: int, rim: int) -> int:
        """A guess that may be better than the middle: on a line, beside it, at a round number.

        ``rim`` is how far from both ends a round number is looked for.
        """
        if self._by_line:  # where the line is right, the end is just beside
            self._by_line, self._is_beside = False, True
            aside = max(1, (high - low) // ASIDE)
            return low + aside if last == low else high - aside
        self._by_line, self._is_beside = not self._is_beside, False
        return self._on_lines(low, high) if self._by_line else roundest(low + rim, high - rim)

    def _below(self, high: int) -> int:
        """Where no batch is known to fit: by what the last one needed, then in growing strides."""
        stride = high - self._in_proportion(high)
        self._by_line = True
        if self._stride or len(self._probes) > 1:
            self._stride = stride = max(4 * stride, 2 * self._stride, high // 1024)
        return min(high - 1, max(1, high - stride))

    def _in_proportion(self, high: int) -> int:
        """The batch that fits by what a larger one needed, but for what all need."""
        room = self.spec.usable_bytes - self._lasting
        return high * room // max(1, room + self._probes[high].over_bytes)

    def _on_lines(self, low: int, high: int) -> int:
        """Where what batches need comes to be too much: a line through two that fit, or of each.

        A pool that is full says nothing of how much more there is; what does not fit does.
        """
        more = -self._probes[low].over_bytes
        if high not in self._probes:
            return high - 1
        if not more:
            return self._in_proportion(high)
        less = [n for n, p in self._probes.items() if p.step is not None and n < low]
        before = max(less, default=None)
        if before is not None:
            grown = self._probes[low].over_bytes - self._probes[before].over_bytes
            guess = low + more * (low - before) // grown if grown > 0 else high
            if guess < high:
                return guess
        return low + more * (high - low) // (more + self._probes[high].over_bytes)

    def _failed(self, batch: int) -> Probe:
        if batch in self._probes:
            return self._probes[batch]
        needed, room = format_apart(self.peak(batch), self.spec.usable_bytes)
        return Probe(batch, 0, None, f"its tensors take {needed}, and {room} of VRAM are usable")

    def _ceiling(self) -> int:
        """The first batch whose tensors alone have no room.

        Between two batches the peak is a line, or bends upwards.
        """
        room, low, high = self.spec.usable_bytes, 0, 1
        while high <= self.maximum and self.peak(high) <= room:
            low, high = high, min(self._beyond(low, high), self.maximum + 1)
        is_line = True
        while low and high - low > 1:
            guess = self._on_the_line(low, high) if is_line else (low + high) // 2
            low, high = (guess, high) if self.peak(guess) <= room else (low, guess)
            is_line = not is_line or guess in (low + 1, high - 1)
        half = max(1, low // 2)
        grows = (self.peak(max(1, low)) - self.peak(half)) // max(1, low - half)
        self._lasting = max(0, self.peak(half) - grows * half)
        return high

    def _beyond(self, low: int, high: int) -> int:
        """A batch that has no room by the line so far, or a few times the last one."""
        grows = self.peak(high) - self.peak(low) if low else 0
        if grows <= 0:
            return 2 * high
        room = self.spec.usable_bytes - self.peak(high)
        return min(STRIDE * high, high + room * (high - low) // grows + 1)

    def _on_the_line(self, low: int, high: int) -> int:
        """The last batch between two that has room by the line through them."""
        share = (self.spec.usable_bytes - self.peak(low)) * (high - low)
        return min(high - 1, low + max(1, share // max(1, self.peak(high) - self.peak(low))))

    def _too_little(self) -> str:
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
        """Find the smallest batch of which a sample takes about as long as it does at best."""
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
    """A step through the pool of a virtual GPU.

    Where VRAM is short, blocks are lent, so that one replay says how many all of the step needs.
    """
    device = VirtualGPU(spec, backend=trace.backend)
    device.install(Policy("unmanaged"), everywhere=True)
    driver, reason = device.model.driver, None
    ends = [0.0]
    try:
        for event in trace.events:
            reason = _on(device, event, reason)
            if event == STEP:
                device.model.synchronize()  # as a program does that reads its loss
                ends.append(device.model.clock.seconds)
    finally:
        driver.residency.forget()
    figures = device.figures
    if reason is not None:
        lent = driver.block_count * BLOCK_BYTES - spec.usable_bytes
        return Probe(batch, max(1, lent), None, reason)
    first, *later = ends[-STEPS:]
    step = BatchStep(
        batch=batch,
        peak_bytes=figures.peak_bytes or 0,
        reserved_bytes=figures.resident_peak_bytes or 0,
        seconds=(later[-1] - first) / len(later),
    )
    return Probe(batch, step.reserved_bytes - spec.usable_bytes, step)


def _on(device: VirtualGPU, event: Event, reason: str | None) -> str | None:
    """Follow an event; return why it had no room, or what was said before."""
    driver = device.model.driver
    while True:
        try:
            device.on_event(event)
            return reason
        except OutOfMemoryError as error:
            reason = reason or str(error).partition(";")[0]
            wanted = driver.pinned_count + -(-_asked_for(event) // BLOCK_BYTES)
            driver.block_count = max(driver.block_count + 1, wanted)


def _asked_for(event: Event) -> int:
    if isinstance(event, Alloc):
        return event.nbytes
    return (event.workspace_bytes or 0) if isinstance(event, Op) else 0


def roundest(first: int, last: int) -> int:
    """The roundest number between two, by powers of two.

    What fits often ends there: at a round batch arrays are whole numbers of the driver's blocks.
    """
    power = max(0, (first ^ last).bit_length() - 1)
    return last >> power << power if first < last else first
