"""What ``umem run --watch`` does beside the script."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from umem.devices.open import entered_device
from umem.locks import safe_lock
from umem.reports.text.live import Seen, Simulated, line, summary, view
from umem.trace.recording.recorder import Recorder
from umem.trace.recording.tally import Tally

_UP_AND_CLEAR = "\x1b[1A\x1b[2K"


class LiveRegion:
    """Draws lines at the bottom of a terminal and takes them away for what is written above.

    What the program writes to ``sys.stdout`` and ``sys.stderr`` passes through as it is, control
    characters and lines without an end included; while such a line stands open nothing is drawn.
    (rich.live would print it anew: wrapped, with other control characters, all on one stream.)
    What goes to the terminal by another way, such as a child process, is not seen.

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
        """Let what goes to the terminal through this region from now on."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                through = _Through(stream, self)
                self._replaced[name] = stream, through
                setattr(sys, name, through)

    def stop(self) -> None:
        """Take the lines away and put the streams back, unless the program has put others.

        What is written next begins a line.
        """
        self.draw(())
        if self._is_open:
            self._is_open = False
            self._terminal.write("\n")
        for name, (stream, through) in self._replaced.items():
            if getattr(sys, name) is through:
                setattr(sys, name, stream)

    def draw(self, lines: Iterable[str]) -> None:
        """Replace the lines, none of which may be wider than the terminal."""
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
        """Write what the program writes, above the lines."""
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
    """A text stream that writes through a region; in everything else it is the stream."""

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
"""Between lines, for the first minute; then there is one a minute."""
_RATE_SECONDS = 5.0


class _Point(NamedTuple):
    seconds: float
    steps: int
    ops: int


class Watching:
    """Follows the calling thread's run and shows it on standard error until it is over.

    A terminal gets a view below what the script writes; a file or a pipe a line every few
    seconds. ``begin`` goes before Chainer is imported, whose PrintReport keeps the standard
    output that it finds then; ``follow`` after it.
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
        """Be ready to draw; the stack ends it."""
        if self._is_drawn:
            self._region.start()
            stack.callback(self._region.stop)

    def follow(self, stack: ExitStack) -> None:
        """Show what runs in this thread from now on; the stack ends it with a summary."""
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

    def _show_once(self, seen: Seen) -> None:
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

    def _seen(self, kinds: Mapping[str, int]) -> Seen:
        tally, now = self._tally, time.perf_counter()
        self._points.append(_Point(now, tally.step_count, tally.op_count))
        while now - self._points[0].seconds > _RATE_SECONDS and len(self._points) > 2:
            self._points.popleft()
        first, last = self._points[0], self._points[-1]
        passed = last.seconds - first.seconds
        return Seen(
            seconds=now - self._began,
            step_count=last.steps,
            op_count=last.ops,
            current_bytes=tally.current_bytes,
            peak_bytes=tally.peak_bytes,
            steps_per_second=(last.steps - first.steps) / passed if passed > 0 else None,
            ops_per_second=(last.ops - first.ops) / passed if passed > 0 else None,
            kinds=dict(kinds),
            simulated=self._simulated(),
        )

    def _simulated(self) -> Simulated | None:
        found = None if self._gpu is None else self._gpu.figures
        if self._gpu is None or found is None:
            return None
        moved = found.migrated_in_bytes + found.migrated_out_bytes
        return Simulated(self._gpu.name, found.fault_count, moved, found.seconds)
