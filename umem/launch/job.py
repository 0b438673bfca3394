"""A job of several ranks: starts mpiexec, prints the ranks' output, and reports how it ended."""

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
from umem.launch.rank import DEATH_SIGNAL, INTERRUPT, INTERRUPT_SECONDS, MARK

END_SECONDS = 3.0
"""Time between SIGTERM and SIGKILL to mpiexec. A choice: no measurement supports it."""
_TICK_SECONDS = 0.1
_SUBREAPER = 36
"""Option of prctl: orphans among a process's descendants become its children."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_TAG = re.compile(
    rb"\[\d+,(\d+)\]<std(?:out|err)>: ?"  # Open MPI
    rb"|^\[(\d+)\] "  # MPICH
)
# Open MPI's message about the rank for which it ended the job.
_ENDED = re.compile(
    r"rank (\d+) with PID \d+ on node (\S+) (?:exited on signal (\d+)|calling \"abort\")"
)
_STATUS = re.compile(r",(\d+)\]\s+Exit code:\s+(\d+)")


class Job:
    """A running mpiexec, from start to end.

    Args:
        line: its command line, with the option that marks each line of output with its rank.
        variables: environment variables to add.
        host: the host of the ranks; None if there are several.
    """

    def __init__(self, line: list[str], variables: dict[str, str], host: str | None) -> None:
        self._line = line
        self._environment = {**os.environ, **variables}
        self._where = "" if host is None else f" on {host}"
        self._errors: dict[int, str] = {}
        self._terminated_at: float | None = None
        self._over: set[int] = set()
        self._signal = 0
        self._interrupted_at: float | None = None
        self.mpiexec_lines = [f"$ {' '.join(line)}"]
        self.is_unexplained = False
        """True if the job failed and only mpiexec's whole output tells why."""

    def run(self) -> tuple[int, str | None]:
        """Run mpiexec to its end; returns the exit status, and the reason if it is not 0."""
        libc = ctypes.CDLL(None)
        before = _children()
        self._memory_kills = _killed_for_memory()
        with self._signals():
            libc.prctl(_SUBREAPER, 1, 0, 0, 0)
            self._mpiexec = subprocess.Popen(
                self._line,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,  # so that only this process gets Ctrl-C and Ctrl-Z
                preexec_fn=lambda: libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
            )
            try:
                self._follow()
            finally:
                if self._mpiexec.poll() is None:
                    self._mpiexec.kill()
                    self._mpiexec.wait()
                if self._mpiexec.returncode:
                    _end_children(but=before)
                libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        return self._result(self._mpiexec.returncode)

    def _follow(self) -> None:
        """Print output until mpiexec has closed both streams and ended."""
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
        """Print the ranks' lines with their numbers; collect mpiexec's and error reports."""
        written = b""
        for line in lines:
            for rank, text in _pieces(line):
                if rank is None:
                    self.mpiexec_lines.append(text.decode(errors="replace"))
                    continue
                text, mark, error = text.partition(MARK.encode())
                if mark:
                    self._note(rank, printable(error.decode(errors="replace").rstrip("\r")))
                if text or not mark:
                    written += b"[%d] %s\n" % (rank, text)
        if written:
            _write(sys.stdout if number == 1 else sys.stderr, written)

    def _note(self, rank: int, error: str) -> None:
        """Keep a rank's first error; an empty text means that its script has ended."""
        if error:
            self._errors.setdefault(rank, error)
        else:
            self._over.add(rank)

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
        """Interrupt, then terminate, then kill mpiexec, each after its time-out."""
        now = time.monotonic()
        if self._terminated_at is not None:
            if now > self._terminated_at + END_SECONDS:
                self._mpiexec.kill()
        elif self._signal and self._interrupted_at is None:
            self._interrupted_at = now
            self._mpiexec.send_signal(INTERRUPT)
        elif self._interrupted_at is not None and now > self._interrupted_at + INTERRUPT_SECONDS:
            self._terminated_at = now
            self._mpiexec.terminate()

    def _result(self, status: int) -> tuple[int, str | None]:
        """Return the exit status of the job, and the reason if it is not 0."""
        if self._signal:
            name = signal.Signals(self._signal).name
            over = f" (over before: {', '.join(map(str, sorted(self._over)))})"
            early = over if self._over else ""
            return 128 + self._signal, f"interrupted by {name}; all ranks were ended{early}"
        if status < 0:
            return 128 - status, f"mpiexec {_ended_by(-status)}; no rank is left"
        if not status:
            return 0, None
        text = " ".join(line.strip("- ") for line in self.mpiexec_lines[1:]).strip()
        cause = self._cause(text, status)
        if cause is not None:
            return status, f"{cause}; all ranks were ended"
        self.is_unexplained = True
        why = f": {short(text.partition('. ')[0].rstrip('.'))}" if text else ""
        return status, f"mpiexec ended with status {status}{why}; no rank is left"

    def _cause(self, text: str, status: int) -> str | None:
        """Tell which rank failed first, and why, from mpiexec's output; None if unknown.

        A rank reports its own uncaught error; mpiexec reports killed ranks and exit statuses.
        """
        ended = _ENDED.search(text)
        if ended is not None and int(ended[1]) not in self._errors:
            how = f"ended with status {status}" if ended[3] is None else _ended_by(int(ended[3]))
            if status == 128 + signal.SIGKILL and _killed_for_memory() > self._memory_kills:
                how = "was killed by the kernel, which had no memory left (SIGKILL)"
            return f"rank {ended[1]} on {ended[2]} {how}"
        for rank, error in self._errors.items():
            return f"rank {rank} {error}"
        left = _STATUS.search(text)
        return left and f"rank {left[1]}{self._where} ended with status {left[2]}"


def _ended_by(number: int) -> str:
    """Describe how a process ended by a signal."""
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return f"{'crashed' if number in _CRASHES else 'was killed'} ({name})"


def _killed_for_memory() -> int:
    """Count the processes that the kernel has killed here for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    return 0


def _end_children(but: frozenset[int], seconds: float = 5.0) -> None:
    """Kill and reap all descendants except ``but``, for at most ``seconds``.

    mpiexec ends its ranks, but not the processes that they started. Orphaned descendants become
    children of this process when their parents are killed.
    """
    deadline = time.monotonic() + seconds
    while (left := _children() - but) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> frozenset[int]:
    """List the children of this process, zombies included."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            if int(file.read().rpartition(b") ")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return frozenset(found)


def _pieces(line: bytes) -> Iterator[tuple[int | None, bytes]]:
    """Split a line of mpiexec's output by rank; None is mpiexec itself.

    A rank's last line may have no line end, and is then followed by another rank's.

    >>> list(_pieces(b"[1,0]<stdout>: no end[1,2]<stdout>:  x"))
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
