"""``umem run --watch``: memory and speed, in a line every few seconds while the script runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, TextIO

from umem.devices import StepCost, entered_device
from umem.trace import names
from umem.trace.recording import Recorder, Tally
from umem.units import format_bytes, format_seconds

TOLD_EVERY_SECONDS = 5.0
"""Interval of lines in the first minute; afterwards one is printed a minute."""
_RATE_SECONDS = 5.0


class _Point(NamedTuple):
    seconds: float
    steps: int
    ops: int


class WatchOption:
    """Prints the calling thread's figures on standard error every few seconds until it ends."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stderr
        self._tally = Tally()
        self._gpu = entered_device()
        self._points: deque[_Point] = deque()
        self._over = threading.Event()
        self._process = os.getpid()
        self._began = time.perf_counter()

    def follow(self, stack: ExitStack) -> None:
        """Print this thread's figures until the stack unwinds, which prints a summary."""
        self._gpu = entered_device()
        self._began = time.perf_counter()
        self._points.append(_Point(self._began, 0, 0))
        thread = threading.Thread(target=self._show, name="umem-watch", daemon=True)
        stack.callback(self._end, thread)
        stack.enter_context(Recorder(self._tally.on_event, keep=False, renamed=self._tally.rename))
        thread.start()

    def _end(self, thread: threading.Thread) -> None:
        if os.getpid() != self._process:
            return  # a child by fork that came to the end of the script
        self._over.set()
        thread.join()
        print(summary(self._seen(self._tally.at_peak)), file=self._stream, flush=True)

    # -- in a thread of its own ------------------------------------------------------------

    def _show(self) -> None:
        while not self._over.wait(self._pause()):
            try:
                print(line(self._seen(self._tally.current)), file=self._stream, flush=True)
            except (OSError, ValueError):  # nobody reads any more: the script goes on
                return

    def _pause(self) -> float:
        return TOLD_EVERY_SECONDS if time.perf_counter() - self._began < 60 else 60.0

    def _seen(self, kinds: Mapping[str, int]) -> RunSoFar:
        """Return the present figures, with rates over the last seconds."""
        tally, now = self._tally, time.perf_counter()
        self._points.append(_Point(now, tally.step_count, tally.op_count))
        while now - self._points[0].seconds > _RATE_SECONDS and len(self._points) > 2:
            self._points.popleft()
        first, last = self._points[0], self._points[-1]
        passed = last.seconds - first.seconds
        return RunSoFar(
            seconds=now - self._began,
            step_count=last.steps,
            op_count=last.ops,
            current_bytes=tally.current_bytes,
            peak_bytes=tally.peak_bytes,
            pools_peak_bytes=tally.pools_peak_bytes,
            steps_per_second=(last.steps - first.steps) / passed if passed > 0 else None,
            ops_per_second=(last.ops - first.ops) / passed if passed > 0 else None,
            kinds=dict(kinds),
            simulated=self._simulated(),
        )

    def _simulated(self) -> Simulated | None:
        cost = None if self._gpu is None else self._gpu.figures
        return None if self._gpu is None or cost is None else Simulated(self._gpu.name, cost)


# -- what is shown --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """Figures of a virtual GPU so far."""

    gpu: str
    cost: StepCost


@dataclass(frozen=True)
class RunSoFar:
    """Figures of a run so far; ``kinds`` is what is alive now, or was at the peak.

    ``pools_peak_bytes`` is the most that arrays used of CuPy's pools, workspace included; None
    where it is not measured.

    Rates are those of the last seconds; None where nothing has happened yet.
    """

    seconds: float
    step_count: int
    op_count: int
    current_bytes: int
    peak_bytes: int
    steps_per_second: float | None = None
    ops_per_second: float | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    simulated: Simulated | None = None
    pools_peak_bytes: int | None = None


def line(seen: RunSoFar) -> str:
    """Format the figures as one line."""
    rates = [
        f"{_rate(rate)} {what}/s"
        for what, rate in (("steps", seen.steps_per_second), ("operations", seen.ops_per_second))
        if rate is not None
    ]
    now, peak = format_bytes(seen.current_bytes), format_bytes(seen.peak_bytes)
    return "; ".join(
        (
            ", ".join((f"umem: step {seen.step_count:,}", *rates)),
            f"{now} now: {_kinds(seen)}",
            f"{peak} peak",
            *_of_pools(seen),
            *_simulated(seen),
        )
    )


def summary(seen: RunSoFar) -> str:
    """Format the figures of a whole run as one line; ``seen.kinds`` are those at the peak."""
    if not seen.op_count:
        return f"umem: the script's main thread ran no operation of {names()}"
    took = f"umem: {seen.step_count:,} steps in {format_seconds(seen.seconds)}"
    if seen.step_count:
        took += f", {_rate(seen.step_count / seen.seconds)}/s"
    peak = f"peak {format_bytes(seen.peak_bytes)}: {_kinds(seen)}"
    return "; ".join((took, peak, *_of_pools(seen), *_simulated(seen)))


def _of_pools(seen: RunSoFar) -> Iterator[str]:
    if seen.pools_peak_bytes is not None:
        nbytes = format_bytes(seen.pools_peak_bytes)
        yield f"{nbytes} used of CuPy's pools at their peak, workspace included"


def _kinds(seen: RunSoFar) -> str:
    parts = (f"{name} {format_bytes(nbytes)}" for name, nbytes in seen.kinds.items() if nbytes)
    return ", ".join(parts) or "nothing"


def _simulated(seen: RunSoFar) -> Iterator[str]:
    found = seen.simulated
    if found is not None:
        moved, seconds = format_bytes(found.cost.moved_bytes), format_seconds(found.cost.seconds)
        faults = f"{found.cost.fault_count or 0:,}"
        yield f"simulated {found.gpu}: {faults} faults, {moved} moved, {seconds}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}" if rate < 1 else f"{rate:.1f}"
