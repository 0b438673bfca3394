"""A job of several ranks: mpiexec is started, what ranks write is passed on, the end is worded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from umem._common.printable import printable, short
from umem.launch.watcher import (
    DEATH_SIGNAL,
    INTERRUPT,
    INTERRUPT_SECONDS,
    SAYS,
    SUBREAPER,
    children,
    end_children,
)

FAULT_SECONDS = 4.0
"""After a rank has failed mpiexec has this long to end by itself."""
END_SECONDS = 3.0
"""mpiexec has this long between SIGTERM and SIGKILL."""
_TICK_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TAG = re.compile(
    rb"\[\d+,(\d+)\](?:\[[^\]\s]+\]<std(?:out|err)>: |<std(?:out|err)>:)"  # Open MPI 5; 4
    rb"|^\[(\d+)\] "  # MPICH
)


class Job:
    """A running mpiexec, from start to end.

    Args:
        line: its command line; it names the rank of each line that ranks write.
        variables: of the environment, besides the present ones.
    """

    def __init__(self, line: list[str], variables: dict[str, str]) -> None:
        self._line = line
        self._environment = {**os.environ, **variables}
        self._fault: str | None = None
        self._faulted_at = 0.0
        self._terminated_at: float | None = None
        self._over: set[int] = set()
        self._signal = 0
        self._interrupted_at: float | None = None
        self.mpiexec_lines = [f"$ {' '.join(line)}"]
        self.is_unexplained = False
        """True if the job failed without a report of a rank, so that only mpiexec's output says
        why."""

    def run(self) -> tuple[int, str | None]:
        """Start mpiexec and follow it to the end; returns the exit status, and the reason if it is
        not 0.
        """
        libc = ctypes.CDLL(None)
        before = children()
        with self._signals():
            libc.prctl(SUBREAPER, 1, 0, 0, 0)
            self._mpiexec = subprocess.Popen(
                self._line,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # Ctrl-C and Ctrl-Z are for this process
                preexec_fn=lambda: libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
            )
            try:
                self._follow()
            finally:
                if self._mpiexec.poll() is None:
                    self._mpiexec.kill()
                    self._mpiexec.wait()
                if self._mpiexec.returncode:
                    end_children(but=before)
                libc.prctl(SUBREAPER, 0, 0, 0, 0)
        return self._result(self._mpiexec.returncode)

    def _follow(self) -> None:
        """Pass output on until mpiexec has closed both streams and ended."""
        rests = {1: b"", 2: b""}
        with selectors.DefaultSelector() as selector:
            for number, stream in ((1, self._mpiexec.stdout), (2, self._mpiexec.stderr)):
                selector.register(stream, selectors.EVENT_READ, number)  # type: ignore[arg-type]
            while selector.get_map():
                for key, _ in selector.select(_TICK_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    *lines, rests[key.data] = (rests[key.data] + data).split(b"\n")
                    self._pass_on(key.data, lines)
                    if not data:
                        selector.unregister(key.fileobj)
                self._end_if_due()
        for number, rest in rests.items():
            self._pass_on(number, [rest] if rest else [])
        while self._mpiexec.poll() is None:
            time.sleep(0.01)
            self._end_if_due()

    # -- what is written -------------------------------------------------------------------

    def _pass_on(self, number: int, lines: list[bytes]) -> None:
        """Print the ranks' lines with their numbers; take out reports to the launcher and mpiexec's
        own.
        """
        written = b""
        for line in lines:
            for rank, text in _pieces(line):
                if rank is None:
                    self.mpiexec_lines.append(text.decode(errors="replace"))
                    continue
                text, mark, said = text.partition(SAYS.encode())
                if mark:
                    self._note(rank, said.decode(errors="replace"))
                if text or not mark:
                    written += b"[%d] %s\n" % (rank, text)
        if written:
            _write(sys.stdout if number == 1 else sys.stderr, written)

    def _note(self, rank: int, said: str) -> None:
        """Keep a rank's first fault, from which later ones follow."""
        if said.endswith(" is over"):
            self._over.add(rank)
        elif self._fault is None and not self._signal:
            self._fault = printable(said.rstrip("\r"))
            self._faulted_at = time.monotonic()

    # -- the end ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Catch signals in the block, to pass them to the ranks."""

        def on_signal(number: int, _: Any) -> None:
            self._signal = number

        before = {}
        for number in _SIGNALS:
            with contextlib.suppress(ValueError):  # in another thread than the main one
                before[number] = signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_if_due(self) -> None:
        """Interrupt, terminate and at last kill mpiexec, each when its time is over."""
        now = time.monotonic()
        if self._terminated_at is not None:
            if now > self._terminated_at + END_SECONDS:
                self._mpiexec.kill()
        elif self._signal and self._interrupted_at is None:
            self._interrupted_at = now
            self._mpiexec.send_signal(INTERRUPT)
        elif self._is_time_to_end(now):
            self._terminated_at = now
            self._mpiexec.terminate()

    def _is_time_to_end(self, now: float) -> bool:
        if self._interrupted_at is not None:
            return now > self._interrupted_at + INTERRUPT_SECONDS
        return self._fault is not None and now > self._faulted_at + FAULT_SECONDS

    def _result(self, status: int) -> tuple[int, str | None]:
        """Return the exit status of the job, and the reason if it is not 0."""
        if self._signal:
            name = signal.Signals(self._signal).name
            over = f" (over before: {', '.join(map(str, sorted(self._over)))})"
            early = over if self._over else ""
            return 128 + self._signal, f"interrupted by {name}; all ranks were ended{early}"
        if self._fault is not None:
            return 128 - status if status < 0 else status or 1, (
                f"{self._fault}; all ranks were ended"
            )
        if status < 0:
            name = signal.Signals(-status).name
            return 128 - status, f"mpiexec was killed ({name}); no rank is left"
        if not status:
            return 0, None
        self.is_unexplained = True
        said = " ".join(line.strip("- ") for line in self.mpiexec_lines[1:]).strip()
        why = f": {short(said.partition('. ')[0].rstrip('.'))}" if said else ""
        return status, f"mpiexec ended with status {status}{why}; no rank is left"


def _pieces(line: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Split a line of mpiexec's output by rank; None is mpiexec itself.

    A rank's last line may lack its end, and then has another rank's behind it.

    >>> list(_pieces(b"[1,0][a:7]<stdout>: no end[1,2][b:8]<stdout>:  x"))
    [(0, b'no end'), (2, b' x')]
    >>> list(_pieces(b"prterun noticed")), list(_pieces(b"[3] of MPICH"))
    ([(None, b'prterun noticed')], [(3, b'of MPICH')])
    """
    tags = list(_TAG.finditer(line))
    ends = [*(tag.start() for tag in tags), len(line)]
    if ends[0] or not tags:
        yield None, line[: ends[0]]
    for tag, end in zip(tags, ends[1:], strict=True):
        yield int(tag[1] or tag[2]), line[tag.end() : end]


def _write(stream: Any, data: bytes) -> None:
    if stream is None:  # closed by whoever started this process
        return
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(data.decode("utf-8", "surrogateescape"))
    else:
        buffer.write(data)
    stream.flush()
