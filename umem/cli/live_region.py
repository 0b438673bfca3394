"""Lines that stay below what a program writes to the same terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from umem.forking import safe_lock

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
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
