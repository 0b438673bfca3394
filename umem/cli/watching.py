"""What ``umem run --watch`` does beside the script."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.text import Text

from umem.blocks import innermost_virtual
from umem.cli.live_region import LiveRegion
from umem.recorder import Recorder
from umem.recording.tally import Tally
from umem.reports.watch import Seen, Simulated, line, summary, view

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
        self._gpu = innermost_virtual()
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
        self._gpu = innermost_virtual()
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
        if self._gpu is None:
            return None
        found = self._gpu.figures
        moved = found.migrated_in_bytes + found.migrated_out_bytes
        return Simulated(self._gpu.name, found.fault_count, moved, found.seconds)
