"""``umem run --watch``: memory and speed, shown while the script runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from umem.devices.cost import StepCost
from umem.devices.open import entered_device
from umem.locks import safe_lock
from umem.trace.frameworks import names
from umem.trace.recording.recorder import Recorder
from umem.trace.recording.tally import Tally
from umem.units import format_bytes, format_seconds

_UP_AND_CLEAR = "\x1b[1A\x1b[2K"


class LiveRegion:
    """Draws lines at the bottom of a terminal, and clears them for output above.

    What the program writes to ``sys.stdout`` and ``sys.stderr`` passes through as it is, control
    characters and lines without an end included; while such a line stands open nothing is drawn.
    rich.live does not: it prints each line anew, so that the cursor movements of Chainer's
    ProgressBar come out as text, one bar below the other, each update of tqdm is a line of its own,
    and long lines are wrapped. What goes to the terminal by another way, such as a child process,
    is not seen.

    Thread-safe. A child by fork writes as if there were no region.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._lock = safe_lock()
        self._process = os.getpid()
        self._height = 0
        self._is_open = False
        self._replaced: dict[str, tuple[Any, _Through]] = {}

    def start(self) -> None:
        """Route the terminal's streams through this region."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                through = _Through(stream, self)
                self._replaced[name] = stream, through
                setattr(sys, name, through)

    def stop(self) -> None:
        """Clear the lines and restore the streams, unless the program replaced them.

        Later output begins on a new line.
        """
        self.draw(())
        if self._is_open:
            self._is_open = False
            self._terminal.write("\n")
        for name, (stream, through) in self._replaced.items():
            if getattr(sys, name) is through:
                setattr(sys, name, stream)

    def draw(self, lines: Iterable[str]) -> None:
        """Replace the lines, none wider than the terminal."""
        found = list(lines)
        with self._lock:
            if self._process != os.getpid():
                return
            self._erase()
            if found and not self._is_open:
                self._terminal.write("".join(f"{line}\n" for line in found))
                self._height = len(found)
            self._terminal.flush()

    def write(self, stream: TextIO, text: str) -> int:
        """Write the program's output above the lines."""
        if self._process != os.getpid():
            return stream.write(text)
        with self._lock:
            if text and self._height:
                self._erase()
                self._terminal.flush()
            count = stream.write(text)
            if text:
                self._is_open = not text.endswith("\n")
            return count

    def _erase(self) -> None:
        self._terminal.write(_UP_AND_CLEAR * self._height)
        self._height = 0


class _Through:
    """A text stream that writes through a region; all else is the wrapped stream's."""

    def __init__(self, stream: TextIO, region: LiveRegion) -> None:
        self._stream, self._region = stream, region

    def write(self, text: str) -> int:
        return self._region.write(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


DRAWN_EVERY_SECONDS = 0.5
TOLD_EVERY_SECONDS = 5.0
"""Interval of lines in the first minute; afterwards one is printed a minute."""
_RATE_SECONDS = 5.0


class _Point(NamedTuple):
    seconds: float
    steps: int
    ops: int


class Watching:
    """Shows the calling thread's run on standard error until it ends.

    A terminal gets a view below what the script writes; a file or a pipe a line every few seconds.
    ``begin`` goes before Chainer is imported, whose PrintReport keeps the standard output that it
    finds then; ``follow`` after it.
    """

    def __init__(self) -> None:
        self._stream: TextIO = sys.stderr
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._is_drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._region = LiveRegion(self._stream)
        self._tally = Tally()
        self._gpu = entered_device()
        self._points: deque[_Point] = deque()
        self._over = threading.Event()
        self._process = os.getpid()
        self._began = time.perf_counter()

    def begin(self, stack: ExitStack) -> None:
        """Prepare to draw until the stack unwinds."""
        if self._is_drawn:
            self._region.start()
            stack.callback(self._region.stop)

    def follow(self, stack: ExitStack) -> None:
        """Show this thread's operations until the stack unwinds, which prints a summary."""
        self._gpu = entered_device()
        self._began = time.perf_counter()
        self._points.append(_Point(self._began, 0, 0))
        thread = threading.Thread(target=self._show, name="umem-watch", daemon=True)
        stack.callback(self._end, thread)
        stack.enter_context(Recorder(self._tally.on_event, keep=False))
        thread.start()

    def _end(self, thread: threading.Thread) -> None:
        if os.getpid() != self._process:
            return  # a child by fork that came to the end of the script
        self._over.set()
        thread.join()
        self._region.stop()
        print(summary(self._seen(self._tally.at_peak)), file=self._stream, flush=True)

    # -- in a thread of its own ------------------------------------------------------------

    def _show(self) -> None:
        while not self._over.wait(self._pause()):
            try:
                self._show_once(self._seen(self._tally.current))
            except (OSError, ValueError):  # nobody reads any more: the script goes on
                return

    def _pause(self) -> float:
        if self._is_drawn:
            return DRAWN_EVERY_SECONDS
        return TOLD_EVERY_SECONDS if time.perf_counter() - self._began < 60 else 60.0

    def _show_once(self, seen: RunSoFar) -> None:
        if self._is_drawn:
            size = self._console.size
            bar = "━" if self._console.encoding.startswith("utf") else "="
            lines = list(view(seen, size.width - 1, bar))[: size.height - 1]
            self._region.draw([self._rendered(text, size.width - 1) for text in lines])
        else:
            print(line(seen), file=self._stream, flush=True)

    def _rendered(self, text: Text, width: int) -> str:
        text.truncate(width)
        with self._console.capture() as capture:
            self._console.print(text, end="")
        return capture.get()

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

_LABEL, _VALUE = 12, 12
_STYLES = {
    "now": "bold",
    "peak": "bold red",
    "parameters": "blue",
    "gradients": "magenta",
    "state": "yellow",
    "activations": "green",
    "inputs": "cyan",
}


@dataclass(frozen=True)
class Simulated:
    """Figures of a virtual GPU so far."""

    gpu: str
    cost: StepCost

    @property
    def faults(self) -> str:
        """Return the number of blocks brought in by faults."""
        return f"{self.cost.fault_count or 0:,}"

    @property
    def moved(self) -> str:
        """Return the bytes moved over the bus."""
        return format_bytes(self.cost.moved_bytes)


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


def view(seen: RunSoFar, width: int, bar: str = "━") -> Iterator[Text]:
    """Format the figures as lines of at most ``width``, 25 columns or more."""
    yield _counted("steps", seen.step_count, seen.steps_per_second)
    yield _counted("operations", seen.op_count, seen.ops_per_second)
    room = max(0, width - _LABEL - _VALUE - 1)
    sizes = {"now": seen.current_bytes, "peak": seen.peak_bytes, **seen.kinds}
    if seen.pools_peak_bytes is not None:
        sizes["pools' peak"] = seen.pools_peak_bytes
    most = max(seen.peak_bytes, seen.pools_peak_bytes or 0)
    for name, nbytes in sizes.items():
        length = round(room * nbytes / most) if most else 0
        text = Text(f"{name:<{_LABEL}}{format_bytes(nbytes):>{_VALUE}} ")
        yield text.append(bar * length, _STYLES.get(name, ""))
    if seen.simulated is not None:
        yield from _simulated_lines(seen.simulated)


def _counted(name: str, count: int, rate: float | None) -> Text:
    text = f"{name:<{_LABEL}}{count:>{_VALUE},}"
    return Text(text if rate is None else f"{text}  {_rate(rate)}/s")


def _simulated_lines(found: Simulated) -> Iterator[Text]:
    yield Text(f"simulated {found.gpu}", "dim")
    values = {
        "faults": found.faults,
        "moved": found.moved,
        "time": format_seconds(found.cost.seconds),
    }
    for name, value in values.items():
        yield Text(f"  {name:<{_LABEL - 2}}{value:>{_VALUE}}", "dim")


def line(seen: RunSoFar) -> str:
    """Format the figures as one line, for a file or a pipe."""
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
        return f"umem: no operation of {names()} ran in the script's main thread"
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
        seconds = format_seconds(found.cost.seconds)
        yield f"simulated {found.gpu}: {found.faults} faults, {found.moved} moved, {seconds}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}" if rate < 1 else f"{rate:.1f}"
